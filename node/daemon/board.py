"""The latest that is known about this node. Knows values and listeners; knows no process, no HTTP, no disk.

One writer: the supervisor's event loop. What the supervisor decides about the phase wins over what the worker reports.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Protocol

from node.api.seam import LOG_LEVELS, LogLine, View, level_name
from node.daemon.notices import NEWER_VERSION, newer_version
from node.status import NodeInfo, Notice, PauseInfo, Phase, PhaseState, Report, RoundRecord, Status

ROUNDS_KEPT = 200
LOGS_KEPT = 2000


class Memory(Protocol):
    """What keeps more than the board does. Neither call waits."""

    def told(self, report: Report) -> None: ...

    def add_round(self, record: RoundRecord) -> None: ...


class Board:
    """Reports and decisions in, `Status` out."""

    def __init__(
        self,
        node: NodeInfo,
        limits: dict[str, float | int | None],
        *,
        state: PhaseState,
        on_status: Callable[[Status], None] | None = None,
    ) -> None:
        """`state` is the first phase. `on_status` hears every change, in the writer's thread."""
        self._node = node
        self._limits = limits
        self._pause: tuple[PauseInfo, str | None] = (PauseInfo(), None)
        self._own: PhaseState | None = state
        self._report = Report()
        self._on_status = on_status
        self.memory: Memory | None = None
        """Hears every report and round record, from when it is set."""
        self._notices: dict[str, Notice] = {}
        self._rounds: deque[RoundRecord] = deque(maxlen=ROUNDS_KEPT)
        self._logs: deque[LogLine] = deque(maxlen=LOGS_KEPT)
        self._log_ids = itertools.count(1)
        self._log_counts: dict[str, int] = dict.fromkeys(LOG_LEVELS, 0)
        self._listeners: set[asyncio.Queue[Status | None]] = set()
        self._closed = False
        self._status = self._build()

    @property
    def status(self) -> Status:
        return self._status

    def place(self) -> tuple[str, int | None]:
        """Phase and round, for log records; None before the first round."""
        return self._status.phase.value, self._status.run.round if self._status.run.round >= 0 else None

    def decide(self, state: PhaseState | None) -> None:
        """Set the phase that the supervisor owns; None leaves the word to the worker's reports."""
        self._own = state
        self._publish()

    def configured(self, name: str, limits: dict[str, float | int | None]) -> None:
        """The node's settings have changed."""
        self._node, self._limits = self._node.model_copy(update={"name": name}), limits
        self._publish()

    def scheduled(self, pause: PauseInfo, schedule_next: str | None) -> None:
        """Who wants a pause, and when the hours turn."""
        self._pause = (pause, schedule_next)
        self._publish()

    def told(self, report: Report) -> None:
        if not report.run.manifest_hash and self._report.run.manifest_hash:
            # A new worker that has not come so far as to read its run's state: that stands where it stood.
            report = report.model_copy(update={"run": self._report.run})
        self._report = report
        if self.memory is not None:
            self.memory.told(report)
        self.notice(NEWER_VERSION, newer_version(self._node.version, report.swarm))

    def add_round(self, record: RoundRecord) -> None:
        """A round that is told again, after a crash, is the same round."""
        if record.head and not record.dropped:
            for known in itertools.takewhile(lambda known: not known.dropped, self._rounds):
                if known.head == record.head:
                    return
        self._rounds.appendleft(record)
        if self.memory is not None:
            self.memory.add_round(record)

    def restore_rounds(self, records: Iterable[RoundRecord]) -> None:
        """What was known before this start, newest first."""
        self._rounds.extend(records)

    def notice(self, code: str, notice: Notice | None) -> None:
        """Tell the owner of something, or, with None, that it is over."""
        if notice is None:
            self._notices.pop(code, None)
        else:
            self._notices[code] = notice
        self._publish()

    def add_log(self, record: logging.LogRecord) -> None:
        level = level_name(record.levelno)
        self._log_counts[level] += 1
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        round_number: int | None = getattr(record, "round", None)
        self._logs.append(
            LogLine(
                id=next(self._log_ids),
                at=at,
                level=level,
                logger=record.name,
                message=message,
                phase=self._status.phase.value,
                round=round_number,
            )
        )

    def view(self, *, alive: bool) -> View:
        return View(
            status=self._status,
            swarm=self._report.swarm,
            rounds=tuple(self._rounds),
            logs=tuple(self._logs),
            log_counts=dict(self._log_counts),
            alive=alive,
        )

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Queue[Status | None]]:
        """See `api.seam.Node.subscribe`. The queue holds one item: the newest."""
        queue: asyncio.Queue[Status | None] = asyncio.Queue(maxsize=1)
        queue.put_nowait(None if self._closed else self._status)
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)

    def close(self) -> None:
        """End all subscriptions."""
        self._closed = True
        for queue in self._listeners:
            _replace(queue, None)

    def _publish(self) -> None:
        """The one place where the status changes: value, listeners and (as they read it from here) metrics together."""
        status = self._build()
        if status == self._status:
            return
        self._status = status
        if not self._closed:
            for queue in self._listeners:
                _replace(queue, status)
        if self._on_status is not None:
            self._on_status(status)

    def _build(self) -> Status:
        state = self._own or self._report.state
        gone = state.phase in (Phase.STOPPED, Phase.ERROR)
        # Before the worker of a pause has told anything, the newest report is that of the one before it.
        gone |= state.phase is Phase.PAUSED and self._report.state.phase is not Phase.PAUSED
        report = _at_rest(self._report) if gone else self._report
        node = self._node.model_copy(update={"peer_id": report.peer_id, "name": self._node.name or report.peer_id[-8:]})
        return Status(
            node=node,
            phase=state.phase,
            reason=state.reason,
            code=state.code,
            since=state.since,
            final=state.final,
            run=report.run,
            training=report.training,
            sync=report.sync,
            peers=report.peers,
            compute_utilization_ratio=report.compute_utilization_ratio,
            forecast_utilization_ratio=report.forecast_utilization_ratio,
            reachability=report.reachability,
            reachability_code=report.reachability_code,
            reachability_reason=report.reachability_reason,
            devices=report.devices,
            limits=self._limits,
            contribution=report.contribution,
            notices=tuple(notice for _, notice in sorted(self._notices.items())),
            pause=self._pause[0],
            schedule_next=self._pause[1],
        )


class BoardHandler(logging.Handler):
    """Puts every log record of this process on the board."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._board.add_log(record)
        except (TypeError, ValueError):
            # A log call with arguments that do not fit its message must not end the caller.
            self.handleError(record)


def _at_rest(report: Report) -> Report:
    """What a worker told that is no more: nothing computes now."""
    training = report.training.model_copy(update={"tokens_per_second": 0.0})
    sync = report.sync.model_copy(update={"stage": "idle", "eta_s": None})
    return report.model_copy(update={"training": training, "sync": sync, "devices": ()})


def _replace(queue: asyncio.Queue[Status | None], item: Status | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(item)

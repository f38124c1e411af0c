"""The state of this node in memory: status, notices, round records, log lines, counters and subscribers.

Used by the supervisor's event loop only. A phase that the supervisor sets takes precedence over the worker's reports.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from typing import Protocol

from packaging.version import InvalidVersion, Version

from node.api.node_interface import LOG_LEVELS, LogLine, View, level_name
from node.daemon.journal import Journal
from node.status import (
    TRAFFIC_LIMIT,
    GovernanceInfo,
    MonthUsage,
    NodeInfo,
    Notice,
    PauseInfo,
    PeerRow,
    PeersInfo,
    Phase,
    PhaseState,
    Report,
    RoundRecord,
    SavedCounters,
    Status,
    rfc3339,
)

WITHOUT_WORKER = (Phase.STOPPED, Phase.ERROR)
"""Phases in which a node has no worker."""
FRESH_S = 3.0
"""A report comes once a second. The ages in an older one are increased by its own age."""
ROUNDS_KEPT = 200
LOGS_KEPT = 2000
NEWER_VERSION = "newer_version"


class RecordsHistory(Protocol):
    """Receives every report and round record. Neither call blocks."""

    def add_report(self, report: Report) -> None: ...

    def add_round(self, record: RoundRecord) -> None: ...


class NodeState:
    def __init__(
        self,
        node: NodeInfo,
        limits: dict[str, float | int | None],
        *,
        state: PhaseState,
        on_status: Callable[[Status], None] | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`state` is the first phase. `on_status` gets each new status."""
        self._clock, self._reported_at_s = clock, clock()
        self._node = node
        self._limits = limits
        self._pause = PauseInfo()
        self._schedule_next: str | None = None
        self._phase_override: PhaseState | None = state
        self._report = Report()
        self._on_status = on_status
        self._histories: tuple[RecordsHistory, ...] = ()
        self._notices: dict[str, Notice] = {}
        self._rounds: deque[RoundRecord] = deque(maxlen=ROUNDS_KEPT)
        self._logs: deque[LogLine] = deque(maxlen=LOGS_KEPT)
        self._log_ids = itertools.count(1)
        self._log_counts: dict[str, int] = dict.fromkeys(LOG_LEVELS, 0)
        self._journal = journal or Journal()
        self._month = MonthUsage()
        self._subscribers: set[asyncio.Queue[Status | None]] = set()
        self.is_closed = False
        self._counters: SavedCounters | None = None
        self._governance = GovernanceInfo()
        self._status = self._build()

    @property
    def status(self) -> Status:
        return self._status

    @property
    def counters(self) -> SavedCounters | None:
        """The node's totals over all workers; None until they are known."""
        return self._counters

    def phase_and_round(self) -> tuple[str, int | None]:
        """Return phase and round for log records. The round is None before the first one."""
        return self._status.phase.value, self._status.run.round if self._status.run.round >= 0 else None

    def record_to(self, *histories: RecordsHistory) -> None:
        """From now on, pass each report and round record to these, and to no others."""
        self._histories = histories

    def set_phase(self, state: PhaseState | None) -> None:
        """Set the phase for the supervisor. None lets the worker's reports decide the phase."""
        self._phase_override = state
        self._publish()

    def set_month(self, month: MonthUsage) -> None:
        if month != self._month:
            self._month = month
            self._publish()

    def worker_started(self) -> None:
        """Call when a new worker runs, whose peer table is empty at first."""
        self._journal.worker_started()

    def update_settings(self, name: str, limits: dict[str, float | int | None]) -> None:
        self._node, self._limits = self._node.model_copy(update={"name": name}), limits
        self._publish()

    def set_pause(self, pause: PauseInfo, schedule_next: str | None) -> None:
        """Set or clear the pause. `schedule_next` is when the scheduled hours next begin or end."""
        self._pause, self._schedule_next = pause, schedule_next
        self._publish()

    def apply_report(self, report: Report, last_round: int = -1) -> None:
        """Apply a worker's report. `last_round` is the newest round that its counters include."""
        if not report.run.manifest_hash and self._report.run.manifest_hash:
            # A new worker has not read the run's state yet: keep the previous position.
            report = report.model_copy(update={"run": self._report.run})
        self._report, self._reported_at_s = report, self._clock()
        self._journal.add_report(report)
        self._counters = SavedCounters(
            counters=report.counters,
            rounds_joined=report.contribution.rounds_joined,
            rounds_attempted=report.contribution.rounds_attempted,
            last_round=last_round,
        )
        for history in self._histories:
            history.add_report(report)
        self.set_notice(NEWER_VERSION, newer_version_notice(self._node.version, report.swarm))

    def set_governance(self, governance: GovernanceInfo) -> None:
        """Set the amendments of the run, and note in the journal those that are new."""
        self._journal.add_amendments(self._governance, governance)
        self._governance = governance

    def add_round(self, record: RoundRecord) -> None:
        """Add a round record, unless a worker reports the round again after a crash.

        Failed attempts in a row at one round share one record, so that they do not displace the committed rounds.
        """
        if record.head and not record.dropped:
            for known in itertools.takewhile(lambda known: not known.dropped, self._rounds):
                if known.head == record.head:
                    return
        if self._rounds and (merged := self._rounds[0].with_failure(record)) is not None:
            self._rounds[0] = merged
        else:
            self._rounds.appendleft(record)
            self._journal.add_round(record)
        for history in self._histories:
            history.add_round(record)

    def restore_counters(self, saved: SavedCounters | None) -> None:
        """Set the totals of earlier starts."""
        self._counters = saved
        self._publish()

    def restore_rounds(self, records: Iterable[RoundRecord]) -> None:
        """Add the records of earlier starts, given newest first."""
        self._rounds.extend(records)

    def set_notice(self, code: str, notice: Notice | None) -> None:
        """Set the notice with this code. None withdraws it."""
        if notice is None:
            self._notices.pop(code, None)
        else:
            self._notices[code] = notice
        self._publish()

    def add_log(self, record: logging.LogRecord) -> None:
        level = level_name(record.levelno)
        self._log_counts[level] += 1
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        self._logs.append(
            LogLine(
                id=next(self._log_ids),
                at=rfc3339(datetime.fromtimestamp(record.created, UTC), "milliseconds"),
                level=level,
                logger=record.name,
                message=message,
                phase=self._status.phase.value,
                round=getattr(record, "round", None),
            )
        )

    def view(self, *, alive: bool) -> View:
        return View(
            status=self._status,
            swarm=() if self._is_alone else self._peer_rows(),
            rounds=tuple(self._rounds),
            logs=tuple(self._logs),
            log_counts=dict(self._log_counts),
            alive=alive,
            journal=self._journal.entries,
            departed=self._journal.departed,
            governance=self._governance,
        )

    @property
    def _is_alone(self) -> bool:
        """Whether the node is out of the swarm. While a worker starts, the newest report is that of the one before."""
        state = self._phase_override or self._report.state
        is_starting = self._phase_override is not None and state.phase is Phase.STARTING
        return is_starting or state.code == TRAFFIC_LIMIT or state.phase in WITHOUT_WORKER

    def _peer_rows(self) -> tuple[PeerRow, ...]:
        """The peer table, whose ages go on while no report comes."""
        age_s = self._clock() - self._reported_at_s
        if age_s < FRESH_S:
            return self._report.swarm
        return tuple(
            row.model_copy(update={"last_seen_s": round(row.last_seen_s + age_s, 1)}) for row in self._report.swarm
        )

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Queue[Status | None]]:
        """See `node_interface.Node.subscribe`. The queue holds only the newest status."""
        queue: asyncio.Queue[Status | None] = asyncio.Queue(maxsize=1)
        queue.put_nowait(None if self.is_closed else self._status)
        self._subscribers.add(queue)
        try:
            yield queue
        finally:
            self._subscribers.discard(queue)

    def close(self) -> None:
        """End all subscriptions."""
        self.is_closed = True
        for queue in self._subscribers:
            _replace(queue, None)

    def _publish(self) -> None:
        """Rebuild the status and pass it on. The status changes nowhere else, so that all readers agree."""
        status = self._build()
        if status == self._status:
            return
        self._status = status
        self._journal.add_status(status)
        if not self.is_closed:
            for queue in self._subscribers:
                _replace(queue, status)
        if self._on_status is not None:
            self._on_status(status)

    def _build(self) -> Status:
        state, report = self._phase_override or self._report.state, self._report
        has_no_worker = state.phase in WITHOUT_WORKER
        # A pause has its own worker. Until it reports, the newest report is that of the training worker before it.
        if has_no_worker or (state.phase is Phase.PAUSED and report.state.phase is not Phase.PAUSED):
            report = _idle(report)
        if has_no_worker:
            unknown = {"reachability": "none", "reachability_code": "not_tested", "reachability_reason": ""}
            report = report.model_copy(update=unknown)
        if self._is_alone:
            report = report.model_copy(update={"peers": PeersInfo()})
        node = self._node.model_copy(update={"peer_id": report.peer_id, "name": self._node.name or report.peer_id[-6:]})
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
            publication=report.publication,
            devices=report.devices,
            limits=self._limits,
            contribution=report.contribution,
            month=self._month,
            notices=tuple(notice for _, notice in sorted(self._notices.items())),
            pause=self._pause,
            schedule_next=self._schedule_next,
        )


def newer_version_notice(own: str, rows: Iterable[PeerRow]) -> Notice | None:
    """Return a notice if more than half of the other live peers run a newer version than this node."""
    own_version, others = _parse_version(own), [_parse_version(row.version) for row in rows if not row.this_node]
    newer = Counter(v for v in others if v is not None and own_version is not None and v > own_version)
    if not newer or 2 * newer.total() <= len(others):
        return None
    usual = newer.most_common(1)[0][0]
    subject = f"{newer.total()} of {len(others)} peers run a newer version, most of them {usual}"
    if len(others) == 1:
        subject = f"The other peer runs a newer version, {usual}"
    return Notice(code=NEWER_VERSION, level="info", text=f"{subject}; this node runs {own}: update it.")


@lru_cache(maxsize=256)
def _parse_version(text: str) -> Version | None:
    """Return the version, or None if the text, which comes from a peer, is not one."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _idle(report: Report) -> Report:
    """Return a report without speed, stage and devices, for a node whose worker has ended."""
    training = report.training.model_copy(update={"tokens_per_second": 0.0})
    sync = report.sync.model_copy(update={"stage": "idle", "eta_s": None})
    return report.model_copy(update={"training": training, "sync": sync, "devices": ()})


def _replace(queue: asyncio.Queue[Status | None], item: Status | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(item)

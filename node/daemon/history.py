"""The history of a node: turns reports into rows, and reads and writes the rows on its own thread.

The event loop never waits for the disk. While the file cannot be used, nothing is recorded, and one warning is logged;
the node is not affected.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import sqlite3
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from node.api.metrics import Series
from node.api.node_interface import Chart, HistoryUnavailable, RecentWork
from node.daemon.history_database import STAGES, SUMS, HistoryDatabase, Row, is_damage, set_aside
from node.status import Activity, Channel, Outcome, Phase, Report, RoundRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")
STEP_S = 10
"""Seconds that one of the finest rows covers."""
GAP_S = 60.0
"""If two reports are further apart, the time between them is a gap in the history."""
QUEUE_MAX = 256
"""Most jobs that may wait for the thread. When the queue is full, rows are lost and queries are refused."""
ANSWER_S = 5.0
CLOSE_S = 0.8
IDLE_CODES = frozenset({"run_paused", "no_text", "waiting_for_peers"})
"""Codes with which a node makes no inner steps for an unknown time. The newest speed that it has measured is old."""
BLIND_PHASES = frozenset({Phase.STARTING, Phase.CONNECTING})
"""Phases in which a node does not know the swarm, so its figures are unknown, not 0."""
REOPEN_S = 30.0
"""Time until the next attempt to open a file that could not be used."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """`wall_s` returns Unix time. `monotonic_s` never goes back, and stops while the machine sleeps."""

    wall_s: Callable[[], float]
    monotonic_s: Callable[[], float]


class Sampler:
    """Turns reports into rows. A row begins at a wall-clock time; durations come from the monotonic clock."""

    def __init__(self, *, trains: bool) -> None:
        """`trains` is False for a relay, whose rows have no activities and no losses."""
        self._trains = trains
        self._previous: tuple[float, Series] | None = None
        """Monotonic clock and totals at the previous report."""
        self._open: dict[int, Row] = {}

    def add_report(self, wall_s: float, monotonic_s: float, report: Report, totals: Series) -> None:
        """Add a report, which covers the time since the previous one. `totals` sums the counters of all workers."""
        previous, self._previous = self._previous, (monotonic_s, totals)
        if previous is None:
            return
        elapsed_s = monotonic_s - previous[0]
        if not 0 < elapsed_s <= GAP_S:
            return
        part = Row(0, elapsed_s, means=self._means(report), sums=self._sums(previous[1], totals, elapsed_s))
        self._spread(part, wall_s - elapsed_s, wall_s)

    def add_round(self, wall_s: float, record: RoundRecord) -> None:
        """Add the durations of a round's stages to the row in which it ended. A skipped round has none."""
        if not record.head or record.outcome is Outcome.SKIPPED:
            return
        seconds = record.seconds.model_dump()
        row = Row(0, rounds=1, sums=dict.fromkeys(SUMS) | {f"sync_{name}": seconds[name] for name in STAGES})
        self._row_at(wall_s).add(row)

    def take(self, wall_s: float | None) -> list[Row]:
        """Remove and return the rows whose time is over at `wall_s`, or all rows if it is None."""
        now = math.inf if wall_s is None else wall_s
        # If the clock was set back, rows far ahead of it are complete.
        done = [at for at in self._open if at + STEP_S <= now or at > now + STEP_S]
        return [row for at in sorted(done) if (row := self._open.pop(at)).seen_s or row.rounds]

    def open_rows(self, since_s: float) -> list[Row]:
        """The rows from a moment on that are not complete."""
        return [row for at, row in self._open.items() if at + STEP_S > since_s]

    def _means(self, report: Report) -> dict[str, float | None]:
        training = report.training
        means: dict[str, float | None] = {
            "training_loss": training.loss,
            "evaluation_loss": training.evaluation_loss,
            "tokens_per_second": training.tokens_per_second,
            "swarm_tokens_per_second": sum(row.tokens_per_second for row in report.swarm),
            "swarm_peers": float(report.peers.training),
            "forecast_utilization_ratio": report.forecast_utilization_ratio,
        }
        if not report.swarm or report.state.phase in BLIND_PHASES:
            means |= {"swarm_tokens_per_second": None, "swarm_peers": None}
        if training.tokens_per_second == 0 and report.state.phase is not Phase.PAUSED:
            means["tokens_per_second"] = None  # No step has been timed yet.
        elif report.state.code in IDLE_CODES:
            means["tokens_per_second"] = 0.0
        if report.run.is_paused and means["swarm_tokens_per_second"] is not None:
            means["swarm_tokens_per_second"] = 0.0  # The members' records have the speeds from before the pause.
        if not self._trains:
            means |= {"training_loss": None, "tokens_per_second": None, "forecast_utilization_ratio": None}
        elif report.state.phase is Phase.PAUSED:
            means["forecast_utilization_ratio"] = None
        return {name: value if value is not None and math.isfinite(value) else None for name, value in means.items()}

    def _sums(self, before: Series, now: Series, elapsed_s: float) -> dict[str, float | None]:
        """Return each counter's increase. Time that no activity accounts for is idle, so they add up to `elapsed_s`."""

        def increases(name: str, labels: Collection[str]) -> dict[str, float]:
            return {label: max(0.0, now[(name, label)] - before[(name, label)]) for label in labels}

        sums: dict[str, float | None] = dict.fromkeys(SUMS)
        sums["sent_bytes"] = sum(increases("network_sent_bytes", tuple(Channel)).values())
        sums["received_bytes"] = sum(increases("network_received_bytes", tuple(Channel)).values())
        if self._trains:
            spent = increases("activity_seconds", tuple(Activity))
            total_s = sum(spent.values())
            if total_s > elapsed_s:
                spent = {activity: seconds * elapsed_s / total_s for activity, seconds in spent.items()}
            else:
                spent[Activity.IDLE] += elapsed_s - total_s
            sums |= {f"activity_{activity}": seconds for activity, seconds in spent.items()}
            sums |= {name: sum(increases(name, ("",)).values()) for name in ("tokens_processed", "tokens_merged")}
        return sums

    def _spread(self, part: Row, from_s: float, to_s: float) -> None:
        """Distribute `part` evenly over the rows from `from_s` to `to_s`."""
        at_s = from_s
        while at_s < to_s:
            row = self._row_at(at_s)
            end_s = min(to_s, float(row.at_s + STEP_S))
            share = (end_s - at_s) / part.seen_s
            sums = {name: None if value is None else value * share for name, value in part.sums.items()}
            row.add(Row(row.at_s, end_s - at_s, means=part.means, sums=sums))
            at_s = end_s

    def _row_at(self, at_s: float) -> Row:
        start = int(at_s // STEP_S) * STEP_S
        return self._open.setdefault(start, Row(start))


class HistoryStore:
    """Implements `node_interface.HistoryReader`. `add_report` and `add_round` return at once."""

    def __init__(self, folder: Path, clocks: Clocks, totals: Callable[[], Series], *, trains: bool) -> None:
        """`totals` is called for each report, and sums the counters of all workers."""
        self._folder, self._clocks, self._totals = folder, clocks, totals
        self._sampler = Sampler(trains=trains)
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(QUEUE_MAX)
        self._database: HistoryDatabase | None = None
        self._tried_at_s = -REOPEN_S
        self._is_paused = False
        self._thread = threading.Thread(target=self._work, name="history", daemon=True)
        self._thread.start()

    # on the event loop

    def add_report(self, report: Report) -> None:
        now_s = self._clocks.wall_s()
        self._sampler.add_report(now_s, self._clocks.monotonic_s(), report, self._totals())
        self._write_rows(now_s)

    def add_round(self, record: RoundRecord) -> None:
        self._sampler.add_round(self._clocks.wall_s(), record)
        self._submit(lambda database: database.add_round(record))

    async def rounds(self, limit: int) -> list[RoundRecord]:
        return await self._ask(lambda database: database.rounds(limit))

    async def chart(self, names: Collection[str], since_s: float | None, points: int) -> Chart:
        now_s = self._clocks.wall_s()
        return await self._ask(lambda database: database.chart(names, since_s, now_s, points))

    async def work(self, since_s: float) -> RecentWork:
        now_s, unwritten = self._clocks.wall_s(), self._sampler.open_rows(since_s)
        return await self._ask(lambda database: database.work(since_s, now_s, unwritten))

    def close(self) -> None:
        """Write the remaining rows and end the thread. Takes at most 2 * CLOSE_S, even if the disk hangs."""
        self._write_rows(None)
        with suppress(queue.Full):
            self._jobs.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("The disk of the history does not respond, so the last seconds of the history are lost.")

    def _write_rows(self, wall_s: float | None) -> None:
        if rows := self._sampler.take(wall_s):
            self._submit(lambda database: database.write(rows))

    def _submit(self, change: Callable[[HistoryDatabase], object]) -> None:
        try:
            self._jobs.put_nowait(lambda: self._use(change))
        except queue.Full:
            self._pause("its disk is too slow")

    async def _ask(self, question: Callable[[HistoryDatabase], T]) -> T:
        """Run a query on the writer thread. Raises HistoryUnavailable."""
        answer: Future[T] = Future()

        def job() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            if not self._use(lambda database: answer.set_result(question(database))):
                answer.set_exception(HistoryUnavailable("The history cannot be read now: the node's log says why."))

        try:
            self._jobs.put_nowait(job)
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.wrap_future(answer)
        except (queue.Full, TimeoutError) as exc:
            raise HistoryUnavailable("The history's disk is too slow now: ask again later.") from exc

    # on the thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("A job of the history failed because of a bug. The history goes on with the next job.")
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()

    def _use(self, use: Callable[[HistoryDatabase], object]) -> bool:
        """Call `use` with the open database. If that fails, log the reason once and return False."""
        try:
            if (database := self._open()) is None:
                return False
            use(database)
        except (sqlite3.Error, OSError) as exc:
            self._handle_failure(exc)
            return False
        if self._is_paused:
            self._is_paused = False
            logger.info("The recording of the history continues.")
        return True

    def _open(self) -> HistoryDatabase | None:
        now_s = self._clocks.monotonic_s()
        if self._database is None and now_s - self._tried_at_s >= REOPEN_S:
            self._tried_at_s = now_s
            self._database = HistoryDatabase(self._folder)
        return self._database

    def _handle_failure(self, exc: sqlite3.Error | OSError) -> None:
        if self._database is not None and isinstance(exc, sqlite3.Error) and is_damage(exc):
            with suppress(sqlite3.Error):
                self._database.close()
            self._database = None
            with suppress(OSError):
                set_aside(self._folder, exc)
                self._tried_at_s = self._clocks.monotonic_s() - REOPEN_S
            return
        self._pause(str(exc))

    def _pause(self, reason: str) -> None:
        if not self._is_paused:
            self._is_paused = True
            logger.warning(
                "The status history is not recorded now (%s). Training goes on. Free some space, or check the disk.",
                reason,
            )

"""Who writes the history, and reads it: one thread with a queue, so that the event loop never waits for a disk.

The loop hands over what the board hears; the thread owns the file. Where the disk is full, or the file cannot be had,
the history pauses with one warning, and goes on when it can; the node does not care.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from node.api.metrics import Series
from node.api.seam import Chart, HistoryAway, Share
from node.daemon.history import History, is_damage, set_aside
from node.daemon.samples import Row, Sampler
from node.status import Report, RoundRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")
QUEUE_MAX = 256
"""Jobs that wait for the thread; beyond, what would be written is lost, and who asks is sent away."""
ANSWER_S = 5.0
CLOSE_S = 0.8
REOPEN_S = 30.0
"""A file that could not be used is tried again so often."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """`wall_s`: Unix time. `monotonic_s`: only grows, and stands still while the machine sleeps."""

    wall_s: Callable[[], float]
    monotonic_s: Callable[[], float]


class Recorder:
    """The node's past (`api.seam.Past`). `told` and `add_round` are called by the event loop, and return at once."""

    def __init__(self, folder: Path, clocks: Clocks, *, trains: bool) -> None:
        self.totals: Callable[[], Series] = dict
        """The counters' totals, over workers; asked with each report."""
        self._folder = folder
        self._clocks = clocks
        self._sampler = Sampler(trains=trains)
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(QUEUE_MAX)
        self._history: History | None = None
        self._tried_at_s = -REOPEN_S
        self._is_paused = False
        self._thread = threading.Thread(target=self._work, name="history", daemon=True)
        self._thread.start()

    # the event loop's side

    def told(self, report: Report) -> None:
        now_s = self._clocks.wall_s()
        self._sampler.told(now_s, self._clocks.monotonic_s(), report, self.totals())
        if rows := self._sampler.take(now_s):
            self._hand_over(rows)

    def add_round(self, record: RoundRecord) -> None:
        self._sampler.round_over(self._clocks.wall_s(), record)
        self._put(lambda: self._try(lambda history: history.add_round(record)))

    async def rounds(self, limit: int) -> list[RoundRecord]:
        return await self._ask(lambda history: history.rounds(limit))

    async def chart(self, names: Collection[str], since_s: float | None, points: int) -> Chart:
        now_s = self._clocks.wall_s()
        return await self._ask(lambda history: history.chart(names, since_s, now_s, points))

    async def shares(self, limit: int) -> Sequence[Share]:
        return await self._ask(lambda history: history.shares(limit))

    def close(self) -> None:
        """Write what is left and end the thread; within 2 CLOSE_S, whatever the disk does."""
        if rows := self._sampler.take(None):
            self._hand_over(rows)
        with suppress(queue.Full):
            self._jobs.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("The history's disk does not answer: its last seconds are lost.")

    def _hand_over(self, rows: list[Row]) -> None:
        self._put(lambda: self._try(lambda history: history.write(rows)))

    def _put(self, job: Callable[[], object]) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._pause("its disk is too slow")

    async def _ask(self, question: Callable[[History], T]) -> T:
        """Raises HistoryAway."""
        answer: Future[T] = Future()

        def job() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            found = self._try(lambda history: answer.set_result(question(history)))
            if not found:
                answer.set_exception(HistoryAway("The history cannot be read just now: the node's log says why."))

        try:
            self._jobs.put_nowait(job)
            return await asyncio.wait_for(asyncio.wrap_future(answer), ANSWER_S)
        except (queue.Full, TimeoutError) as exc:
            raise HistoryAway("The history's disk is too slow just now: ask again later.") from exc

    # the thread's side

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("A fault of ours in the history; it goes on with the next")
        if self._history is not None:
            with suppress(sqlite3.Error):
                self._history.close()

    def _try(self, use: Callable[[History], object]) -> bool:
        """Use the file. False where that was not possible; why is said once."""
        try:
            if (history := self._opened()) is None:
                return False
            use(history)
        except (sqlite3.Error, OSError) as exc:
            self._failed(exc)
            return False
        if self._is_paused:
            self._is_paused = False
            logger.info("The history goes on.")
        return True

    def _opened(self) -> History | None:
        now_s = self._clocks.monotonic_s()
        if self._history is None and now_s - self._tried_at_s >= REOPEN_S:
            self._tried_at_s = now_s
            self._history = History(self._folder)
        return self._history

    def _failed(self, exc: sqlite3.Error | OSError) -> None:
        if self._history is not None and isinstance(exc, sqlite3.Error) and is_damage(exc):
            with suppress(sqlite3.Error):
                self._history.close()
            self._history = None
            with suppress(OSError):
                set_aside(self._folder, exc)
                self._tried_at_s = self._clocks.monotonic_s() - REOPEN_S
            return
        self._pause(str(exc))

    def _pause(self, why: str) -> None:
        if not self._is_paused:
            self._is_paused = True
            logger.warning("The history pauses: %s. The node goes on; free some space, or see to its disk.", why)

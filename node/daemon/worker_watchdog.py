"""The watchdog of the worker: kills a worker that sends no heartbeats or does not stop in time.

`WorkerWatchdog` runs one worker process after another; `SupervisorTimings` holds its deadlines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.daemon.worker_process import WorkerExit, WorkerProcess
from node.worker_protocol import Beat, Ended, Start, Stop, SupervisorMessage, Unsaved, WorkerMessage

logger = logging.getLogger(__name__)

FROZEN_S = 5.0
"""A longer gap between two ticks means that this process was frozen, not that the machine was busy."""


@dataclass(frozen=True, slots=True)
class SupervisorTimings:
    """The supervisor's timeouts in seconds; tests shorten them."""

    grace_s: float = 60.0
    """From a worker's start until heartbeats are required."""
    hung_s: float = 30.0
    """Without a heartbeat: the worker is killed and restarted."""
    stale_s: float = 15.0
    """Without a heartbeat: `livez` reports it."""
    stop_s: float = 6.0
    """From a stop to the kill. Uvicorn has 2 s more, so that both end within 10 s."""
    save_s: float = 50.0
    """As `stop_s`, while the worker reports unsaved work. Containers and services are given 60 s."""
    backoff_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Before the restart after the first, second, ... crash; one more crash is an error."""
    healthy_s: float = 60.0
    """A worker that sent heartbeats for this long clears the count of crashes."""
    tick_s: float = 0.25


class WorkerWatchdog:
    """Runs one worker at a time: call `start` and `wait` in turn. Enforces its deadlines."""

    def __init__(
        self, command: Sequence[str], timings: SupervisorTimings, on_message: Callable[[WorkerMessage], None]
    ) -> None:
        self._command, self._timings, self._on_message = command, timings, on_message
        self._worker: WorkerProcess | None = None
        self._started_at_s = 0.0
        self._beat_at_s = 0.0
        self._asked_at_s = 0.0
        self._ticked_at_s = 0.0
        self._stop_by_s: float | None = None

    async def start(self, start: Start) -> None:
        """Start a worker process. Raises OSError."""
        self._started_at_s = self._beat_at_s = self._ticked_at_s = time.monotonic()
        self._stop_by_s = None
        self._worker = await WorkerProcess.spawn(self._command, start, self._receive)
        logger.debug("Worker %d runs, mode %s", self._worker.pid, start.mode)

    async def wait(self) -> tuple[WorkerExit, str | None]:
        """Wait until the worker has ended. Returns how it ended, and the requested way to stop, if any."""
        worker = self._worker
        assert worker is not None, "start it first"
        try:
            return await worker.wait(), worker.asked
        finally:
            self._worker = None

    @property
    def was_asked(self) -> bool:
        """Whether the running worker has been asked to stop."""
        return self._worker is not None and self._worker.asked is not None

    @property
    def lived_s(self) -> float:
        """From the newest worker's start to its last heartbeat; 0 if there was none."""
        return self._beat_at_s - self._started_at_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat; 0 during the grace period, and without a worker."""
        now_s = time.monotonic()
        if self._worker is None or now_s - self._started_at_s < self._timings.grace_s:
            return 0.0
        return now_s - self._beat_at_s

    def send(self, message: SupervisorMessage) -> None:
        """No effect without a worker."""
        if self._worker is not None:
            self._worker.send(message)

    def stop(self, stop: Stop) -> None:
        """Ask the worker to end within `stop_s`. A drain has no deadline, because it waits for its round."""
        worker = self._worker
        if worker is None:
            return
        worker.send(stop)
        if not worker.has_begun:
            worker.kill("it had not begun yet")  # It still imports: it has nothing to save and would be slow to react.
        self._asked_at_s = time.monotonic()
        self._stop_by_s = None if stop.how == "drain" else self._asked_at_s + self._timings.stop_s

    def kill(self, reason: str) -> None:
        """End the worker at once, unsaved, as if it had been asked to leave."""
        if self._worker is not None:
            self._worker.asked = self._worker.asked or "leave"
            self._worker.kill(reason)

    def tick(self) -> None:
        """Kill a worker that hangs or misses its deadline. To be called every `tick_s`."""
        worker = self._worker
        if worker is None:
            return
        now_s, timings = time.monotonic(), self._timings
        self._extend_deadlines(now_s - self._ticked_at_s - timings.tick_s)
        self._ticked_at_s = now_s
        if self._stop_by_s is not None and now_s > self._stop_by_s:
            worker.kill(f"it did not end within {now_s - self._asked_at_s:.0f} s")
        elif self.silent_s > timings.hung_s:
            worker.kill(f"it hung: no heartbeat for {timings.hung_s:g} s")

    def _extend_deadlines(self, gap_s: float) -> None:
        """A freeze of this process (`docker pause`) has frozen the worker too, so its deadlines move by as much."""
        if gap_s < FROZEN_S:
            return
        logger.info("This process was frozen for %.0f s; the worker's deadlines are extended.", gap_s)
        self._beat_at_s = min(self._beat_at_s + gap_s, time.monotonic())
        self._asked_at_s += gap_s
        if self._stop_by_s is not None:
            self._stop_by_s += gap_s

    def _receive(self, message: WorkerMessage) -> None:
        now_s, timings = time.monotonic(), self._timings
        if isinstance(message, Beat):
            self._beat_at_s = now_s
        elif isinstance(message, Unsaved) and self._stop_by_s is not None:
            self._stop_by_s = min(now_s + timings.stop_s, self._asked_at_s + timings.save_s)
        elif isinstance(message, Ended) and self._stop_by_s is None:  # It ends on its own: as long as for a stop.
            self._asked_at_s, self._stop_by_s = now_s, now_s + timings.stop_s
        self._on_message(message)

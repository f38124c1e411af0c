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
"""A longer gap between two ticks means that this process was frozen, not merely that the machine was busy."""


@dataclass(frozen=True, slots=True)
class SupervisorTimings:
    """The supervisor's timeouts in seconds; tests shorten them."""

    grace_s: float = 60.0
    """Time from a worker's start until it must send heartbeats, or at least use the processor."""
    start_s: float = 600.0
    """Time from a worker's start for which it need not send heartbeats while it uses the processor. Imports are slow on
    a busy machine."""
    hung_s: float = 30.0
    """A worker that sends no heartbeat for this long is killed and restarted."""
    stale_s: float = 15.0
    """A worker that sends no heartbeat for this long makes `/livez` fail."""
    stop_s: float = 6.0
    """Time from a `Stop` to the kill. The HTTP server then has 2 s, so that the node ends within 10 s."""
    save_s: float = 50.0
    """Replaces `stop_s` while the worker reports that it still saves. Our container and service files allow 60 s."""
    backoff_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Delays before the restart after the first, second, ... crash in a row. One more crash is an error."""
    memory_pauses_s: tuple[float, float] = (5.0, 300.0)
    """First and longest delay before another try to start a worker for which there is too little memory."""
    healthy_s: float = 60.0
    """A worker that sent heartbeats for this long clears the count of crashes."""
    tick_s: float = 0.25


class WorkerWatchdog:
    """Runs one worker at a time, and kills it if it misses a deadline. Call `start` and `wait` in turn."""

    def __init__(
        self, command: Sequence[str], timings: SupervisorTimings, on_message: Callable[[WorkerMessage], None]
    ) -> None:
        self._command, self._timings, self._on_message = command, timings, on_message
        self._worker: WorkerProcess | None = None
        self._started_at_s = 0.0
        self._alive_at_s = 0.0
        """When the worker last sent a heartbeat, or used the processor during its start."""
        self._first_beat_at_s: float | None = None
        self._processor_s = 0.0
        self._asked_at_s = 0.0
        self._ticked_at_s = 0.0
        self._stop_by_s: float | None = None

    async def start(self, start: Start) -> None:
        """Start a worker process. Raises OSError."""
        self._started_at_s = self._alive_at_s = self._ticked_at_s = time.monotonic()
        self._stop_by_s = self._first_beat_at_s = None
        self._processor_s = 0.0
        self._worker = await WorkerProcess.spawn(self._command, start, self._receive)
        logger.debug("Worker process %d has started in mode %s.", self._worker.pid, start.mode)

    async def wait(self) -> tuple[WorkerExit, str | None]:
        """Wait until the worker has ended. Returns how it ended, and the requested way to stop, if any."""
        worker = self._worker
        assert worker is not None, "start it first"
        try:
            return await worker.wait(), worker.asked
        finally:
            self._worker = None

    @property
    def pid(self) -> int | None:
        """The id of the running worker's process; None without one."""
        return self._worker.pid if self._worker is not None else None

    @property
    def was_asked(self) -> bool:
        """Whether the running worker has been asked to stop."""
        return self._worker is not None and self._worker.asked is not None

    @property
    def lived_s(self) -> float:
        """Seconds from the newest worker's first heartbeat to its last; 0 if it has sent none."""
        return self._alive_at_s - self._first_beat_at_s if self._first_beat_at_s is not None else 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life; 0 during the grace period and without a worker."""
        now_s = time.monotonic()
        if self._worker is None or now_s - self._started_at_s < self._timings.grace_s:
            return 0.0
        return now_s - self._alive_at_s

    def send(self, message: SupervisorMessage) -> None:
        """Send a message to the running worker, if there is one."""
        if self._worker is not None:
            self._worker.send(message)

    def stop(self, stop: Stop) -> None:
        """Ask the worker to end within `stop_s`. A drain has no deadline, because the worker first ends its round."""
        worker = self._worker
        if worker is None:
            return
        worker.send(stop)
        if not worker.has_begun:
            # The worker is still importing modules, and would react late.
            worker.kill("it had just started, and has nothing to save", logging.INFO)
        self._asked_at_s = time.monotonic()
        self._stop_by_s = None if stop.how == "drain" else self._asked_at_s + self._timings.stop_s

    def kill(self, reason: str) -> None:
        """Kill the worker without waiting for it to save. It counts as asked to leave, not as crashed."""
        if self._worker is not None:
            self._worker.asked = self._worker.asked or "leave"
            self._worker.kill(reason)

    def tick(self) -> None:
        """Kill the worker if it sends no heartbeats or misses its deadline to stop. Call this every `tick_s`."""
        worker = self._worker
        if worker is None:
            return
        now_s, timings = time.monotonic(), self._timings
        self._extend_deadlines(now_s - self._ticked_at_s - timings.tick_s)
        self._ticked_at_s = now_s
        if self._first_beat_at_s is None and now_s - self._started_at_s < timings.start_s:
            self._watch_start(worker, now_s)
        if self._stop_by_s is not None and now_s > self._stop_by_s:
            worker.kill(f"it did not end within {now_s - self._asked_at_s:.0f} s")
        elif self.silent_s > timings.hung_s:
            worker.kill(f"it sent no heartbeat for {timings.hung_s:g} s")

    def _watch_start(self, worker: WorkerProcess, now_s: float) -> None:
        """Count the use of the processor as a sign of life."""
        processor_s = worker.processor_s()
        if processor_s > self._processor_s:
            self._processor_s, self._alive_at_s = processor_s, now_s

    def _extend_deadlines(self, gap_s: float) -> None:
        """Move the deadlines by the time for which this process and its worker were frozen, as by `docker pause`."""
        if gap_s < FROZEN_S:
            return
        logger.info("This process was frozen for %.0f s, so the worker's deadlines are extended by that time.", gap_s)
        self._alive_at_s = min(self._alive_at_s + gap_s, time.monotonic())
        self._asked_at_s += gap_s
        if self._stop_by_s is not None:
            self._stop_by_s += gap_s

    def _receive(self, message: WorkerMessage) -> None:
        now_s, timings = time.monotonic(), self._timings
        if isinstance(message, Beat):
            self._alive_at_s = now_s
            self._first_beat_at_s = self._first_beat_at_s or now_s
        elif isinstance(message, Unsaved) and self._stop_by_s is not None:
            self._stop_by_s = min(now_s + timings.stop_s, self._asked_at_s + timings.save_s)
        elif isinstance(message, Ended) and self._stop_by_s is None:
            # A worker that ends on its own has as much time as one that was asked to.
            self._asked_at_s, self._stop_by_s = now_s, now_s + timings.stop_s
        self._on_message(message)

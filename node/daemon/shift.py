"""One worker at a time, from its start to its death: heard, watched, asked to end. Knows deadlines, and no phase.

A worker that is asked to end has `stop_s`; one that says meanwhile that its work is not saved yet has `save_s`: its
current operation ends before the save, and a volunteer's disk takes gigabytes slowly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.daemon.child import Child, Fate
from node.link import Beat, Down, Ended, Start, Stop, Unsaved, Up

logger = logging.getLogger(__name__)

FROZEN_S = 5.0
"""Between two looks at the deadlines: more than a busy machine explains."""


@dataclass(frozen=True, slots=True)
class Timings:
    """How long the supervisor waits for what, in seconds; tests shorten them."""

    grace_s: float = 60.0
    """From a worker's start until its heartbeat is asked for."""
    hung_s: float = 30.0
    """Without a beat: the worker is killed and restarted."""
    stale_s: float = 15.0
    """Without a beat: `livez` says so. Workers beat once a second."""
    stop_s: float = 6.0
    """For saying goodbye; then the worker is killed. Uvicorn has 2 s more, and both are done within 10."""
    save_s: float = 50.0
    """The same while it says that its work is not saved yet; containers and services are given 60 s."""
    backoff_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Before the restart after the first, second, ... crash; one more crash than there are entries is an error."""
    healthy_s: float = 60.0
    """A worker that was heard for this long clears the crashes before it."""
    tick_s: float = 0.25


class Shift:
    """`start` and `wait` in turn, for each worker. One event loop."""

    def __init__(self, command: Sequence[str], timings: Timings, on_message: Callable[[Up], None]) -> None:
        self._command, self._timings, self._on_message = command, timings, on_message
        self._child: Child | None = None
        self._started_at_s = 0.0
        self._beat_at_s = 0.0
        self._asked_at_s = 0.0
        self._looked_at_s = 0.0
        """When deadlines were last held to."""
        self._stop_by_s: float | None = None

    async def start(self, start: Start) -> None:
        """Raises OSError where the system refuses a process."""
        self._started_at_s = self._beat_at_s = self._looked_at_s = time.monotonic()
        self._stop_by_s = None
        child = await Child.spawn(self._command, start, self._heard)
        self._child = child
        logger.debug("Worker %d runs, mode %s", child.pid, start.mode)

    async def wait(self) -> tuple[Fate, str | None]:
        """Until it is dead. Returns how it ended, and how it was asked to, if it was."""
        child = self._child
        assert child is not None, "start it first"
        try:
            return await child.wait(), child.asked
        finally:
            self._child = None

    @property
    def was_asked(self) -> bool:
        """Whether this worker has been asked to end."""
        return self._child is not None and self._child.asked is not None

    @property
    def age_s(self) -> float:
        """Since the newest worker was started, dead or alive."""
        return time.monotonic() - self._started_at_s

    @property
    def lived_s(self) -> float:
        """From the newest worker's start to its last beat; 0 for one that never beat."""
        return self._beat_at_s - self._started_at_s

    @property
    def silent_s(self) -> float:
        """Seconds without a beat; 0 during the grace after the start, and without a worker."""
        if self._child is None or self.age_s < self._timings.grace_s:
            return 0.0
        return time.monotonic() - self._beat_at_s

    def tell(self, message: Down) -> None:
        """Nothing happens without a worker."""
        if self._child is not None:
            self._child.tell(message)

    def ask(self, stop: Stop) -> None:
        """Ask it to end, by a deadline; a drain has none, as it waits for its round."""
        child = self._child
        if child is None:
            return
        child.stop(stop)
        if not child.heard:
            child.kill("it had not begun yet")  # still importing: it has nothing to save, and would be slow to listen
        self._asked_at_s = time.monotonic()
        self._stop_by_s = None if stop.how == "drain" else self._asked_at_s + self._timings.stop_s

    def give_up(self, why: str) -> None:
        """End it at once, unsaved, as if it had been asked to: nobody wants it any more."""
        if self._child is not None:
            self._child.asked = self._child.asked or "leave"
            self._child.kill(why)

    def hold_to_deadlines(self) -> None:
        """Kill one that hangs, or does not end. To be called every `tick_s`, as no message brings that."""
        child = self._child
        if child is None:
            return
        now_s, timings = time.monotonic(), self._timings
        self._forgive(now_s - self._looked_at_s - timings.tick_s)
        self._looked_at_s = now_s
        if self._stop_by_s is not None and now_s > self._stop_by_s:
            child.kill(f"it did not end within {now_s - self._asked_at_s:.0f} s")
        elif self.silent_s > timings.hung_s:
            child.kill(f"it hung: no heartbeat for {timings.hung_s:g} s")

    def _forgive(self, gap_s: float) -> None:
        """Whatever stopped this process for so long (a frozen container) has stopped the worker, too."""
        if gap_s < FROZEN_S:
            return
        logger.info("This process stood still for %.0f s; the worker is given as long.", gap_s)
        self._beat_at_s = min(self._beat_at_s + gap_s, time.monotonic())
        self._asked_at_s += gap_s
        if self._stop_by_s is not None:
            self._stop_by_s += gap_s

    def _heard(self, message: Up) -> None:
        now_s, timings = time.monotonic(), self._timings
        if isinstance(message, Beat):
            self._beat_at_s = now_s
        elif isinstance(message, Unsaved) and self._stop_by_s is not None:
            self._stop_by_s = min(now_s + timings.stop_s, self._asked_at_s + timings.save_s)
        elif isinstance(message, Ended) and self._stop_by_s is None:
            # Its last words are said: what is left of it has as long as any stop.
            self._asked_at_s, self._stop_by_s = now_s, now_s + timings.stop_s
        self._on_message(message)

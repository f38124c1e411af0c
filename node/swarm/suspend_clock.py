"""A monotonic clock that stops while this process or the machine is suspended.

A process that was stopped or starved has received no messages meanwhile, but that does not mean that its peers are
dead. With a plain clock it would take all peers for dead when it resumes, and continue alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

SUSPENDED_S = 3.0
"""A longer gap between two readings means that the process did not run, because it reads the clock every second."""
JUST_RESUMED_S = 3.0


def awake_and_asleep_s() -> float:
    """Seconds on a clock that also counts while the machine sleeps, which that of an event loop does not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class SuspendClock:
    """Counts seconds, except for gaps longer than SUSPENDED_S between two readings."""

    def __init__(self, clock: Callable[[], float], with_sleep: Callable[[], float] | None = None) -> None:
        """`with_sleep` is a clock that also counts while the machine sleeps, if `clock` does not."""
        self._clock, self._with_sleep = clock, with_sleep or clock
        self._read_at_s, self._slept_until_s = clock(), self._with_sleep()
        self._suspended_s = 0.0
        self._resumed_at_s: float | None = None
        self.suspensions = 0
        """How often this process has been suspended."""

    def __call__(self) -> float:
        now_s, slept_until_s = self._clock(), self._with_sleep()
        gap_s = now_s - self._read_at_s
        longest_s = max(gap_s, slept_until_s - self._slept_until_s)
        self._read_at_s, self._slept_until_s = now_s, slept_until_s
        if longest_s > SUSPENDED_S:
            self._suspended_s += gap_s
            self._resumed_at_s = now_s
            self.suspensions += 1
        return now_s - self._suspended_s

    def just_resumed(self) -> bool:
        """Whether the process resumed within the last JUST_RESUMED_S. Peers may have closed connections."""
        self()
        return self._resumed_at_s is not None and self._read_at_s - self._resumed_at_s < JUST_RESUMED_S

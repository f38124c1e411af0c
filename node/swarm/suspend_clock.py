"""A monotonic clock that stops while this process is suspended.

A process that was stopped or starved has received no messages meanwhile, but that does not mean that its peers are
dead. With a plain clock it would take all peers for dead when it resumes, and continue alone.
"""

from __future__ import annotations

from collections.abc import Callable

SUSPENDED_S = 3.0
"""A longer gap between two readings means that the process did not run, because it reads the clock every second."""
JUST_RESUMED_S = 3.0


class SuspendClock:
    """Counts seconds, except for gaps longer than SUSPENDED_S between two readings."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_at_s = clock()
        self._suspended_s = 0.0
        self._resumed_at_s: float | None = None
        self.suspensions = 0
        """How often this process has been suspended."""

    def __call__(self) -> float:
        now_s = self._clock()
        gap_s = now_s - self._read_at_s
        self._read_at_s = now_s
        if gap_s > SUSPENDED_S:
            self._suspended_s += gap_s
            self._resumed_at_s = now_s
            self.suspensions += 1
        return now_s - self._suspended_s

    def just_resumed(self) -> bool:
        """Whether the process resumed within the last JUST_RESUMED_S. Peers may have closed connections."""
        self()
        return self._resumed_at_s is not None and self._read_at_s - self._resumed_at_s < JUST_RESUMED_S

"""Time as a node lives it. Knows no peers.

A process that was stopped, or starved, heard nothing in that time: that says nothing about the others. Were they taken
for dead, a node would wake up as the only one there, and go on alone from where it fell asleep.
"""

from __future__ import annotations

from collections.abc import Callable

ASLEEP_S = 3.0
"""A node that does not look at its clock for so long was not running: it looks about once a second."""

DROWSY_S = 3.0


class AwakeClock:
    """Monotonic seconds, less those in which nobody looked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked_at_s = clock()
        self._asleep_s = 0.0
        self._woke_at_s: float | None = None

    def __call__(self) -> float:
        now_s = self._clock()
        gap_s = now_s - self._looked_at_s
        self._looked_at_s = now_s
        if gap_s > ASLEEP_S:
            self._asleep_s += gap_s
            self._woke_at_s = now_s
        return now_s - self._asleep_s

    def drowsy(self) -> bool:
        """Whether the node has woken up just now. Others may have let go of its connections meanwhile."""
        self()
        return self._woke_at_s is not None and self._looked_at_s - self._woke_at_s < DROWSY_S

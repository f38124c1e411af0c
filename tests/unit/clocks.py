"""Clocks that stand still until a test moves them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass
class Clock:
    """A monotonic clock, in seconds."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class WallClock:
    now: datetime

    def __call__(self) -> datetime:
        return self.now

    def add(self, **time: float) -> None:
        """Advance the clock by the arguments of a `timedelta`."""
        self.now += timedelta(**time)

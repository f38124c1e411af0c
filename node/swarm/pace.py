"""Keeps bulk traffic within the volunteer's limit. Knows bytes and a clock; no wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

OVERHEAD_RATIO = 1.06
"""Of bytes on the interface to those of a stream: libp2p, TCP, IP and Ethernet headers at 1500 bytes a packet, and the
acknowledgements of what comes the other way."""


AHEAD_RATIO = 0.5
"""Share of the limit for what does not wait, so that bulk always gets the rest."""
AHEAD_S = 1.0
"""Of that share, so much passes at once: 5 % of what a limit allows in ten seconds."""


class Pace:
    """One direction of a link, shared by all streams. Pieces pass in the order in which they came.

    Whoever has taken waits until its bytes would have passed at the limit, so at no time has more gone through than the
    limit allows, beside what does not wait: calls without bulk, such as heartbeats. These count, up to their share.
    """

    def __init__(self, clock: Callable[[], float], mbit_s: float = 0.0) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        """Of the first in line. Only its bytes are booked, so what does not wait passes before the rest of the line."""
        self.limit(mbit_s)

    def limit(self, mbit_s: float) -> None:
        """From now on; 0: none."""
        self.bytes_s = mbit_s * 1e6 / 8 / OVERHEAD_RATIO
        self._free_at_s = 0.0
        self._ahead_until_s = 0.0
        """When what has not waited would have passed, at its share of the limit."""

    async def take(self, size: int) -> None:
        """Wait until these bytes may pass."""
        came_at_s = self._clock()
        if not self.bytes_s:
            return
        async with self._turn:
            await asyncio.sleep(self._book(size, came_at_s))

    def take_ahead(self, size: int) -> bool:
        """Count these bytes, which do not wait. False, and they do not count, where the share is used up."""
        if not self.spares(size):
            return False
        now_s = self._clock()
        if self.bytes_s:
            self._ahead_until_s = self._ahead_at_s(size, now_s)
        self._book(size, now_s)
        return True

    def spares(self, size: int) -> bool:
        """Whether so many bytes may pass without waiting."""
        now_s = self._clock()
        return not self.bytes_s or self._ahead_at_s(size, now_s) <= now_s + AHEAD_S

    def _ahead_at_s(self, size: int, now_s: float) -> float:
        return max(self._ahead_until_s, now_s) + size / (AHEAD_RATIO * self.bytes_s)

    def _book(self, size: int, came_at_s: float) -> float:
        """Count these bytes; returns after how many seconds they have passed at the limit. 0 without one."""
        if not self.bytes_s:
            return 0.0
        self._free_at_s = max(self._free_at_s, came_at_s) + size / self.bytes_s
        return max(0.0, self._free_at_s - self._clock())

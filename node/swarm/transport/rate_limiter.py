"""A rate limiter for one direction of the volunteer's link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

OVERHEAD_RATIO = 1.06
"""Bytes on the network interface per stream byte. They include libp2p, TCP, IP and Ethernet headers at 1500 bytes a
packet, and the acknowledgements of the other direction."""
PRIORITY_RATIO = 0.5
"""Share of the limit that priority bytes may use. Bulk always gets the rest."""
PRIORITY_BURST_S = 1.0
"""Priority bytes may run this far ahead of their share, a burst of 5 % of the bytes that a limit allows in 10 s."""


class RateLimiter:
    """Limits one direction of a link, which all streams share. Bulk passes in arrival order.

    `acquire` returns when its bytes would have passed at the limit, so bulk never exceeds the limit. Priority bytes,
    which are calls without bulk such as heartbeats, do not wait, but count towards the limit up to their share.
    """

    def __init__(self, clock: Callable[[], float], mbit_s: float = 0.0) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        """The lock of bulk. Only its holder's bytes are counted, so priority bytes pass before the queued bytes."""
        self.limit(mbit_s)

    def limit(self, mbit_s: float) -> None:
        """Set the limit in Mbit/s; 0 removes the limit."""
        self.bytes_s = mbit_s * 1e6 / 8 / OVERHEAD_RATIO
        self._free_at_s = 0.0
        self._priority_free_at_s = 0.0
        """When the priority bytes that were counted so far would have passed at their share of the limit."""

    async def acquire(self, size: int) -> None:
        """Wait until `size` bulk bytes may pass."""
        arrived_at_s = self._clock()
        if not self.bytes_s:
            return
        async with self._turn:
            await asyncio.sleep(self._book(size, arrived_at_s))

    def try_acquire_priority(self, size: int) -> bool:
        """Count `size` priority bytes. Returns False and counts nothing if the share is used up."""
        if not self.has_priority_budget(size):
            return False
        now_s = self._clock()
        if self.bytes_s:
            self._priority_free_at_s = self._next_priority_free_at_s(size, now_s)
            self._book(size, now_s)
        return True

    def has_priority_budget(self, size: int) -> bool:
        now_s = self._clock()
        return not self.bytes_s or self._next_priority_free_at_s(size, now_s) <= now_s + PRIORITY_BURST_S

    def _next_priority_free_at_s(self, size: int, now_s: float) -> float:
        return max(self._priority_free_at_s, now_s) + size / (PRIORITY_RATIO * self.bytes_s)

    def _book(self, size: int, arrived_at_s: float) -> float:
        """Count bytes towards the limit. Returns the seconds until they may pass; 0 if the limit was removed."""
        if not self.bytes_s:
            return 0.0
        self._free_at_s = max(self._free_at_s, arrived_at_s) + size / self.bytes_s
        return max(0.0, self._free_at_s - self._clock())

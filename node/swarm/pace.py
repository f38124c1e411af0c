"""Keeps bulk traffic within the volunteer's limit. Knows bytes and a clock; no wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

OVERHEAD_RATIO = 1.06
"""Of bytes on the interface to those of a stream: libp2p, TCP, IP and Ethernet headers at 1500 bytes a packet, and the
acknowledgements of what comes the other way."""


class Pace:
    """One direction of a link, shared by all streams. Pieces pass in the order in which they came.

    Whoever has taken waits until its bytes would have passed at the limit, so at no time has more gone through than the
    limit allows, beside what does not wait: calls without bulk, such as heartbeats, only count.
    """

    def __init__(self, clock: Callable[[], float], mbit_s: float = 0.0) -> None:
        self._clock = clock
        self._free_at_s = 0.0
        self.limit(mbit_s)

    def limit(self, mbit_s: float) -> None:
        """From now on; 0: none."""
        self.bytes_s = mbit_s * 1e6 / 8 / OVERHEAD_RATIO
        self._free_at_s = 0.0

    async def take(self, size: int, *, wait: bool = True) -> None:
        wait_s = self.book(size)
        if wait and wait_s:
            await asyncio.sleep(wait_s)

    def book(self, size: int) -> float:
        """Count these bytes; returns after how many seconds they have passed at the limit. 0 without one."""
        if not self.bytes_s:
            return 0.0
        now_s = self._clock()
        self._free_at_s = max(self._free_at_s, now_s) + size / self.bytes_s
        return self._free_at_s - now_s

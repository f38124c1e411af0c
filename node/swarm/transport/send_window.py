"""A window on the bytes of one message body that are in flight.

All calls between two peers share one connection. Without a window, the buffers of that connection hold megabytes, and
on a slow line each small call waits for many seconds behind them. So the receiver acknowledges the bytes that it has
read, with the time on its clock, and the sender keeps the queuing delay at TARGET_S. As in LEDBAT (RFC 6817), that is
the delay in the sender's own direction, because the reverse direction may be full of the receiver's own data:

    queuing delay = one-way delay - base delay
    window = window + rate * (TARGET_S - queuing delay)

The base delay is the smallest one-way delay of the last minutes. `rate` is that of the acknowledged bytes. It is at
most that of the line, so the window does not overshoot.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from node.errors import PeerError

TARGET_S = 0.5
"""The queuing delay that the window aims at. On a line that is full in both directions, a small call waits twice as
long, which is well below the timeouts of calls."""
MIN_WINDOW_BYTES = 64 * 1024
"""The smallest window, and the first one to a peer."""
MAX_FIRST_WINDOW_BYTES = 2 * 2**20
"""Limit on the window with which a body starts, because the line may have become slower."""
MAX_WINDOW_BYTES = 64 * 2**20
MAX_CHANGE_RATIO = 4.0
"""Largest factor by which the window changes at once, because a busy machine may acknowledge late."""
PIECES_PER_WINDOW = 4
BASE_PERIOD_S = 300.0
"""The base delay is that of this period and the one before. So a change of the route is forgotten, and a suspension,
which changes the difference of the clocks. The size of a window is forgotten after one period."""
CLOCK_MODULUS = 2**32


def milliseconds(clock_s: float) -> int:
    """The time of an acknowledgement: milliseconds on the receiver's clock, of which only differences count."""
    return int(1000 * clock_s) % CLOCK_MODULUS


def _difference(later_ms: int, earlier_ms: int) -> int:
    half = CLOCK_MODULUS // 2
    return (later_ms - earlier_ms + half) % CLOCK_MODULUS - half


class PathHistory:
    """What earlier bodies have found out about the path to one peer. The windows of all bodies to that peer share it.

    A body that starts while the line is full would take the queuing delay for a part of the base delay. And a window of
    the smallest size takes several round trips to grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._base_delays: deque[tuple[float, int]] = deque(maxlen=2)
        """The start and the smallest one-way delay in ms of the period before and of this one. The delays include the
        difference of the two clocks."""
        self._window: tuple[float, float] = (-math.inf, 0.0)
        """When the last window was changed, and its size."""

    @property
    def first_window_bytes(self) -> float:
        """The size with which the next window starts: that of the last one, within limits."""
        changed_at_s, size_bytes = self._window
        if self._clock() - changed_at_s > BASE_PERIOD_S:
            return MIN_WINDOW_BYTES
        return min(size_bytes, MAX_FIRST_WINDOW_BYTES)

    def keep_window(self, size_bytes: float) -> None:
        self._window = self._clock(), size_bytes

    def queuing_delay_s(self, one_way_ms: int) -> float:
        """Take a measured one-way delay into account, and return the queuing delay in it."""
        now_s, delays = self._clock(), self._base_delays
        while delays and delays[0][0] < now_s - 2 * BASE_PERIOD_S:
            delays.popleft()
        if not delays or delays[-1][0] < now_s - BASE_PERIOD_S:
            delays.append((now_s, one_way_ms))
        elif _difference(one_way_ms, delays[-1][1]) < 0:
            delays[-1] = delays[-1][0], one_way_ms
        return max(_difference(one_way_ms, base_ms) for _, base_ms in delays) / 1000


class SendWindow:
    """The window of one message. Used on one event loop."""

    def __init__(self, clock: Callable[[], float], path: PathHistory) -> None:
        self._clock, self._path = clock, path
        self.size_bytes = path.first_window_bytes
        self._written_bytes = self._acknowledged_bytes = 0
        self._pieces: deque[tuple[int, int]] = deque()
        """For each piece in flight: the bytes written up to its end, and when it was written in ms."""
        self._adjusted_at_s = clock()
        self._adjusted_at_bytes = 0
        """The acknowledged bytes at the last adjustment."""
        self._adjust_at_bytes = int(self.size_bytes)
        """The next adjustment is due when so many bytes are acknowledged. The piece that ends there was written after a
        whole window of the present size, so its delay shows the effect of that size."""
        self._was_full = self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def in_flight_bytes(self) -> int:
        return self._written_bytes - self._acknowledged_bytes

    @property
    def piece_bytes(self) -> int:
        """The largest useful piece."""
        return int(self.size_bytes) // PIECES_PER_WINDOW

    async def reserve(self, size: int) -> None:
        """Wait until `size` bytes fit into the window, and count them as written. Raises ConnectionResetError."""
        while self.in_flight_bytes and self.in_flight_bytes + size > self.size_bytes:
            self._was_full = True
            await self.progress()
        self._written_bytes += size
        self._pieces.append((self._written_bytes, milliseconds(self._clock())))

    async def progress(self) -> None:
        """Wait for the next acknowledgement. Raises ConnectionResetError if no more arrive."""
        if self._is_closed:
            raise ConnectionResetError("the receiver has closed the stream")
        self._changed.clear()
        await self._changed.wait()

    def acknowledge(self, size: int, received_ms: int) -> None:
        """Count `size` bytes as received. Raises PeerError if so many are not in flight."""
        if not 0 < size <= self.in_flight_bytes:
            raise PeerError("a peer acknowledges bytes that were not sent")
        self._acknowledged_bytes += size
        written_ms = None
        while self._pieces and self._pieces[0][0] <= self._acknowledged_bytes:
            written_ms = self._pieces.popleft()[1]
        if written_ms is not None:
            queuing_delay_s = self._path.queuing_delay_s((received_ms - written_ms) % CLOCK_MODULUS)
            if self._acknowledged_bytes >= self._adjust_at_bytes:
                self._adjust(queuing_delay_s)
        self._changed.set()

    def _adjust(self, queuing_delay_s: float) -> None:
        """Apply the equation of the module. The window grows only if it has delayed the sender."""
        now_s = self._clock()
        rate_bytes_s = (self._acknowledged_bytes - self._adjusted_at_bytes) / max(now_s - self._adjusted_at_s, 1e-3)
        change_bytes = rate_bytes_s * (TARGET_S - queuing_delay_s)
        if change_bytes < 0 or self._was_full:
            least = max(self.size_bytes / MAX_CHANGE_RATIO, MIN_WINDOW_BYTES)
            most = min(self.size_bytes * MAX_CHANGE_RATIO, MAX_WINDOW_BYTES)
            self.size_bytes = min(max(self.size_bytes + change_bytes, least), most)
            self._path.keep_window(self.size_bytes)
        self._adjusted_at_s, self._adjusted_at_bytes = now_s, self._acknowledged_bytes
        self._adjust_at_bytes = self._written_bytes + int(self.size_bytes)
        self._was_full = False

    def close(self) -> None:
        """Let the sender fail if it waits, because no more acknowledgements arrive."""
        self._is_closed = True
        self._changed.set()

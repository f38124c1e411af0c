"""A window on the bytes of one message body that are on their way to the receiver.

All calls between two peers share one connection. Without a window, the buffers of that connection hold megabytes, and
on a slow line each small call waits for many seconds behind them. So the receiver acknowledges the bytes that it has
read, with the time on its clock, and the sender keeps the wait in the buffers at TARGET_S. As in LEDBAT (RFC 6817), the
wait is that of the sender's own direction, because the way back may be full of the receiver's own data:

    wait = (time on the way) - (shortest time on the way in the last minutes)
    window = window + rate * (TARGET_S - wait)

`rate` is that of the acknowledged bytes. It is at most that of the line, so the window does not overshoot.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from node.errors import PeerError

TARGET_S = 0.5
"""The wait in the buffers that the window aims at. A small call waits for as long there and, on a line that is full in
both directions, on its way back; so this is well below the timeouts of calls."""
MIN_WINDOW_BYTES = 64 * 1024
"""The smallest window, and the first one to a peer."""
MAX_FIRST_WINDOW_BYTES = 2 * 2**20
"""Limit on the window with which a body starts, because the line may have become slower."""
MAX_WINDOW_BYTES = 64 * 2**20
MOST_CHANGE = 4.0
"""Largest factor by which the window changes at once, because a busy machine may acknowledge late."""
PIECES = 4
"""A full window consists of at least so many pieces."""
KEPT_S = 300.0
"""The shortest time on the way is that of the last one to two times KEPT_S. Then a change of the route, or of a clock
by a suspension, is forgotten. The size of a window is forgotten after KEPT_S."""
CLOCK_MODULUS = 2**32


def milliseconds(clock_s: float) -> int:
    """The time of an acknowledgement: milliseconds on the receiver's clock, of which only differences count."""
    return int(1000 * clock_s) % CLOCK_MODULUS


def _difference(later_ms: int, earlier_ms: int) -> int:
    half = CLOCK_MODULUS // 2
    return (later_ms - earlier_ms + half) % CLOCK_MODULUS - half


class Way:
    """What the windows of earlier bodies have found out about the way to one peer.

    All windows share the shortest time, because a body that starts while the line is full would take the wait for a
    part of the way. The next window starts with the size of the last one, because a small one takes several round trips
    to grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: deque[tuple[float, int]] = deque(maxlen=2)
        """The start and the shortest time in ms of this period and of the one before. The times include the difference
        of the two clocks."""
        self._window: tuple[float, float] = (-math.inf, 0.0)
        """When the last window was adjusted, and its size."""

    @property
    def first_window_bytes(self) -> float:
        """The size with which the next window starts."""
        adjusted_at_s, size_bytes = self._window
        if self._clock() - adjusted_at_s > KEPT_S:
            return MIN_WINDOW_BYTES
        return min(size_bytes, MAX_FIRST_WINDOW_BYTES)

    def keep_window(self, size_bytes: float) -> None:
        self._window = self._clock(), size_bytes

    def wait_s(self, way_ms: int) -> float:
        """The part of this time on the way that a piece has waited in buffers."""
        now_s = self._clock()
        while self._kept and self._kept[0][0] < now_s - 2 * KEPT_S:
            self._kept.popleft()
        if not self._kept or self._kept[-1][0] < now_s - KEPT_S:
            self._kept.append((now_s, way_ms))
        elif _difference(way_ms, self._kept[-1][1]) < 0:
            self._kept[-1] = self._kept[-1][0], way_ms
        return max(_difference(way_ms, shortest_ms) for _, shortest_ms in self._kept) / 1000


class SendWindow:
    """The window of one message. Used on one event loop."""

    def __init__(self, clock: Callable[[], float], way: Way) -> None:
        self._clock, self._way = clock, way
        self.size_bytes = way.first_window_bytes
        self._written_bytes = self._acknowledged_bytes = 0
        self._pieces: deque[tuple[int, int]] = deque()
        """For each piece on its way: the bytes written up to its end, and when it was written in ms."""
        self._adjusted_at_s = clock()
        self._adjusted_at_bytes = 0
        """The acknowledged bytes at the last adjustment."""
        self._adjust_at_bytes = int(self.size_bytes)
        """The next adjustment is due when so many bytes are acknowledged: when the newest piece has left after a whole
        window of the present size."""
        self._was_full = self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def in_flight_bytes(self) -> int:
        return self._written_bytes - self._acknowledged_bytes

    @property
    def piece_bytes(self) -> int:
        """The largest useful piece."""
        return int(self.size_bytes) // PIECES

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
        """Count `size` bytes as received. Raises PeerError if so many are not on their way."""
        if not 0 < size <= self.in_flight_bytes:
            raise PeerError("a peer acknowledges bytes that were not sent")
        self._acknowledged_bytes += size
        written_ms = None
        while self._pieces and self._pieces[0][0] <= self._acknowledged_bytes:
            written_ms = self._pieces.popleft()[1]
        if written_ms is not None:
            wait_s = self._way.wait_s((received_ms - written_ms) % CLOCK_MODULUS)
            if self._acknowledged_bytes >= self._adjust_at_bytes:
                self._adjust(wait_s)
        self._changed.set()

    def _adjust(self, wait_s: float) -> None:
        """Apply the equation of the module. The window grows only if it has delayed the sender."""
        now_s = self._clock()
        rate_bytes_s = (self._acknowledged_bytes - self._adjusted_at_bytes) / max(now_s - self._adjusted_at_s, 1e-3)
        change_bytes = rate_bytes_s * (TARGET_S - wait_s)
        if change_bytes < 0 or self._was_full:
            least = max(self.size_bytes / MOST_CHANGE, MIN_WINDOW_BYTES)
            most = min(self.size_bytes * MOST_CHANGE, MAX_WINDOW_BYTES)
            self.size_bytes = min(max(self.size_bytes + change_bytes, least), most)
            self._way.keep_window(self.size_bytes)
        self._adjusted_at_s, self._adjusted_at_bytes = now_s, self._acknowledged_bytes
        self._adjust_at_bytes = self._written_bytes + int(self.size_bytes)
        self._was_full = False

    def close(self) -> None:
        """Let the sender fail if it waits, because no more acknowledgements arrive."""
        self._is_closed = True
        self._changed.set()

"""Reads and writes one message on a stream: a length-prefixed header, then blobs. Limits sizes, rates and stalls.

A stream carries words of four bytes, big endian, and what they announce. A word below 2**31 is the length of a header,
and the header and its blobs follow. A word from 2**31 on acknowledges `word - 2**31` bytes of the blobs that the other
end is sending, and is followed by the time of the receipt (`send_window.milliseconds`). The receiver of more than
WINDOWED_BYTES acknowledges all of them, and the sender keeps to a `SendWindow`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Protocol, TypeVar

from node.errors import PeerError
from node.swarm.transport.rate_limiter import RateLimiter
from node.swarm.transport.send_window import MIN_WINDOW_BYTES, SendWindow, milliseconds
from node.swarm.transport.wire import MAX_HEADER_BYTES, STALL_S, ByteCounter, CheckSize, Message, unpack_header

PIECE_BYTES = 256 * 1024
LIMITED_PIECE_BYTES = 16 * 1024
"""Size of the pieces under a rate limit: so small that many streams share a slow link evenly."""
SMALL_BYTES = 64 * 1024
"""Longer headers, and longer messages, count as bulk for the rate limit. In a swarm of thousands, gossip has headers of
up to 300 kB."""
MIN_BYTES_S = PIECE_BYTES / STALL_S
"""A peer that transfers the longest body of a verb more slowly than this counts as hung. A shorter body may be one of
many that share a slow line, so it has the same time."""
LINGER_S = 1.0
WINDOWED_BYTES = MIN_WINDOW_BYTES
"""Longer bodies are sent with a window."""
ACKNOWLEDGE_S = 0.02
"""Time for which received bytes are collected before they are acknowledged."""
ACKNOWLEDGEMENT_BIT = 2**31

T = TypeVar("T")


class Reader(Protocol):
    """The incoming half of a stream; `asyncio.StreamReader` is one."""

    async def read(self, n: int) -> bytes:
        """Read up to `n` bytes; b"" at the end of the stream."""

    async def readexactly(self, n: int) -> bytes:
        """Read exactly `n` bytes. Raises IncompleteReadError if the stream ends early."""


class Writer(Protocol):
    """The outgoing half of a stream; `asyncio.StreamWriter` is one."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue data to be sent."""

    async def drain(self) -> None:
        """Wait while too much data is queued."""

    def close(self) -> None:
        """Close the stream after the queued data is sent."""


def abort(writer: Writer) -> None:
    """End a stream at once, although the other end has not read all of it."""
    if isinstance(writer, asyncio.StreamWriter):
        writer.transport.abort()
    else:
        getattr(writer, "abort", writer.close)()


def close(writer: Writer) -> None:
    """Close a stream after the queued data is sent, or after STALL_S.

    `writer.close` alone would keep the socket until the other end has read all of it, which may be never.
    """
    if isinstance(writer, asyncio.StreamWriter) and writer.transport.get_write_buffer_size():
        asyncio.get_running_loop().call_later(STALL_S, writer.transport.abort)
    writer.close()


class _StallTimer:
    """Bounds the time that one message waits for the other end. Waits for this node's own rate limit do not count.

    It is a context manager. One timeout serves the whole message, because a timeout for each piece costs more than the
    piece.
    """

    def __init__(self, size: int) -> None:
        self._clock = asyncio.get_running_loop().time
        self._left_s = STALL_S + size / MIN_BYTES_S
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> _StallTimer:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, traceback)

    async def wait(self, step: Awaitable[T]) -> T:
        """Wait for one transfer. Raises TimeoutError if it takes STALL_S or the whole message is too slow."""
        began_s = self._clock()
        self._timeout.reschedule(began_s + min(STALL_S, self._left_s))
        result = await step
        self._left_s -= self._clock() - began_s
        return result

    async def pass_limit(self, limiter: RateLimiter | None, size: int) -> None:
        """Wait until this node's own rate limit allows `size` bytes. None: they are allowed already."""
        if limiter is not None and limiter.bytes_s:
            self._timeout.reschedule(None)
            await limiter.acquire(size)


async def write_message(
    writer: Writer,
    header: bytes,
    blobs: Sequence[bytes],
    limiter: RateLimiter,
    window: SendWindow,
    counter: ByteCounter,
    longest: int = 0,
) -> None:
    """Send a packed header and blobs. Raises TimeoutError if the peer reads too slowly.

    The caller passes the peer's acknowledgements to `window`. `longest` is the longest body of the verb in bytes.
    """
    length, blob_bytes = len(header).to_bytes(4, "big"), sum(map(len, blobs))
    is_small = len(header) + blob_bytes <= SMALL_BYTES
    if len(header) <= SMALL_BYTES:
        counted = len(header) + (blob_bytes if is_small else 0)
        if not limiter.try_acquire_priority(counted):
            await limiter.acquire(counted)
        writer.write(length + header)
        counter.sent(4 + len(header))
    else:
        writer.write(length)
        counter.sent(4)
        await _write_pieces(writer, [header], limiter, None, counter)
    # A heartbeat has a blob for each record. In turns between bulk data, they would take seconds.
    blob_limiter = None if is_small else limiter
    await _write_pieces(writer, blobs, blob_limiter, window if blob_bytes > WINDOWED_BYTES else None, counter, longest)


async def _write_pieces(
    writer: Writer,
    blobs: Sequence[bytes],
    limiter: RateLimiter | None,
    window: SendWindow | None,
    counter: ByteCounter,
    longest: int = 0,
) -> None:
    most = LIMITED_PIECE_BYTES if limiter is not None and limiter.bytes_s else PIECE_BYTES
    async with _StallTimer(max(longest, sum(map(len, blobs)))) as timer:
        for blob in blobs:
            view = memoryview(blob)
            while view:
                piece = view[: min(most, window.piece_bytes) if window else most]
                view = view[len(piece) :]
                await timer.pass_limit(limiter, len(piece))
                if window:
                    await timer.wait(window.reserve(len(piece)))
                writer.write(piece)
                counter.sent(len(piece))
                await timer.wait(writer.drain())
        await timer.wait(writer.drain())


async def write_reply(
    ends: tuple[Reader, Writer],
    header: bytes,
    blobs: Sequence[bytes],
    limiter: RateLimiter,
    window: SendWindow,
    counter: ByteCounter,
    longest: int = 0,
) -> None:
    """Like `write_message`, but reads the acknowledgements, which are all that the caller still sends, and awaits them.

    If the stream were closed before, the data in flight would be lost, because p2pd resets a stream if it cannot
    deliver an acknowledgement.
    """

    async def read_acknowledgements() -> None:
        with suppress(OSError, EOFError, PeerError):
            await _read_length(ends[0], window, None)
        window.close()  # The caller has closed the stream, or sends anything else.

    acknowledging = asyncio.create_task(read_acknowledgements())
    try:
        await write_message(ends[1], header, blobs, limiter, window, counter, longest)
        async with _StallTimer(max(longest, window.in_flight_bytes)) as timer:
            while window.in_flight_bytes:
                await timer.wait(window.progress())
    finally:
        acknowledging.cancel()
        await asyncio.gather(acknowledging, return_exceptions=True)


async def read_message(
    ends: tuple[Reader, Writer],
    check_size: CheckSize,
    limiter: RateLimiter,
    counter: ByteCounter,
    first_s: float | None = None,
    window: SendWindow | None = None,
) -> tuple[str, Message]:
    """Receive one message. Returns verb or status, and message. Checks each size before it is used.

    Args:
        first_s: the timeout of the first bytes.
        window: that of the message which this end is sending on the same stream.
    """
    reader = ends[0]
    length = await _read_length(reader, window, first_s)
    if length <= SMALL_BYTES:
        async with _StallTimer(length) as timer:
            packed = await timer.wait(reader.readexactly(length))
    else:
        (packed,) = await _read_blobs(reader, [length], limiter, None, counter)
    try:
        verb, header, sizes, longest = unpack_header(packed, check_size)
    finally:
        counter.received(4 + (length if length <= SMALL_BYTES else 0))
    is_small = length + sum(sizes) <= SMALL_BYTES and limiter.try_acquire_priority(length + sum(sizes))
    if not is_small and length <= SMALL_BYTES:
        # Headers beyond the priority share are not counted. Otherwise strangers could stop this node's bulk data.
        limiter.try_acquire_priority(length)
    acknowledger = _Acknowledger(ends[1]) if sum(sizes) > WINDOWED_BYTES else None
    try:
        blob_limiter = None if is_small else limiter
        blobs = await _read_blobs(reader, sizes, blob_limiter, acknowledger, counter, longest) if sizes else []
    finally:
        if acknowledger:
            acknowledger.flush()
    return verb, Message(header, blobs)


async def _read_length(reader: Reader, window: SendWindow | None, first_s: float | None) -> int:
    """Read the length of the next header, and pass acknowledgements before it to `window`."""
    while True:
        async with asyncio.timeout(first_s):
            word = await _read_word(reader)
        if word <= MAX_HEADER_BYTES:
            return word
        if window is None or word < ACKNOWLEDGEMENT_BIT:
            raise PeerError("a header is longer than allowed", code="bad_size")
        window.acknowledge(word - ACKNOWLEDGEMENT_BIT, await _read_word(reader))


async def _read_word(reader: Reader) -> int:
    return int.from_bytes(await reader.readexactly(4), "big")


class _Acknowledger:
    """Acknowledges the bytes of one body, many at once, because each acknowledgement takes processor time."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self._loop = writer, asyncio.get_running_loop()
        self._pending_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, size: int) -> None:
        self._pending_bytes += size
        self._timer = self._timer or self._loop.call_later(ACKNOWLEDGE_S, self.flush)

    def flush(self) -> None:
        """Acknowledge the bytes that are pending."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._pending_bytes:
            words = ACKNOWLEDGEMENT_BIT + self._pending_bytes, milliseconds(self._loop.time())
            self._pending_bytes = 0
            self._writer.write(b"".join(word.to_bytes(4, "big") for word in words))


async def _read_blobs(
    reader: Reader,
    sizes: Sequence[int],
    limiter: RateLimiter | None,
    acknowledger: _Acknowledger | None,
    counter: ByteCounter,
    longest: int = 0,
) -> list[bytes]:
    """Read blobs no faster than the limit allows, which slows the sender down."""
    blobs = []
    async with _StallTimer(max(longest, sum(sizes))) as timer:
        for size in sizes:
            pieces, left = [], size
            while left:
                most = LIMITED_PIECE_BYTES if limiter is not None and limiter.bytes_s else PIECE_BYTES
                piece = await timer.wait(reader.read(min(left, most)))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", size)
                pieces.append(piece)
                left -= len(piece)
                counter.received(len(piece))
                await timer.pass_limit(limiter, len(piece))
                if acknowledger:
                    acknowledger.add(len(piece))
            blobs.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
    return blobs


@asynccontextmanager
async def ended_by_stall(sending: asyncio.Task[None]) -> AsyncIterator[None]:
    """Raise TimeoutError in the block as soon as the peer reads a request too slowly, because no answer will come."""
    async with asyncio.timeout(None) as answer:

        def check(sent: asyncio.Task[None]) -> None:
            if not sent.cancelled() and isinstance(sent.exception(), TimeoutError):
                with suppress(RuntimeError):  # The answer has come at the same moment.
                    answer.reschedule(0.0)

        sending.add_done_callback(check)
        try:
            yield
        finally:
            sending.remove_done_callback(check)


async def linger(reader: Reader, counter: ByteCounter) -> None:
    """Wait until the caller closes, and discard its input. To close while the caller writes would lose the reply."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await discard(reader, counter)


async def discard(reader: Reader, counter: ByteCounter) -> None:
    """Read until the other end closes, and keep nothing."""
    while piece := await reader.read(PIECE_BYTES):
        counter.received(len(piece))

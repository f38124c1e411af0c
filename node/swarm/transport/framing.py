"""Reads and writes one message on a stream: a length-prefixed header, then blobs. Limits sizes, rates and stalls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol, TypeVar

from node.errors import PeerError
from node.swarm.transport.rate_limiter import RateLimiter
from node.swarm.transport.wire import MAX_HEADER_BYTES, STALL_S, Message, unpack_header

PIECE_BYTES = 256 * 1024
LIMITED_PIECE_BYTES = 16 * 1024
"""Size of the pieces under a rate limit: so small that many streams share a slow link evenly."""
SMALL_HEADER_BYTES = 64 * 1024
"""A longer header counts as bulk for the rate limit. In a swarm of thousands, gossip has headers of up to 300 kB."""
MIN_BYTES_S = PIECE_BYTES / STALL_S
"""A peer that transfers a whole message more slowly than this counts as hung."""
LINGER_S = 1.0

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

    async def pass_limit(self, limiter: RateLimiter, size: int) -> None:
        """Wait until this node's own rate limit allows `size` bytes."""
        if limiter.bytes_s:
            self._timeout.reschedule(None)
            await limiter.acquire(size)


async def write_message(writer: Writer, header: bytes, blobs: Sequence[bytes], limiter: RateLimiter) -> int:
    """Send a packed header and blobs. Returns the bytes sent. Raises TimeoutError if the peer reads too slowly."""
    length, blob_bytes = len(header).to_bytes(4, "big"), sum(map(len, blobs))
    if len(header) <= SMALL_HEADER_BYTES:
        if not limiter.try_acquire_priority(len(header)):
            await limiter.acquire(len(header))
        writer.write(length + header)
        bulk = blobs
    else:
        writer.write(length)
        bulk = [header, *blobs]
    step = LIMITED_PIECE_BYTES if limiter.bytes_s else PIECE_BYTES
    async with _StallTimer(sum(map(len, bulk))) as timer:
        for blob in bulk:
            view = memoryview(blob)
            for start in range(0, len(view), step):
                piece = view[start : start + step]
                await timer.pass_limit(limiter, len(piece))
                writer.write(piece)
                await timer.wait(writer.drain())
        await timer.wait(writer.drain())
    return 4 + len(header) + blob_bytes


async def read_message(
    reader: Reader, limit: Callable[[str], int], limiter: RateLimiter, first_s: float | None = None
) -> tuple[str, Message, int]:
    """Receive one message. Returns verb or status, message, and bytes received. Checks each size before it is used.

    `limit` maps the verb to the maximum body length. `first_s` is the timeout of the first bytes.
    """
    async with asyncio.timeout(first_s):
        length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_HEADER_BYTES:
        raise PeerError("a header is longer than allowed", code="bad_size")
    if length <= SMALL_HEADER_BYTES:
        async with _StallTimer(length) as timer:
            packed = await timer.wait(reader.readexactly(length))
        # Headers beyond the priority share are not counted. Otherwise strangers could stop this node's bulk data.
        limiter.try_acquire_priority(length)
    else:
        (packed,) = await _read_blobs(reader, [length], limiter)
    verb, header, sizes = unpack_header(packed, limit)
    blobs = await _read_blobs(reader, sizes, limiter) if sizes else []
    return verb, Message(header, blobs), 4 + length + sum(sizes)


async def _read_blobs(reader: Reader, sizes: Sequence[int], limiter: RateLimiter) -> list[bytes]:
    """Read blobs no faster than the limit allows, which slows the sender down."""
    blobs = []
    async with _StallTimer(sum(sizes)) as timer:
        for size in sizes:
            pieces, left = [], size
            while left:
                most = LIMITED_PIECE_BYTES if limiter.bytes_s else PIECE_BYTES
                piece = await timer.wait(reader.read(min(left, most)))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", size)
                pieces.append(piece)
                left -= len(piece)
                await timer.pass_limit(limiter, len(piece))
            blobs.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
    return blobs


async def linger(reader: Reader) -> None:
    """Wait until the caller closes, and discard its input. To close while the caller writes would lose the reply."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await reader.read(PIECE_BYTES):
                pass

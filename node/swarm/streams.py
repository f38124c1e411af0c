"""One message on a stream: a length-prefixed header, then blobs. Knows bytes, limits and pace; no peer, no verb."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from node.errors import PeerError
from node.swarm.base import MAX_HEADER_BYTES, STALL_S, Message, unpack_header
from node.swarm.pace import Pace

PIECE_BYTES = 256 * 1024
PACED_PIECE_BYTES = 16 * 1024
"""Under a limit: small enough that many streams share a slow line evenly."""
SMALL_HEADER_BYTES = 64 * 1024
"""A longer header keeps to the limit as blobs do. Gossip in a swarm of thousands has headers up to 300 kB."""
LEAST_BYTES_S = PIECE_BYTES / STALL_S
"""Slower than this in the long run, a peer is as good as one that hangs."""
LINGER_S = 1.0

T = TypeVar("T")


class Reader(Protocol):
    """The incoming half of a stream; `asyncio.StreamReader` is one."""

    async def read(self, n: int) -> bytes:
        """Up to n bytes; nothing at the end of the stream."""

    async def readexactly(self, n: int) -> bytes:
        """Raises IncompleteReadError where the stream ends before."""


class Writer(Protocol):
    """The outgoing half of a stream; `asyncio.StreamWriter` is one."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue data."""

    async def drain(self) -> None:
        """Wait while too much is queued."""

    def close(self) -> None:
        """Hang up once what is queued is sent."""


class _Patience:
    """How long the other end may keep this one waiting, in all, for a message of so many bytes; the own pace apart."""

    def __init__(self, size: int) -> None:
        self._clock = asyncio.get_running_loop().time
        self._left_s = STALL_S + size / LEAST_BYTES_S

    async def wait(self, step: Awaitable[T]) -> T:
        """TimeoutError if nothing moves for STALL_S, or if all of it takes too long."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(min(STALL_S, self._left_s)):
                return await step
        finally:
            self._left_s -= self._clock() - began_s


async def write_message(writer: Writer, header: bytes, blobs: Sequence[bytes], pace: Pace) -> int:
    """Send one message, its header packed; returns its bytes.

    TimeoutError for a peer that takes nothing, or all of it too slowly.
    """
    length, blob_bytes = len(header).to_bytes(4, "big"), sum(map(len, blobs))
    if len(header) <= SMALL_HEADER_BYTES:
        if not pace.take_ahead(len(header)):
            await pace.take(len(header))
        writer.write(length + header)
        bulk = blobs
    else:
        writer.write(length)
        bulk = [header, *blobs]
    step = PACED_PIECE_BYTES if pace.bytes_s else PIECE_BYTES
    patience = _Patience(sum(map(len, bulk)))
    for blob in bulk:
        view = memoryview(blob)
        for start in range(0, len(view), step):
            piece = view[start : start + step]
            await pace.take(len(piece))
            writer.write(piece)
            await patience.wait(writer.drain())
    await patience.wait(writer.drain())
    return 4 + len(header) + blob_bytes


async def read_message(
    reader: Reader, limit: Callable[[str], int], pace: Pace, first_s: float | None = None
) -> tuple[str, Message, int]:
    """Receive one message: verb or status, message, bytes. No size is believed before it is checked.

    `first_s` bounds the wait for the first byte; None where the caller bounds the whole.
    """
    async with asyncio.timeout(first_s):
        length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_HEADER_BYTES:
        raise PeerError("a header is longer than allowed", code="bad_size")
    if length <= SMALL_HEADER_BYTES:
        head = await _Patience(length).wait(reader.readexactly(length))
        pace.take_ahead(length)  # Beyond their share they do not count, or strangers could stop this node's bulk.
    else:
        head = await _read_blob(reader, length, pace)
    verb, header, sizes = unpack_header(head, limit)
    blobs = [await _read_blob(reader, size, pace) for size in sizes]
    return verb, Message(header, blobs), 4 + length + sum(sizes)


async def _read_blob(reader: Reader, size: int, pace: Pace) -> bytes:
    """A limit is kept by reading no faster, and the sender feels it."""
    pieces, left, patience = [], size, _Patience(size)
    while left:
        piece = await patience.wait(reader.read(min(left, PACED_PIECE_BYTES if pace.bytes_s else PIECE_BYTES)))
        if not piece:
            raise asyncio.IncompleteReadError(b"", size)
        pieces.append(piece)
        left -= len(piece)
        await pace.take(len(piece))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def linger(reader: Reader) -> None:
    """Let the caller hang up first: hanging up on one that still writes would lose the answer. Drops what comes."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await reader.read(PIECE_BYTES):
                pass

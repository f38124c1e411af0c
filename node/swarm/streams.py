"""One message on a stream: a length-prefixed header, then blobs. Knows bytes, limits and pace; no peer, no verb."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from node.errors import PeerError
from node.swarm.base import MAX_HEADER_BYTES, STALL_S, Message, pack_header, unpack_header
from node.swarm.pace import Pace

PIECE_BYTES = 256 * 1024
PACED_PIECE_BYTES = 16 * 1024
"""Under a limit: small enough that many streams share a slow line evenly."""
LINGER_S = 1.0


async def write_message(writer: asyncio.StreamWriter, verb: str, message: Message, pace: Pace) -> int:
    """Send one message; returns its bytes. A peer that takes nothing for STALL_S raises TimeoutError."""
    header = pack_header(verb, message)
    writer.write(len(header).to_bytes(4, "big") + header)
    await pace.take(len(header), wait=False)
    step = PACED_PIECE_BYTES if pace.bytes_s else PIECE_BYTES
    for blob in message.blobs:
        view = memoryview(blob)
        for start in range(0, len(view), step):
            piece = view[start : start + step]
            await pace.take(len(piece))
            writer.write(piece)
            async with asyncio.timeout(STALL_S):
                await writer.drain()
    async with asyncio.timeout(STALL_S):
        await writer.drain()
    return 4 + len(header) + message.blob_bytes


async def read_message(
    reader: asyncio.StreamReader, limit: Callable[[str], int], pace: Pace, first_s: float | None = None
) -> tuple[str, Message, int]:
    """Receive one message: verb or status, message, bytes. No size is believed before it is checked.

    `first_s` bounds the wait for the first byte; None where the caller bounds the whole.
    """
    async with asyncio.timeout(first_s):
        length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_HEADER_BYTES:
        raise PeerError("a header is longer than allowed", code="bad_size")
    async with asyncio.timeout(STALL_S):
        head = await reader.readexactly(length)
    await pace.take(length, wait=False)
    verb, header, sizes = unpack_header(head, limit)
    blobs = [await _read_blob(reader, size, pace) for size in sizes]
    return verb, Message(header, blobs), 4 + length + sum(sizes)


async def _read_blob(reader: asyncio.StreamReader, size: int, pace: Pace) -> bytes:
    """As long as anything comes; a limit is kept by reading no faster, and the sender feels it."""
    pieces, left = [], size
    while left:
        async with asyncio.timeout(STALL_S):
            piece = await reader.read(min(left, PACED_PIECE_BYTES if pace.bytes_s else PIECE_BYTES))
        if not piece:
            raise asyncio.IncompleteReadError(b"", size)
        pieces.append(piece)
        left -= len(piece)
        await pace.take(len(piece))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def linger(reader: asyncio.StreamReader) -> None:
    """Let the caller hang up first: hanging up on one that still writes would lose the answer. Drops what comes."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await reader.read(PIECE_BYTES):
                pass

"""One direction of a stream in memory. Create it on an event loop."""

from __future__ import annotations

import asyncio


class Pipe:
    """A writer that keeps its data, and lets `reader` read it at once unless `is_held` is set."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.data = bytearray()
        self.is_held = False
        self.gate = asyncio.Event()
        """`drain` waits while it is cleared."""
        self.gate.set()
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data
        if not self.is_held:
            self.reader.feed_data(bytes(data))

    def holds(self, size: int) -> bool:
        return len(self.data) >= size

    async def drain(self) -> None:
        await self.gate.wait()

    def close(self) -> None:
        self.is_closed = True
        self.reader.feed_eof()

"""The event stream: server-sent events. Knows their format and pace; knows no node beyond `seam.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from node.api.seam import Node
from node.status import Status

INTERVAL_S = 1.0
KEEP_ALIVE_S = 15.0
RETRY_MS = 2000
"""How long a browser waits before it connects again."""


async def stream(
    node: Node, *, interval_s: float = INTERVAL_S, keep_alive_s: float = KEEP_ALIVE_S
) -> AsyncIterator[bytes]:
    """A full snapshot as event `status` at once, then one when something changed, at most one per `interval_s`; a
    comment after `keep_alive_s` of silence. Ends, with the last snapshot, when the node does."""
    yield f"retry: {RETRY_MS}\n\n".encode()
    with node.subscribe() as queue:
        while True:
            try:
                status = await asyncio.wait_for(queue.get(), keep_alive_s)
            except TimeoutError:
                yield b": keep-alive\n\n"
                continue
            if status is None:
                yield encode(node.view().status)
                return
            yield encode(status)
            await asyncio.sleep(interval_s)


def encode(status: Status) -> bytes:
    return b"event: status\ndata: " + status.model_dump_json().encode() + b"\n\n"

"""What a node holds in memory for the peers to which it sends states and chains."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from node.errors import PeerError
from node.swarm.state_sync.server import MOST_LEAVES, StateServer
from node.swarm.transport.wire import Message, Service
from tests.event_loop import in_virtual_time


class Leaves:
    """A source whose leaf 7 is gone."""

    def leaf(self, digest: str, index: int) -> bytes:
        if index == 7:
            raise LookupError(digest)
        return b"leaf"


@in_virtual_time
async def test_leaves_that_are_being_sent_are_limited_over_all_callers() -> None:
    services: dict[str, Service] = {}
    wire: Any = SimpleNamespace(serve=services.update)
    source: Any = Leaves()
    StateServer(wire, source)

    async def leaf(number: int, index: int = 0) -> Message:
        return await services["leaf"].handler(f"caller {number}", Message({"digest": "ab" * 32, "index": index}))

    with pytest.raises(PeerError, match="does not have that state any more"):
        await leaf(0, 7)
    held = [await leaf(number) for number in range(MOST_LEAVES)]
    with pytest.raises(PeerError) as caught:
        await leaf(MOST_LEAVES)
    assert caught.value.code == "busy"
    waiting = asyncio.ensure_future(leaf(MOST_LEAVES))
    await asyncio.sleep(1.0)
    held[0].release()
    assert (await waiting).blobs == [b"leaf"], "a caller that waits gets the place of a reply that was sent"

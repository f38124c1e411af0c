"""Tests of the rate limit that a volunteer sets, on real streams in both directions."""

from __future__ import annotations

import asyncio
import time

import pytest

from node.status import Channel
from node.swarm.transport.libp2p import Libp2pWire
from node.swarm.transport.wire import Message, Service
from tests.contract.harness import Swarm

MBIT_S = 8.0
STREAMS = 8
RECORDS = 16
"""Blobs of a heartbeat: one for each record."""
BULK = 2_000_000
"""These bytes take two seconds at MBIT_S, and 6 % more for headers."""


async def _echo(caller: str, message: Message) -> Message:
    return Message({"bytes": message.blob_bytes})


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.only_over("p2p", "the local transport has no links")
def test_rate_limit_slows_bulk_calls_but_not_small_ones(swarm: Swarm, direction: str) -> None:
    sender, receiver = swarm.hosts(2)
    assert isinstance(sender.wire, Libp2pWire) and isinstance(receiver.wire, Libp2pWire)
    receiver.wire.serve({"bulk": Service(_echo, Channel.REDUCE, max_request_bytes=2 * BULK, per_caller=2 * STREAMS)})
    sender.learn(receiver.peer_id, receiver.addresses())
    limiters = {"up": sender.wire.upload_limiter, "down": receiver.wire.download_limiter}

    async def limit(mbit_s: float) -> None:
        limiters[direction].limit(mbit_s)

    async def call(size: int, blob_count: int = 4) -> float:
        began_s = time.monotonic()
        blobs = [bytes(size // blob_count)] * blob_count if size else []
        reply = await sender.wire.call(receiver.peer_id, "bulk", Message(blobs=blobs), timeout_s=20)
        assert reply.header["bytes"] == size
        return time.monotonic() - began_s

    async def both() -> tuple[float, list[float]]:
        bulk = [asyncio.create_task(call(BULK // STREAMS)) for _ in range(STREAMS)]
        small, began_s = [], time.monotonic()
        while not all(one.done() for one in bulk):
            small.append(await call(RECORDS * 900, RECORDS))
            await asyncio.sleep(0.1)
        await asyncio.gather(*bulk)
        return time.monotonic() - began_s, small

    sender.do(call(0))
    (sender if direction == "up" else receiver).do(limit(MBIT_S))
    try:
        bulk_s, small_s = sender.do(both())
    finally:
        (sender if direction == "up" else receiver).do(limit(0))
    assert 2.0 <= bulk_s < 4.0
    assert max(small_s) < 1.0, "heartbeats do not wait for bulk"
    assert sender.do(call(BULK)) < 1.5, "without the limit it is quick"

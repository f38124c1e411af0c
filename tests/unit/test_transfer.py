"""Leaves from several peers: who is slow is asked less, who is hung holds nobody up, who lies is out at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from node.diloco.digest import LEAF_ELEMENTS, leaf_hashes
from node.diloco.outer import OuterState
from node.errors import PeerError, TransferFailed
from node.status import Channel
from node.swarm.base import Message, Service
from node.swarm.download import Transfer
from node.swarm.local import LocalHub, LocalWire
from node.swarm.partial import PartialState
from node.swarm.state import Snapshot

P = 8 * LEAF_ELEMENTS
LEAVES = 16
Answer = Callable[[int], Awaitable[bytes]]


@pytest.fixture(scope="module")
def state() -> OuterState:
    return OuterState(torch.randn(P), torch.randn(P), 3, 5000)


def leaf(state: OuterState, index: int) -> bytes:
    which, place = divmod(index, LEAVES // 2)
    vector = (state.anchor, state.momentum)[which]
    return bytes(vector[place * LEAF_ELEMENTS : (place + 1) * LEAF_ELEMENTS].numpy().tobytes())


class Peers:
    """A joiner, and servers that behave as told."""

    def __init__(self, state: OuterState, folder: Path) -> None:
        self.hub = LocalHub()
        self.wire = LocalWire(self.hub, "joiner")
        self.snapshot = Snapshot(3, "aa" * 32, 5000, "bb" * 32, leaf_hashes(state), None)
        self.partial = PartialState(folder, self.snapshot.digest, P)
        self.asked: dict[str, list[int]] = {}
        self.progress: list[float] = []
        self.state, self.dropped = state, set[str]()

    def add(self, name: str, answer: Answer) -> None:
        wire, asked = LocalWire(self.hub, name), self.asked.setdefault(name, [])

        async def on_leaf(_caller: str, message: Message) -> Message:
            asked.append(message.header["index"])
            return Message(blobs=[await answer(message.header["index"])])

        wire.serve({"leaf": Service(on_leaf, Channel.STATE)})

    def good(self, delay_s: float = 0.0) -> Answer:
        async def answer(index: int) -> bytes:
            await asyncio.sleep(delay_s)
            return leaf(self.state, index)

        return answer

    async def run(self, *servers: str, later: tuple[str, ...] = ()) -> None:
        async def refresh() -> list[str]:
            return [*servers, *later]

        missing = self.partial.open(self.snapshot.leaves)
        transfer = Transfer(self.wire, self.snapshot, self.partial, missing, self.dropped, self.progress.append)
        await transfer.run(servers, refresh)

    def has_all(self) -> bool:
        return self.partial.open(self.snapshot.leaves) == []


async def never(index: int) -> bytes:
    await asyncio.sleep(60)
    raise AssertionError


async def zeros(index: int) -> bytes:
    return bytes(4 * LEAF_ELEMENTS)


async def gone(index: int) -> bytes:
    raise PeerError("not any more", code="gone")


@pytest.mark.timeout(30)
def test_a_slow_peer_is_asked_less_and_a_hung_one_holds_nobody_up(tmp_path: Path, state: OuterState) -> None:
    async def main() -> tuple[Peers, float]:
        peers = Peers(state, tmp_path)
        peers.add("quick", peers.good(0.05))
        peers.add("slow", peers.good(1.0))
        peers.add("hung", never)
        began_s = time.monotonic()
        await peers.run("hung", "quick", "slow")
        return peers, time.monotonic() - began_s

    peers, took_s = asyncio.run(main())
    assert peers.has_all() and peers.progress[-1] == 1.0
    assert took_s < 8, "the two leaves of the hung one are asked for elsewhere"
    assert len(peers.asked["quick"]) > 2 * len(peers.asked["slow"])
    assert len(peers.asked["hung"]) <= 3 and peers.dropped == set()


@pytest.mark.timeout(30)
def test_a_liar_is_dropped_by_name_and_counted_once(
    tmp_path: Path, state: OuterState, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> Peers:
        peers = Peers(state, tmp_path)
        peers.add("honest", peers.good(0.05))
        peers.add("liar", zeros)
        await peers.run("liar", "honest")
        return peers

    with caplog.at_level(logging.WARNING):
        peers = asyncio.run(main())
    assert peers.has_all() and peers.dropped == {"liar"}
    assert [r.getMessage() for r in caplog.records if "liar is dropped" in r.getMessage()]
    assert peers.wire.traffic.rejected["bad_message"] == 1
    assert sorted(set(peers.asked["honest"])) == list(range(LEAVES))


@pytest.mark.timeout(30)
def test_without_anybody_left_it_fails_and_goes_on_from_there(tmp_path: Path, state: OuterState) -> None:
    given = 0

    async def some(index: int) -> bytes:
        nonlocal given
        given += 1
        if given > 5:
            raise PeerError("not any more", code="gone")
        return leaf(state, index)

    async def first() -> None:
        peers = Peers(state, tmp_path)
        peers.add("some", some)
        with pytest.raises(TransferFailed, match="11 of 16 parts"):
            await peers.run("some")
        peers.partial.close()

    async def second() -> Peers:
        peers = Peers(state, tmp_path)
        peers.add("other", peers.good())
        await peers.run("other")
        return peers

    asyncio.run(first())
    peers = asyncio.run(second())
    assert len(peers.asked["other"]) == 11 and peers.has_all()


@pytest.mark.timeout(30)
def test_who_comes_later_helps(tmp_path: Path, state: OuterState) -> None:
    async def main() -> Peers:
        peers = Peers(state, tmp_path)
        peers.add("leaving", gone)
        peers.add("coming", peers.good())
        await peers.run("leaving", later=("coming",))
        return peers

    assert asyncio.run(main()).has_all()

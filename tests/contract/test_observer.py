"""A relay tells those that are connected with it over UDP where it sees them, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from node.errors import PeerError
from node.swarm.base import Message
from node.swarm.directory import Directory, PeerRecord, sign_record
from node.swarm.observer import Observer
from node.swarm.p2p import P2PWire
from tests.contract.harness import Seat, Swarm, wait_until
from tests.unit.test_p2pd import free_port

RUN = "a" * 64


def record(seat: Seat, **facts: Any) -> PeerRecord:
    return PeerRecord(peer_id=seat.peer_id, number=1, run=RUN, head=RUN, **facts)


def observer_of(seat: Seat, others: Sequence[Seat], folder: Path, port: int, *, relays: bool = True) -> Observer:
    async def make() -> Observer:
        directory = Directory(seat.identity, record(seat, relays=relays), seat.loop.time)
        directory.merge(sign_record(other.identity, record(other)) for other in others)
        return Observer(seat.wire, directory, folder, [f"/ip4/127.0.0.1/tcp/{port}"])

    return seat.do(make())


def ask(seat: Seat, relay: Seat, verb: str, **header: str) -> dict[str, Any]:
    return dict(seat.do(seat.wire.call(relay.peer_id, verb, Message(header), timeout_s=20)).header)


def connect(seat: Seat, peer_id: str, port: int) -> None:
    assert isinstance(seat.wire, P2PWire)
    seat.do(seat.wire.connect_quic(peer_id, "127.0.0.1", port))


def test_two_that_connect_over_udp_are_told_where_each_other_is_seen(swarm: Swarm, tmp_path: Path) -> None:
    if swarm.transport == "local":
        pytest.skip("the local transport has no ports")
    one, other, stranger, relay = swarm.acquainted(4)
    port = free_port()
    observer = observer_of(relay, [one, other], tmp_path, port)
    try:
        with pytest.raises(PeerError, match="does not see both"):
            ask(one, relay, "outer", of=other.peer_id)
        with pytest.raises(PeerError, match="does not know"):
            ask(stranger, relay, "observer")
        peer_id = ask(one, relay, "observer")["peer"]
        assert ask(other, relay, "observer")["peer"] == peer_id != relay.peer_id
        connect(one, peer_id, port)
        with pytest.raises(PeerError, match="does not see both"):
            ask(other, relay, "outer", of=one.peer_id)
        connect(other, peer_id, port)
        (ip, its_port), (_, mine) = (ask(one, relay, "outer", of=seat.peer_id)["outer"] for seat in (other, one))
        assert ip == "127.0.0.1" and its_port != mine
    finally:
        relay.do(observer.close())


def test_an_observer_that_nobody_asks_for_ends_and_starts_again_with_the_same_peer_id(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if swarm.transport == "local":
        pytest.skip("the local transport has no ports")
    one, relay = swarm.acquainted(2)
    observer = observer_of(relay, [one], tmp_path, free_port())
    monkeypatch.setattr("node.swarm.observer.LOOK_S", 0.05)
    monkeypatch.setattr("node.swarm.observer.IDLE_S", 0.1)
    peer_id = ask(one, relay, "observer")["peer"]
    watch = asyncio.run_coroutine_threadsafe(observer.run(), relay.loop)
    try:
        wait_until(lambda: observer._daemon is None)
        assert ask(one, relay, "observer")["peer"] == peer_id
    finally:
        watch.cancel()
        relay.do(observer.close())


def test_a_node_that_relays_nothing_observes_nobody(swarm: Swarm, tmp_path: Path) -> None:
    if swarm.transport == "local":
        pytest.skip("the local transport has no ports")
    one, relay = swarm.acquainted(2)
    observer_of(relay, [one], tmp_path, free_port(), relays=False)
    with pytest.raises(PeerError, match="no relay"):
        ask(one, relay, "observer")
    assert not list(tmp_path.iterdir())

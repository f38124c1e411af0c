"""A relay tells members that are connected to it over UDP at which addresses it sees them."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from node.errors import PeerError, SwarmError
from node.swarm import identity
from node.swarm.connectivity import address_observer
from node.swarm.connectivity.address_observer import AddressObserver
from node.swarm.membership.peer_table import PeerRecord, PeerTable, sign_record
from node.swarm.transport.libp2p import Libp2pWire
from node.swarm.transport.wire import Message
from tests.contract.harness import Host, Swarm, wait_until
from tests.free_ports import free_port

RUN = "a" * 64


def record(host: Host, **facts: Any) -> PeerRecord:
    return PeerRecord(peer_id=host.peer_id, number=1, run=RUN, head=RUN, **facts)


def observer_of(host: Host, others: Sequence[Host], folder: Path, port: int, *, relays: bool = True) -> AddressObserver:
    async def make() -> AddressObserver:
        peer_table = PeerTable(host.identity, record(host, relays=relays), host.loop.time)
        peer_table.merge(sign_record(other.identity, record(other)) for other in others)
        return AddressObserver(host.wire, peer_table, folder, [f"/ip4/127.0.0.1/tcp/{port}"])

    return host.do(make())


def ask(host: Host, relay: Host, verb: str, **header: str) -> dict[str, Any]:
    return dict(host.do(host.wire.call(relay.peer_id, verb, Message(header), timeout_s=20)).header)


def connect(host: Host, peer_id: str, port: int) -> None:
    assert isinstance(host.wire, Libp2pWire)
    host.do(host.wire.connect_quic(peer_id, "127.0.0.1", port))


@pytest.mark.parametrize("full", [True, False])
def test_a_relay_whose_key_is_damaged_or_cannot_be_written_logs_no_bug(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, full: bool
) -> None:
    """The key is a cache: a damaged one is replaced. The daemon does not start in this test."""

    def refuse(_path: Path, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def fail(_options: object) -> None:
        raise SwarmError("no daemon")

    one, relay = swarm.introduced_hosts(2)
    monkeypatch.setattr(address_observer, "start_daemon", fail)
    if full:
        monkeypatch.setattr(identity, "write_whole", refuse)
    else:
        (tmp_path / "identity.key").touch()
    observer = observer_of(relay, [one], tmp_path, free_port())
    with pytest.raises(PeerError) as caught:
        ask(one, relay, "observer")
    assert caught.value.code == "no_relay"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert full or identity.load_identity(tmp_path / "identity.key")
    relay.do(observer.close())


@pytest.mark.only_over("p2p", "the local transport has no ports")
def test_members_connected_to_the_observer_learn_each_others_observed_address(swarm: Swarm, tmp_path: Path) -> None:
    one, other, stranger, relay = swarm.introduced_hosts(4)
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
        (ip, its_port), (_, mine) = (ask(one, relay, "outer", of=host.peer_id)["outer"] for host in (other, one))
        assert ip == "127.0.0.1" and its_port != mine
    finally:
        relay.do(observer.close())


@pytest.mark.only_over("p2p", "the local transport has no ports")
def test_idle_address_observer_stops_and_restarts_with_the_same_peer_id(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, relay = swarm.introduced_hosts(2)
    observer = observer_of(relay, [one], tmp_path, free_port())
    monkeypatch.setattr("node.swarm.connectivity.address_observer.LOOK_S", 0.05)
    monkeypatch.setattr("node.swarm.connectivity.address_observer.IDLE_S", 0.1)
    peer_id = ask(one, relay, "observer")["peer"]
    watch = asyncio.run_coroutine_threadsafe(observer.run(), relay.loop)
    try:
        wait_until(lambda: observer._daemon is None)
        assert ask(one, relay, "observer")["peer"] == peer_id
    finally:
        watch.cancel()
        relay.do(observer.close())


@pytest.mark.only_over("p2p", "the local transport has no ports")
def test_node_that_is_no_relay_does_not_observe_addresses(swarm: Swarm, tmp_path: Path) -> None:
    one, relay = swarm.introduced_hosts(2)
    observer_of(relay, [one], tmp_path, free_port(), relays=False)
    with pytest.raises(PeerError, match="no relay"):
        ask(one, relay, "observer")
    assert not list(tmp_path.iterdir())

"""What a wire remembers of the peers of its run."""

from __future__ import annotations

import asyncio
import errno
from ipaddress import ip_interface
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from node.errors import PeerError
from node.swarm import member
from node.swarm.identity import new_identity
from node.swarm.transport import libp2p
from node.swarm.transport.address_scope import LocalAddresses
from node.swarm.transport.encrypted_stream import Handshake
from tests.event_loop import in_loop
from tests.unit.memory_stream import Pipe

PEERS = [new_identity().peer_id for _ in range(12)]


def make_wire(client: Any = None) -> libp2p.Libp2pWire:
    unused: Any = None
    p2p: Any = SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda: "me"))
    return libp2p.Libp2pWire(unused, unused, p2p, client)


@in_loop
async def test_a_peer_that_does_not_answer_is_dialed_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, dialed = 0.0, []

    async def peers() -> dict[str, list[str]]:
        return {}

    wire = make_wire(SimpleNamespace(peers=peers))
    for pauses in (wire._redials, wire._not_dialed):
        monkeypatch.setattr(pauses, "_clock", lambda: now_s)

    async def dial(addresses: tuple[str, ...]) -> None:
        dialed.append((now_s, addresses))
        raise PeerError("no answer", code="unreachable")

    monkeypatch.setattr(wire, "_dial", dial)
    for peer in PEERS:
        wire.learn(peer, [f"/ip4/203.0.113.5/tcp/1/p2p/{peer}"])
    await wire.keep_connected(PEERS[:1])
    for _ in range(119):
        now_s += 1.0
        await wire.keep_connected(PEERS[:1])
    assert [at_s for at_s, _ in dialed] == [0, 2, 6, 14, 30, 60, 90]
    dialed.clear()
    await wire.keep_connected(PEERS[1:])
    assert len(dialed) == libp2p.MAX_REDIALED
    await wire.keep_connected(PEERS[1:])
    assert len(dialed) == len(PEERS) - 1, "the others have their turn next"


@in_loop
async def test_addresses_that_a_wire_knows_already_are_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, parsed = make_wire(), []

    def parse(peer_id: str, named: tuple[str, ...]) -> tuple[str, ...]:
        parsed.append(peer_id)
        return named

    monkeypatch.setattr(libp2p, "addresses_of", parse)
    wire.learn("peer", ["/ip4/203.0.113.5/tcp/1"])
    wire.learn("peer", ("/ip4/203.0.113.5/tcp/1",))
    assert parsed == ["peer"]
    wire.learn("peer", ["/ip4/203.0.113.5/tcp/2"])
    assert parsed == ["peer", "peer"]


@in_loop
async def test_a_wire_forgets_the_addresses_of_the_peers_that_it_has_heard_of_least_recently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libp2p, "MOST_ADDRESSES", 3)
    wire = make_wire()
    for number in range(3):
        wire.learn(f"peer {number}", ["/ip4/203.0.113.5/tcp/1"], inbound=number > 0)
    wire.relayed_at_s["peer 0"] = wire.relayed_at_s["peer 1"] = 5.0
    wire.learn("peer 0", ["/ip4/203.0.113.5/tcp/2"], inbound=False)
    wire.learn("peer 3", ["/ip4/203.0.113.5/tcp/1"], inbound=False)
    assert list(wire._addresses) == ["peer 2", "peer 0", "peer 3"]
    assert wire._closed_to_dials == {"peer 0", "peer 3"} and list(wire.relayed_at_s) == ["peer 0"]


@in_loop
async def test_a_node_keeps_its_last_known_interfaces_while_they_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    for module in (libp2p, member):
        monkeypatch.setattr(module, "read_interfaces", fail)

    async def peers() -> dict[str, list[str]]:
        return {}

    wire = make_wire(SimpleNamespace(peers=peers))
    wire.listen_addresses = ["/ip4/0.0.0.0/tcp/7"]
    with pytest.raises(PeerError, match="cannot be read"):
        await wire.addresses()
    known = wire.local_addresses = LocalAddresses(interfaces=(ip_interface("192.168.1.2/24"),))
    node: Any = SimpleNamespace(
        wire=wire,
        peer_table=SimpleNamespace(live=lambda: ["me"]),
        reachability=SimpleNamespace(observed=frozenset()),
        _surroundings_at_s=-member.SURROUNDINGS_S,
        _listening=(),
        _seen={},
    )
    await member.SwarmMember._read_surroundings(node)
    assert wire.local_addresses == known


def open_over_relay(wire: libp2p.Libp2pWire, relay: str, caller: str, hello: bytes) -> asyncio.Task[None]:
    """A stream on which an honest relay names this caller, who then stays silent."""
    reader = asyncio.StreamReader()
    frame = msgpack.packb([caller, hello])
    reader.feed_data(len(frame).to_bytes(2, "big") + frame)
    info: Any = SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda: relay))
    ends: Any = (reader, Pipe())
    return asyncio.create_task(wire._on_relayed(info, *ends))


@in_loop
async def test_silent_circuits_of_one_caller_do_not_use_up_a_relay_for_all_others() -> None:
    target, relay = new_identity(), new_identity().peer_id
    unused: Any = None
    p2p: Any = SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda: target.peer_id))
    wire = libp2p.Libp2pWire(unused, target, p2p, unused)
    hello = Handshake(new_identity()).hello
    hostile = [open_over_relay(wire, relay, PEERS[0], hello) for _ in range(100)]
    honest = open_over_relay(wire, relay, PEERS[1], hello)
    await asyncio.sleep(0.2)
    assert not honest.done(), "it waits for the caller's signature"
    assert sum(not one.done() for one in hostile) == libp2p.STREAMS_PER_CALLER
    for one in (*hostile, honest):
        one.cancel()
    await asyncio.gather(*hostile, honest, return_exceptions=True)

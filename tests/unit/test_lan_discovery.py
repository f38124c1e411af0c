"""Tests of LAN discovery: the datagrams that are used, and the networks on which a node announces itself."""

from __future__ import annotations

import asyncio
import json
import random
from ipaddress import ip_interface

from node.swarm.identity import new_identity
from node.swarm.membership.lan_discovery import ACCEPTED_PER_S, MAX_HINTS, LanDiscovery, read_hint, tag_of
from node.swarm.transport.address_scope import LocalAddresses

RUN, PEER, ME = "a" * 64, new_identity().peer_id, new_identity().peer_id
HERE = LocalAddresses(
    interfaces=tuple(map(ip_interface, ("127.0.0.1/8", "192.168.1.2/24", "203.0.113.7/24"))),
    listening=frozenset({("192.168.1.2", 1), ("127.0.0.1", 1), ("203.0.113.7", 1), ("fd00::1", 1)}),
)
NEIGHBOUR = "192.168.1.9"


def packed(**changes: object) -> bytes:
    return json.dumps({"run": tag_of(RUN), "peer": PEER, "port": 31337} | changes).encode()


def new_discovery(dialed: list[str], here: LocalAddresses = HERE, known: frozenset[str] = frozenset()) -> LanDiscovery:
    async def dial(address: str) -> None:
        dialed.append(address)

    return LanDiscovery(RUN, ME, lambda: here, is_alone=lambda: True, is_known=known.__contains__, dial=dial)


def dialed_after(*datagrams: tuple[bytes, str], known: frozenset[str] = frozenset()) -> list[str]:
    """The addresses that a node dials after these datagrams, each of which is given with its source."""
    dialed: list[str] = []

    async def main() -> None:
        discovery = new_discovery(dialed, known=known)
        for data, source in datagrams:
            discovery.datagram_received(data, (source, 1))
        task = asyncio.create_task(discovery.dial_announced())
        for _ in range(2 * MAX_HINTS):
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    return dialed


def test_lan_announcement_names_a_peer_of_the_run_without_naming_the_run() -> None:
    assert read_hint(packed(), RUN) == (PEER, 31337)
    assert RUN.encode() not in packed()
    assert read_hint(packed(run=tag_of("b" * 64)), RUN) is None


def test_invalid_lan_announcement_is_ignored() -> None:
    bad = [b"", b"\xff" * 9, b"[" * 400, b"{}", b"[]", b"5", packed(pad="x" * 500)]
    bad += [packed(port=port) for port in (0, -1, 65536, "1", None, True, 1.5)]
    bad += [packed(peer=peer) for peer in ("", 5, None, "x" * 200, PEER + "/tcp", "../" + PEER)]
    for data in bad:
        assert read_hint(data, RUN) is None, data
    rng = random.Random(1)
    for _ in range(500):
        damaged = bytearray(packed())
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        read_hint(bytes(damaged), RUN)


def test_peer_that_is_announced_on_the_local_network_is_dialed_once() -> None:
    assert dialed_after(*[(packed(), NEIGHBOUR)] * 2) == [f"/ip4/{NEIGHBOUR}/tcp/31337/p2p/{PEER}"]


def test_node_ignores_lan_announcements_from_other_networks_itself_and_known_peers() -> None:
    elsewhere = ("10.0.0.1", "203.0.113.9", "127.0.0.1", "8.8.8.8")
    assert not dialed_after(*((packed(), source) for source in elsewhere), (packed(peer=ME), "192.168.1.2"))
    assert not dialed_after((packed(), NEIGHBOUR), known=frozenset({PEER}))


def test_node_drops_most_of_a_flood_of_lan_announcements() -> None:
    flood = [(packed(peer=new_identity().peer_id), NEIGHBOUR) for _ in range(5 * ACCEPTED_PER_S)]
    assert 0 < len(dialed_after(*flood)) <= min(2 * ACCEPTED_PER_S, MAX_HINTS)


def test_node_announces_itself_on_private_networks_only() -> None:
    assert new_discovery([])._private_addresses() == [("192.168.1.2", 1)]
    assert new_discovery([], LocalAddresses())._private_addresses() == []

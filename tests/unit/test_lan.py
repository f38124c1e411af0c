"""What a node takes from datagrams on its local network, and where it sends its own."""

from __future__ import annotations

import asyncio
import json
import random
from ipaddress import ip_interface

from node.swarm.identity import new_identity
from node.swarm.lan import ACCEPTED_PER_S, MAX_HINTS, LanDiscovery, read_hint, tag_of
from node.swarm.places import Here

RUN, PEER, ME = "a" * 64, new_identity().peer_id, new_identity().peer_id
GOOD = {"run": tag_of(RUN), "peer": PEER, "port": 31337}
HERE = Here(
    interfaces=tuple(map(ip_interface, ("127.0.0.1/8", "192.168.1.2/24", "203.0.113.7/24"))),
    listening=frozenset({("192.168.1.2", 1), ("127.0.0.1", 1), ("203.0.113.7", 1), ("fd00::1", 1)}),
)


def packed(**changes: object) -> bytes:
    return json.dumps(GOOD | changes).encode()


def discovery(here: Here = HERE, known: frozenset[str] = frozenset()) -> tuple[LanDiscovery, list[str]]:
    dialed: list[str] = []

    async def dial(address: str) -> None:
        dialed.append(address)

    made = LanDiscovery(RUN, ME, lambda: here, is_alone=lambda: True, is_known=known.__contains__, dial=dial)
    return made, dialed


async def heard(made: LanDiscovery, *datagrams: tuple[bytes, str]) -> None:
    for data, source in datagrams:
        made.hear(data, source)
    task = asyncio.create_task(made.follow())
    for _ in range(2 * MAX_HINTS):
        await asyncio.sleep(0)
    task.cancel()


def test_a_datagram_names_a_peer_of_the_run_without_naming_the_run() -> None:
    assert read_hint(packed(), RUN) == (PEER, 31337)
    assert RUN.encode() not in packed()
    assert read_hint(packed(run=tag_of("b" * 64)), RUN) is None


def test_what_is_no_announcement_is_none() -> None:
    bad = [b"", b"\xff" * 9, b"[" * 400, b"{}", b"[]", b"5", packed(pad="x" * 500)]
    bad += [packed(port=port) for port in (0, -1, 65536, "1", None, True, 1.5)]
    bad += [packed(peer=peer) for peer in ("", 5, None, "x" * 200, PEER + "/tcp", "../" + PEER)]
    for data in bad:
        assert read_hint(data, RUN) is None, data
    rng = random.Random(1)
    for _ in range(500):
        data = bytearray(packed())
        data[rng.randrange(len(data))] = rng.randrange(256)
        read_hint(bytes(data), RUN)


def test_a_peer_that_is_announced_on_this_network_is_dialed_once() -> None:
    made, dialed = discovery()
    here = (packed(), "192.168.1.9")
    asyncio.run(heard(made, here, here))
    assert dialed == [f"/ip4/192.168.1.9/tcp/31337/p2p/{PEER}"]


def test_what_comes_from_elsewhere_or_is_known_is_dialed_by_nobody() -> None:
    made, dialed = discovery()
    elsewhere = ("10.0.0.1", "203.0.113.9", "127.0.0.1", "8.8.8.8")
    asyncio.run(heard(made, *((packed(), source) for source in elsewhere), (packed(peer=ME), "192.168.1.2")))
    assert not dialed
    made, dialed = discovery(known=frozenset({PEER}))
    asyncio.run(heard(made, (packed(), "192.168.1.9")))
    assert not dialed


def test_a_flood_is_dropped() -> None:
    made, dialed = discovery()
    flood = [(packed(peer=new_identity().peer_id), "192.168.1.9") for _ in range(5 * ACCEPTED_PER_S)]
    asyncio.run(heard(made, *flood))
    assert 0 < len(dialed) <= min(2 * ACCEPTED_PER_S, MAX_HINTS)


def test_only_private_networks_hear_of_this_node() -> None:
    assert discovery()[0]._private_places() == [("192.168.1.2", 1)]
    assert discovery(Here())[0]._private_places() == []

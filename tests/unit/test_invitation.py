"""Which addresses an invite names, and what its owner is told of where it works."""

from __future__ import annotations

from ipaddress import ip_interface
from pathlib import Path

import pytest

from node.swarm.directory import PeerRecord
from node.swarm.identity import new_identity
from node.swarm.invitation import MAX_PEERS, OTHERS_S, invite_note, invited, is_container, is_too_early
from node.swarm.places import Here

ME = "/p2p/me"
LAN, LOOP, OUTER = f"/ip4/192.168.1.2/tcp/1{ME}", f"/ip4/127.0.0.1/tcp/1{ME}", f"/ip4/203.0.113.2/tcp/1{ME}"
HOME = Here(interfaces=tuple(map(ip_interface, ("127.0.0.1/8", "192.168.1.2/24", "172.17.0.1/16"))))
BRIDGED = Here(interfaces=tuple(map(ip_interface, ("127.0.0.1/8", "172.17.0.2/16"))))


def other(*places: str) -> PeerRecord:
    peer = new_identity().peer_id
    return PeerRecord(
        peer_id=peer, number=1, run="a" * 64, head="a" * 64, addresses=tuple(f"/{p}/tcp/5/p2p/{peer}" for p in places)
    )


def test_an_invite_names_addresses_that_others_have_dialed_and_no_private_ones_beside_them() -> None:
    assert invited([OUTER, LAN, LOOP], [], {}) == (OUTER,)
    assert invited([f"/dns4/home.example/tcp/1{ME}", LAN], [], {}) == (f"/dns4/home.example/tcp/1{ME}",)


def test_without_such_an_address_it_names_those_of_this_network_and_machine() -> None:
    assert invited([LAN, LOOP], [], {}) == (LAN, LOOP)
    near = other("ip4/192.168.1.9")
    assert invited([LAN, LOOP], [near], {near.peer_id: ["192.168.1.9"]}) == (LAN, LOOP, *near.addresses)


def test_of_other_peers_it_names_where_this_node_sees_them() -> None:
    told = other("ip4/198.51.100.7", "ip4/8.8.8.8", "dns4/their.example", "ip4/10.0.0.9")
    seen = {told.peer_id: ["198.51.100.7"]}
    assert invited([LAN], [told], seen) == (told.addresses[0], told.addresses[2])
    assert invited([LAN], [told], {}) == (LAN,), "what it says of itself may be wrong"


def test_it_names_few_peers_and_the_nodes_own_addresses_first() -> None:
    others = [other("ip4/198.51.100.7") for _ in range(2 * MAX_PEERS)]
    named = invited([OUTER], others, {one.peer_id: ["198.51.100.7"] for one in others})
    assert len(named) == MAX_PEERS and named[0] == OUTER


@pytest.mark.parametrize(
    ("addresses", "here", "in_container", "where"),
    [
        ([LAN, LOOP], HOME, False, "this network"),
        ([LOOP], HOME, False, "this machine"),
        (["/ip4/172.17.0.2/tcp/1/p2p/me", LOOP], BRIDGED, True, "this machine"),
        # a container on the host's own network
        ([LAN, LOOP], HOME, True, "this network"),
        ([OUTER], HOME, False, ""),
        ([], HOME, False, ""),
    ],
)
def test_its_owner_is_told_where_it_does_not_work(
    addresses: list[str], here: Here, in_container: bool, where: str
) -> None:
    note = invite_note(addresses, here, 31337, in_container=in_container)
    assert bool(note) == bool(where) and where in note
    if where:
        assert "DILOCO_SWARM__ANNOUNCE" in note and "/tcp/31337" in note and "forward or publish" in note


@pytest.mark.parametrize(
    ("addresses", "has_bootstrap", "knows_others", "age_s", "early"),
    [
        ([LAN], True, False, 1.0, True),
        ([LAN], True, True, 1.0, False),
        ([LAN], True, False, OTHERS_S, False),
        ([LAN], False, False, 1.0, False),
        ([OUTER], True, False, 1.0, False),
    ],
)
def test_a_local_invite_waits_a_while_for_bootstrap_peers(
    addresses: list[str], has_bootstrap: bool, knows_others: bool, age_s: float, early: bool
) -> None:
    assert is_too_early(addresses, has_bootstrap=has_bootstrap, knows_others=knows_others, age_s=age_s) is early


def test_an_address_that_nobody_has_tried_since_the_start_does_not_make_an_invite_good() -> None:
    before_start = {OUTER.partition("/p2p/")[0]}
    assert "since this node's start" in invite_note([OUTER], HOME, 1, in_container=False, remembered=before_start)
    tested = other("ip4/198.51.100.7").addresses[0]
    assert invite_note([OUTER, tested], HOME, 1, in_container=False, remembered=before_start) == ""


def test_a_container_is_known_by_its_mark(tmp_path: Path) -> None:
    mark = tmp_path / ".dockerenv"
    assert not is_container([str(mark)])
    mark.touch()
    assert is_container([str(mark)])

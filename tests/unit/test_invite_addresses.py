"""The addresses that an invite names, and the note about where the invite works."""

from __future__ import annotations

from ipaddress import ip_interface
from pathlib import Path

import pytest

from node.swarm.connectivity.invite_addresses import (
    MAX_PEERS,
    OTHERS_S,
    choose_invite_addresses,
    invite_note,
    is_container,
    is_too_early,
)
from node.swarm.identity import new_identity
from node.swarm.membership.peer_table import PeerRecord
from node.swarm.transport.address_scope import LocalAddresses

ME = "/p2p/me"
LAN, LOOP, OUTER = f"/ip4/192.168.1.2/tcp/1{ME}", f"/ip4/127.0.0.1/tcp/1{ME}", f"/ip4/203.0.113.2/tcp/1{ME}"
HOME = LocalAddresses(interfaces=tuple(map(ip_interface, ("127.0.0.1/8", "192.168.1.2/24", "172.17.0.1/16"))))
BRIDGED = LocalAddresses(interfaces=tuple(map(ip_interface, ("127.0.0.1/8", "172.17.0.2/16"))))


def other(*places: str) -> PeerRecord:
    peer = new_identity().peer_id
    return PeerRecord(
        peer_id=peer, number=1, run="a" * 64, head="a" * 64, addresses=tuple(f"/{p}/tcp/5/p2p/{peer}" for p in places)
    )


def test_invite_with_public_addresses_names_no_private_addresses() -> None:
    assert choose_invite_addresses([OUTER, LAN, LOOP], [], {}) == (OUTER,)
    assert choose_invite_addresses([f"/dns4/home.example/tcp/1{ME}", LAN], [], {}) == (f"/dns4/home.example/tcp/1{ME}",)


def test_invite_without_public_addresses_names_private_addresses() -> None:
    assert choose_invite_addresses([LAN, LOOP], [], {}) == (LAN, LOOP)
    near = other("ip4/192.168.1.9")
    assert choose_invite_addresses([LAN, LOOP], [near], {near.peer_id: ["192.168.1.9"]}) == (LAN, LOOP, *near.addresses)


def test_invite_names_other_peers_at_the_addresses_where_this_node_sees_them() -> None:
    named = other("ip4/198.51.100.7", "ip4/8.8.8.8", "dns4/their.example", "ip4/10.0.0.9")
    seen = {named.peer_id: ["198.51.100.7"]}
    assert choose_invite_addresses([LAN], [named], seen) == (named.addresses[0], named.addresses[2])
    assert choose_invite_addresses([LAN], [named], {}) == (LAN,), "unseen addresses may be wrong"


def test_invite_names_a_limited_number_of_addresses_and_its_own_ones_first() -> None:
    others = [other("ip4/198.51.100.7") for _ in range(2 * MAX_PEERS)]
    named = choose_invite_addresses([OUTER], others, {one.peer_id: ["198.51.100.7"] for one in others})
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
def test_invite_note_says_where_an_invite_with_local_addresses_works(
    addresses: list[str], here: LocalAddresses, in_container: bool, where: str
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
def test_invite_with_local_addresses_waits_until_bootstrap_peers_are_known(
    addresses: list[str], has_bootstrap: bool, knows_others: bool, age_s: float, early: bool
) -> None:
    assert is_too_early(addresses, has_bootstrap=has_bootstrap, knows_others=knows_others, age_s=age_s) is early


def test_invite_that_names_only_untested_addresses_has_a_note() -> None:
    before_start = {OUTER.partition("/p2p/")[0]}
    assert "since this node's start" in invite_note([OUTER], HOME, 1, in_container=False, remembered=before_start)
    tested = other("ip4/198.51.100.7").addresses[0]
    assert invite_note([OUTER, tested], HOME, 1, in_container=False, remembered=before_start) == ""


def test_container_is_recognized_by_its_marker_file(tmp_path: Path) -> None:
    mark = tmp_path / ".dockerenv"
    assert not is_container([str(mark)])
    mark.touch()
    assert is_container([str(mark)])

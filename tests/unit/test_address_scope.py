"""The endpoints of multiaddresses, and the choice of a peer's addresses to dial."""

from __future__ import annotations

from ipaddress import ip_address, ip_interface

import pytest

from node.swarm.identity import new_identity
from node.swarm.transport.address_scope import (
    MAX_DIALED,
    LocalAddresses,
    describe_dial,
    interface_addresses,
    parse_endpoint,
    read_interfaces,
    scope_of,
    select_addresses,
    sort_by_reach,
)

PEER, RELAY = new_identity().peer_id, new_identity().peer_id
CIRCUIT = f"/ip4/1.2.3.4/tcp/1/p2p/{RELAY}/p2p-circuit/p2p/{PEER}"

HERE = LocalAddresses(
    interfaces=tuple(map(ip_interface, ("127.0.0.1/8", "192.168.1.2/24", "172.17.0.1/16", "::1/128", "fd00::2/64"))),
    listening=frozenset({("192.168.1.2", 31337), ("127.0.0.1", 31337), ("172.17.0.1", 31337)}),
    observed=frozenset({"203.0.113.7"}),
)


def at(*places: str) -> list[str]:
    """Multiaddresses of the peer. A place without a port, such as `ip4/HOST`, gets port 31337."""
    return [f"/{p if '/tcp/' in p else p + '/tcp/31337'}/p2p/{PEER}" for p in places]


@pytest.mark.parametrize(
    ("told", "dialed"),
    [
        (["ip4/8.8.8.8", "ip4/10.0.0.5", "ip4/127.0.0.1"], ["ip4/8.8.8.8"]),
        (["dns4/example.org", "ip6/2001:db8::1", "ip4/10.0.0.5"], ["dns4/example.org", "ip6/2001:db8::1"]),
        # on a network of this machine
        (["ip4/8.8.8.8", "ip4/192.168.1.9"], ["ip4/8.8.8.8", "ip4/192.168.1.9"]),
        (["ip6/fd00::9", "ip6/fd01::9"], ["ip6/fd00::9"]),
        # behind the same router
        (["ip4/203.0.113.7", "ip4/10.0.0.5"], ["ip4/203.0.113.7", "ip4/10.0.0.5"]),
        # the peer is on this machine: it has the same address with another port
        (
            ["ip4/192.168.1.2/tcp/4000", "ip4/127.0.0.1/tcp/4000"],
            ["ip4/192.168.1.2/tcp/4000", "ip4/127.0.0.1/tcp/4000"],
        ),
        (["ip4/127.0.0.1/tcp/4000"], ["ip4/127.0.0.1/tcp/4000"]),
        # a peer in a container elsewhere has this node's address and port, so a dial would reach this node
        (["ip4/8.8.8.8", "ip4/172.17.0.1", "ip4/127.0.0.1"], ["ip4/8.8.8.8"]),
        (["ip4/172.17.0.1", "ip4/127.0.0.1"], []),
        # no other address is known, and a router may connect the other network with this one
        (["ip4/10.0.0.5", "ip4/127.0.0.1"], ["ip4/10.0.0.5"]),
    ],
    ids=str,
)
def test_only_addresses_that_may_lead_to_the_peer_are_dialed(told: list[str], dialed: list[str]) -> None:
    assert select_addresses(at(*told), HERE) == (at(*dialed), [a for a in at(*told) if a not in at(*dialed)])


def test_all_addresses_of_a_peer_are_dialed_if_the_own_interfaces_are_unknown() -> None:
    told = at("ip4/8.8.8.8", "ip4/10.0.0.5", "ip4/127.0.0.1")
    assert select_addresses(told, LocalAddresses()) == (told, [])


def test_relayed_addresses_are_kept_and_the_number_of_dialed_addresses_is_limited() -> None:
    assert select_addresses([CIRCUIT, *at("ip4/10.0.0.5")], HERE)[0] == [CIRCUIT, *at("ip4/10.0.0.5")]
    many = at(*(f"ip4/8.8.8.{n}" for n in range(20)))
    assert select_addresses(many, HERE) == (many[:MAX_DIALED], many[MAX_DIALED:])


def test_read_interfaces_finds_the_loopback_address_and_its_network() -> None:
    here = LocalAddresses(interfaces=read_interfaces())
    assert here.has_address(ip_address("127.0.0.1")) and here.has_network_of(ip_address("127.9.9.9"))


def test_describe_dial_names_tried_addresses_and_counts_skipped_private_ones() -> None:
    tried, private = at("ip4/203.0.113.5"), at("ip4/10.0.0.5", "ip4/127.0.0.1")
    assert describe_dial(tried, private) == ("203.0.113.5:31337 (and 2 private addresses that are not on this network)")
    assert describe_dial(at("ip6/2001:db8::1", "dns4/a.example"), private[:1]) == (
        "[2001:db8::1]:31337, a.example:31337 (and 1 private address that is not on this network)"
    )
    assert describe_dial(at(*(f"ip4/8.8.8.{n}" for n in range(5))), []).endswith("8.8.8.2:31337 and 2 more")


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/",
        "/x",
        "/ip4/1.2.3/tcp/1",
        "/ip4/1.2.3.4/tcp/0",
        "/ip4/1.2.3.4/tcp/99999",
        "/ip4/::1/tcp/1",
        "/ip6/::1/udp/7/quic",
        CIRCUIT,
    ],
)
def test_malformed_udp_and_relayed_addresses_have_no_tcp_endpoint(address: str) -> None:
    assert parse_endpoint(address) is None


def test_ip_addresses_are_classified_as_loopback_private_or_wide() -> None:
    scopes = {"127.3.2.1": 0, "::1": 0, "10.1.1.1": 1, "100.64.0.1": 1, "fe80::1": 1, "fd12::1": 1}
    scopes |= {"0.0.0.0": 0, "::": 0, "::ffff:127.0.0.1": 0, "::ffff:192.168.9.1": 1, "::ffff:203.0.113.5": 2}
    scopes |= {"11.0.0.1": 2, "203.0.113.5": 2, "2001:db8::1": 2, "172.32.0.1": 2}
    assert {ip: int(scope_of(ip_address(ip))) for ip in scopes} == scopes


def test_wildcard_listen_address_is_replaced_by_the_addresses_of_the_interfaces() -> None:
    interfaces = tuple(map(ip_interface, ("127.0.0.1/8", "192.168.1.2/24", "fe80::2/64", "2001:db8::2/64")))
    both = ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/8"]
    assert interface_addresses(both, interfaces) == [
        "/ip4/127.0.0.1/tcp/7", "/ip4/192.168.1.2/tcp/7", "/ip6/2001:db8::2/tcp/8",
    ]  # fmt: skip
    assert interface_addresses(["/ip4/10.0.0.1/tcp/7", "/ip6/::/tcp/8"], interfaces[:1]) == ["/ip4/10.0.0.1/tcp/7"]


def test_a_list_of_own_addresses_that_is_cut_keeps_both_ip_versions_and_the_widest_addresses() -> None:
    bridges = [f"172.{17 + number}.0.1/16" for number in range(15)]
    interfaces = tuple(
        map(
            ip_interface,
            ("127.0.0.1/8", "192.168.1.2/24", *bridges, "8.8.8.8/24", "::1/128", "fd00::2/64", "2a00::1/64"),
        )
    )
    own = interface_addresses(["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"], interfaces)
    listed = sort_by_reach(own)
    assert sorted(listed) == sorted(own)
    assert listed[:5] == [
        "/ip4/8.8.8.8/tcp/7",
        "/ip6/2a00::1/tcp/7",
        "/ip4/192.168.1.2/tcp/7",
        "/ip6/fd00::2/tcp/7",
        "/ip4/172.17.0.1/tcp/7",
    ]
    assert listed[-1] == "/ip4/127.0.0.1/tcp/7"

"""Validation of addresses and texts from peers."""

from __future__ import annotations

import random

import pytest

from node.host.printable import printable
from node.swarm.identity import new_identity
from node.swarm.transport.libp2p import addresses_of, peer_of

PEER, RELAY = new_identity().peer_id, new_identity().peer_id
RIGHT = [
    f"/ip4/1.2.3.4/tcp/31337/p2p/{PEER}",
    f"/ip6/::1/tcp/7/p2p/{PEER}",
    f"/dns4/example.org/tcp/1/p2p/{PEER}",
]
WRONG = [
    f"/ip6/::1/udp/7/quic/p2p/{PEER}",
    f"/ip4/1.2.3.4/tcp/1/ws/p2p/{PEER}",
    f"/ip4/1.2.3.4/tcp/1/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",
    f"/x{PEER}",
    f"/garbage/p2p/{PEER}",
    f"/p2p/{PEER}",
    f"/ip4/1.2.3.4/tcp/99999999/p2p/{PEER}",
    f"/ip4/1.2.3/tcp/1/p2p/{PEER}",
    f"/ip4/1.2.3.4/tcp/1/p2p/{PEER} ",
    f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}\n",
    "/ip4/1.2.3.4/tcp/1/p2p/",
    "/ip4/1.2.3.4/tcp/1/p2p/0OIl",
    "/ip4/1.2.3.4/tcp/1/p2p/é",
    "/",
    "",
]


@pytest.mark.parametrize("address", RIGHT, ids=range(len(RIGHT)))
def test_peer_id_is_read_from_a_tcp_address(address: str) -> None:
    assert peer_of(address) == PEER


@pytest.mark.parametrize("address", WRONG, ids=range(len(WRONG)))
def test_an_address_that_is_invalid_or_not_plain_tcp_names_no_peer(address: str) -> None:
    assert peer_of(address) == ""


def test_addresses_of_keeps_only_valid_addresses_of_the_peer_itself() -> None:
    assert addresses_of(PEER, [*WRONG, *RIGHT, f"/ip4/1.2.3.4/tcp/1/p2p/{RELAY}"]) == tuple(RIGHT)


def test_reading_random_addresses_raises_no_error() -> None:
    rng = random.Random(1)
    parts = [
        "ip4",
        "ip6",
        "tcp",
        "p2p",
        "dns4",
        "onion3",
        "unix",
        "p2p-circuit",
        "1.2.3.4",
        "::1",
        "80",
        "-1",
        "",
        PEER,
    ]
    parts += ["x", "é", "fe80::1%e", "timaq4ygg2iegci7:80", "\x00", "9" * 60]
    for _ in range(20_000):
        peer_of("/" + "/".join(rng.choice(parts) for _ in range(rng.randint(0, 6))) + rng.choice(["", f"/p2p/{PEER}"]))


def test_text_from_a_peer_becomes_one_short_line_without_control_characters() -> None:
    said = "no\r\n2026-11-22 ERROR \x1b[2Jall is lost\x00\x7f\x9b1m\u2028\u2029\u202egnp.exe\u2066\u200f"
    assert printable(said, 300) == "no  2026-11-22 ERROR  [2Jall is lost   1m   gnp.exe  "
    assert printable("äß 日本 👍", 300) == "äß 日本 👍"
    assert printable("x" * 1000, 300) == "x" * 300 and printable("\ud800", 9) == " "
    assert printable(["x"], 9) == printable(None, 9) == printable(float("inf"), 9) == ""

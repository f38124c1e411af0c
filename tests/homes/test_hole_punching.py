"""Real nodes behind NATs without a forwarded port: hole punching connects them if the NATs allow it, else relays do."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tests.homes.home import Home, Kind
from tests.homes.nodes import ROUND_S, relayed_in_rounds, start_behind_relays
from tests.homes.world import World, world
from tests.swarm.harness import Node, Swarm, wait_for

HEAVY = bool(os.environ.get("DILOCO_TEST_HOMES"))
ROUNDS = 6 if HEAVY else 2
DIRECT_S = 90.0
GOSSIP_BYTES = 5_000
"""Bytes that a relay may still carry for calls that began before the direct connection."""
heavy = pytest.mark.skipif(not HEAVY, reason="takes minutes: set DILOCO_TEST_HOMES=1")


def homes_of(*kinds: Kind) -> list[Home]:
    return [Home(kind, ipv6=kind == "public") for kind in kinds]


def transports(members: Sequence[Node]) -> set[str]:
    """The transports between the members, read from each member's peer list. Empty while a member is missing there."""
    everybody = {node.peer_id() for node in members}
    rows = [row for node in members for row in node.peers() if row["peer_id"] in everybody and not row["this_node"]]
    return {row["transport"] for row in rows} if len(rows) == len(members) * (len(members) - 1) else set()


def become_direct(homes: World, swarm: Swarm, count: int) -> tuple[list[Node], Node]:
    members, (relay,) = start_behind_relays(swarm, homes, count=count)
    wait_for(lambda: transports(members) == {"direct"}, DIRECT_S, "members do not connect directly")
    return members, relay


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kinds",
    [("cone", "cone"), pytest.param(("ipv6_only", "ipv6_only"), marks=heavy), pytest.param(("cone",) * 3, marks=heavy)],
    ids="-".join,
)
def test_members_whose_nats_allow_hole_punching_stop_using_the_relay(swarm: Swarm, kinds: tuple[Kind, ...]) -> None:
    with world(homes_of(*kinds, "public")) as homes:
        members, relay = become_direct(homes, swarm, len(kinds))
        assert relayed_in_rounds(members, relay, ROUNDS)[0] < GOSSIP_BYTES
        status = members[0].status()
        assert status["reachability"] == "relay", "all but the punched peers call it over the relay"


@heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kinds", [("cone", "symmetric"), ("symmetric", "symmetric")], ids="-".join)
def test_members_behind_symmetric_nats_keep_using_the_relay(swarm: Swarm, kinds: tuple[Kind, ...]) -> None:
    with world(homes_of(*kinds, "public")) as homes:
        members, (relay,) = start_behind_relays(swarm, homes, count=len(kinds))
        assert relayed_in_rounds(members, relay, ROUNDS)[0] > 1_000_000
        assert transports(members) == {"relay"}


@heavy
@pytest.mark.timeout(900)
def test_members_complete_rounds_after_they_lose_their_direct_connection_and_connect_again(swarm: Swarm) -> None:
    with world(homes_of("cone", "cone", "public")) as homes:
        members, _ = become_direct(homes, swarm, 2)
        since = members[0].status()["run"]["round"]
        homes[1].change_address()
        members[0].until_round(since + 3, 6 * ROUND_S)
        wait_for(lambda: transports(members) == {"direct"}, 300.0, "members do not connect again")

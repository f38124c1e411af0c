"""A dozen peers that know each other by gossip alone: who comes, leaves or dies is soon known to all. Life's own times.

Over `local` only: a dozen libp2p daemons take longer to start than all of this, and the gossip above them is one code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.harness import Ether, Node, Swarm, assert_same, offer_all, wait_until

PEERS = 12
KILLED_S = 10.0
LEFT_S = 2.0
MET_S = 10.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """All by way of one that they knew at first."""
    ether = Ether("local", tmp_path)
    swarm = Swarm(ether)
    rules = swarm.rules(50_000, "fp16", min_peers=2)
    made = [swarm.node(rules, seat=seat) for seat in swarm.seats(PEERS)]
    for node in made:
        node.start_gossip()
    for node in made[1:]:
        node.seat.do(node.gossip.exchange(made[0].peer_id))
    wait_until(lambda: all(count(node) == PEERS for node in made), MET_S)
    yield made
    swarm.close()
    ether.close()


def count(node: Node) -> int:
    return len(node.directory.members())


def test_a_killed_peer_is_out_of_the_count_within_10_s_and_one_that_leaves_within_2_s(nodes: list[Node]) -> None:
    killed, leaving, *others = nodes
    killed.vanish()
    wait_until(lambda: not any(node.directory.is_member(killed.peer_id) for node in others), KILLED_S)
    assert all(count(node) == PEERS - 1 for node in others), "nobody who lives was taken for dead"
    began_s = time.monotonic()
    leaving.leave()
    wait_until(lambda: not any(node.directory.is_member(leaving.peer_id) for node in others), LEFT_S)
    assert time.monotonic() - began_s < LEFT_S
    time.sleep(LEFT_S)
    assert {count(node) for node in others} == {PEERS - 2}, "the dead stay dead"


def test_a_dozen_commit_round_after_round_as_one_group(nodes: list[Node]) -> None:
    for number in range(5):
        offer_all(nodes, number)
        done = [node.committed() for node in nodes]
        assert_same(done)
        assert len(done[0].outcome.included) == PEERS

"""A dozen peers join, leave and die, and the others learn of it by gossip alone at the default intervals.

The tests use only the local transport, because a dozen libp2p daemons start slowly and gossip is the same over both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.harness import HostPool, Node, Swarm, round_of, wait_until

PEERS = 12
DEATH_S = 10.0
GOODBYE_S = 2.0
JOIN_S = 10.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Nodes that found each other through the first one."""
    host_pool = HostPool("local", tmp_path)
    swarm = Swarm(host_pool)
    rules = swarm.rules(50_000, "fp16", min_peers=2)
    nodes = [swarm.node(rules, host=host) for host in swarm.hosts(PEERS)]
    for node in nodes:
        node.start_gossip()
    for node in nodes[1:]:
        node.host.do(node.gossip.exchange(nodes[0].peer_id))
    wait_until(lambda: all(count(node) == PEERS for node in nodes), JOIN_S)
    yield nodes
    swarm.close()
    host_pool.close()


def count(node: Node) -> int:
    return len(node.peer_table.members())


def test_a_killed_peer_counts_as_dead_within_10_s_and_one_that_leaves_within_2_s(nodes: list[Node]) -> None:
    killed, leaving, *others = nodes
    killed.vanish()
    wait_until(lambda: not any(node.peer_table.is_member(killed.peer_id) for node in others), DEATH_S)
    assert all(count(node) == PEERS - 1 for node in others), "a live peer is taken for dead"
    leaving.leave()
    wait_until(lambda: not any(node.peer_table.is_member(leaving.peer_id) for node in others), GOODBYE_S)
    time.sleep(GOODBYE_S)
    assert {count(node) for node in others} == {PEERS - 2}, "the dead stay dead"


def test_a_dozen_peers_commit_five_rounds_as_one_group(nodes: list[Node]) -> None:
    for number in range(5):
        assert len(round_of(nodes, number)[0].outcome.included) == PEERS

"""Nodes that disagree about who is live, and so about the leader, commit one outcome."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from tests.contract.harness import Node, Swarm, assert_same, offer_all, round_of

PARAMETERS = 20_000
SOON_S = 10.0


def suspect(node: Node, others: Sequence[Node]) -> None:
    """Let a node take others for dead until it receives a newer record."""

    async def run() -> None:
        for other in others:
            node.peer_table.suspect(other.peer_id)

    node.host.do(run())


def commit_after_gossip(nodes: Sequence[Node]) -> None:
    """All nodes offer and commit one outcome. Gossip starts after half a second."""
    offer_all(nodes, 0)
    time.sleep(0.5)
    for node in nodes:
        node.start_gossip()
    assert_same([node.committed() for node in nodes])


def test_nodes_commit_one_outcome_although_half_of_them_take_the_leader_for_dead(swarm: Swarm) -> None:
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=3), gossip=False)
    for node in nodes[2:]:
        suspect(node, nodes[:1])
    commit_after_gossip(nodes)
    round_of(nodes, 1)


@pytest.mark.parametrize("seed", range(3))
def test_nodes_with_random_views_of_who_is_live_never_commit_two_outcomes(swarm: Swarm, seed: int) -> None:
    """`min_peers` is a majority, so two groups would share a member."""
    nodes = swarm.nodes(5, swarm.rules(PARAMETERS, "fp16", min_peers=3), gossip=False)
    rng = random.Random(seed)
    for node in nodes:
        suspect(node, [other for other in nodes if other is not node and rng.random() < 0.35])
    commit_after_gossip(nodes)


def test_two_leaders_of_different_attempts_commit_one_outcome(swarm: Swarm) -> None:
    """The first node leads attempt 0. The second has seen it fail and leads attempt 1."""
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    first, second = nodes

    async def fail_once() -> None:
        second.participant.ballot.number = 1

    second.host.do(fail_once())
    offer_all(nodes, 0)
    assert_same([first.committed(SOON_S), second.committed(SOON_S)])


def test_a_leader_without_a_contribution_still_leads(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    ready = nodes[1:]
    offer_all(ready, 0)
    done = [node.committed() for node in nodes]
    assert_same(done)
    assert done[0].outcome.included == tuple(sorted(node.peer_id for node in ready))
    assert [d.offered for d in done] == [False, True, True]
    assert not any(node.failures for node in nodes)

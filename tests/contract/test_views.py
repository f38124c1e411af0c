"""Nodes that do not see the same peers, so do not agree on who leads. What is committed is the same for all."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from tests.contract.harness import Node, Swarm, assert_same, offer_all, round_of

PARAMETERS = 20_000
SOON_S = 10.0


def forget(node: Node, others: Sequence[Node]) -> None:
    """This node takes these for dead, until it hears from them."""

    async def suspect() -> None:
        for other in others:
            node.directory.suspect(other.peer_id)

    node.seat.do(suspect())


def test_two_views_of_who_leads(swarm: Swarm) -> None:
    """Half of the nodes take the leader for dead; without news, they keep to another one."""
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=3), gossip=False)
    leader, *others = nodes
    for node in others[1:]:
        forget(node, [leader])
    offer_all(nodes, 0)
    time.sleep(0.5)
    for node in nodes:
        node.start_gossip()
    assert_same([node.committed() for node in nodes])
    assert_same(round_of(nodes, 1))


@pytest.mark.parametrize("seed", range(3))
def test_random_views_never_commit_two_outcomes(swarm: Swarm, seed: int) -> None:
    """Each node takes some of the others for dead; min_peers is a majority, so two groups would share a member."""
    nodes = swarm.nodes(5, swarm.rules(PARAMETERS, "fp16", min_peers=3), gossip=False)
    rng = random.Random(seed)
    for node in nodes:
        forget(node, [other for other in nodes if other is not node and rng.random() < 0.35])
    offer_all(nodes, 0)
    time.sleep(0.5)
    for node in nodes:
        node.start_gossip()
    assert_same([node.committed() for node in nodes])


def test_two_that_wait_for_each_other_in_different_attempts_meet(swarm: Swarm) -> None:
    """One has seen an attempt fail and leads the next; the other has not, and leads the first."""
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    first, second = nodes

    async def fail_once() -> None:
        second.rounds.number = 1

    second.seat.do(fail_once())
    offer_all(nodes, 0)
    assert_same([first.committed(SOON_S), second.committed(SOON_S)])


def test_a_leader_that_is_not_ready_leads_all_the_same(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    ready = nodes[1:]
    offer_all(ready, 0)
    done = [node.committed() for node in nodes]
    assert_same(done)
    assert done[0].outcome.included == tuple(sorted(node.peer_id for node in ready))
    assert [d.offered for d in done] == [False, True, True]
    assert not any(node.failures for node in nodes), "no attempt was lost for it"


def test_a_split_forks_and_the_lesser_line_is_told_when_the_halves_meet(swarm: Swarm) -> None:
    if swarm.transport == "p2p":
        pytest.skip("only the local transport can cut a path")
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    round_of(nodes, 0)
    lesser, greater = nodes[:2], nodes[2:]
    cut(swarm, lesser, greater, True)
    done = [*round_of(lesser, 1), *round_of(greater, 1, extra_tokens=5000)]
    assert len({d.tip.head for d in done}) == 2
    cut(swarm, lesser, greater, False)
    for node in lesser:
        assert node.lost.wait(15)
    assert not any(node.lost.is_set() for node in greater)
    assert {node.tip.head for node in greater} == {done[-1].tip.head}


def cut(swarm: Swarm, one: Sequence[Node], other: Sequence[Node], is_cut: bool) -> None:
    for a in one:
        for b in other:
            swarm.hub.cut(a.peer_id, b.peer_id, cut=is_cut)

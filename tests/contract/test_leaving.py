"""Peers leave cleanly, or die in a round, also as its leader. The others soon continue and agree."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from node.swarm.consensus.commit import Committed
from node.swarm.faults import parse_faults
from tests.contract.harness import (
    Node,
    Swarm,
    Trap,
    assert_same,
    in_leader_order,
    offer_all,
    round_of,
    wait_until,
)

SOON_S = 10.0
"""More than a loaded machine needs, and less than the time after which a silent peer counts as dead."""
PARAMETERS = 50_000
"""These are thirteen chunks, so every member reduces some of them."""
STAGES = ("rendezvous", "reduce", "average", "commit")


def set_trap(node: Node, plan: str) -> Trap:
    trap = Trap(parse_faults(plan).plan)
    node.participant.ctx.hooks._faults = trap
    return trap


def survive(nodes: Sequence[Node], lost: Node, trap: Trap, round_: int) -> list[Committed]:
    """Let all members offer, and one die when its fault applies. Returns what the others commit."""
    offer_all(nodes, round_)
    assert trap.sprung.wait(SOON_S)
    began_s = time.monotonic()
    lost.vanish()
    done = [node.committed() for node in nodes if node is not lost]
    assert time.monotonic() - began_s < SOON_S
    assert_same(done)
    return done


def test_the_next_round_does_not_wait_for_a_member_that_has_left_cleanly(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    round_of(nodes, 0)
    gone, *stay = in_leader_order(nodes)
    gone.leave()
    began_s = time.monotonic()
    done = round_of(stay, 1)
    assert time.monotonic() - began_s < stay[0].peer_table.timings.dead_s
    assert all(d.included and d.outcome.plan.members == d.outcome.included for d in done)
    assert len(done[0].outcome.included) == 2
    assert not any(node.failures for node in stay), "no call to it failed"


@pytest.mark.parametrize("place", [0, 2], ids=["leader", "other member"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_member_that_dies_in_a_round_does_not_stop_it(swarm: Swarm, stage: str, place: int) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    dying = nodes[place]
    others = [node for node in nodes if node is not dying]
    trap = set_trap(dying, f"{stage}@0=stall:60")
    for d in survive(nodes, dying, trap, 0):
        assert {node.peer_id for node in others} <= set(d.outcome.included)
        assert d.included
    round_of(others, 1)


def test_an_outcome_accepted_under_a_dead_leader_is_proposed_again(swarm: Swarm) -> None:
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    leader, quick, *slow = nodes
    set_trap(leader, "commit@0=stall:60")
    for node in slow:
        set_trap(node, "commit@0=stall:0.8")
    offer_all(nodes, 0)
    wait_until(lambda: quick.participant.ballot.accepted is not None)
    accepted = quick.participant.ballot.accepted
    leader.vanish()
    done = [node.committed() for node in nodes[1:]]
    assert_same(done)
    for d in done:
        assert accepted is not None and d.tip.head == accepted.outcome.hash
        assert d.tip.proof is not None and d.tip.proof.attempt > 0, "a later leader ratified the first one's outcome"
        assert leader.peer_id in d.outcome.included, "the outcome includes the dead leader's contribution"


def test_chunks_of_a_dead_reducer_are_fetched_from_other_members(swarm: Swarm) -> None:
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    reducer = nodes[3]
    trap = set_trap(reducer, "serve@0=stall:60")
    done = survive(nodes, reducer, trap, 0)
    assert {node.peer_id for node in nodes[:3]} <= set(done[0].outcome.included)
    round_of(nodes[:3], 1)


def test_the_last_live_member_continues_alone_if_min_peers_is_one(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=1))
    round_of(nodes, 0)
    last, *others = nodes
    for node in others:
        node.vanish()
    offer_all([last], 1)
    done = last.committed(2 * SOON_S)
    assert done.outcome.included == (last.peer_id,)


def test_no_round_is_committed_with_fewer_members_than_min_peers(swarm: Swarm) -> None:
    rules = swarm.rules(PARAMETERS, "fp16", min_peers=2)
    (first,) = swarm.nodes(1, rules)
    offer_all([first], 0)
    wait_until(lambda: first.participant.waiting()[1] == "waiting_for_peers")
    time.sleep(0.5)
    assert first.mail.empty() and first.tip.round == -1
    second = swarm.node(rules)
    second.meet([first])
    second.start_gossip()
    offer_all([second], 0)
    assert_same([first.committed(), second.committed()])

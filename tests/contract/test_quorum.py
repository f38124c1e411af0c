"""Without a partition each round has one outcome, despite slow links, late members, crashes and two leaders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from node.swarm.faults import parse_faults
from node.swarm.membership.peer_table import sign_record
from node.swarm.transport.wire import Message
from tests.contract.harness import QUICK, Node, Swarm, assert_same, in_leader_order, offer_all, round_of, wait_until

PARAMETERS = 50_000
"""These are thirteen chunks, so every member reduces some of them."""
SLOW_S = 4.0
"""Seconds that a call for result chunks takes on a slow link."""
DEAD_S = 4.0
HANG_S = 7.0
SOON_S = 25.0
MAX_ROUNDS = 5


def slow_down(monkeypatch: pytest.MonkeyPatch, node: Node, delay_s: float = SLOW_S) -> None:
    """Give this node a slow downlink: each call for result chunks takes SLOW_S."""
    promptly = node.host.wire.call

    async def call(peer_id: str, verb: str, message: Message, **options: Any) -> Message:
        if verb == "fetch" and peer_id != node.peer_id:
            await asyncio.sleep(delay_s)
        return await promptly(peer_id, verb, message, **options)

    monkeypatch.setattr(node.host.wire, "call", call)


def adopted(nodes: Sequence[Node], round_: int) -> set[str]:
    """Heads of all nodes that have committed this round."""
    tips = [node.tip for node in nodes]
    return {link.head for tip in tips for link in tip.links if link.round == round_}


def commits_within(node: Node, round_: int, seconds: float) -> bool:
    """Wait for this node's commit. Returns False after the timeout."""
    with suppress(AssertionError):
        wait_until(lambda: node.tip.round >= round_, seconds)
    return node.tip.round >= round_


def round_with_all(nodes: Sequence[Node]) -> int:
    """Run rounds until one includes all nodes, because nodes are late on a busy machine. Returns its number."""
    for round_ in range(MAX_ROUNDS):
        if len(round_of(nodes, round_)[0].outcome.included) == len(nodes):
            return round_
    raise AssertionError(f"none of {MAX_ROUNDS} rounds includes all nodes")


@pytest.mark.parametrize("fault", ["none", "the leader crashes", "the leader hangs"])
def test_late_members_and_members_on_slow_links_commit_the_leaders_outcome(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Five of eight members form a group, two of them on slow links. The other three are ready soon after."""
    swarm.timings = replace(QUICK, dead_s=DEAD_S)
    # The five lightest members have less than half of the weight, and the leader would wait for the others.
    nodes = swarm.nodes(8, swarm.rules(PARAMETERS, "fp16", min_peers=2, quorum_ratio=0.4))
    number = round_with_all(nodes) + 1
    leader, *others = in_leader_order(nodes)
    slow, fast, late = others[:2], others[2:4], others[4:]
    for node in slow:
        slow_down(monkeypatch, node)
    offer_all([leader, *slow, *fast], number)
    # Three of the five hold the result at once.
    wait_until(lambda: all(node.tip.round == number or node.participant.ballot.accepted for node in (leader, *fast)))
    commits_within(leader, number, 1.5)
    time.sleep(0.3)
    offer_all(late, number)
    if fault != "none":
        wait_until(lambda: leader.tip.round == number)
        time.sleep(0.3)
    if fault == "the leader crashes":
        leader.vanish()
    elif fault == "the leader hangs":
        leader.host.loop.call_soon_threadsafe(time.sleep, HANG_S)
    wait_until(lambda: all(node.tip.round >= number for node in others), SOON_S)
    if fault != "the leader crashes":
        wait_until(lambda: leader.tip.round >= number, SOON_S)
    assert len(adopted(nodes, number)) == 1
    assert not any(node.lost.is_set() for node in nodes)
    outcome = others[0].committed().outcome
    assert set(outcome.included) == {node.peer_id for node in (leader, *slow, *fast)}


def test_a_member_that_joins_after_the_plan_waits_for_the_proposal_and_votes(swarm: Swarm) -> None:
    """It must not begin another attempt, which would end the attempt of the others."""
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    number = round_with_all(nodes) + 1
    leader, *others = in_leader_order(nodes)
    leader.participant.ctx.hooks._faults = parse_faults(f"average@{number}=stall:1.5")
    offer_all([leader, *others[:2]], number)
    wait_until(lambda: leader.participant.ballot.current.plan is not None)
    first = leader.participant.ballot.number
    offer_all(others[2:], number)
    done = [node.committed() for node in nodes]
    assert_same(done)
    assert set(done[0].outcome.included) == {node.peer_id for node in (leader, *others[:2])}
    proof = leader.tip.proof
    assert proof is not None and (proof.attempt, others[2].peer_id in proof.accepts) == (first, True)


def test_a_minority_on_slow_links_does_not_delay_the_commit(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = swarm.nodes(5, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    round_of(nodes, 0)
    leader, *others = in_leader_order(nodes)
    slow, fast = others[:2], [leader, *others[2:]]
    for node in slow:
        slow_down(monkeypatch, node, 3 * SLOW_S)
    offer_all(nodes, 1)
    wait_until(lambda: all(node.tip.round == 1 for node in fast), 3 * SLOW_S)
    assert all(node.tip.round == 0 for node in slow), "the fast members waited for the slow ones"
    wait_until(lambda: all(node.tip.round == 1 for node in slow), SOON_S)
    assert len(adopted(nodes, 1)) == 1


def test_a_minority_that_dies_while_the_result_is_accepted_does_not_stop_the_round(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of seven members die, including the leader. All four survivors must vote, and one is slow."""
    nodes = swarm.nodes(7, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    round_of(nodes, 0)
    leader, *others = in_leader_order(nodes)
    dying, left = [leader, *others[4:]], others[:4]
    for node in left:
        slow_down(monkeypatch, node, SLOW_S / 4)
    offer_all(nodes, 1)
    wait_until(lambda: leader.participant.ballot.accepted is not None)
    accepted = leader.participant.ballot.accepted
    for node in dying:
        node.vanish()
    wait_until(lambda: all(node.tip.round == 1 for node in left), SOON_S)
    assert len(adopted(left, 1)) == 1
    if any(node.tip.round == 1 for node in dying):
        assert accepted is not None and adopted(left, 1) == {accepted.outcome.hash}
    round_of(left, 2)


def test_a_member_that_is_never_ready_blocks_the_others_only_until_the_round_is_overdue(swarm: Swarm) -> None:
    """One of four members leaves and one is never ready. The other two are half of the last contributors."""
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2, patience_s=6.0))
    round_of(nodes, 0)
    gone, silent, *ready = nodes
    gone.leave()
    offer_all(ready, 1)
    assert not commits_within(ready[0], 1, 2.0)
    assert ready[0].participant.waiting()[1] == "waiting_for_peers"
    wait_until(lambda: all(node.tip.round == 1 for node in (silent, *ready)), SOON_S)
    assert len(adopted(nodes, 1)) == 1


def test_a_member_joins_a_second_leader_only_after_the_first_one_has_released_it(swarm: Swarm) -> None:
    """If two leaders of one attempt could use one join, both could propose an outcome."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=3), gossip=False)
    first, second, member = nodes
    offer_all([member], 0)
    wait_until(lambda: member.participant.ballot.attempt(0).holder == first.peer_id)

    me = first.peer_table.me
    closed = sign_record(first.host.identity, me.model_copy(update={"inbound": False, "number": me.number + 9}))

    async def learn(node: Node) -> None:
        node.peer_table.merge([closed])

    for node in (second, member):
        node.host.do(learn(node))
    time.sleep(1.0)
    assert not second.participant.ballot.attempt(0).joins
    assert member.peer_id in first.participant.ballot.attempt(0).joins
    first.peer_table.update_own(inbound=False)
    wait_until(lambda: member.peer_id in second.participant.ballot.attempt(0).joins)
    assert not first.participant.ballot.attempt(0).joins


def test_a_member_is_not_told_after_the_plan_why_the_group_was_open(swarm: Swarm) -> None:
    """The leader is not in its own plan. The reducers stall for longer than the leader holds a call."""
    leader, *others = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    for node in others:
        node.participant.ctx.hooks._faults = parse_faults("average@0=stall:4")
    offer_all(others, 0)
    wait_until(lambda: all(node.participant.ballot.current.has == "plan" for node in others))
    time.sleep(2 * QUICK.hold_s)
    assert [node.participant.waiting() for node in others] == [("", "")] * 2
    assert all(node.tip.round < 0 for node in others), "the reducers still stall"
    assert_same([node.committed() for node in (leader, *others)])

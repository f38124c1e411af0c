"""False norms, weights, claims and signatures are bounded or refused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from node.diloco.aggregate import clip_scales, weighted_mean
from node.errors import PeerError
from node.status import Channel
from node.swarm.allreduce import reducer as reduce
from node.swarm.consensus.ballot import LocalContribution
from node.swarm.consensus.context import Context
from node.swarm.faults import parse_faults
from node.swarm.membership.peer_table import sign_record
from node.swarm.messages import Plan, Proof, RoundOutcome, accept, parse, sign
from node.swarm.transport.wire import Message, Service
from tests.contract.harness import Node, Swarm, assert_same, gradient, in_leader_order, offer_all, round_of
from tests.contract.test_hostile import (
    PARAMETERS,
    SOON_S,
    _call,
    _ones,
    forged_join,
    give_plan,
    joined,
    lone_outcome,
    propose,
)


def test_a_contribution_with_a_hundred_times_the_usual_norm_is_clipped(swarm: Swarm) -> None:
    nodes = swarm.nodes(5, swarm.rules(PARAMETERS, "fp32", min_peers=5))
    given = {node.peer_id: gradient(i, 0, PARAMETERS) for i, node in enumerate(nodes)}
    honest = weighted_mean([given[p] for p in sorted(given)], [100] * 5)
    bad = nodes[3]
    given[bad.peer_id] = given[bad.peer_id] * 100
    for node in nodes:
        node.offer(given[node.peer_id], 100)
    done = [node.committed() for node in nodes]
    assert_same(done)
    parts = [given[p] for p in sorted(given)]
    norms = [nodes[0].rules.layouts[0].norm(nodes[0].encode(x)) for x in parts]
    assert torch.equal(done[0].tip.state.momentum, weighted_mean(parts, [100] * 5, clip_scales(norms, [100] * 5)))
    moved = (done[0].tip.state.momentum - honest).norm() / honest.norm()
    assert moved < 1, f"it moved the mean by {moved:.2f} of its length"
    unclipped = (weighted_mean(parts, [100] * 5) - honest).norm() / honest.norm()
    assert unclipped > 20, "without clipping the attack would work"


@pytest.mark.parametrize("factor", [0.01, 3.0])
def test_a_leader_that_reduces_alone_excludes_a_member_with_a_false_norm(swarm: Swarm, factor: float) -> None:
    """With several reducers, a reducer's sums may be false as well, so the first attempt excludes no member."""
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    bad = nodes[2]
    for node in nodes:
        chunks = node.encode(_ones())
        norm = node.rules.layouts[0].norm(chunks) * (factor if node is bad else 1.0)
        contribution = LocalContribution(node.tip.head, chunks, 100, 0.01, norm)
        node.host.loop.call_soon_threadsafe(node.participant.offer, contribution)
    done = [node.committed() for node in nodes]
    assert_same(done)
    assert set(done[0].outcome.plan.members) - set(done[0].outcome.included) == {bad.peer_id}
    assert done[0].outcome.plan.attempt == 1
    assert [node.host.wire.traffic.rejected["bad_norm"] for node in nodes] == [0, 1, 0, 0]


def test_a_reducer_that_scales_its_mean_up_does_not_reduce_in_the_next_attempt(swarm: Swarm) -> None:
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    bad = nodes[2]
    true = reduce.Reducer.average

    def longer(self: reduce.Reducer, included: Sequence[str]) -> tuple[dict[int, bytes], dict[str, float]]:
        means, squares = true(self, included)
        layout = bad.rules.layouts[0]
        return {
            c: layout.codec.encode(layout.codec.decode(d, layout.elements(c)) * 100) for c, d in means.items()
        }, squares

    on_average = bad.host.wire._services["average"].handler  # type: ignore[attr-defined]

    async def average_badly(caller: str, message: Message) -> Message:
        reduce.Reducer.average = longer  # type: ignore[method-assign]
        try:
            return await on_average(caller, message)  # type: ignore[no-any-return]
        finally:
            reduce.Reducer.average = true  # type: ignore[method-assign]

    bad.host.wire.serve({"average": Service(average_badly, Channel.REDUCE)})
    done = round_of(nodes, 0)
    assert done[0].outcome.plan.attempt > 0 and bad.peer_id not in done[0].outcome.plan.reducers
    assert any(node.failures and node.failures[0].code == "rejected" for node in nodes)


@pytest.mark.parametrize("kind", ["garbage", "nan", "shape"])
def test_a_reducer_that_damages_every_mean_does_not_stop_rounds(swarm: Swarm, kind: str) -> None:
    """After a refused result the next leader reduces alone. If it is the attacker, the leader after it does."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    bad = nodes[1]
    bad.participant.ctx.hooks._faults = parse_faults(f"average@*={kind}")
    for round_ in range(4):
        began_s = time.monotonic()
        done = round_of(nodes, round_)
        assert time.monotonic() - began_s < SOON_S
        assert bad.peer_id not in done[0].outcome.plan.reducers
        assert len(done[0].outcome.included) == 3, "its contribution was valid"


def test_a_forged_token_count_is_refused(swarm: Swarm) -> None:
    """The attacker signs too many tokens in its own join, and changes the tokens in another member's join."""
    rules = replace(swarm.rules(PARAMETERS, "fp16", min_peers=2), max_tokens=1000)
    nodes = swarm.nodes(3, rules)
    bad, *honest = nodes
    for peer in honest:
        header = {"attempt": 0, "join": forged_join(bad, bad.tip.head, 1001).model_dump()}
        with pytest.raises(PeerError) as caught:
            _call(bad, peer, "attend", Message(header))
        assert caught.value.code == "bad_weight"
    joined(bad, honest[0])
    join = forged_join(honest[1], bad.tip.head, 100)
    more = join.model_copy(update={"text": join.text.replace(":100,", ":900,")})
    plan = Plan(
        run=rules.run,
        parent=bad.tip.head,
        attempt=0,
        leader=bad.peer_id,
        joins=(more,),
        reducers=(more.signer,),
        owners=(0,) * 13,
    )
    with pytest.raises(PeerError) as caught:
        give_plan(bad, honest[0], sign(bad.host.identity, plan))
    assert caught.value.code == "bad_signature"
    bad.leave()
    offer_all(honest[1:], 0)
    assert_same([node.committed() for node in honest])


def test_a_record_with_more_tokens_than_were_signed_does_not_attract_members(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    round_of(nodes, 0)
    *honest, bad = nodes
    bad.stop()
    forged = sign_record(
        bad.host.identity,
        bad.peer_table.me.model_copy(
            update={"number": 10**6, "round": 99, "head": "ee" * 32, "swarm_tokens": 10**15, "state_digest": "ee" * 32}
        ),
    )

    async def tell(node: Node) -> None:
        node.peer_table.merge([forged])

    for node in honest:
        node.host.do(tell(node))
    done = round_of(honest, 1, timeout_s=2 * SOON_S)
    assert len(done[0].outcome.included) == 2
    assert not any(node.lost.is_set() for node in honest)


def test_a_member_that_signs_two_outcomes_in_one_attempt_is_evicted(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    bad, victim, other = in_leader_order(nodes)
    parent = bad.tip.head
    joined(bad, victim)
    outcome, hashes = lone_outcome(bad, parent, 1.0, others=[other])
    propose(bad, victim, outcome, hashes.hex())
    outcome, hashes = lone_outcome(bad, parent, 2.0, others=[other])
    with pytest.raises(PeerError) as caught:
        propose(bad, victim, outcome, hashes.hex())
    assert caught.value.code == "equivocation"
    assert not victim.host.do(_is_member(victim, bad)), "evicted, although it still gossips its record"
    assert victim.host.do(_is_member(victim, other))


async def _is_member(node: Node, peer: Node) -> bool:
    return node.peer_table.is_member(peer.peer_id)


def test_an_outcome_of_a_leader_alone_gets_no_vote(swarm: Swarm) -> None:
    """It would be the only contributor to the last round, and decide about all further ones."""
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    round_of(nodes, 0)
    bad, victim, *_ = in_leader_order(nodes)
    joined(bad, victim)
    outcome, hashes = lone_outcome(bad, bad.tip.head, 1.0, round_=1)
    with pytest.raises(PeerError, match="too few"):
        propose(bad, victim, outcome, hashes.hex())


def test_an_outcome_of_another_plan_than_the_one_that_was_sent_gets_no_vote(swarm: Swarm) -> None:
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    round_of(nodes, 0)
    bad, victim, other, _ = in_leader_order(nodes)
    joined(bad, victim)
    outcome, hashes = lone_outcome(bad, bad.tip.head, 1.0, round_=1, others=[other])
    plan = parse(RoundOutcome, outcome.text).plan
    victim.participant.ballot.attempt(0).given = plan.model_copy(update={"joins": plan.joins[:1]})
    with pytest.raises(PeerError, match="not of the plan"):
        propose(bad, victim, outcome, hashes.hex())
    victim.participant.ballot.attempt(0).given = plan
    assert propose(bad, victim, outcome, hashes.hex())


def test_a_member_keeps_its_vote_in_later_attempts_until_the_round_is_overdue(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome may be committed by a member that is away, and the next leader hostile."""
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    round_of(nodes, 0)
    first, second, victim, other = in_leader_order(nodes)
    joined(first, victim)
    outcome, hashes = lone_outcome(first, first.tip.head, 1.0, round_=1, others=[other])
    assert propose(first, victim, outcome, hashes.hex())
    victim.participant.ballot.number = 1
    another, hashes = lone_outcome(second, first.tip.head, 2.0, round_=1, attempt=1, others=[other])
    with pytest.raises(PeerError, match="accepted another outcome"):
        propose(second, victim, another, hashes.hex(), 1)
    monkeypatch.setattr(Context, "is_overdue", property(lambda _: True))
    assert propose(second, victim, another, hashes.hex(), 1)


def test_a_second_leader_of_one_attempt_is_refused(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    first, second, victim = in_leader_order(nodes)
    joined(first, victim)
    outcome, hashes = lone_outcome(first, first.tip.head, 1.0, others=[second])
    assert propose(first, victim, outcome, hashes.hex())
    outcome, hashes = lone_outcome(second, second.tip.head, 1.0, others=[first])
    with pytest.raises(PeerError, match="another leader"):
        propose(second, victim, outcome, hashes.hex())


def test_a_single_member_cannot_commit_without_the_others_even_if_min_peers_is_one(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    round_of(nodes, 0)
    *honest, bad = nodes
    outcome, hashes = lone_outcome(bad, bad.tip.head, 1.0, round_=1)
    vote = accept(bad.host.identity, outcome.hash, 0)
    proof = Proof(outcome=outcome, attempt=0, group=(bad.peer_id,), accepts={bad.peer_id: vote}, hashes=hashes.hex())
    for peer in honest:
        with pytest.raises(PeerError) as caught:
            peer.host.do(peer.participant.committer.adopt(proof))
        assert caught.value.code == "unsupported"

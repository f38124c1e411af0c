"""The chain of committed rounds, the content of its tip, and the proofs that it keeps."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.config.amendments import AcceptedAmendment, Amendment, encode_list
from node.diloco.credit import Credit
from node.diloco.digest import state_digest
from node.diloco.outer import OuterOptimizer, credited, genesis, outer_step
from node.swarm.allreduce.result_store import KEPT_ROUNDS, ResultStore
from node.swarm.chain.chain import Chain, OuterRule, Rollback, Tip, make_tip, next_tip, schedule_tokens
from node.swarm.governance.charter import sign_amendment
from node.swarm.identity import new_identity
from node.swarm.messages import LEAST_STEP_S, MOST_STEP_S, Join, Proof, RoundOutcome, parse
from tests.unit.swarm_data import RUN, A, B, committed, new_join

P = 100
OUTER = OuterRule(lr=0.7, optimizer=OuterOptimizer(), inner_steps=50)


def first_tip() -> Tip:
    return make_tip(genesis(torch.linspace(-1, 1, P)), RUN, None, OUTER, {}, 5.0)


def step(
    tip: Tip,
    joins: dict[str, Join] | None = None,
    mean: torch.Tensor | None = None,
    proof: Proof | None = None,
    outer: OuterRule = OUTER,
) -> Tip:
    """The tip one round later. By default only A contributes, and the mean is a vector of ones."""
    proof = proof or committed(tip.head, tip.round + 1, (A,))
    joins = joins or {A.peer_id: new_join(parent=tip.head)}
    mean = torch.ones(P) if mean is None else mean
    return next_tip(tip, outer, mean, proof, parse(RoundOutcome, proof.outcome.text), joins, 7.0, ((0, P),))


def advance(chain: Chain) -> Tip:
    tip = step(chain.tip)
    assert tip.proof is not None
    chain.advance(tip, chain.tip.head, tip.proof)
    return tip


def test_initial_tip_of_a_chain_has_no_proof_and_no_previous_round() -> None:
    tip = first_tip()
    assert (tip.head, tip.round, tip.proof) == (RUN, -1, None)
    assert (tip.round_s, tip.last_round_tokens, dict(tip.last_weights)) == (None, None, {})
    assert tip.digest == state_digest(tip.state)


def test_automatic_settings_fit_inner_steps_to_transfers_and_outer_lr_to_contributors() -> None:
    outer = OuterRule(lr=0.1, optimizer=OuterOptimizer("sgd"), inner_steps=50, most_inner_steps=100, follows_peers=True)
    tip = make_tip(genesis(torch.zeros(P)), RUN, None, outer, {}, 5.0)
    assert (tip.inner_steps, tip.round_s) == (50, None)
    four = {new_identity().peer_id: new_join().model_copy(update={"transfer_s": 6.0}) for _ in range(4)}
    one = step(tip, dict(list(four.items())[:1]), outer=outer)
    tip = step(one, four, outer=outer)
    assert tip.inner_steps == 75 and tip.round_s == pytest.approx(7.5)
    assert one.state.anchor[0] == pytest.approx(-0.4), "the published rate for one contributor"
    assert tip.state.anchor[0] == pytest.approx(-0.4 - 0.6), "the rate for 2.5, the mean of one and four"


def test_next_tip_is_computed_from_the_mean_and_the_signed_joins() -> None:
    tip, proof = first_tip(), committed(RUN, 0, (A,))
    joins = {A.peer_id: new_join(100, 0.1), B.peer_id: new_join(300, 0.2)}
    mean = torch.randn(P, generator=torch.Generator().manual_seed(0))
    new = step(tip, joins, mean, proof)
    stepped = outer_step(tip.state, mean, OuterOptimizer(), lr=0.7, tokens=400)
    expected = credited(stepped, {A.peer_id: 100, B.peer_id: 300})
    assert torch.equal(new.state.anchor, expected.anchor) and torch.equal(new.state.momentum, expected.momentum)
    assert (new.head, new.proof, new.round, new.anchor_at_s) == (proof.outcome.hash, proof, 0, 7.0)
    assert new.digest == state_digest(expected) != tip.digest
    assert dict(new.state.credit) == {A.peer_id: Credit(100, 1, 0, 0, 0), B.peer_id: Credit(300, 1, 0, 0, 0)}
    assert new.last_weights == {A.peer_id: 100, B.peer_id: 300} and new.last_round_tokens == 400
    assert [(link.parent, link.head, link.round, link.tokens) for link in new.links] == [(RUN, new.head, 0, 400)]
    assert new.round_s == pytest.approx(50 * 0.1), "inner steps times the lower median of the step times"
    assert torch.equal(tip.state.anchor, torch.linspace(-1, 1, P)), "the old state is unchanged"


def test_credit_adds_up_to_the_tokens_of_the_state_with_fragments() -> None:
    """A contribution to one of three fragments counts a third of its tokens, rounded down for each member."""
    outer, tip = replace(OUTER, fragments=3), first_tip()
    for _ in range(4):
        tip = step(tip, {A.peer_id: new_join(100, 0.1, tip.head), B.peer_id: new_join(200, 0.1, tip.head)}, outer=outer)
        assert tip.last_round_tokens == 33 + 66
    assert tip.state.credit[A.peer_id] == Credit(4 * 33, 4, 0, 0, 3)
    assert tip.state.tokens == tip.state.credit.tokens == 4 * (33 + 66)


@pytest.mark.parametrize("step_s", [LEAST_STEP_S, MOST_STEP_S])
def test_one_signed_step_time_changes_the_round_length_by_at_most_a_factor_of_four(step_s: float) -> None:
    before = step(first_tip())
    assert before.round_s == pytest.approx(5.0)
    joins = {A.peer_id: new_join(2**40, step_s, before.head).model_copy(update={"round_s": before.round_s})}
    tip = step(before, joins)
    assert tip.round_s == pytest.approx(20.0 if step_s > 1 else 1.25)
    assert tip.round_s == make_tip(tip.state, tip.head, tip.proof, OUTER, joins, 9.0).round_s, "without the tip before"


def test_chain_gives_the_proofs_from_any_kept_head_to_its_tip(tmp_path: Path) -> None:
    chain = Chain(first_tip(), ResultStore(tmp_path))
    heads = [RUN, *(advance(chain).head for _ in range(KEPT_ROUNDS + 2))]
    assert chain.proofs_after(heads[-1]) == [] and chain.proof_after(heads[-1]) is None
    for back in range(1, KEPT_ROUNDS + 1):
        assert [proof.outcome.hash for proof in chain.proofs_after(heads[-1 - back])] == heads[-back:]
    for head in (heads[1], "00" * 32):
        assert chain.proofs_after(head) == [] and chain.proof_after(head) is None, "dropped, or unknown"


def test_only_a_child_of_the_tip_extends_the_chain(tmp_path: Path) -> None:
    chain = Chain(first_tip(), ResultStore(tmp_path))
    tip = step(chain.tip)
    assert tip.proof is not None
    with pytest.raises(AssertionError):
        chain.advance(tip, "00" * 32, tip.proof)
    assert chain.tip.head == RUN


def test_a_downloaded_state_replaces_the_chain(tmp_path: Path) -> None:
    chain = Chain(first_tip(), ResultStore(tmp_path))
    downloaded = step(step(advance(chain)))
    chain.replace(downloaded)
    assert chain.tip is downloaded and chain.proof_after(RUN) is None


def test_chain_knows_the_rounds_that_it_committed_before_a_lost_fork(tmp_path: Path) -> None:
    """A node that comes back to such a round must not commit another result of it."""
    store, start = ResultStore(tmp_path), first_tip()
    chain = Chain(start, store)
    lost = [advance(chain) for _ in range(2)]
    for tip in lost:
        assert tip.proof is not None
        store.put(tip.proof, [b"chunk"])
    chain.replace(start)
    store.set_aside(chain.heads_aside())
    for chain in (chain, Chain(start, ResultStore(tmp_path))):  # noqa: B020 - the second one is after a restart
        assert chain.next_stored() is None, "it must not replay the lost chain before it has met the others"
        for tip in lost:
            proof = chain.next_aside()
            assert proof == tip.proof and proof is not None
            chain.advance(tip, chain.tip.head, proof)
        assert chain.next_aside() is None
    chain.replace(start)
    chain.store.remove(lost[0].head)
    assert chain.next_aside() is None, "the store has dropped the round"


def test_restarted_chain_finds_the_rounds_around_its_checkpoint(tmp_path: Path) -> None:
    store, tips = ResultStore(tmp_path), [first_tip()]
    for number in range(5):
        tips.append(step(tips[-1]))
        proof = tips[-1].proof
        assert proof is not None
        if number != 0:  # Round 0 was not stored, because the disk was full.
            store.put(proof, [b"chunk"])
    other = committed(tips[2].head, 2, (A,), tokens=1)
    store.put(other, [b"other"])
    os.utime(store._proof_path(other.outcome.hash), (0, 0))
    chain = Chain(tips[3], ResultStore(tmp_path))
    assert chain.proofs_after(tips[1].head) == [tips[2].proof, tips[3].proof]
    assert chain.proofs_after(RUN) == []
    for following in tips[4:]:
        proof = chain.next_stored()
        assert proof == following.proof and proof is not None
        chain.advance(following, chain.tip.head, proof)
    assert chain.next_stored() is None
    assert chain.proofs_after(tips[1].head) == [tip.proof for tip in tips[2:]]


def test_a_round_of_a_paused_run_changes_only_its_number() -> None:
    before = step(first_tip())
    after = step(before, outer=replace(OUTER, is_paused=True), mean=torch.empty(0))
    assert (after.round, after.state.tokens) == (before.round + 1, before.state.tokens)
    assert torch.equal(after.state.anchor, before.state.anchor) and after.state.credit is before.state.credit
    assert after.digest == state_digest(after.state) != before.digest
    assert after.last_round_tokens is None


def test_a_rollback_brings_back_parameters_and_schedules_but_takes_no_credit() -> None:
    back = Amendment(run=RUN, number=1, from_round=4, action="rollback", to_round=0, state="ef" * 32)
    entry = AcceptedAmendment(signed=sign_amendment(new_identity(), back), round=1)
    tips = [step(first_tip())]
    for _ in range(3):
        tips.append(step(tips[-1]))
    proof = committed(tips[-1].head, tips[-1].round + 1, (A,))
    joins = {A.peer_id: new_join(parent=tips[-1].head)}
    after = next_tip(
        tips[-1], OUTER, torch.ones(P), proof, parse(RoundOutcome, proof.outcome.text), joins, 7.0, ((0, P),),
        encode_list([entry]), None, Rollback(1, tips[0].state),
    )  # fmt: skip
    assert torch.equal(after.state.anchor, tips[0].state.anchor)
    assert torch.equal(after.state.momentum, tips[0].state.momentum)
    assert after.round == 4 and after.state.tokens == after.state.credit.tokens == 5 * tips[0].state.tokens
    assert schedule_tokens(after.state) == tips[0].state.tokens
    assert schedule_tokens(step(after).state) == 2 * tips[0].state.tokens
    assert after.digest == state_digest(after.state)

"""The line of committed rounds: what a tip says, what is remembered, where the line breaks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from node.diloco.digest import state_digest
from node.diloco.outer import genesis, outer_step
from node.swarm.chain import Chain, Outer, Tip, next_tip, open_chain, tip_at
from node.swarm.identity import new_identity
from node.swarm.records import (
    LEAST_STEP_S,
    MOST_STEP_S,
    Join,
    Outcome,
    Plan,
    Proof,
    accept,
    parse,
    results_root,
    sign,
)
from node.swarm.results import KEPT_ROUNDS, ResultStore

P, RUN = 100, "ab" * 32
OUTER = Outer(lr=0.7, momentum=0.9, inner_steps=50)
A, B = sorted((new_identity() for _ in range(2)), key=lambda identity: identity.peer_id)


def join(tokens: int, step_s: float, parent: str = RUN) -> Join:
    return Join(run=RUN, parent=parent, tokens=tokens, step_s=step_s, norm=1.0)


def proof_after(parent: str, round_: int, name: str = "") -> Proof:
    """`name`: another one for each."""
    plan = Plan(
        run=RUN,
        parent=parent,
        attempt=0,
        joins=(sign(A, join(100 + len(name), 0.1, parent)),),
        reducers=(A.peer_id,),
        owners=(0,),
    )
    outcome = Outcome(round=round_, plan=plan, included=(A.peer_id,), results=results_root([bytes(32)]))
    document = sign(A, outcome)
    votes = {A.peer_id: accept(A, document.hash, 0)}
    return Proof(outcome=document, attempt=0, group=(A.peer_id,), accepts=votes, hashes=bytes(32).hex())


def first() -> Tip:
    return tip_at(genesis(torch.linspace(-1, 1, P)), RUN, None, OUTER, {}, 5.0)


def step(tip: Tip, now_s: float = 7.0) -> Tip:
    proof = proof_after(tip.head, tip.round + 1)
    return take(tip, torch.ones(P), proof, {A.peer_id: join(100, 0.1, tip.head)}, now_s)


def take(tip: Tip, mean: torch.Tensor, proof: Proof, joins: dict[str, Join], now_s: float) -> Tip:
    return next_tip(tip, OUTER, mean, proof, parse(Outcome, proof.outcome.text), joins, now_s, ((0, P),))


def test_the_first_tip_knows_no_round() -> None:
    tip = first()
    assert (tip.head, tip.round, tip.proof) == (RUN, -1, None)
    assert (tip.round_s, tip.last_round_tokens, dict(tip.last_weights)) == (None, None, {})
    assert tip.digest == state_digest(tip.state)


def test_with_auto_h_follows_the_signed_transfers_and_the_rate_the_contributors() -> None:
    outer = Outer(lr=0.1, momentum=0.0, inner_steps=50, most_inner_steps=100, follows_peers=True)
    tip = tip_at(genesis(torch.zeros(P)), RUN, None, outer, {}, 5.0)
    assert (tip.inner_steps, tip.round_s) == (50, None)
    names = [new_identity().peer_id for _ in range(4)]
    slow = {n: join(100, 0.1).model_copy(update={"transfer_s": 6.0}) for n in names}
    tips = []
    for joins in (dict(list(slow.items())[:1]), slow):
        proof = proof_after(tip.head, tip.round + 1)
        record = parse(Outcome, proof.outcome.text)
        tips.append(tip := next_tip(tip, outer, torch.ones(P), proof, record, joins, 7.0, ((0, P),)))
    assert (tip.inner_steps, tip.round_s) == (75, pytest.approx(7.5))
    # Alone 0.4; then of one and of four contributors the mean, 2.5, which lies on the plateau.
    assert tips[0].state.anchor[0] == pytest.approx(-0.4)
    assert tips[1].state.anchor[0] == pytest.approx(-0.4 - 0.6)


def test_the_next_tip_follows_from_mean_and_joins() -> None:
    tip = first()
    proof = proof_after(RUN, 0)
    joins = {A.peer_id: join(100, 0.1), B.peer_id: join(300, 0.2)}
    mean = torch.randn(P, generator=torch.Generator().manual_seed(0))
    new = take(tip, mean, proof, joins, 7.0)
    expected = outer_step(tip.state, mean, lr=0.7, momentum=0.9, tokens=400)
    assert torch.equal(new.state.anchor, expected.anchor) and torch.equal(new.state.momentum, expected.momentum)
    assert (new.head, new.proof, new.round, new.anchor_at_s) == (proof.outcome.hash, proof, 0, 7.0)
    assert new.digest == state_digest(expected) != tip.digest
    assert new.last_weights == {A.peer_id: 100, B.peer_id: 300} and new.last_round_tokens == 400
    assert [(link.parent, link.head, link.round, link.tokens) for link in new.line] == [(RUN, new.head, 0, 400)]
    assert new.round_s == pytest.approx(50 * 0.1), "inner steps times the lower median of the step times"
    assert torch.equal(tip.state.anchor, torch.linspace(-1, 1, P)), "the old state is left as it was"


@pytest.mark.parametrize("step_s", [LEAST_STEP_S, MOST_STEP_S])
def test_a_members_step_time_moves_the_rounds_length_by_a_factor_of_four_at_most(step_s: float) -> None:
    before, tip = step(first()), step(first())
    assert before.round_s == pytest.approx(5.0)
    joins = {A.peer_id: join(2**40, step_s, tip.head).model_copy(update={"round_s": tip.round_s})}
    proof = proof_after(tip.head, 1)
    tip = take(tip, torch.ones(P), proof, joins, 7.0)
    assert tip.round_s == pytest.approx(20.0 if step_s > 1 else 1.25)
    assert tip.round_s == tip_at(tip.state, tip.head, proof, OUTER, joins, 9.0).round_s, "without the tip before"


def test_proofs_lead_from_any_kept_head_to_the_tip(tmp_path: Path) -> None:
    chain = Chain(first(), ResultStore(tmp_path))
    heads = [RUN]
    for _ in range(KEPT_ROUNDS + 2):
        tip = step(chain.tip)
        assert tip.proof is not None
        chain.advance(tip, heads[-1], tip.proof)
        heads.append(tip.head)
    assert chain.proofs_after(heads[-1]) == [] and chain.proof_after(heads[-1]) is None
    for back in range(1, KEPT_ROUNDS + 1):
        proofs = chain.proofs_after(heads[-1 - back])
        assert [proof.outcome.hash for proof in proofs] == heads[-back:]
    assert chain.proofs_after(heads[1]) == [] and chain.proof_after(heads[1]) is None, "eight are kept"
    assert chain.proofs_after("00" * 32) == []


def test_only_a_child_of_the_tip_extends_the_line(tmp_path: Path) -> None:
    chain = Chain(first(), ResultStore(tmp_path))
    tip = step(chain.tip)
    assert tip.proof is not None
    with pytest.raises(AssertionError):
        chain.advance(tip, "00" * 32, tip.proof)
    assert chain.tip.head == RUN


def test_starting_again_elsewhere_forgets_the_old_line(tmp_path: Path) -> None:
    chain = Chain(first(), ResultStore(tmp_path))
    tip = step(chain.tip)
    assert tip.proof is not None
    chain.advance(tip, RUN, tip.proof)
    elsewhere = step(step(tip))
    chain.replace(elsewhere)
    assert chain.tip is elsewhere and chain.proof_after(RUN) is None


def test_two_histories_with_one_state_have_two_heads() -> None:
    one = proof_after(RUN, 0)
    assert one.outcome.hash != proof_after("cd" * 32, 0).outcome.hash


def test_a_start_finds_the_rounds_before_and_after_its_checkpoint_and_removes_other_lines(tmp_path: Path) -> None:
    store, tip, tips = ResultStore(tmp_path), first(), [first()]
    for number in range(5):
        tip = step(tip)
        assert tip.proof is not None
        if number != 0:  # The disk had no room for it.
            store.put(tip.proof, [b"chunk"])
        tips.append(tip)
    other = proof_after(tips[2].head, 2, "elsewhere")
    store.put(other, [b"other"])
    os.utime(store._path(other.outcome.hash), (0, 0))
    checkpoint = tips[3]
    chain = open_chain(checkpoint, ResultStore(tmp_path))
    assert chain.proofs_after(tips[1].head) == [tips[2].proof, tips[3].proof]
    assert chain.proofs_after(RUN) == []
    assert len(list(tmp_path.iterdir())) == 4
    for following in tips[4:]:
        proof = chain.next_stored()
        assert proof == following.proof and proof is not None
        chain.advance(following, chain.tip.head, proof)
    assert chain.next_stored() is None
    assert chain.proofs_after(tips[1].head) == [one.proof for one in tips[2:]]

"""The line of committed rounds: head, outer state, and the results that late peers replay. Knows no network.

One writer: the swarm's loop. Outer states are immutable; whoever holds one may keep it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from node.diloco.digest import leaf_hashes, root_digest
from node.diloco.fragments import Ranges, step
from node.diloco.outer import OuterState
from node.diloco.schedule import fitting_steps, published_outer_lr, round_seconds
from node.swarm.line import Link, extend, heads_of, link_of
from node.swarm.records import Join, Outcome, Proof
from node.swarm.results import ResultStore, StoredRound, kept_rounds


@dataclass(frozen=True, slots=True)
class Outer:
    """How a mean becomes the next outer state."""

    lr: float
    momentum: float
    inner_steps: int
    """Of a typical node between two rounds."""
    fragments: int = 1
    """Rounds in which all parameters have their turn; a contribution's tokens are those since the fragment's last."""
    most_inner_steps: int = 0
    """To which the inner steps follow the transfers; 0: they do not."""
    follows_peers: bool = False
    """Whether the learning rate is the published one for as many contributors, in place of `lr`."""

    def lr_for(self, contributors: Sequence[int]) -> float:
        """`contributors` of the newest records: their mean, so that one that comes and goes moves it by half."""
        return published_outer_lr(fmean(contributors)) if self.follows_peers else self.lr

    def steps_after(self, joins: Sequence[Join]) -> int:
        """Inner steps of the round after a record with these contributors."""
        if not self.most_inner_steps or not joins:
            return self.inner_steps
        steps, transfers = [j.step_s for j in joins], [j.transfer_s for j in joins]
        return fitting_steps(steps, transfers, least=self.inner_steps, most=self.most_inner_steps)


@dataclass(frozen=True, slots=True)
class Tip:
    """The newest point of the chain, and what the next round takes from it."""

    head: str
    state: OuterState
    digest: str
    last_weights: Mapping[str, int]
    """Tokens of the contributors to the newest record; empty before the first."""
    round_s: float | None
    """T_r of the next round, from what the contributors signed, and nothing else; None before the first record."""
    inner_steps: int
    """H of the next round."""
    last_round_tokens: int | None
    anchor_at_s: float
    """Monotonic time at which the round after the tip began, its commit; who hears of it later is told its age."""
    leaves: Sequence[bytes]
    """The digest's hash tree."""
    proof: Proof | None
    """What led to `head`; None for the initial state."""
    line: tuple[Link, ...]
    """The rounds that led here, oldest first, as far as this node can show them."""

    @property
    def round(self) -> int:
        return self.state.round


def tip_at(
    state: OuterState,
    head: str,
    proof: Proof | None,
    outer: Outer,
    included: Mapping[str, Join],
    now_s: float,
    line: tuple[Link, ...] = (),
) -> Tip:
    """The tip with this state; `included`: the joins that the newest record counts. Heavy: hashes the state."""
    leaves = leaf_hashes(state)
    joins = list(included.values())
    inner_steps = outer.steps_after(joins)
    return Tip(
        head=head,
        state=state,
        digest=root_digest(state.round, state.tokens, state.anchor.numel(), leaves),
        last_weights={peer: join.tokens for peer, join in included.items()},
        round_s=_round_s(joins, inner_steps),
        inner_steps=inner_steps,
        last_round_tokens=sum(join.tokens for join in joins) // outer.fragments if joins else None,
        anchor_at_s=now_s,
        leaves=leaves,
        proof=proof,
        line=line,
    )


def _round_s(joins: Sequence[Join], inner_steps: int) -> float | None:
    """All of them say the same of the round before: else no member would have accepted their record."""
    if not joins:
        return None
    steps, settles = [j.step_s for j in joins], [j.settle_s for j in joins]
    return round_seconds(steps, inner_steps, joins[0].round_s, settles)


def next_tip(
    tip: Tip,
    outer: Outer,
    mean: Tensor,
    proof: Proof,
    outcome: Outcome,
    included: Mapping[str, Join],
    now_s: float,
    ranges: Ranges,
) -> Tip:
    """The tip after a proven outcome with this mean, fp32 [P_f], of `ranges`: outer step, hash. Pure and heavy."""
    tokens = sum(join.tokens for join in included.values())
    done = tokens // outer.fragments
    lr = outer.lr_for([len(tip.last_weights or included), len(included)])
    state = step(tip.state, ranges, mean, lr=lr, momentum=outer.momentum, tokens=done)
    line = extend(tip.line, link_of(proof, outcome, tokens))
    return tip_at(state, proof.outcome.hash, proof, outer, included, now_s, line)


def open_chain(tip: Tip, store: ResultStore) -> Chain:
    """The chain at a checkpoint's tip. Removes the results of other lines from the store, so it accesses the disk."""
    chain = Chain(tip, store)
    store.keep_only(chain.heads())
    store.stored.clear()  # The chain has taken over what is needed of it.
    return chain


class Chain:
    """The tip, and the proofs that led to it."""

    def __init__(self, tip: Tip, store: ResultStore) -> None:
        self.tip = tip
        self.store = store
        self.wanted_since: Callable[[], int | None] = lambda: None
        """The oldest round from whose state somebody replays: a joiner, or this node after a crash."""
        self._proofs: OrderedDict[str, Proof] = OrderedDict()
        """By parent: what led to the tip."""
        self._ahead: dict[str, Proof] = {}
        """By parent: what this node has committed after the tip, before it was started again."""
        self._digests = {tip.head: tip.digest}
        self._link(store.stored)

    def _link(self, stored: Sequence[StoredRound]) -> None:
        """Take over what an earlier process has left of this line, before the tip and after it."""
        by_head = {one.head: one for one in stored}
        before, head = [], self.tip.head
        while (one := by_head.get(head)) is not None:
            before.append(one)
            head = one.parent
        self._proofs.update({one.parent: one.proof for one in reversed(before)})
        by_parent = {one.parent: one for one in stored}
        head = self.tip.head
        while (one := by_parent.get(head)) is not None:
            self._ahead[head] = one.proof
            head = one.head

    def next_stored(self) -> Proof | None:
        """The round after the tip, where this node has committed it before it was started again."""
        return self._ahead.get(self.tip.head)

    def forget_stored(self) -> None:
        """The rounds after the tip cannot be taken again."""
        self._ahead.clear()

    def heads(self) -> set[str]:
        """All heads of this line that this node can show, or can come to from its disk."""
        proofs = (*self._proofs.values(), *self._ahead.values())
        return {*heads_of(self.tip.line, self.tip.head), *(proof.outcome.hash for proof in proofs)}

    def advance(self, tip: Tip, parent: str, proof: Proof) -> None:
        assert parent == self.tip.head
        self._proofs[parent] = proof
        self._ahead.pop(parent, None)
        self._digests[tip.head] = tip.digest
        store = self.store
        store.kept_rounds = kept_rounds(tip.round, self.wanted_since(), store.in_use(), store.turns)
        while len(self._proofs) > self.store.kept_rounds:
            old, _ = self._proofs.popitem(last=False)
            self._digests.pop(old, None)
        self.tip = tip

    def replace(self, tip: Tip) -> None:
        """Start again from a downloaded state; what led elsewhere is dropped."""
        self._proofs.clear()
        self._ahead.clear()
        self._digests = {tip.head: tip.digest}
        self.tip = tip

    def digest_at(self, head: str) -> str | None:
        """The digest of the state at a head of this line; None where it is not known (any more)."""
        return self._digests.get(head)

    def proof_after(self, parent: str) -> Proof | None:
        return self._proofs.get(parent)

    def proofs_after(self, parent: str) -> list[Proof]:
        """All that is known from `parent` to the tip, in order; empty where the line is broken."""
        found = []
        while (proof := self._proofs.get(parent)) is not None:
            found.append(proof)
            parent = proof.outcome.hash
        return found if parent == self.tip.head else []

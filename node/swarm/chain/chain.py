"""The chain of committed rounds: its tip with the outer state, and the proofs that a late peer replays.

Only the swarm's event loop writes to a chain. Outer states are immutable, so any thread may hold one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from torch import Tensor

from node.config.amendments import rewound, rewound_tokens
from node.diloco.digest import digest_of, leaf_hashes
from node.diloco.fragments import Ranges, step
from node.diloco.outer import OuterOptimizer, OuterState, credited, paused, rolled_back
from node.diloco.schedule import fitting_steps, published_outer_lr, round_seconds
from node.swarm.allreduce.result_store import ResultStore
from node.swarm.chain.fork_choice import Link, append_link, link_of
from node.swarm.messages import Join, Proof, RoundOutcome


@dataclass(frozen=True, slots=True)
class OuterRule:
    """How a mean pseudo-gradient becomes the next outer state."""

    lr: float
    optimizer: OuterOptimizer
    inner_steps: int
    """Inner steps of a typical node between two rounds."""
    fragments: int = 1
    """The number of rounds in which every parameter is averaged once. A contribution counts the tokens since the last
    round of its fragment."""
    most_inner_steps: int = 0
    """Upper limit of the inner steps if their number adapts to the transfer time; 0 if it does not adapt."""
    follows_peers: bool = False
    """Whether to use the published learning rate for the number of contributors in place of `lr`."""
    is_paused: bool = False
    """Whether the run is paused, so that a round changes no parameter."""

    def lr_for(self, contributors: Sequence[int]) -> float:
        """Learning rate for the mean contributor count of the newest records, so that it changes gradually."""
        return published_outer_lr(fmean(contributors)) if self.follows_peers else self.lr

    def steps_after(self, joins: Sequence[Join]) -> int:
        """The number of inner steps in the round after a record with these joins."""
        if not self.most_inner_steps or not joins:
            return self.inner_steps
        steps, transfers = [j.step_s for j in joins], [j.transfer_s for j in joins]
        return fitting_steps(steps, transfers, least=self.inner_steps, most=self.most_inner_steps)


@dataclass(frozen=True, slots=True)
class Rollback:
    """A rollback that takes place after an outer step."""

    number: int
    """The number of the amendment."""
    to: OuterState

    def apply(self, state: OuterState) -> OuterState:
        """Replace parameters and momentum, and let the schedules continue from the tokens of the earlier state."""
        tokens = schedule_tokens(state) - schedule_tokens(self.to)
        amendments = rewound(state.amendments, self.number, tokens)
        return replace(rolled_back(state, self.to), amendments=amendments)


def schedule_tokens(state: OuterState) -> int:
    """The tokens of the swarm, less those that rollbacks of this run have rewound."""
    return state.tokens - rewound_tokens(state.amendments)


@dataclass(frozen=True, slots=True)
class Tip:
    """The newest point of the chain, and what the next round takes from it."""

    head: str
    state: OuterState
    digest: str
    last_weights: Mapping[str, int]
    """Tokens of the contributors to the newest record; empty before the first."""
    round_s: float | None
    """T_r of the next round, computed from the signed joins alone; None before the first record."""
    inner_steps: int
    """H of the next round."""
    last_round_tokens: int | None
    anchor_at_s: float
    """Monotonic time of the commit, at which the next round began. Late peers are told how long ago that was."""
    leaves: Sequence[bytes]
    """The leaf hashes of the state's Merkle tree."""
    proof: Proof | None
    """The commit certificate of `head`; None for the initial state."""
    links: tuple[Link, ...]
    """The rounds that led to this tip, oldest first, as far as this node knows them."""

    @property
    def round(self) -> int:
        return self.state.round

    @property
    def known(self) -> frozenset[str]:
        """The contributors to the last two records, who are no newcomers; empty before the first.

        A leader chooses the contributors to its record. So those of one record alone are not enough.
        """
        return frozenset[str]().union(*(link.members for link in self.links[-2:]))

    @property
    def leader(self) -> str:
        """The leader that made the head (`messages.read_outcome`); empty before the first record."""
        return self.proof.outcome.signer if self.proof is not None else ""


def make_tip(
    state: OuterState,
    head: str,
    proof: Proof | None,
    outer: OuterRule,
    included: Mapping[str, Join],
    now_s: float,
    links: tuple[Link, ...] = (),
    next_outer: OuterRule | None = None,
    leaves: Sequence[bytes] | None = None,
) -> Tip:
    """Make the tip of this state. Slow: hashes the state. `included` are the newest record's joins, by peer id.

    `outer` is the rule of the newest round and `next_outer` that of the next one, if an amendment changes it. `leaves`
    are those of the state, if they are known.
    """
    leaves = leaf_hashes(state) if leaves is None else leaves
    joins = list(included.values())
    inner_steps, round_s = (next_outer or outer).steps_after(joins), None
    if joins:  # No record is accepted unless all of its joins state the same T_r.
        settles = [j.settle_s for j in joins]
        round_s = round_seconds([j.step_s for j in joins], inner_steps, joins[0].round_s, settles)
    has_tokens = bool(joins) and not outer.is_paused
    return Tip(
        head=head,
        state=state,
        digest=digest_of(state, leaves),
        last_weights={peer: join.tokens for peer, join in included.items()},
        round_s=round_s,
        inner_steps=inner_steps,
        last_round_tokens=sum(join.tokens // outer.fragments for join in joins) if has_tokens else None,
        anchor_at_s=now_s,
        leaves=leaves,
        proof=proof,
        links=links,
    )


def next_tip(
    tip: Tip,
    outer: OuterRule,
    mean: Tensor,
    proof: Proof,
    outcome: RoundOutcome,
    included: Mapping[str, Join],
    now_s: float,
    ranges: Ranges,
    amendments: bytes | None = None,
    next_outer: OuterRule | None = None,
    rollback: Rollback | None = None,
) -> Tip:
    """Compute the tip after a proven outcome. Pure and slow. `mean`: fp32 [P_f], for the parameters in `ranges`.

    `amendments` is the list after the outcome if it accepts an amendment, and `next_outer` as in `make_tip`. With
    `rollback`, the state of an earlier round replaces the parameters after the outer step.
    """
    leaves = None
    if outer.is_paused:
        state, leaves = paused(tip.state), tip.leaves
    else:
        shares = {peer: join.tokens // outer.fragments for peer, join in included.items()}
        lr = outer.lr_for([len(tip.last_weights or included), len(included)])
        tokens, number = sum(shares.values()), outcome.round // outer.fragments
        state = credited(step(tip.state, ranges, mean, outer.optimizer, lr=lr, tokens=tokens, number=number), shares)
    if amendments is not None:
        state = replace(state, amendments=amendments)
    if rollback is not None:
        state, leaves = rollback.apply(state), None
    links = append_link(tip.links, link_of(proof, outcome, sum(join.tokens for join in included.values())))
    return make_tip(state, proof.outcome.hash, proof, outer, included, now_s, links, next_outer, leaves)


class Chain:
    """The tip, and the proofs that led to it."""

    def __init__(self, tip: Tip, store: ResultStore, oldest_needed_round: Callable[[], int | None] = lambda: None):
        """Take over the rounds that are in the store.

        Args:
            tip: the tip at a checkpoint.
            oldest_needed_round: the oldest round from which a joiner, or this node after a crash, will replay.
        """
        self.tip = tip
        self.store = store
        self._oldest_needed_round = oldest_needed_round
        self._proofs: OrderedDict[str, Proof] = OrderedDict()
        """Parent to the proof of the round after it, up to the tip."""
        self._stored: dict[str, Proof] = {}
        """Parent to proof for the rounds after the tip, which an earlier process of this node committed."""
        self._aside: dict[str, Proof] = {}
        """Parent to proof of the stored rounds that this node committed on chains that it has left since."""
        stored = store.take_stored()
        by_head = {proof.outcome.hash: (parent, proof) for parent, proof in stored}
        before, head = [], tip.head
        while head in by_head:
            before.append(by_head[head])
            head = by_head[head][0]
        self._proofs.update(reversed(before))
        self._stored.update((parent, proof) for parent, proof in stored if parent not in self._proofs)
        self._aside.update(store.take_aside())

    def next_stored(self) -> Proof | None:
        """The proof of the round after the tip, if an earlier process of this node committed it."""
        return self._stored.get(self.tip.head)

    def next_aside(self) -> Proof | None:
        """The proof of the round after the tip, if this node committed it on a chain that it has left."""
        proof = self._aside.get(self.tip.head)
        return proof if proof is not None and self.store.holds(proof.outcome.hash) else None

    def forget_next(self) -> None:
        """Drop the stored rounds after the tip, because they cannot be replayed."""
        self._stored.pop(self.tip.head, None)
        self._aside.pop(self.tip.head, None)

    def keep_aside(self, parent: str, proof: Proof) -> None:
        """Remember a committed round of a chain that this node has left."""
        self._aside[parent] = proof

    def heads_aside(self) -> list[str]:
        """The heads of the rounds that this node committed on chains that it has left, the newest first."""
        return [proof.outcome.hash for proof in reversed(self._aside.values())]

    def advance(self, tip: Tip, parent: str, proof: Proof) -> None:
        assert parent == self.tip.head
        self._proofs[parent] = proof
        self._stored.pop(parent, None)
        self._aside = {
            parent: aside
            for parent, aside in self._aside.items()
            if aside.outcome.hash != tip.head and self.store.holds(aside.outcome.hash)
        }
        kept_rounds = self.store.set_retention(tip.round, self._oldest_needed_round())
        while len(self._proofs) > kept_rounds:
            self._proofs.popitem(last=False)
        self.tip = tip

    def replace(self, tip: Tip) -> None:
        """Continue from a downloaded state. The rounds of the chain so far are set aside.

        If the node comes back to that chain, it replays them, and does not commit another result of one of them.
        """
        self._aside |= self._stored | self._proofs
        self._stored.clear()
        self._proofs.clear()
        self.tip = tip

    def set_anchor(self, at_s: float) -> None:
        """Correct the time at which the current round began."""
        self.tip = replace(self.tip, anchor_at_s=at_s)

    def proof_after(self, parent: str) -> Proof | None:
        """The proof of the round after `parent`; None if it is no longer kept, or not committed yet."""
        return self._proofs.get(parent)

    def proofs_after(self, parent: str) -> list[Proof]:
        """The proofs of the rounds from `parent` to the tip, in order; empty if one of them is missing."""
        found = []
        while (proof := self._proofs.get(parent)) is not None:
            found.append(proof)
            parent = proof.outcome.hash
        return found if parent == self.tip.head else []

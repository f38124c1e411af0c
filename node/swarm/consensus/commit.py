"""The committer adopts committed rounds: it checks the proof, fetches the mean, and takes the outer step.

No other code changes the outer state.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from node.diloco.aggregate import norm_bound
from node.errors import PeerError, RoundFailed, SwarmError
from node.swarm.allreduce.reducer import exceeds_norm_bound
from node.swarm.chain.chain import Tip, next_tip
from node.swarm.chain.fork_choice import heads_of
from node.swarm.consensus.ballot import Attempt, Ballot, StageTimer
from node.swarm.consensus.context import Context
from node.swarm.messages import (
    Document,
    Join,
    Proof,
    RoundOutcome,
    check_proof,
    included_joins,
    joins_of,
    split_hashes,
    voters,
)
from node.swarm.transport.wire import Message

logger = logging.getLogger(__name__)

SLOW_FETCH_S = 1.0
"""A member that fetched the mean for longer than this asks the leader when the round was committed."""
ASK_S = 2.0
"""Timeout of the call that asks the leader when the round was committed."""
TWIN_ROUNDS, TWIN_WINDOW = 5, 20
"""Another running node has the identity of this one if TWIN_ROUNDS of the last TWIN_WINDOW rounds that include it
have a contribution that this process did not offer. After a restart, one or two rounds may have an earlier one."""
EVICT_S = 600.0
"""A peer that signs two outcomes in one attempt is evicted for this time only: it may have lost its data in a crash."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed round: the new tip, and whether this node's contribution is included."""

    tip: Tip
    outcome: RoundOutcome
    included: bool
    """Whether the round includes the contribution that this node has offered. If it has offered none, whether the round
    includes one that an earlier process offered."""
    offered: bool
    """Whether this node had offered a contribution to the round."""
    stage_s: dict[str, float]
    fetch_s: float = 0.0
    """Seconds from the commit until this node had adopted it."""
    is_replayed: bool = False
    """Whether an earlier process of this node committed the round, and this process read it from the disk."""
    is_behind: bool = False
    """Whether this node is catching up, and a later round is known."""
    mean_norm: float | None = None
    """L2 norm of the decoded mean, as every node computes it; None if another result was checked meanwhile."""


class Committer:
    """Adopts committed rounds, one at a time. `on_commit` is called on the event loop after each."""

    def __init__(
        self, ctx: Context, ballot: Ballot, stages: StageTimer, on_commit: Callable[[Committed], None]
    ) -> None:
        self._ctx, self._ballot, self._stages, self._on_commit = ctx, ballot, stages, on_commit
        self.transfer_s = 0.0
        """Seconds from the plan to the commit, in the last round that included this node; 0.0 before the first."""
        self._adopting = asyncio.Lock()
        self._signed: dict[tuple[str, int], str] = {}
        """The outcome of this round that each (signer, attempt) has signed. A second outcome evicts the signer."""
        self._mean: tuple[str, Tensor, float] | None = None
        """Root of the chunk hashes, mean, and its norm, of the newest result whose norm was found within its bound."""
        self._preferred = ""
        """The first head after the fork point of the chain that has won (`fork_choice.is_heavier`)."""
        self._dropped: frozenset[str] = frozenset()
        """Heads of this node's chain that has lost. Others that have lost, too, may still offer them."""
        self._left_at = -1
        """The last round that this process may have contributed to on a chain that it has left since."""
        self._foreign: deque[bool] = deque(maxlen=TWIN_WINDOW)
        """For each of the last rounds that include this identity, whether another process made the contribution."""
        self._present_since: int | None = None
        """The count of this process's suspensions at the last round that it took part in; None before the first."""

    @property
    def has_twin(self) -> bool:
        """Whether another running node has the identity of this one, so that each takes part in place of the other."""
        return sum(self._foreign) >= TWIN_ROUNDS

    async def adopt(self, proof: Proof, committed_at_s: float | None = None, *, is_behind: bool = False) -> bool:
        """Check a proof and take its outer step. Returns False if the proof is not for this node's next round.

        Raises PeerError if the proof is not valid.

        Args:
            committed_at_s: when the round was committed, on this node's clock; None means now. The next round begins
                at this time, however long it takes to fetch and apply the mean.
            is_behind: whether a later round is known.
        """
        ctx = self._ctx
        committed_at_s = ctx.clock() if committed_at_s is None else committed_at_s
        outcome, joins = await asyncio.to_thread(check_proof, proof, ctx.bounds)
        if outcome.plan.parent == ctx.chain.tip.head:
            # Peers that hang may delay this for minutes, so it must not hold the lock.
            self._check_next(proof, outcome, joins)
            await ctx.results.complete(outcome, split_hashes(proof.hashes))
        async with self._adopting:
            if outcome.plan.parent != ctx.chain.tip.head:
                if outcome.round > ctx.next_round:
                    ctx.behind.set()
                return False
            self._check_next(proof, outcome, joins)
            self.check_equivocation(proof.outcome, outcome)
            hashes, included = split_hashes(proof.hashes), included_joins(outcome, joins)
            chunks, mean = await self.mean_of(outcome, included, hashes)
            if self._stages.stage == "commit" and self._stages.seconds > SLOW_FETCH_S:
                committed_at_s = min(committed_at_s, await self._ask_commit_time(proof))
            self._stages.enter("apply")
            await ctx.hooks.at("apply")
            tip = await self._next_tip(proof, outcome, included, mean, committed_at_s)
            # The round is on the disk before any peer or reader sees its head.
            await asyncio.to_thread(ctx.chain.store.put, proof, chunks)
            if outcome.plan.parent != ctx.chain.tip.head:  # This node has restarted from a downloaded state meanwhile.
                ctx.chain.keep_aside(outcome.plan.parent, proof)
                await asyncio.to_thread(ctx.chain.store.set_aside, [proof.outcome.hash])
                return False
            self._commit(tip, outcome, proof, committed_at_s, is_behind=is_behind)
            ctx.hooks.corrupt_anchor(tip.round)
            if ctx.rules.feedback is not None:
                ctx.tasks.spawn(asyncio.to_thread(ctx.feedback.save, tip.head))
            return True

    def _check_next(self, proof: Proof, outcome: RoundOutcome, joins: Mapping[str, Join]) -> None:
        """Raise PeerError unless this node may adopt a proof of its next round."""
        self.check_round(outcome, joins)
        if not self.is_supported(proof):
            raise PeerError("too few contributors to the last round support a result", code="unsupported")

    async def replay_next(self) -> bool:
        """Replay the round after the tip from the disk, if an earlier process of this node committed it.

        The checks are those of `adopt`, except for the support of other peers, which the earlier process has checked.
        Returns False if the disk has no such round, or a damaged one.
        """
        return await self._replay(self._ctx.chain.next_stored())

    async def replay_aside(self) -> bool:
        """Replay the round after the tip, if this node committed it on a chain that it has left. As `replay_next`."""
        return await self._replay(self._ctx.chain.next_aside(), is_aside=True)

    async def _replay(self, proof: Proof | None, *, is_aside: bool = False) -> bool:
        ctx = self._ctx
        if proof is None:
            return False
        try:
            outcome, joins = await asyncio.to_thread(check_proof, proof, ctx.rules.bounds)
            async with self._adopting:
                if outcome.plan.parent != ctx.chain.tip.head:
                    return True  # A peer delivered the round first.
                self.check_round(outcome, joins)
                hashes, included = split_hashes(proof.hashes), included_joins(outcome, joins)
                ctx.results.hold(hashes, await asyncio.to_thread(ctx.chain.store.load, proof))
                _, mean = await self.mean_of(outcome, included, hashes)
                now_s = ctx.clock()
                tip = await self._next_tip(proof, outcome, included, mean, now_s)
                if is_aside:
                    await asyncio.to_thread(ctx.chain.store.take_back, proof.outcome.hash)
                if outcome.plan.parent == ctx.chain.tip.head:
                    self._commit(tip, outcome, proof, now_s, is_replayed=True, was_left=is_aside)
                return True
        except (SwarmError, OSError, ValueError) as exc:
            logger.warning("Round %d is on the disk, but cannot be replayed: %s", ctx.next_round, exc)
            ctx.chain.forget_next()
            if not isinstance(exc, OSError):  # After an OSError, the next start may be able to read the round.
                await asyncio.to_thread(ctx.chain.store.remove, proof.outcome.hash)
            return False

    async def set_aside(self) -> None:
        """After `restart_at`, mark the rounds of the chain that this node has left. No round is committed meanwhile."""
        chain = self._ctx.chain
        async with self._adopting:
            await asyncio.to_thread(chain.store.set_aside, chain.heads_aside())

    async def _ask_commit_time(self, proof: Proof) -> float:
        """Ask the leader when the round was committed. Returns that time on this node's clock; now without an answer.

        On a slow link the commit message waits behind the chunks of the mean. After the fetch the link is free, and
        the leader's answer arrives at once.
        """
        ctx, head, leader = self._ctx, proof.outcome.hash, proof.outcome.signer
        if leader == ctx.me:
            return ctx.clock()
        try:
            reply = await ctx.wire.call(leader, "chain", Message({"heads": [head]}), timeout_s=ASK_S)
        except PeerError as exc:
            logger.debug("The leader did not say when the round was committed: %s", exc)
            return ctx.clock()
        age_s = ctx.stated_age_s(reply.header) if reply.header.get("head") == head else 0.0
        return ctx.clock() - min(age_s, ctx.age_s)

    async def _next_tip(
        self, proof: Proof, outcome: RoundOutcome, included: Mapping[str, Join], mean: Tensor, committed_at_s: float
    ) -> Tip:
        ctx = self._ctx
        at_s = self.anchor_at_s(outcome.plan.parent, committed_at_s, is_included=ctx.me in included)
        ranges = ctx.rules.layout_at(outcome.round).ranges
        tip, outer = ctx.chain.tip, ctx.rules.outer
        amendments = ctx.amendments_after(outcome.plan)
        next_outer = ctx.manifest_rules.at(amendments, outcome.round + 1).outer
        rollback = await ctx.rollback_after(amendments, outcome.plan)
        return await asyncio.to_thread(
            next_tip, tip, outer, mean, proof, outcome, included, at_s, ranges, amendments, next_outer, rollback
        )

    def check_round(self, outcome: RoundOutcome, joins: Mapping[str, Join]) -> None:
        """Raise PeerError unless the outcome is of the next round, and its joins and amendment fit this node's tip."""
        if outcome.round != self._ctx.next_round:
            raise PeerError(f"an outcome has the number {outcome.round} where round {self._ctx.next_round} is next")
        for join in joins.values():
            self._ctx.check_join_fits(join)
        self._ctx.amendments_after(outcome.plan)

    def prefer(self, head: str, dropped: Collection[str]) -> None:
        """Adopt the outcome with this head, because its chain has won, and none of those that this node has dropped."""
        self._preferred, self._dropped = head, frozenset(dropped)

    def is_supported(self, proof: Proof) -> bool:
        """Whether this node may adopt a proof of the round after its tip.

        It may if the outcome is on the chain that has won a fork, if it has voted for the outcome and the votes are a
        quorum, or if it believes the votes of others (`Electorate.believes`). Its own vote alone does not suffice: a
        hostile leader could leave out the votes of the others, and the round would lose each fork.

        If the round is overdue, and fewer than `min_peers` members are at this node's head, no other round can follow
        here. Then any certificate will do.
        """
        head, accepted, votes = proof.outcome.hash, self._ballot.accepted, voters(proof)
        if head == self._preferred:
            return True
        if head in self._dropped and not self._ctx.is_overdue:  # Later, the winners may have left.
            return False
        if accepted is not None and accepted.outcome.hash == head and self._ctx.electorate().is_quorum(votes):
            return True
        tip = self._ctx.chain.tip
        members = self._ctx.peer_table.members()
        here = {record.peer_id for record in members if record.head == tip.head} | {self._ctx.me}
        if self._ctx.is_overdue and len(here) < self._ctx.rules.closing.min_peers:
            return True
        # A member that has another outcome of this round does not speak for this one.
        next_round, others = self._ctx.next_round, [r for r in members if r.head != tip.head and r.round >= tip.round]
        gone_on = {r.peer_id for r in others if r.round != next_round or r.head == head}
        if self._was_away:
            gone_on.add(self._ctx.me)
        return self._ctx.electorate().believes(votes, gone_on)

    @property
    def _was_away(self) -> bool:
        """Whether this process has started or was suspended since its last round. Then the others may have gone on."""
        return self._present_since != self._ctx.peer_table.suspensions

    async def mean_of(
        self, outcome: RoundOutcome, included: Mapping[str, Join], hashes: Sequence[bytes]
    ) -> tuple[list[bytes], Tensor]:
        """Fetch and decode a result. Returns its chunks and its mean, fp32 [P_f]. Raises PeerError, RoundFailed."""
        chunks = await self._ctx.results.complete(outcome, hashes)
        layout = self._ctx.rules.result_layout_at(outcome.round)
        known = self._mean
        if known is None or known[0] != outcome.results:
            try:
                known = (outcome.results, *await asyncio.to_thread(layout.decode_and_measure, chunks))
            except ValueError as exc:
                raise PeerError(f"a result cannot be decoded: {exc}", code="bad_size") from exc
        _, mean, norm = known
        joins, codec = list(included.values()), layout.codec
        bound = norm_bound([join.tokens for join in joins], [join.norm for join in joins])
        longer = (1 + codec.stretch_ratio) * (1 + self._ctx.feedback.stretch_ratio(codec.name)) - 1
        if exceeds_norm_bound(norm, bound, longer):
            raise PeerError("the norm of a result exceeds the bound of its contributions", code="bad_norm")
        self._mean = known
        return chunks, mean

    def check_equivocation(self, document: Document, outcome: RoundOutcome) -> bool:
        """Record the signer of an outcome. Evicts it and returns False if it signed two outcomes in one attempt."""
        if outcome.plan.parent != self._ctx.chain.tip.head:
            return True
        known = self._signed.setdefault((document.signer, outcome.plan.attempt), document.hash)
        if known == document.hash:
            return True
        logger.warning("Peer %s is evicted because it signed two outcomes for one attempt.", document.signer[-6:])
        self._ctx.peer_table.evict(document.signer, EVICT_S)
        self._ctx.wire.traffic.reject(PeerError("two outcomes", code="equivocation"))
        return False

    def _commit(
        self,
        tip: Tip,
        outcome: RoundOutcome,
        proof: Proof,
        committed_at_s: float,
        *,
        is_replayed: bool = False,
        is_behind: bool = False,
        was_left: bool = False,
    ) -> None:
        ctx, parent = self._ctx, outcome.plan.parent
        offered, included = self._ballot.offers(parent), ctx.me in outcome.included
        is_own = included and offered and self._ballot.is_mine(joins_of(proof.outcome)[ctx.me])
        if was_left or outcome.round <= self._left_at:
            # It may include an earlier contribution, which this node discarded when it left its chain.
            included = is_own
        elif included and not (is_replayed or is_behind):
            self._foreign.append(not is_own)
        was_paused = ctx.rules.is_paused
        ctx.chain.advance(tip, parent, proof)
        if was_paused:
            ctx.feedback.continue_at(tip.head)
        else:
            ctx.feedback.round_over(outcome.round, split_hashes(proof.hashes), tip.head)
        if ctx.manifest_rules.is_rolled_back(tip):
            ctx.feedback.clear()
        self._say_tip(tip)
        if offered:  # The others may have gone on since this node's vote.
            at_vote = self._ballot.suspensions_at_vote
            self._present_since = ctx.peer_table.suspensions if at_vote is None else at_vote
        if tip.head in self._dropped:
            self._dropped = frozenset()  # This node is back on the chain that had lost.
        mean_norm = self._mean[2] if self._mean is not None and self._mean[0] == outcome.results else None
        attempts = self._start_next_round()
        stage_s = self._stages.finish()
        # In overlapped runs, `committed_at_s` is when the leader offered its contribution.
        late_s = stage_s.get("commit", 0.0) if ctx.rules.overlapped else ctx.clock() - committed_at_s
        if offered and included:
            self.transfer_s = stage_s.get("reduce", 0.0) + stage_s.get("commit", 0.0)
        fetch_s = max(0.0, late_s)
        self._on_commit(Committed(tip, outcome, included, offered, stage_s, fetch_s, is_replayed, is_behind, mean_norm))
        for attempt in attempts:
            attempt.finish()
            attempt.stop()

    def restart_here(self, doubt_s: float) -> Tip:
        """Continue from the present tip, because no peer serves another state. Drops this node's offer.

        For `doubt_s`, peers on unknown heads, or with another digest at this node's head, are not believed until they
        claim a further head. Then they are believed again, because they may be honest members out of reach.
        """
        tip = self._ctx.chain.tip
        known = set(heads_of(tip.links, tip.head))
        for record in self._ctx.peer_table.others() if doubt_s else ():
            if record.head not in known or (record.head == tip.head and record.state_digest != tip.digest):
                self._ballot.add_false_claim(record, doubt_s)
        self._left_at = max(self._left_at, self._ctx.next_round)
        self._dropped, self._ballot.mine = frozenset(), None
        return self._ctx.chain.tip

    def restart_at(self, tip: Tip) -> None:
        """Continue from a downloaded state."""
        self._left_at = max(self._left_at, self._ctx.next_round)
        self._ctx.chain.replace(tip)
        self._ctx.feedback.clear()
        self._present_since = None
        for attempt in self._start_next_round():
            attempt.fail(RoundFailed("this node starts again from a downloaded state"))
            attempt.stop()
        self._say_tip(tip)

    def _start_next_round(self) -> list[Attempt]:
        self._signed, self._mean = {}, None
        self._ctx.results.clear()
        return self._ballot.clear()

    def _say_tip(self, tip: Tip) -> None:
        swarm_tokens = tip.state.tokens
        self._ctx.peer_table.update_own(
            round=tip.round, head=tip.head, attempt=0, state_digest=tip.digest, swarm_tokens=swarm_tokens
        )

    def anchor_at_s(self, parent: str, committed_at_s: float, *, is_included: bool) -> float:
        """When the round after this commit begins, on this node's clock.

        In overlapped runs, the round begins when this node's contribution was ready, so averaging does not lengthen the
        round. In other runs it begins at the commit, but not before this node's own contribution, if included.
        """
        ballot = self._ballot
        is_mine = is_included and ballot.offers(parent)
        if is_mine and self._ctx.rules.overlapped:
            return ballot.offered_at_s
        return max(committed_at_s, ballot.offered_at_s) if is_mine else committed_at_s

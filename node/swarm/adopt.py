"""From a proof to the next tip: believed, complete, within its bounds, applied. Knows one `Rounds`.

The only place where a node's outer state moves on. Whatever a proof says is checked before it touches state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from node.diloco.aggregate import norm_bound
from node.errors import PeerError, SwarmError
from node.swarm.base import Message
from node.swarm.chain import Tip, next_tip
from node.swarm.records import Document, Join, Outcome, Proof, check_proof, included_joins, split_hashes, voters
from node.swarm.reduce import Grid, exceeds
from node.swarm.rendezvous import supported
from node.swarm.results import ResultStore

if TYPE_CHECKING:
    from node.swarm.rounds import Rounds

logger = logging.getLogger(__name__)

SLOW_FETCH_S = 1.0
"""A member that fetched the mean for longer asks the leader when the round was committed."""
ASK_S = 2.0
"""For the answer."""
EVICT_S = 600.0
"""One that signs two outcomes for one attempt is out for so long; it may have lost its memory in a crash."""


class Adoption:
    """Takes over committed rounds, one at a time."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._adopting = asyncio.Lock()
        self._signed: dict[tuple[str, int], str] = {}
        """(signer, attempt) to the outcome that it signed for this round; a second one evicts it."""
        self._mean: tuple[str, Tensor] | None = None
        """The newest mean that was decoded and found within its bound, by the root of its hashes."""

    def clear(self) -> None:
        """The round is over."""
        self._signed, self._mean = {}, None

    async def adopt(self, proof: Proof, committed_at_s: float | None = None) -> bool:
        """Commit: take the outer step that the proof stands for. False if it is not about this node's next round.

        `committed_at_s`: when the round was committed, on this node's clock; None: now. The next round counts from
        there, however long it takes to fetch and to apply the mean.
        """
        rounds = self._rounds
        committed_at_s = rounds.clock() if committed_at_s is None else committed_at_s
        outcome, joins = await asyncio.to_thread(check_proof, proof, rounds.rules.bounds)
        async with self._adopting:
            if outcome.plan.parent != rounds.chain.tip.head:
                if outcome.round > rounds.next_round:
                    rounds.behind.set()
                return False
            self.check_round(outcome, joins)
            if not self._is_supported(proof):
                raise PeerError("most members of the last round know nothing of a result", code="unsupported")
            self.witness(proof.outcome, outcome)
            hashes, included = split_hashes(proof.hashes), included_joins(outcome, joins)
            chunks, mean = await self.mean_of(outcome, included, hashes)
            if rounds.stage == "commit" and rounds.stage_seconds > SLOW_FETCH_S:
                committed_at_s = min(committed_at_s, await self._ask_commit_time(proof))
            rounds.enter_stage("apply")
            await rounds.mishaps.at("apply")
            tip = await self._next_tip(proof, outcome, included, mean, committed_at_s)
            # On the disk before this node shows it to anybody.
            await asyncio.to_thread(rounds.chain.store.put, proof, chunks)
            if outcome.plan.parent != rounds.chain.tip.head:
                return False  # This node has started again from a downloaded state meanwhile.
            rounds.commit(tip, outcome, proof, committed_at_s)
            if rounds.faults.corrupts("apply", tip.round, rounds.mishaps.role):
                tip.state.anchor[0] += 1.0
            return True

    async def replay_next(self) -> bool:
        """Take the round after the tip again, where this node committed it before it was started again.

        All checks are those of `adopt`, less the one whether others support it: this node found so when it committed.
        False where the disk has no such round (any more).
        """
        rounds = self._rounds
        proof = rounds.chain.next_stored()
        if proof is None:
            return False
        try:
            outcome, joins = await asyncio.to_thread(check_proof, proof, rounds.rules.bounds)
            async with self._adopting:
                if outcome.plan.parent != rounds.chain.tip.head:
                    return True  # The swarm was quicker.
                self.check_round(outcome, joins)
                hashes, included = split_hashes(proof.hashes), included_joins(outcome, joins)
                grid = rounds.rules.grid_at(outcome.round)
                rounds.results.hold(hashes, await asyncio.to_thread(_load, rounds.chain.store, proof, grid))
                _, mean = await self.mean_of(outcome, included, hashes)
                now_s = rounds.clock()
                tip = await self._next_tip(proof, outcome, included, mean, now_s)
                if outcome.plan.parent == rounds.chain.tip.head:
                    rounds.commit(tip, outcome, proof, now_s, is_replayed=True)
                return True
        except (SwarmError, OSError, ValueError) as exc:
            logger.warning("Round %d is on the disk, but cannot be taken again: %s", rounds.next_round, exc)
            rounds.chain.forget_stored()
            if not isinstance(exc, OSError):  # What cannot be read now may be read at the next start.
                await asyncio.to_thread(rounds.chain.store.keep_only, rounds.chain.heads())
            return False

    async def _ask_commit_time(self, proof: Proof) -> float:
        """When the round was committed, on this node's clock, as its leader says; now where it does not.

        On a slow line the message of the commit waits for seconds behind the chunks of the mean. After a long fetch the
        line is free, and the answer to this question arrives at once.
        """
        rounds, head, leader = self._rounds, proof.outcome.hash, proof.outcome.signer
        if leader == rounds.me:
            return rounds.clock()
        try:
            reply = await rounds.wire.call(leader, "proofs", Message({"after": head}), timeout_s=ASK_S)
        except PeerError as exc:
            logger.debug("The leader does not say when the round was committed: %s", exc)
            return rounds.clock()
        age_s = rounds.told_age_s(reply.header) if reply.header.get("head") == head else 0.0
        return rounds.clock() - min(age_s, rounds.age_s)

    async def keep_own_line(self) -> None:
        """Remove the stored rounds of other lines. No round is committed meanwhile."""
        chain = self._rounds.chain
        async with self._adopting:
            await asyncio.to_thread(chain.store.keep_only, chain.heads())

    async def _next_tip(
        self, proof: Proof, outcome: Outcome, included: Mapping[str, Join], mean: Tensor, committed_at_s: float
    ) -> Tip:
        rounds = self._rounds
        at_s = rounds.anchor_at_s(outcome.plan.parent, committed_at_s, is_included=rounds.me in included)
        ranges = rounds.rules.grid_at(outcome.round).ranges
        tip, outer = rounds.chain.tip, rounds.rules.outer
        return await asyncio.to_thread(next_tip, tip, outer, mean, proof, outcome, included, at_s, ranges)

    def check_round(self, outcome: Outcome, joins: Mapping[str, Join]) -> None:
        """What follows this node's tip must be the next round, and as long as it was. Raises PeerError.

        The next one's length follows from what these joins say of this one's.
        """
        if outcome.round != self._rounds.next_round:
            raise PeerError(f"an outcome calls round {self._rounds.next_round} round {outcome.round}")
        if any(join.round_s != self._rounds.chain.tip.round_s for join in joins.values()):
            raise PeerError("a join names another length of the round")

    def _is_supported(self, proof: Proof) -> bool:
        """Whether a proof speaks for the members of the last round, or nobody contradicts it."""
        accepted = self._rounds.accepted
        if accepted is not None and accepted.outcome.hash == proof.outcome.hash:
            return True
        tip = self._rounds.chain.tip
        members = self._rounds.directory.members()
        stands = {r.peer_id: r.head == tip.head or r.round < tip.round for r in members}
        return supported(voters(proof), tip.last_weights, stands)

    async def mean_of(
        self, outcome: Outcome, included: Mapping[str, Join], hashes: Sequence[bytes]
    ) -> tuple[list[bytes], Tensor]:
        """All chunks of a result, and the mean, fp32 [P_f]. PeerError where it is longer than its inputs allow."""
        chunks = await self._rounds.results.complete(outcome, hashes)
        if self._mean is None or self._mean[0] != outcome.results:
            grid = self._rounds.rules.grid_at(outcome.round)
            mean = await asyncio.to_thread(grid.decode, chunks)
            joins = list(included.values())
            bound = norm_bound([join.tokens for join in joins], [join.norm for join in joins])
            if await asyncio.to_thread(exceeds, mean, bound, grid.codec.stretch_ratio):
                raise PeerError("a result is longer than the contributions behind it", code="bad_norm")
            self._mean = (outcome.results, mean)
        return chunks, self._mean[1]

    def witness(self, document: Document, outcome: Outcome) -> bool:
        """Remember who signed what for this round. False, and the signer is out, if it has signed another outcome."""
        if outcome.plan.parent != self._rounds.chain.tip.head:
            return True
        known = self._signed.setdefault((document.signer, outcome.plan.attempt), document.hash)
        if known == document.hash:
            return True
        logger.warning("Peer %s signed two outcomes for one attempt: it is out.", document.signer[-6:])
        self._rounds.directory.evict(document.signer, EVICT_S)
        self._rounds.wire.traffic.reject(PeerError("two outcomes", code="equivocation"))
        return False


def _load(store: ResultStore, proof: Proof, grid: Grid) -> list[bytes]:
    """The chunks of a stored result, each checked. Raises OSError, ValueError, PeerError."""
    chunks = store.load(proof)
    for chunk, data in enumerate(chunks):
        grid.check(chunk, data)
    return chunks

"""The voter checks an outcome before this node votes for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from node.errors import PeerError, SwarmError
from node.swarm.consensus.ballot import Attempt, Ballot
from node.swarm.consensus.claims import MAX_CLAIM_BYTES, made
from node.swarm.consensus.commit import EVICT_S, Committer
from node.swarm.consensus.context import Context
from node.swarm.messages import (
    AcceptedOutcome,
    Document,
    Join,
    RoundOutcome,
    accept,
    accepted_by,
    check_hashes,
    check_outcome,
    included_joins,
    parse,
    read_outcome,
    split_hashes,
)

MAX_CLAIMS = 16
"""Limit on the outcomes that one member claims in one round to have accepted. Each stays in memory for the round."""


@dataclass(frozen=True, slots=True)
class Voter:
    """Casts this node's votes, and checks the votes that other members claim to have cast."""

    ctx: Context
    ballot: Ballot
    committer: Committer

    async def vote(self, attempt: Attempt, leader: str, document: Document, hashes: str) -> str:
        """Fetch and check the mean of an outcome, then vote for it. Returns the signed vote. Raises SwarmError."""
        outcome, joins = self._check_outcome(document, hashes, self.ctx.chain.tip.head, attempt.number)
        is_only_one = self.committer.check_equivocation(document, outcome)
        # An outcome of an earlier attempt may be committed, even if its leader has signed two.
        if not is_only_one and outcome.plan.attempt == attempt.number:
            raise PeerError("a leader signed two outcomes for one attempt", code="equivocation")
        if outcome.plan.attempt == attempt.number and document.signer != leader:
            raise PeerError("an outcome of this attempt is not signed by its leader", code="bad_signature")
        self._check_plan(attempt, document, outcome)
        if not self._may_replace(outcome, document.hash):
            raise PeerError("this node has accepted another outcome, which may be committed", code="round_failed")
        chunks = await self.ctx.results.complete(outcome, split_hashes(hashes))
        store = self.ctx.chain.store
        saving = asyncio.ensure_future(asyncio.to_thread(store.save_chunks, document.hash, hashes, chunks))
        try:
            await self.committer.mean_of(outcome, included_joins(outcome, joins), split_hashes(hashes))
        except SwarmError:
            await saving
            await asyncio.to_thread(store.discard, document.hash)
            raise
        await saving
        if attempt.number != self.ballot.number or attempt.parent != self.ctx.chain.tip.head:
            raise PeerError("that attempt is over", code="round_failed")
        before = self.ballot.accepted
        if before is not None and before.attempt == attempt.number and before.outcome.hash != document.hash:
            self.ctx.peer_table.evict(leader, EVICT_S)
            raise PeerError("a leader proposes two outcomes in one attempt", code="equivocation")
        vote = accept(self.ctx.peer_table.identity, document.hash, attempt.number)
        accepted = AcceptedOutcome(attempt=attempt.number, outcome=document, hashes=hashes, vote=vote)
        self.ballot.accepted = accepted
        if self.ballot.suspensions_at_vote is None:
            self.ballot.suspensions_at_vote = self.ctx.peer_table.suspensions
        # The vote is on the disk before the leader counts it, so that this node still knows it after a crash.
        await self.ballot.save(attempt.parent, attempt.number + 1, chunks)
        return vote

    def _check_plan(self, attempt: Attempt, document: Document, outcome: RoundOutcome) -> None:
        """Raise PeerError if an outcome is of another plan than its leader has sent, or of too few members.

        For an outcome of an earlier attempt, those that have accepted it count as well. If it contradicts the plan of
        that attempt, only they count.
        """
        if outcome.plan.attempt == attempt.number and attempt.given is not None:
            if outcome.plan != attempt.given:
                raise PeerError("an outcome is not of the plan that its leader has sent")
            return
        head = document.hash
        earlier = {
            peer
            for peer, (number, vote) in attempt.support.items()
            if number < attempt.number and accepted_by(peer, head, number, vote)
        }
        members = () if self.ballot.contradicts_plan(outcome) else outcome.plan.members
        if not self.ctx.electorate().suffice(earlier.union(members)):
            raise PeerError("an outcome is of too few of the last round's members", code="unsupported")

    def _may_replace(self, outcome: RoundOutcome, head: str) -> bool:
        """Whether this node may vote for an outcome, although it may have accepted another one.

        If the round is overdue, it may, because otherwise some failures would stop the run.
        """
        known = self.ballot.accepted
        if known is None or known.outcome.hash == head or self.ctx.is_overdue:
            return True
        return made(outcome).replaces(known.outcome.hash, known.attempt, self.ctx.electorate().voters)

    def read_accepted(self, claim: bytes, caller: str, attempt: Attempt) -> AcceptedOutcome:
        """Read a member's claim to have accepted an outcome earlier, and check its vote for it. Raises PeerError."""
        accepted = parse(AcceptedOutcome, claim)
        if accepted.attempt >= attempt.number:
            raise PeerError("a member claims to have accepted an outcome in a later attempt")
        if not accepted_by(caller, accepted.outcome.hash, accepted.attempt, accepted.vote):
            raise PeerError("a member has not voted for what it claims to have accepted", code="bad_signature")
        # All members that have voted for an outcome claim the same one, which has a signature of each of them.
        key = accepted.outcome, accepted.hashes
        outcome = self.ballot.checked_claims.get(key)
        if outcome is None:
            if self.ballot.claims_of[caller] >= MAX_CLAIMS:
                raise PeerError("a member claims to have accepted too many outcomes", code="busy")
            self.ballot.claims_of[caller] += 1
            outcome, _ = self._check_outcome(accepted.outcome, accepted.hashes, attempt.parent, accepted.attempt)
            self.ballot.checked_claims[key] = outcome
        if outcome.plan.attempt > accepted.attempt:
            raise PeerError("an outcome is of a later attempt than the one that accepts it")
        # The claim of an honest member counts, even if the leader of that attempt signed two outcomes.
        self.committer.check_equivocation(accepted.outcome, outcome)
        return accepted

    def _check_outcome(
        self, document: Document, hashes: str, parent: str, number: int
    ) -> tuple[RoundOutcome, dict[str, Join]]:
        """Check everything that an adoption checks, except the mean, because later attempts may propose it again.

        `number` is the attempt in which the outcome is accepted. The outcome may come from an earlier attempt.
        """
        bounds = self.ctx.rules.bounds
        if 2 * len(document.text.encode()) + len(hashes) > MAX_CLAIM_BYTES:  # A claim repeats the text as JSON.
            raise PeerError("an outcome is too long to be claimed later", code="bad_size")
        outcome = read_outcome(document)
        joins = check_outcome(outcome, bounds)
        check_hashes(outcome, split_hashes(hashes), bounds)
        if outcome.plan.parent != parent:
            raise PeerError("an outcome is for another round")
        if outcome.plan.attempt > number:
            raise PeerError("an outcome is of a later attempt than the one that accepts it")
        self.committer.check_round(outcome, joins)
        return outcome, joins

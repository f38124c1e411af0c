"""Handlers of the calls of a round.

The wire authenticates callers. Handlers check everything else in a message before they change state. The wire turns an
exception that malformed input raises into a refusal (`wire.run_handler`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from node.errors import PeerError
from node.status import Channel
from node.swarm.allreduce.incoming import Incoming
from node.swarm.allreduce.reducer import chunk_hash
from node.swarm.consensus.ballot import Attempt, Ballot, first
from node.swarm.consensus.claims import MAX_CLAIM_BYTES
from node.swarm.consensus.context import Context
from node.swarm.consensus.depositary import Depositary, check_chunks
from node.swarm.consensus.leader import Leader
from node.swarm.consensus.voter import Voter
from node.swarm.messages import (
    MAX_MEMBERS,
    Document,
    Join,
    accepted_by,
    check_deposit,
    check_join,
    read,
)
from node.swarm.transport.wire import MAX_HEADER_BYTES, Message, Service

MAX_AT_ONCE = 4
"""Limit on concurrent request bodies of one verb from one caller. Bodies of failed attempts may still be arriving."""
MAX_AVERAGES = 2
"""Limit on concurrent averages for one caller. That of a failed attempt may still be running."""
MAX_REFUSED_CLAIMS = 8
"""Limit on the wrong claims of one member that are checked in one round."""
MAX_FETCHES = 2
"""Limit on concurrent fetches of one caller. `ResultCache.reserve` limits what all callers hold together."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """The handlers of one node. The wire serves `services`."""

    ctx: Context
    ballot: Ballot
    voter: Voter
    leader: Leader
    depositary: Depositary
    incoming: Incoming

    def services(self) -> dict[str, Service]:
        bulk = self.ctx.rules.contribution_bytes + MAX_HEADER_BYTES
        small = partial(Service, channel=Channel.REDUCE)
        large = partial(small, admits=self.ctx.peer_table.knows, per_caller=MAX_AT_ONCE)
        return {
            "attend": small(self._on_attend, max_request_bytes=MAX_CLAIM_BYTES, per_caller=MAX_AT_ONCE),
            "contribute": large(self._on_contribute, max_request_bytes=bulk, place=self.incoming.receive),
            "deposit": large(
                self._on_deposit,
                max_request_bytes=bulk,
                per_caller=1,
                admits=self.ctx.peer_table.is_member,
                place=self.depositary.place,
            ),
            "forward": small(self._on_forward, admits=self.ctx.peer_table.is_member, per_caller=MAX_AT_ONCE),
            "collect": small(self._on_collect),
            "average": small(self._on_average, per_caller=MAX_AVERAGES),
            "fetch": small(self._on_fetch, per_caller=MAX_FETCHES, max_reply_bytes=bulk),
        }

    def _attempt_of(self, message: Message) -> Attempt:
        parent, number = message.header.get("parent"), message.header.get("attempt")
        if not isinstance(parent, str):
            raise PeerError("a message names no round")
        return self.ballot.joined(parent, self.ballot.check_number(number))

    def _attempt_led_by(self, caller: str, message: Message) -> Attempt:
        """Return the attempt if its leader calls: the author of the plan or, before it, a peer asked to lead."""
        attempt = self._attempt_of(message)
        if caller not in ({attempt.leader} if attempt.leader else attempt.asked):
            raise PeerError("this attempt has another leader")
        return attempt

    async def _on_attend(self, caller: str, message: Message) -> Message:
        """Let a member attend an attempt that this node leads. Holds the call until there is news for the member."""
        document = Document.model_validate(message.header.get("join"))
        join = read(document, Join)
        if document.signer != caller or join.run != self.ctx.rules.run:
            raise PeerError("a join is not the caller's, or is for another run")
        if self.ctx.peer_table.is_member(caller):
            self.ballot.joined_at[caller] = self.ctx.chain.tip.round
        if join.parent != self.ctx.chain.tip.head:
            return self._reply_to_other_round(join.parent)
        check_join(document, self.ctx.rules.bounds, join.parent)
        self.ctx.check_join_fits(join)
        number = self.ballot.check_number(message.header.get("attempt"))
        if join.attempt != number:
            raise PeerError("a join is for another attempt")
        if number < self.ballot.number:
            return self._stale(number)
        is_leader = self.ctx.me in self.ctx.peer_table.leaders()
        leads = is_leader and self.ctx.leader_at(number) == self.ctx.me
        if not leads and self.ballot.release(number, caller):
            return Message({"status": "elsewhere"})
        attempt = self.ballot.attended(number, caller)
        if len(attempt.joins) >= MAX_MEMBERS and not self.ctx.peer_table.is_member(caller):
            raise PeerError("too many peers have joined this attempt", code="round_failed")
        self._take_claim(message.blobs, caller, join, attempt)
        if caller not in attempt.joins:
            attempt.has_join.set()
        attempt.joins[caller] = document
        attempt.attended_at_s[caller] = self.ctx.clock()
        if attempt.proposal is not None and "vote" in message.header:
            vote, outcome = message.header["vote"], attempt.proposal.outcome
            is_valid = isinstance(vote, str) and accepted_by(caller, outcome.hash, number, vote)
            attempt.votes[caller] = vote if is_valid else attempt.votes.get(caller, "")
            attempt.has_vote.set()
        if number > self.ballot.number:
            self.ballot.follow_members()
        if attempt.leading is None and number == self.ballot.number:
            attempt.leading = self.ctx.tasks.spawn(self.leader.lead(attempt))
        return await self._wait_for_news(attempt, caller, str(message.header.get("has", "")))

    def _take_claim(self, claims: Sequence[bytes], caller: str, join: Join, attempt: Attempt) -> None:
        """Keep the outcome that a member has accepted. Raises PeerError if it is not valid, or not that of the join.

        Only the first claim counts: an honest member sends at most one. Claims of peers without a say are ignored, as
        the leader does not ask them.

        A check of a thousand signatures takes a tenth of a second, so a member gets MAX_REFUSED_CLAIMS of them.
        """
        known = attempt.proposals.get(caller)
        if known is None and caller not in self.ctx.electorate().deciding:
            return
        if claims and known is None:
            refused = self.ballot.refused_claims.setdefault(caller, [])
            if len(refused) >= MAX_REFUSED_CLAIMS:
                raise PeerError(str(refused[-1]), code=refused[-1].code)
            try:
                known = self.voter.read_accepted(claims[0], caller, attempt)
            except PeerError as exc:
                refused.append(PeerError(str(exc), code=exc.code))  # `exc` itself would keep the claim in memory.
                raise
        if join.accepted != (known.outcome.hash if known is not None else ""):
            raise PeerError("a join names another accepted outcome than its member claims")
        if known is not None:
            attempt.proposals[caller] = known

    async def _wait_for_news(self, attempt: Attempt, caller: str, has: str) -> Message:
        """Wait until there is more than the member has, and return it. Returns `wait` after `hold_s`."""
        until_s = self.ctx.clock() + self.ctx.peer_table.timings.hold_s
        while True:
            if attempt.parent != self.ctx.chain.tip.head:
                return self._reply_to_other_round(attempt.parent)
            if attempt.proof is not None:
                age_s = float(self.ctx.clock() - attempt.committed_at_s)
                return Message({"status": "ahead", "age_s": age_s}, [attempt.proof.model_dump_json().encode()])
            if attempt.ended.is_set() or attempt.number < self.ballot.number:
                return self._stale(attempt.number)
            if attempt.proposal is not None and has != "proposal":
                return self.leader.proposal_of(attempt, attempt.proposal)
            if attempt.plan is not None and not has and caller in attempt.members:
                return Message({"status": "plan"}, [attempt.plan.model_dump_json().encode()])
            left_s = until_s - self.ctx.clock()
            if left_s <= 0:
                return Message({"status": "wait", "reason": attempt.waiting_reason, "code": attempt.waiting_code})
            await first((attempt.has_more,), left_s)

    def _reply_to_other_round(self, parent: str) -> Message:
        """The answer to a member in another round."""
        proof = self.ctx.chain.proof_after(parent)
        if proof is None:
            self.ctx.behind.set()
            return Message({"status": "behind"})
        header: dict[str, Any] = {"status": "ahead"}
        if proof.outcome.hash == self.ctx.chain.tip.head:
            header["age_s"] = self.ctx.age_s
        return Message(header, [proof.model_dump_json().encode()])

    def _stale(self, number: int) -> Message:
        """The answer to a member in an attempt that is over for this node."""
        later = max(self.ballot.number, number + 1)
        return Message({"status": "stale", "attempt": later} | self.ballot.failure_of(number))

    async def _on_contribute(self, caller: str, message: Message) -> Message:
        """Take chunks of the caller's contribution, or of another member's deposit that the caller forwards.

        Chunks that do not match a deposit's signature are the depositary's fault, not the member's.
        """
        attempt = self._attempt_of(message)
        reducer = await attempt.reducer_ready(self.ctx.answer_s)
        sender, chunks = caller, message.header["chunks"]
        if (deposit := message.header.get("deposit")) is not None:
            document, hashes = Document.model_validate(deposit), message.header.get("hashes")
            named = check_deposit(document, hashes, self.ctx.rules.bounds, attempt.parent, self.ctx.next_round)
            sender, parts = document.signer, await asyncio.to_thread(check_chunks, named, chunks, message.blobs)
            if sorted(parts) != sorted(reducer.chunks):
                raise PeerError("a depositary sends other chunks than those that this node reduces", code="bad_size")
        try:
            parts = dict(zip(chunks, message.blobs, strict=True))
            await asyncio.to_thread(reducer.check, sender, parts)
        except (PeerError, ValueError, TypeError, LookupError):
            reducer.refuse(sender)
            raise
        reducer.take(sender, parts)
        return Message()

    async def _on_deposit(self, caller: str, message: Message) -> Message:
        await self.depositary.take(caller, message)
        return Message()

    async def _on_forward(self, caller: str, message: Message) -> Message:
        parent, number = message.header.get("parent"), self.ballot.check_number(message.header.get("attempt"))
        if parent != self.ctx.chain.tip.head:
            raise PeerError("this node is in another round", code="round_failed")
        wanted = message.header.get("chunks")
        if not isinstance(wanted, dict) or not all(isinstance(chunks, list) for chunks in wanted.values()):
            raise PeerError("a request to forward has the wrong form")
        wait_s = message.header.get("wait_s")
        if not isinstance(wait_s, float) or not 0 < wait_s <= self.ctx.rules.bulk_s:
            raise PeerError("a request to forward names no time")
        return Message({"taken": await self.depositary.forward(Attempt(parent, number), caller, wanted, wait_s)})

    async def _on_collect(self, caller: str, message: Message) -> Message:
        attempt = self._attempt_led_by(caller, message)
        reducer = await attempt.reducer_ready(self.ctx.answer_s)
        members, since_s = set(attempt.weights), self.ctx.clock()

        def awaited() -> set[str]:
            if attempt.ended.is_set():  # Nobody needs the answer, and this call holds the contributions in memory.
                return set()
            live = members & {record.peer_id for record in self.ctx.peer_table.members()}
            missing = members.difference(reducer.arrived)
            return {peer for peer in live if not self.incoming.is_silent(peer, since_s, missing)}

        return Message({"arrived": await reducer.collect(awaited, self.ctx.rules.bulk_s)})

    async def _on_average(self, caller: str, message: Message) -> Message:
        attempt = self._attempt_led_by(caller, message)
        reducer = await attempt.reducer_ready(self.ctx.answer_s)
        included = message.header.get("included")
        if not isinstance(included, list) or included != sorted(set(included)) or not included:
            raise PeerError("the list of included members has the wrong form")
        await self.ctx.hooks.at("average")
        means, squares = await asyncio.to_thread(reducer.average, included)
        blobs = self.ctx.hooks.damage("average", [means[chunk] for chunk in reducer.chunks])
        hashes = await asyncio.to_thread(lambda: [chunk_hash(data) for data in blobs])
        self.ctx.results.add(attempt.number, hashes, blobs)
        return Message({"hashes": hashes, "squares": [squares[peer] for peer in included]})

    async def _on_fetch(self, caller: str, message: Message) -> Message:
        wanted = message.header.get("hashes")
        if not isinstance(wanted, list) or len(wanted) > self.ctx.bounds.most_chunks:
            raise PeerError("a fetch has the wrong form")
        chosen, release = self.ctx.results.reserve(wanted, is_member=self.ctx.peer_table.is_member(caller))
        try:
            found = await asyncio.to_thread(self.ctx.results.get_all, chosen)
            if found is None:
                raise PeerError("this node does not have all of these chunks", code="round_failed")
            return Message(blobs=await self.ctx.hooks.serve(found), release=release)
        except BaseException:
            release()
            raise

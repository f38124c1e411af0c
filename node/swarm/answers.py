"""What a node answers in a round: every call of the protocol that a peer may make. Knows one `Rounds`.

Callers are authenticated by the wire; everything else they say is checked here before it touches state. What a message
makes a handler stumble over is turned into a refusal by the wire (`base.answer`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from node.errors import PeerError, RoundFailed
from node.status import Channel
from node.swarm import leader
from node.swarm.adopt import EVICT_S
from node.swarm.attempt import Accepted, Attempt, known_code
from node.swarm.base import MAX_HEADER_BYTES, Message, Service, plain
from node.swarm.deposits import check_chunks
from node.swarm.records import (
    Document,
    Join,
    Outcome,
    Plan,
    Proof,
    accept,
    accepted_by,
    check_deposit,
    check_hashes,
    check_join,
    check_outcome,
    check_plan,
    included_joins,
    parse,
    read,
    split_hashes,
)
from node.swarm.reduce import Bench

if TYPE_CHECKING:
    from node.swarm.rounds import Rounds

CALL_S = 5.0
MAX_AT_ONCE = 4
"""Bodies of one kind by one peer: those of attempts that were given up may still be on their way."""
MAX_FETCHES = 2
"""By one caller at once: a round's chunks are in memory for each until they are sent."""
MAX_AHEAD = 1000
"""Attempts that a peer may be ahead; so nobody can use up the numbers."""


class Answers:
    """The handlers of one node's rounds."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def services(self) -> dict[str, Service]:
        bulk = self._rounds.rules.round_bytes + MAX_HEADER_BYTES
        small = partial(Service, channel=Channel.REDUCE)
        large = partial(small, admits=self._rounds.directory.knows, per_caller=MAX_AT_ONCE)
        return {
            "join": small(self._on_join, max_request_bytes=4 * MAX_HEADER_BYTES),
            "attempt": small(self._on_attempt),
            "plan": large(self._on_plan, max_request_bytes=4 * MAX_HEADER_BYTES),
            "contribute": large(self._on_contribute, max_request_bytes=bulk),
            "contribute_for": large(self._on_contribute_for, max_request_bytes=bulk),
            "deposit": large(
                self._on_deposit,
                max_request_bytes=bulk,
                per_caller=1,
                admits=self._rounds.directory.is_member,
                place=self._rounds.depositary.place,
            ),
            "forward": small(self._on_forward, admits=self._rounds.directory.is_member, per_caller=MAX_AT_ONCE),
            "collect": small(self._on_collect),
            "average": small(self._on_average),
            "propose": large(self._on_propose, max_request_bytes=8 * MAX_HEADER_BYTES),
            "commit": large(self._on_commit, max_request_bytes=8 * MAX_HEADER_BYTES),
            "failed": small(self._on_failed),
            "fetch": small(self._on_fetch, per_caller=MAX_FETCHES),
        }

    def _keyed(self, caller: str, message: Message) -> Attempt:
        parent, number = message.header.get("parent"), message.header.get("attempt")
        if not isinstance(parent, str):
            raise PeerError("a message names no round")
        return self._rounds.enter(parent, self._checked_number(number), caller)

    def _checked_number(self, number: object) -> int:
        if not isinstance(number, int) or not 0 <= number <= self._rounds.number + MAX_AHEAD:
            raise PeerError("a message names no attempt")
        return number

    def _led(self, caller: str, message: Message) -> Attempt:
        """The attempt, if the caller leads it: whose plan this node has taken, else whom it has asked to."""
        attempt = self._keyed(caller, message)
        if caller not in ({attempt.leader} if attempt.leader else attempt.asked):
            raise PeerError("this attempt has another leader")
        return attempt

    async def _on_join(self, caller: str, message: Message) -> Message:
        document = Document.model_validate(message.header.get("join"))
        join = read(document, Join)
        if document.signer != caller or join.run != self._rounds.rules.run:
            raise PeerError("a join is not the caller's, or of another run")
        check_join(document, self._rounds.rules.bounds, join.parent)
        if self._rounds.directory.is_member(caller):
            self._rounds.joined_at[caller] = self._rounds.chain.tip.round
        if join.parent != self._rounds.chain.tip.head:
            proof = self._rounds.chain.proof_after(join.parent)
            if proof is None:
                self._rounds.behind.set()
                return Message({"status": "behind"})
            header: dict[str, Any] = {"status": "ahead"}
            if proof.outcome.hash == self._rounds.chain.tip.head:
                header["age_s"] = self._rounds.age_s
            return Message(header, [proof.model_dump_json().encode()])
        if join.round_s != self._rounds.chain.tip.round_s:
            raise PeerError("a join names another length of the round")
        number = self._checked_number(message.header.get("attempt"))
        if number < self._rounds.number:
            return Message({"status": "stale", "attempt": self._rounds.number} | self._rounds.why_over(number))
        is_leader = self._rounds.me in self._rounds.directory.leaders()
        leads = is_leader and self._rounds.leader_at(number) == self._rounds.me
        if not leads and self._rounds.release(number, caller):
            return Message({"status": "elsewhere"})
        attempt = self._rounds.enter(join.parent, number, caller)
        if (claim := message.header.get("accepted")) and caller not in attempt.proposals:
            attempt.proposals[caller] = self._read_accepted(claim, caller, attempt)
        attempt.joins[caller] = document
        if attempt.leading is None:
            attempt.leading = self._rounds.spawn(leader.lead(self._rounds, attempt))
        return Message({"status": "wait", "reason": attempt.waiting_reason, "code": attempt.waiting_code})

    def _read_accepted(self, claim: Any, caller: str, attempt: Attempt) -> Accepted:
        """What a member has accepted in an earlier attempt, as its own vote shows. Raises PeerError."""
        number, document, hashes, vote = claim
        accepted = Accepted(self._checked_number(number), Document.model_validate(document), str(hashes), str(vote))
        if accepted.attempt >= attempt.number:
            raise PeerError("a member claims to have accepted an outcome before its time")
        if not accepted_by(caller, accepted.outcome.hash, accepted.attempt, accepted.vote):
            raise PeerError("a member has not voted for what it claims to have accepted", code="bad_signature")
        self._check_outcome(accepted.outcome, accepted.hashes, attempt.parent, accepted.attempt)
        return accepted

    async def _on_attempt(self, caller: str, message: Message) -> Message:
        self._keyed(caller, message)
        return Message()

    async def _on_plan(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        document = Document.model_validate_json(message.blobs[0])
        plan = read(document, Plan)
        rules = self._rounds.rules
        joins = check_plan(plan, rules.bounds, attempt.parent, self._rounds.next_round)
        mine = self._rounds.mine
        is_member = self._rounds.directory.is_member(caller)
        if document.signer != caller or plan.attempt != attempt.number or not is_member:
            raise PeerError("a plan is not its leader's")
        if mine is None or self._rounds.me not in joins or joins[self._rounds.me].tokens != mine.tokens:
            raise PeerError("a plan does not hold this node's join")
        if attempt.planned.is_set():
            return Message()
        attempt.leader, attempt.weights = caller, joins
        owned = plan.chunks_of(self._rounds.me)
        if self._rounds.me in plan.reducers:
            weights = {peer: join.tokens for peer, join in joins.items()}
            norms = {peer: join.norm for peer, join in joins.items()}
            attempt.bench = Bench(self._rounds.grid, owned, weights, norms)
        attempt.planned.set()
        self._rounds.enter_stage("reduce")
        attempt.sending = self._rounds.spawn(self._rounds.send(attempt, plan, mine))
        return Message()

    async def _on_contribute(self, caller: str, message: Message) -> Message:
        attempt = self._keyed(caller, message)
        bench = await attempt.bench_ready(CALL_S)
        try:
            parts = dict(zip(message.header["chunks"], message.blobs, strict=True))
            await asyncio.to_thread(bench.check, caller, parts)
        except (PeerError, ValueError, TypeError, LookupError):
            bench.refuse(caller)
            raise
        bench.take(caller, parts)
        return Message()

    async def _on_contribute_for(self, caller: str, message: Message) -> Message:
        """Chunks of a member's contribution, from the one that it has given them to.

        Where they are not what the member has signed, that is the fault of the caller, and says nothing of the member.
        """
        attempt = self._keyed(caller, message)
        bench = await attempt.bench_ready(CALL_S)
        document = Document.model_validate(message.header.get("deposit"))
        hashes, chunks = message.header.get("hashes"), message.header["chunks"]
        bounds, number = self._rounds.rules.bounds, self._rounds.next_round
        named = check_deposit(document, hashes, bounds, attempt.parent, number)
        parts = await asyncio.to_thread(check_chunks, named, chunks, message.blobs)
        if sorted(parts) != sorted(bench.chunks):
            raise PeerError("chunks of a deposit are not those that this node reduces", code="bad_size")
        try:
            await asyncio.to_thread(bench.check, document.signer, parts)
        except PeerError:
            bench.refuse(document.signer)
            raise
        bench.take(document.signer, parts)
        return Message()

    async def _on_deposit(self, caller: str, message: Message) -> Message:
        await self._rounds.depositary.take(caller, message)
        return Message()

    async def _on_forward(self, caller: str, message: Message) -> Message:
        attempt = self._keyed(caller, message)
        wanted = message.header.get("chunks")
        if not isinstance(wanted, dict) or not all(isinstance(chunks, list) for chunks in wanted.values()):
            raise PeerError("a request to forward has the wrong form")
        wait_s = message.header.get("wait_s")
        if not isinstance(wait_s, float) or not 0 < wait_s <= self._rounds.rules.bulk_s:
            raise PeerError("a request to forward names no time")
        return Message({"taken": await self._rounds.depositary.forward(attempt, caller, wanted, wait_s)})

    async def _on_collect(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        bench = await attempt.bench_ready(CALL_S)
        members = set(attempt.weights)

        def awaited() -> set[str]:
            return members & {record.peer_id for record in self._rounds.directory.members()}

        return Message({"arrived": await bench.arrived(awaited, self._rounds.rules.bulk_s)})

    async def _on_average(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        bench = await attempt.bench_ready(CALL_S)
        included = message.header.get("included")
        if not isinstance(included, list) or included != sorted(set(included)) or not included:
            raise PeerError("the list of the included has the wrong form")
        await self._rounds.mishaps.at("average")
        means, squares = await asyncio.to_thread(bench.average, included)
        blobs = self._rounds.mishaps.spoil("average", [means[chunk] for chunk in bench.chunks])
        hashes = self._rounds.results.add(blobs)
        return Message({"hashes": hashes, "squares": [squares[peer] for peer in included]})

    async def _on_propose(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        attempt.leader = caller
        self._rounds.enter_stage("commit")
        await self._rounds.mishaps.at("commit")
        document = Document.model_validate_json(message.blobs[0])
        hashes = str(message.header.get("hashes"))
        outcome, joins = self._check_outcome(document, hashes, self._rounds.chain.tip.head, attempt.number)
        await self._rounds.adoption.mean_of(outcome, included_joins(outcome, joins), split_hashes(hashes))
        if attempt.number != self._rounds.number or attempt.parent != self._rounds.chain.tip.head:
            raise PeerError("that attempt is over", code="round_failed")
        before = self._rounds.accepted
        if before is not None and before.attempt == attempt.number and before.outcome.hash != document.hash:
            self._rounds.directory.evict(caller, EVICT_S)
            raise PeerError("a leader proposes two outcomes in one attempt", code="equivocation")
        vote = accept(self._rounds.directory.identity, document.hash, attempt.number)
        self._rounds.accepted = Accepted(attempt.number, document, hashes, vote)
        return Message({"accept": self._rounds.mishaps.vote(vote)})

    def _check_outcome(
        self, document: Document, hashes: str, parent: str, number: int
    ) -> tuple[Outcome, dict[str, Join]]:
        """All that adoption asks of an outcome but its mean: what is accepted must be proposed for ever after.

        `number`: the attempt in which it is accepted; its own may be an earlier one.
        """
        bounds = self._rounds.rules.bounds
        outcome = read(document, Outcome)
        joins = check_outcome(outcome, bounds)
        check_hashes(outcome, split_hashes(hashes), bounds)
        if outcome.plan.parent != parent:
            raise PeerError("an outcome is for another round")
        if outcome.plan.attempt > number:
            raise PeerError("an outcome is of a later attempt than the one that accepts it")
        self._rounds.adoption.check_round(outcome, joins)
        if not self._rounds.adoption.witness(document, outcome):
            raise PeerError("a member signed two outcomes for one attempt", code="equivocation")
        return outcome, joins

    async def _on_commit(self, caller: str, message: Message) -> Message:
        # Whoever has the proof may send it, so its age is believed only as far back as the round itself goes.
        committed_at_s = self._rounds.clock() - min(self._rounds.told_age_s(message.header), self._rounds.age_s)
        self._rounds.spawn(self._rounds.adopt_quietly(parse(Proof, message.blobs[0]), committed_at_s))
        return Message()

    async def _on_failed(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        reason, code = plain(message.header.get("reason"), 200), known_code(message.header.get("code"))
        attempt.fail(RoundFailed(reason, code=code))
        return Message()

    async def _on_fetch(self, caller: str, message: Message) -> Message:
        wanted = message.header.get("hashes")
        if not isinstance(wanted, list) or len(wanted) > max(self._rounds.rules.bounds.chunks):
            raise PeerError("a fetch has the wrong form")
        found = await asyncio.to_thread(self._rounds.results.get_all, wanted)
        if found is None:
            raise PeerError("this node does not have all of these chunks", code="round_failed")
        return Message(blobs=await self._rounds.mishaps.serve(found))

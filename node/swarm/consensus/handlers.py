"""Handlers of the round's calls.

The wire authenticates callers. Handlers check everything else in a message before it touches state. The wire turns an
exception that malformed input raises into a refusal (`wire.answer`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from node.errors import PeerError, RoundFailed
from node.status import Channel
from node.swarm.allreduce.reducer import Reducer
from node.swarm.consensus.ballot import Attempt, Ballot, StageTimer, known_code
from node.swarm.consensus.commit import Committer
from node.swarm.consensus.context import CALL_S, Context
from node.swarm.consensus.depositary import Depositary, Sender, check_chunks
from node.swarm.consensus.leader import Leader
from node.swarm.consensus.voter import Voter
from node.swarm.messages import (
    Document,
    Join,
    Plan,
    Proof,
    check_deposit,
    check_join,
    check_plan,
    parse,
    read,
)
from node.swarm.transport.wire import MAX_HEADER_BYTES, Message, Service, printable

MAX_AT_ONCE = 4
"""Concurrent bodies of one verb from one caller. Those of failed attempts may still be arriving."""
MAX_FETCHES = 2
"""Concurrent fetches of one caller. Each holds a round's chunks in memory until they are sent."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """The handlers of one node. `services` are served by the wire."""

    ctx: Context
    ballot: Ballot
    stages: StageTimer
    committer: Committer
    voter: Voter
    leader: Leader
    sender: Sender
    depositary: Depositary

    def services(self) -> dict[str, Service]:
        bulk = self.ctx.rules.round_bytes + MAX_HEADER_BYTES
        small = partial(Service, channel=Channel.REDUCE)
        large = partial(small, admits=self.ctx.peer_table.knows, per_caller=MAX_AT_ONCE)
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
                admits=self.ctx.peer_table.is_member,
                place=self.depositary.place,
            ),
            "forward": small(self._on_forward, admits=self.ctx.peer_table.is_member, per_caller=MAX_AT_ONCE),
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
        return self.ballot.enter(parent, self.ballot.check_number(number), caller)

    def _led(self, caller: str, message: Message) -> Attempt:
        """The attempt, if the caller leads it: the leader whose plan this node has, or a peer that it asked to lead."""
        attempt = self._keyed(caller, message)
        if caller not in ({attempt.leader} if attempt.leader else attempt.asked):
            raise PeerError("this attempt has another leader")
        return attempt

    async def _on_join(self, caller: str, message: Message) -> Message:
        document = Document.model_validate(message.header.get("join"))
        join = read(document, Join)
        if document.signer != caller or join.run != self.ctx.rules.run:
            raise PeerError("a join is not the caller's, or is for another run")
        check_join(document, self.ctx.rules.bounds, join.parent)
        if self.ctx.peer_table.is_member(caller):
            self.ballot.joined_at[caller] = self.ctx.chain.tip.round
        if join.parent != self.ctx.chain.tip.head:
            proof = self.ctx.chain.proof_after(join.parent)
            if proof is None:
                self.ctx.behind.set()
                return Message({"status": "behind"})
            header: dict[str, Any] = {"status": "ahead"}
            if proof.outcome.hash == self.ctx.chain.tip.head:
                header["age_s"] = self.ctx.age_s
            return Message(header, [proof.model_dump_json().encode()])
        self.ctx.check_join_fits(join)
        number = self.ballot.check_number(message.header.get("attempt"))
        if number < self.ballot.number:
            return Message({"status": "stale", "attempt": self.ballot.number} | self.ballot.failure_of(number))
        is_leader = self.ctx.me in self.ctx.peer_table.leaders()
        leads = is_leader and self.ctx.leader_at(number) == self.ctx.me
        if not leads and self.ballot.release(number, caller):
            return Message({"status": "elsewhere"})
        attempt = self.ballot.enter(join.parent, number, caller)
        if (claim := message.header.get("accepted")) and caller not in attempt.proposals:
            attempt.proposals[caller] = self.voter.read_accepted(claim, caller, attempt)
        attempt.joins[caller] = document
        if attempt.leading is None:
            attempt.leading = self.ctx.tasks.spawn(self.leader.lead(attempt))
        return Message({"status": "wait", "reason": attempt.waiting_reason, "code": attempt.waiting_code})

    async def _on_attempt(self, caller: str, message: Message) -> Message:
        self._keyed(caller, message)
        return Message()

    async def _on_plan(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        document = Document.model_validate_json(message.blobs[0])
        plan = read(document, Plan)
        rules = self.ctx.rules
        joins = check_plan(plan, rules.bounds, attempt.parent, self.ctx.next_round)
        mine = self.ballot.mine
        is_member = self.ctx.peer_table.is_member(caller)
        if document.signer != caller or plan.attempt != attempt.number or not is_member:
            raise PeerError("a plan is not its leader's")
        if mine is None or self.ctx.me not in joins or joins[self.ctx.me].tokens != mine.tokens:
            raise PeerError("a plan does not hold this node's join")
        if attempt.planned.is_set():
            return Message()
        attempt.leader, attempt.weights = caller, joins
        owned = plan.chunks_of(self.ctx.me)
        if self.ctx.me in plan.reducers:
            weights = {peer: join.tokens for peer, join in joins.items()}
            norms = {peer: join.norm for peer, join in joins.items()}
            attempt.reducer = Reducer(self.ctx.layout, owned, weights, norms)
        attempt.planned.set()
        self.stages.enter("reduce")
        attempt.sending = self.ctx.tasks.spawn(self.sender.send(attempt, plan, mine))
        return Message()

    async def _on_contribute(self, caller: str, message: Message) -> Message:
        attempt = self._keyed(caller, message)
        reducer = await attempt.reducer_ready(CALL_S)
        try:
            parts = dict(zip(message.header["chunks"], message.blobs, strict=True))
            await asyncio.to_thread(reducer.check, caller, parts)
        except (PeerError, ValueError, TypeError, LookupError):
            reducer.refuse(caller)
            raise
        reducer.take(caller, parts)
        return Message()

    async def _on_contribute_for(self, caller: str, message: Message) -> Message:
        """Chunks of another member's contribution, sent by its depositary.

        Chunks that do not match the member's signature are the depositary's fault, not the member's.
        """
        attempt = self._keyed(caller, message)
        reducer = await attempt.reducer_ready(CALL_S)
        document = Document.model_validate(message.header.get("deposit"))
        hashes, chunks = message.header.get("hashes"), message.header["chunks"]
        bounds, number = self.ctx.rules.bounds, self.ctx.next_round
        named = check_deposit(document, hashes, bounds, attempt.parent, number)
        parts = await asyncio.to_thread(check_chunks, named, chunks, message.blobs)
        if sorted(parts) != sorted(reducer.chunks):
            raise PeerError("chunks of a deposit are not those that this node reduces", code="bad_size")
        try:
            await asyncio.to_thread(reducer.check, document.signer, parts)
        except PeerError:
            reducer.refuse(document.signer)
            raise
        reducer.take(document.signer, parts)
        return Message()

    async def _on_deposit(self, caller: str, message: Message) -> Message:
        await self.depositary.take(caller, message)
        return Message()

    async def _on_forward(self, caller: str, message: Message) -> Message:
        attempt = self._keyed(caller, message)
        wanted = message.header.get("chunks")
        if not isinstance(wanted, dict) or not all(isinstance(chunks, list) for chunks in wanted.values()):
            raise PeerError("a request to forward has the wrong form")
        wait_s = message.header.get("wait_s")
        if not isinstance(wait_s, float) or not 0 < wait_s <= self.ctx.rules.bulk_s:
            raise PeerError("a request to forward names no time")
        return Message({"taken": await self.depositary.forward(attempt, caller, wanted, wait_s)})

    async def _on_collect(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        reducer = await attempt.reducer_ready(CALL_S)
        members = set(attempt.weights)

        def awaited() -> set[str]:
            return members & {record.peer_id for record in self.ctx.peer_table.members()}

        return Message({"arrived": await reducer.collect(awaited, self.ctx.rules.bulk_s)})

    async def _on_average(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        reducer = await attempt.reducer_ready(CALL_S)
        included = message.header.get("included")
        if not isinstance(included, list) or included != sorted(set(included)) or not included:
            raise PeerError("the list of the included has the wrong form")
        await self.ctx.hooks.at("average")
        means, squares = await asyncio.to_thread(reducer.average, included)
        blobs = self.ctx.hooks.damage("average", [means[chunk] for chunk in reducer.chunks])
        hashes = self.ctx.results.add(blobs)
        return Message({"hashes": hashes, "squares": [squares[peer] for peer in included]})

    async def _on_propose(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        attempt.leader = caller
        self.stages.enter("commit")
        await self.ctx.hooks.at("commit")
        document = Document.model_validate_json(message.blobs[0])
        vote = await self.voter.vote(attempt, caller, document, str(message.header.get("hashes")))
        return Message({"accept": self.ctx.hooks.vote(vote)})

    async def _on_commit(self, caller: str, message: Message) -> Message:
        # Any peer may send the proof, so its age is believed up to the age of this round only.
        committed_at_s = self.ctx.clock() - min(self.ctx.stated_age_s(message.header), self.ctx.age_s)
        self.ctx.tasks.spawn(self.committer.adopt_quietly(parse(Proof, message.blobs[0]), committed_at_s))
        return Message()

    async def _on_failed(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        reason, code = printable(message.header.get("reason"), 200), known_code(message.header.get("code"))
        attempt.fail(RoundFailed(reason, code=code))
        return Message()

    async def _on_fetch(self, caller: str, message: Message) -> Message:
        wanted = message.header.get("hashes")
        if not isinstance(wanted, list) or len(wanted) > max(self.ctx.rules.bounds.chunks):
            raise PeerError("a fetch has the wrong form")
        found = await asyncio.to_thread(self.ctx.results.get_all, wanted)
        if found is None:
            raise PeerError("this node does not have all of these chunks", code="round_failed")
        return Message(blobs=await self.ctx.hooks.serve(found))

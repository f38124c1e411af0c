"""A node's part in the rounds: ready, grouped, reduced, committed. Knows no training; the transport is a `Wire`.

    offer -> join the leader -> PLAN -> send chunks to their reducers -> collect, average -> PROPOSE -> accept -> COMMIT

Every step is a short call that can be repeated. Whatever goes wrong ends the attempt, and the next one has another
leader; inputs stay untouched until commit. Calls are keyed (parent, attempt), only the highest attempt seen is obeyed.
The leader's side is in `leader`, the rule for closing a group in `rendezvous`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from node.errors import NodeError, PeerError, RoundFailed, SwarmError
from node.status import Channel
from node.swarm import leader
from node.swarm.attempt import Accepted, Attempt, Contribution, raise_failure
from node.swarm.base import MAX_HEADER_BYTES, Message, Service, Wire
from node.swarm.chain import Chain, Outer, Tip, next_tip
from node.swarm.directory import Directory
from node.swarm.faults import Faults
from node.swarm.records import (
    Document,
    Join,
    Outcome,
    Plan,
    Proof,
    accept,
    check_outcome,
    check_plan,
    check_proof,
    included_joins,
    parse,
    read,
    sign,
    split_hashes,
)
from node.swarm.reduce import Bench, Grid, chunk_hash
from node.swarm.rendezvous import Quorum, leader_of

logger = logging.getLogger(__name__)

CALL_S = 5.0
"""For calls whose answer needs no waiting and no bulk."""
REJOIN_S = 1.0
BACK_OFF_S = 0.3
SLOWEST_BYTES_PER_S = 250_000.0
"""Bulk transfers may take as long as at this rate (2 Mbit/s), and FIXED_S."""
FIXED_S = 15.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What the manifest says about rounds."""

    run: str
    grid: Grid
    quorum: Quorum
    outer: Outer

    @property
    def bulk_s(self) -> float:
        return FIXED_S + self.grid.encoded_bytes() / SLOWEST_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Committed:
    """A round is over for this node: the new tip, and what became of its contribution."""

    tip: Tip
    outcome: Outcome
    included: bool
    offered: bool
    """Whether this node had joined with a contribution."""
    stage_s: dict[str, float]


Deliver = Callable[[Committed | RoundFailed], None]


class Rounds:
    """All of a node's rounds, one after the other. Lives on one loop; `deliver` is called there."""

    def __init__(
        self, wire: Wire, directory: Directory, rules: Rules, chain: Chain, faults: Faults, deliver: Deliver
    ) -> None:
        self.wire, self.directory, self.rules, self.chain, self.faults = wire, directory, rules, chain, faults
        self.clock = asyncio.get_running_loop().time
        self.behind = asyncio.Event()
        """Somebody is ahead of this node; `state` catches up."""
        self._deliver = deliver
        self._attempts: dict[int, Attempt] = {}
        self._number = 0
        self._mine: Contribution | None = None
        self._accepted: Accepted | None = None
        self._chunks: dict[bytes, bytes] = {}
        self._offered = asyncio.Event()
        self._adopting = asyncio.Lock()
        self._background: set[asyncio.Future[Any]] = set()
        self.stage, self._stage_at_s, self._stage_s = "idle", self.clock(), dict[str, float]()
        wire.serve(self._services())

    def _services(self) -> dict[str, Service]:
        bulk = self.rules.grid.encoded_bytes() + MAX_HEADER_BYTES
        small = partial(Service, channel=Channel.REDUCE)
        return {
            "join": small(self._on_join, max_request_bytes=4 * MAX_HEADER_BYTES),
            "plan": small(self._on_plan, max_request_bytes=4 * MAX_HEADER_BYTES),
            "contribute": small(self._on_contribute, max_request_bytes=bulk),
            "collect": small(self._on_collect),
            "average": small(self._on_average),
            "propose": small(self._on_propose, max_request_bytes=8 * MAX_HEADER_BYTES),
            "commit": small(self._on_commit, max_request_bytes=8 * MAX_HEADER_BYTES),
            "failed": small(self._on_failed),
            "fetch": small(self._on_fetch),
        }

    # the member

    @property
    def me(self) -> str:
        return self.wire.peer_id

    @property
    def next_round(self) -> int:
        return self.chain.tip.round + 1

    def offer(self, contribution: Contribution) -> None:
        """Take part with this in the round after its parent, as soon as may be. The newest offer counts."""
        self._mine = contribution
        self._offered.set()

    async def run(self) -> None:
        """Take part in rounds for ever."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            mine = self._mine
            if mine is not None and mine.parent == self.chain.tip.head:
                await self._take_part(mine)

    async def _take_part(self, mine: Contribution) -> None:
        self._enter_stage("rendezvous")
        failures = 0
        while self.chain.tip.head == mine.parent and self._mine is mine:
            attempt = self._attempt(self._number)
            try:
                await self._attend(attempt, mine)
            except (RoundFailed, PeerError) as exc:
                attempt.fail(exc)
                failures += 1
                logger.info("Round %d, attempt %d failed: %s", self.next_round, attempt.number, exc)
                self._deliver(RoundFailed(str(exc), code=exc.code))
                self._number = max(self._number, attempt.number + 1)
                self._enter_stage("rendezvous")
                await asyncio.sleep(min(3.0, BACK_OFF_S * failures))

    async def _attend(self, attempt: Attempt, mine: Contribution) -> None:
        """From joining to commit, or RoundFailed. Every wait ends: with an event, a dead leader, or the bulk time."""
        await self.faults.at("rendezvous", self.next_round)
        join = sign(
            self.directory.identity, Join(run=self.rules.run, parent=mine.parent, tokens=mine.tokens, step_s=mine.step_s)
        )
        strange = 0
        while not attempt.planned.is_set():
            target = leader_of(mine.parent, [r.peer_id for r in self.directory.members()], attempt.number)
            status = await self._join(attempt, target, join)
            if status == "ahead" or attempt.ended.is_set():
                break
            strange = 0 if status == "wait" else strange + 1
            if strange > 20:
                raise RoundFailed("no leader could be agreed on", code="leader_lost")
            await _first((attempt.planned, attempt.ended), REJOIN_S if status == "wait" else BACK_OFF_S)
        deadline_s = self.clock() + 3 * self.rules.bulk_s
        while not attempt.ended.is_set() and self.chain.tip.head == mine.parent:
            if attempt.leader and not self.directory.is_member(attempt.leader):
                raise RoundFailed(f"the leader {attempt.leader[-6:]} is gone", code="leader_lost")
            if self.clock() > deadline_s:
                raise RoundFailed("the attempt took too long", code="timeout")
            await _first((attempt.ended,), 0.5)
        raise_failure(attempt)

    async def _join(self, attempt: Attempt, target: str, join: Document) -> str:
        """Tell the leader that this node is ready. Returns what it says; raises PeerError where it is gone."""
        header: dict[str, Any] = {"attempt": attempt.number, "join": join.model_dump()}
        if self._accepted is not None:
            header["accepted"] = [self._accepted.attempt, self._accepted.outcome.model_dump(), self._accepted.hashes]
        try:
            reply = await self.wire.call(target, "join", Message(header), timeout_s=CALL_S)
        except PeerError as exc:
            self.directory.suspect(target)
            raise RoundFailed(f"the leader {target[-6:]} does not answer", code="leader_lost") from exc
        status = str(reply.header.get("status"))
        attempt.waiting_reason = str(reply.header.get("reason", ""))[:200]
        attempt.waiting_code = str(reply.header.get("code", ""))[:40]
        if status == "ahead":
            await self.adopt(parse(Proof, reply.blobs[0] if reply.blobs else b""))
        elif status == "stale":
            self._number = max(self._number, int(reply.header.get("attempt", 0)))
            raise RoundFailed("a later attempt is under way", code="round_failed")
        return status

    def waiting(self) -> tuple[str, str]:
        """What this node's current attempt waits for: one sentence, one word."""
        attempt = self._attempt(self._number)
        return attempt.waiting_reason, attempt.waiting_code

    async def _send(self, attempt: Attempt, plan: Plan, mine: Contribution) -> None:
        """Give every reducer its chunks."""
        await self.faults.at("reduce", self.next_round)
        await asyncio.gather(*(self._send_to(peer, attempt, plan, mine) for peer in plan.reducers))

    async def _send_to(self, peer: str, attempt: Attempt, plan: Plan, mine: Contribution) -> None:
        chunks = plan.chunks_of(peer)
        message = Message(self._key(attempt) | {"chunks": chunks}, [mine.chunks[chunk] for chunk in chunks])
        try:
            await self.wire.call(peer, "contribute", message, timeout_s=self.rules.bulk_s)
        except PeerError as exc:
            # The reducer, not the sender, decides what arrived; the leader hears it from there.
            logger.info("Reducer %s did not take this node's chunks: %s", peer[-6:], exc)

    # attempts

    def _attempt(self, number: int) -> Attempt:
        if number not in self._attempts:
            self._attempts[number] = Attempt(self.chain.tip.head, number)
        return self._attempts[number]

    def enter(self, parent: str, number: int) -> Attempt:
        """The attempt that a peer speaks of, if it may. A higher one than any before supersedes those."""
        if parent != self.chain.tip.head:
            raise PeerError("that is not the round this node is in", code="round_failed")
        if number < self._number:
            raise PeerError("a later attempt is under way", code="round_failed")
        if number > self._number:
            self._number = number
            for old in self._attempts.values():
                if old.number < number:
                    old.fail(RoundFailed("a later attempt is under way"))
                    old.stop()
        return self._attempt(number)

    def _key(self, attempt: Attempt) -> dict[str, Any]:
        return {"parent": attempt.parent, "attempt": attempt.number}

    def _keyed(self, message: Message) -> Attempt:
        parent, number = message.header.get("parent"), message.header.get("attempt")
        if not isinstance(parent, str) or not isinstance(number, int) or not 0 <= number < 10_000:
            raise PeerError("a message names no attempt")
        return self.enter(parent, number)

    def _led(self, caller: str, message: Message) -> Attempt:
        """The attempt, if the caller is its leader."""
        attempt = self._keyed(message)
        if attempt.leader and attempt.leader != caller:
            raise PeerError("this attempt has another leader")
        return attempt

    # answers

    async def _on_join(self, caller: str, message: Message) -> Message:
        document = Document.model_validate(message.header.get("join"))
        join = read(document, Join)
        number = message.header.get("attempt")
        if document.signer != caller or join.run != self.rules.run or not isinstance(number, int):
            raise PeerError("a join is not the caller's, or of another run")
        if join.parent != self.chain.tip.head:
            proof = self.chain.proof_after(join.parent)
            if proof is None:
                self.behind.set()
                return Message({"status": "behind"})
            return Message({"status": "ahead"}, [proof.model_dump_json().encode()])
        if number < self._number:
            return Message({"status": "stale", "attempt": self._number})
        members = [r.peer_id for r in self.directory.members()]
        if self.me not in members or leader_of(join.parent, members, number) != self.me:
            return Message({"status": "elsewhere"})
        attempt = self.enter(join.parent, number)
        attempt.joins[caller] = document
        if proposal := message.header.get("accepted"):
            attempt.proposals.append(self._read_accepted(proposal))
        if attempt.leading is None:
            attempt.leading = self.spawn(leader.lead(self, attempt))
        return Message({"status": "wait", "reason": attempt.waiting_reason, "code": attempt.waiting_code})

    def _read_accepted(self, proposal: Any) -> Accepted:
        number, document, hashes = proposal
        accepted = Accepted(int(number), Document.model_validate(document), str(hashes))
        self._check_outcome(accepted.outcome, accepted.hashes)
        return accepted

    async def _on_plan(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        document = Document.model_validate_json(message.blobs[0])
        plan = read(document, Plan)
        joins = check_plan(plan, run=self.rules.run, parent=attempt.parent, chunks=len(self.rules.grid.bounds))
        mine = self._mine
        if document.signer != caller or plan.attempt != attempt.number or caller not in joins:
            raise PeerError("a plan is not its leader's")
        if mine is None or self.me not in joins or joins[self.me].tokens != mine.tokens:
            raise PeerError("a plan does not hold this node's join")
        if attempt.planned.is_set():
            return Message()
        attempt.plan, attempt.leader, attempt.weights = plan, caller, joins
        owned = plan.chunks_of(self.me)
        if self.me in plan.reducers:
            attempt.bench = Bench(self.rules.grid, owned, {peer: join.tokens for peer, join in joins.items()})
        attempt.planned.set()
        self._enter_stage("reduce")
        attempt.sending = self.spawn(self._send(attempt, plan, mine))
        return Message()

    async def _on_contribute(self, caller: str, message: Message) -> Message:
        attempt = self._keyed(message)
        bench = await attempt.bench_ready(CALL_S)
        chunks = message.header.get("chunks")
        if not isinstance(chunks, list) or len(chunks) != len(message.blobs):
            raise PeerError("a contribution has the wrong form")
        parts = dict(zip(chunks, message.blobs, strict=True))
        await asyncio.to_thread(bench.check, caller, parts)
        bench.take(caller, parts)
        return Message()

    async def _on_collect(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        bench = await attempt.bench_ready(CALL_S)
        members = set(attempt.weights)

        def awaited() -> set[str]:
            return members & {record.peer_id for record in self.directory.members()}

        return Message({"arrived": await bench.arrived(awaited, self.rules.bulk_s)})

    async def _on_average(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        bench = await attempt.bench_ready(CALL_S)
        included = message.header.get("included")
        if not isinstance(included, list) or included != sorted(set(included)) or not included:
            raise PeerError("the list of the included has the wrong form")
        await self.faults.at("average", self.next_round)
        means = await asyncio.to_thread(bench.average, included)
        hashes = {chunk: chunk_hash(data) for chunk, data in means.items()}
        self._chunks.update({hashes[chunk]: data for chunk, data in means.items()})
        return Message({"hashes": [hashes[chunk] for chunk in bench.chunks]})

    async def _on_propose(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        attempt.leader = caller
        self._enter_stage("commit")
        await self.faults.at("commit", self.next_round)
        document = Document.model_validate_json(message.blobs[0])
        hashes = str(message.header.get("hashes"))
        outcome, _ = self._check_outcome(document, hashes)
        if outcome.plan.parent != self.chain.tip.head:
            raise PeerError("an outcome is for another round")
        await self._complete(outcome, split_hashes(hashes))
        if attempt.number != self._number:
            raise PeerError("a later attempt is under way", code="round_failed")
        self._accepted = Accepted(attempt.number, document, hashes)
        return Message({"accept": accept(self.directory.identity, document.hash, attempt.number)})

    def _check_outcome(self, document: Document, hashes: str) -> tuple[Outcome, dict[str, Join]]:
        outcome = read(document, Outcome)
        chunks = len(self.rules.grid.bounds)
        joins = check_outcome(outcome, run=self.rules.run, chunks=chunks, hashes=split_hashes(hashes))
        return outcome, joins

    async def _on_commit(self, caller: str, message: Message) -> Message:
        self.spawn(self._adopt_quietly(parse(Proof, message.blobs[0])))
        return Message()

    async def _on_failed(self, caller: str, message: Message) -> Message:
        attempt = self._led(caller, message)
        reason, code = str(message.header.get("reason"))[:200], str(message.header.get("code"))[:40]
        attempt.fail(RoundFailed(reason, code=code))
        return Message()

    async def _on_fetch(self, caller: str, message: Message) -> Message:
        wanted = message.header.get("hashes")
        if not isinstance(wanted, list) or len(wanted) > len(self.rules.grid.bounds):
            raise PeerError("a fetch has the wrong form")
        await self.faults.at("serve", self.next_round)
        found = [self._chunks.get(digest) or self.chain.store.get(digest) for digest in wanted]
        if any(data is None for data in found):
            raise PeerError("this node does not have all of these chunks", code="round_failed")
        return Message(blobs=[data for data in found if data is not None])

    # commit

    async def _complete(self, outcome: Outcome, hashes: Sequence[bytes]) -> list[bytes]:
        """All chunks of the result, fetched by hash: from their reducers first, then from any member."""
        by_owner: dict[str, set[int]] = {}
        for chunk, digest in enumerate(hashes):
            if digest not in self._chunks:
                by_owner.setdefault(outcome.plan.reducers[outcome.plan.owners[chunk]], set()).add(chunk)
        await asyncio.gather(*(self._fetch_from(o, sorted(c), hashes) for o, c in by_owner.items()))
        others = {*outcome.plan.members, *(r.peer_id for r in self.directory.members())} - {self.me}
        for peer in sorted(others):
            missing = [chunk for chunk, digest in enumerate(hashes) if digest not in self._chunks]
            if not missing:
                break
            await self._fetch_from(peer, missing, hashes)
        if any(digest not in self._chunks for digest in hashes):
            raise RoundFailed("nobody has all of the result's chunks", code="reducer_lost")
        return [self._chunks[digest] for digest in hashes]

    async def _fetch_from(self, peer: str, chunks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Take what is right of what a peer gives; what is not stays missing."""
        request = Message({"hashes": [hashes[chunk] for chunk in chunks]})
        try:
            reply = await self.wire.call(peer, "fetch", request, timeout_s=self.rules.bulk_s)
            for chunk, data in zip(chunks, reply.blobs, strict=False):
                if chunk_hash(data) != hashes[chunk]:
                    raise PeerError(f"chunk {chunk} from {peer[-6:]} has a wrong hash", code="bad_message")
                self.rules.grid.check(chunk, data)
                self._chunks[hashes[chunk]] = data
        except PeerError as exc:
            logger.info("Peer %s did not give %d result chunks: %s", peer[-6:], len(chunks), exc)

    async def adopt(self, proof: Proof) -> bool:
        """Commit: take the outer step that the proof stands for. False if it is not about this node's next round."""
        outcome, joins = await asyncio.to_thread(
            check_proof, proof, run=self.rules.run, chunks=len(self.rules.grid.bounds)
        )
        async with self._adopting:
            if outcome.plan.parent != self.chain.tip.head:
                if outcome.round > self.next_round:
                    self.behind.set()
                return False
            hashes = split_hashes(proof.hashes)
            chunks = await self._complete(outcome, hashes)
            self._enter_stage("apply")
            if outcome.round != self.next_round:
                raise PeerError(f"an outcome calls round {self.next_round} round {outcome.round}")
            included = included_joins(outcome, joins)
            tip = await asyncio.to_thread(
                next_tip, self.chain.tip, self.rules.outer, self.rules.grid, proof, included, chunks, self.clock()
            )
            await asyncio.to_thread(self.chain.store.put, tip.head, hashes, chunks)
            self._commit(tip, outcome, proof)
            return True

    async def _adopt_quietly(self, proof: Proof) -> None:
        try:
            await self.adopt(proof)
        except SwarmError as exc:
            logger.info("Could not take over a committed round yet: %s", exc)
            self.behind.set()

    def _commit(self, tip: Tip, outcome: Outcome, proof: Proof) -> None:
        mine = self._mine
        offered = mine is not None and mine.parent == outcome.plan.parent
        self.chain.advance(tip, outcome.plan.parent, proof)
        self.directory.say(
            round=tip.round, head=tip.head, state_digest=tip.digest, swarm_tokens=tip.state.tokens
        )
        attempts = list(self._attempts.values())
        self._leave_round()
        self._enter_stage("idle")
        stage_s, self._stage_s = self._stage_s, {}
        self._deliver(Committed(tip, outcome, self.me in outcome.included, offered, stage_s))
        for attempt in attempts:
            attempt.finish()
            attempt.stop()

    def _leave_round(self) -> None:
        self._attempts, self._number = {}, 0
        self._mine, self._accepted, self._chunks = None, None, {}

    def restart_at(self, tip: Tip) -> None:
        """Go on from a downloaded state."""
        for attempt in self._attempts.values():
            attempt.fail(RoundFailed("this node starts again from a downloaded state"))
            attempt.stop()
        self.chain.replace(tip)
        self._leave_round()
        self.directory.say(round=tip.round, head=tip.head, state_digest=tip.digest, swarm_tokens=tip.state.tokens)

    # upkeep

    def _enter_stage(self, stage: str) -> None:
        now = self.clock()
        if self.stage != "idle":
            self._stage_s[self.stage] = self._stage_s.get(self.stage, 0.0) + now - self._stage_at_s
        self.stage, self._stage_at_s = stage, now

    def spawn(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        """Run beside, owned by this object; an error nobody expects is logged."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Future[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.INFO if isinstance(error, NodeError) else logging.ERROR
            logger.log(level, "A task of the round ended: %s", error, exc_info=level == logging.ERROR and error)

    async def close(self) -> None:
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)


async def _first(events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Wait for the first of these events, or for the time to pass."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()

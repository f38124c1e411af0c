"""A node's part in the rounds: ready, grouped, reduced, committed. Knows no training; the transport is a `Wire`.

    offer -> join the leader -> PLAN -> send chunks to their reducers -> collect, average -> PROPOSE -> accept -> COMMIT

Every step is a short call that can be repeated. Whatever goes wrong ends the attempt, and the next one has another
leader; inputs stay untouched until commit. Calls are keyed (parent, attempt), only the highest attempt seen is obeyed.
The leader's side is in `leader`, the rule for closing a group in `rendezvous`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from node.errors import NodeError, PeerError, RoundFailed, SwarmError
from node.swarm.adopt import Adoption
from node.swarm.answers import MAX_AHEAD, Answers
from node.swarm.attempt import Accepted, Attempt, Contribution, first, known_code, raise_failure
from node.swarm.base import Message, Wire, plain
from node.swarm.calls import while_live
from node.swarm.chain import Chain, Outer, Tip
from node.swarm.deposits import Depositary, Depositor
from node.swarm.directory import Directory
from node.swarm.faults import Faults
from node.swarm.mishaps import Mishaps
from node.swarm.records import (
    LEAST_STEP_S,
    MOST_SETTLE_S,
    MOST_STEP_S,
    Bounds,
    Document,
    Join,
    Outcome,
    Plan,
    Proof,
    parse,
)
from node.swarm.reduce import Grid
from node.swarm.rendezvous import LATELY, PATIENCE_RATIO, PATIENCE_S, WAITING_CODES, Quorum, leader_of, slow_uplinks
from node.swarm.results import Results
from node.swarm.uplink import Uplink

logger = logging.getLogger(__name__)

CALL_S = 5.0
"""For calls whose answer needs no waiting and no bulk."""
REJOIN_S = 1.0
BACK_OFF_S = 0.3
LEADER_PATIENCE_S = 45.0
MAX_RAISES = 64
"""Attempts of one round that one peer may begin."""
SLOWEST_BYTES_PER_S = 200_000.0
"""Bulk transfers may take as long as at this rate, and FIXED_S: 2 Mbit/s, less headers (`pace.OVERHEAD_RATIO`) and what
else is on the line."""
FIXED_S = 15.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What the manifest says about rounds."""

    run: str
    grids: tuple[Grid, ...]
    """Of each fragment; the rounds take turns."""
    quorum: Quorum
    outer: Outer
    max_tokens: int
    """Most tokens that one contribution may weigh."""
    overlapped: bool = False
    """Training goes on while a round is averaged."""

    @property
    def bounds(self) -> Bounds:
        chunks = tuple(len(grid.bounds) for grid in self.grids)
        return Bounds(self.run, chunks, self.quorum.min_peers, self.max_tokens)

    def grid_at(self, round_: int) -> Grid:
        return self.grids[round_ % len(self.grids)]

    @property
    def round_bytes(self) -> int:
        """Of the largest fragment, encoded."""
        return max(grid.encoded_bytes() for grid in self.grids)

    @property
    def bulk_s(self) -> float:
        return FIXED_S + self.round_bytes / SLOWEST_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Committed:
    """A round is over for this node: the new tip, and what became of its contribution."""

    tip: Tip
    outcome: Outcome
    included: bool
    offered: bool
    """Whether this node had joined with a contribution."""
    stage_s: dict[str, float]
    fetch_s: float = 0.0
    """Seconds from the commit until this node had taken it over."""
    is_replayed: bool = False
    """Whether an earlier process of this node committed it, and this one has taken it from the disk."""


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
        self.results = Results(wire, directory, rules.grid_at, chain.store, rules.bulk_s, self._others)
        self.uplink = Uplink()
        self.depositor, self.depositary = Depositor(self), Depositary(self)
        self._slow: tuple[str, frozenset[str]] = ("", frozenset())
        """Members on slow uplinks by the record at this head."""
        self.joined_at: dict[str, int] = {}
        """Members that have told this node of a join, and the round that it was in then."""
        self._transfer_s = 0.0
        """Of this node's last round, from the closed group to the commit."""
        self.mishaps = Mishaps(self)
        self.adoption = Adoption(self)
        self._deliver = deliver
        self._attempts: dict[int, Attempt] = {}
        self.number = 0
        self.mine: Contribution | None = None
        self._offered_at_s = 0.0
        self.accepted: Accepted | None = None
        self.shunned: set[str] = set()
        """Members that failed an attempt that this node led: left out of its next plans for this round."""
        self.false_claims: dict[str, str] = {}
        """Peer id to a head that it said to be further, and could not show."""
        self.wronged = False
        """A result of this round was refused: whoever leads trusts no reducer but itself."""
        self._raised: Counter[str] = Counter()
        self._offered = asyncio.Event()
        self._background: set[asyncio.Future[Any]] = set()
        self.stage, self._stage_at_s, self._stage_s = "idle", self.clock(), dict[str, float]()
        wire.serve(Answers(self).services())

    # the member

    @property
    def me(self) -> str:
        return self.wire.peer_id

    @property
    def next_round(self) -> int:
        return self.chain.tip.round + 1

    def leader_at(self, number: int) -> str:
        """Who leads this attempt at the next round; all members with the same tip come to the same."""
        tip = self.chain.tip
        if self._slow[0] != tip.head:
            joins: Sequence[Document] = ()
            if tip.proof is not None:
                joins = parse(Outcome, tip.proof.outcome.text).plan.joins
            uplinks = {join.signer: parse(Join, join.text).upload_bytes_s for join in joins}
            self._slow = (tip.head, slow_uplinks(uplinks))
        leaders, preferred = self.directory.leaders(), self.directory.callable_members()
        return leader_of(tip.head, leaders, number, self._slow[1] | (set(leaders) - set(preferred)))

    @property
    def upload_bytes_s(self) -> float:
        """Of this node's uplink: what it has measured, within the volunteer's limit; 0 while neither is known."""
        return min((rate for rate in (self.uplink.bytes_s, self.wire.up.bytes_s) if rate > 0), default=0.0)

    @property
    def lead_s(self) -> float:
        """How long before the end of a round a contribution has to leave this node; 0 but for a slow uplink."""
        return self.depositor.lead_s

    @property
    def age_s(self) -> float:
        """Seconds since the round that this node is in began."""
        return float(self.clock() - self.chain.tip.anchor_at_s)

    def told_age_s(self, header: Mapping[str, Any]) -> float:
        """How long ago the round that a message speaks of began, as its sender says; 0.0 where it does not.

        At most PATIENCE_S above the length of a round, so that a false age does not make the round overdue.
        """
        age_s, round_s = header.get("age_s"), self.chain.tip.round_s
        if not isinstance(age_s, float) or not 0 <= age_s < math.inf:
            return 0.0
        return age_s if round_s is None else min(age_s, round_s + PATIENCE_S)

    @property
    def grid(self) -> Grid:
        """Of the round that this node is in."""
        return self.rules.grid_at(self.next_round)

    def offer(self, contribution: Contribution) -> None:
        """Take part with this in the round after its parent, as soon as may be. The newest offer counts."""
        self.mine, self._offered_at_s = contribution, self.clock()
        self._offered.set()

    def anchor_at_s(self, parent: str, committed_at_s: float, *, is_included: bool) -> float:
        """When the clock starts again after the round that follows `parent`: at its commit.

        Overlapped, when this node's contribution was ready: a round lasts no longer for the time its average takes.
        Peers say when a commit was; it is not before a contribution that it includes.
        """
        is_mine = is_included and self.mine is not None and self.mine.parent == parent
        if is_mine and self.rules.overlapped:
            return self._offered_at_s
        return max(committed_at_s, self._offered_at_s) if is_mine else committed_at_s

    async def run(self) -> None:
        """Take part in rounds for ever."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            mine = self.mine
            if mine is not None and mine.parent == self.chain.tip.head:
                await self._take_part(mine)

    async def _take_part(self, mine: Contribution) -> None:
        self.enter_stage("rendezvous")
        await self.depositor.hand_over(mine)
        failures = 0
        while self.chain.tip.head == mine.parent and self.mine is mine:
            attempt = self._attempt(self.number)
            try:
                await self._attend(attempt, mine)
            except (RoundFailed, PeerError) as exc:
                self.give_up(attempt, exc)
                failures += 1
                self.wronged |= exc.code in ("rejected", "bad_norm")
                logger.info("Round %d, attempt %d failed: %s", self.next_round, attempt.number, exc)
                self._deliver(RoundFailed(str(exc), code=known_code(exc.code)))
                self.enter_stage("rendezvous")
                await asyncio.sleep(min(3.0, BACK_OFF_S * failures))

    async def _attend(self, attempt: Attempt, mine: Contribution) -> None:
        """From joining to commit, or RoundFailed. Every wait ends: with an event, a dead leader, or the bulk time."""
        await self.mishaps.at("rendezvous")
        content = Join(
            run=self.rules.run,
            parent=mine.parent,
            tokens=mine.tokens,
            step_s=min(max(mine.step_s, LEAST_STEP_S), MOST_STEP_S),
            round_s=self.chain.tip.round_s,
            norm=mine.norm,
            # All members would wait for what a slow line reduces.
            reduces=self.me in self.directory.callable_members() and not self.lead_s,
            upload_bytes_s=self.upload_bytes_s,
            transfer_s=self._transfer_s,
            settle_s=min(max(mine.settle_s, 0.0), MOST_SETTLE_S),
            evaluation_loss=mine.evaluation_loss,
        )
        join = self.mishaps.join(self.directory.identity, content)
        strange, patient_until_s = 0, self.clock() + self._patience_s()
        while not attempt.planned.is_set():
            if self._enough_members() and self.clock() > patient_until_s:
                raise RoundFailed("the leader closes no group", code="leader_lost")
            target = attempt.holder or self.leader_at(attempt.number)
            attempt.asked.add(target)
            status = await self._join(attempt, target, join)
            attempt.holder = target if status == "wait" else ""
            if status == "ahead" or attempt.ended.is_set():
                break
            strange = 0 if status == "wait" else strange + 1
            if strange > 20:
                raise RoundFailed("no leader could be agreed on", code="leader_lost")
            await first((attempt.planned, attempt.ended), REJOIN_S if status == "wait" else BACK_OFF_S)
        deadline_s = self.clock() + 3 * self.rules.bulk_s
        while not attempt.ended.is_set() and self.chain.tip.head == mine.parent:
            if attempt.leader and not self.directory.is_member(attempt.leader):
                raise RoundFailed(f"the leader {attempt.leader[-6:]} is gone", code="leader_lost")
            if self.clock() > deadline_s:
                raise RoundFailed("the attempt took too long", code="timeout")
            await first((attempt.ended,), 0.5)
        raise_failure(attempt)

    def _patience_s(self) -> float:
        """Longer than any rule keeps a group open: a leader that takes more time is none."""
        return LEADER_PATIENCE_S + PATIENCE_RATIO * (self.chain.tip.round_s or 0.0)

    def _enough_members(self) -> bool:
        return len(self.directory.members()) >= self.rules.quorum.min_peers

    async def _join(self, attempt: Attempt, target: str, join: Document) -> str:
        """Tell the leader that this node is ready. Returns what it says; raises PeerError where it is gone."""
        header: dict[str, Any] = {"attempt": attempt.number, "join": join.model_dump()}
        if (known := self.accepted) is not None and known.attempt < attempt.number:
            header["accepted"] = [known.attempt, known.outcome.model_dump(), known.hashes, known.vote]
        try:
            call = self.wire.call(target, "join", Message(header), timeout_s=CALL_S)
            reply = await while_live(self.directory, target, call)
        except PeerError as exc:
            if exc.code in ("unreachable", "timeout"):
                self.directory.suspect(target)
            raise RoundFailed(f"the leader {target[-6:]} does not answer", code="leader_lost") from exc
        status = str(reply.header.get("status"))
        code = reply.header.get("code")
        attempt.waiting_reason = plain(reply.header.get("reason"), 200)
        attempt.waiting_code = code if code in WAITING_CODES else ""
        if status == "ahead":
            committed_at_s = self.clock() - self.told_age_s(reply.header)
            await self.adopt(parse(Proof, reply.blobs[0] if reply.blobs else b""), committed_at_s)
        elif status == "stale":
            raise_failure(attempt)  # It knows itself why.
            self._follow(attempt, reply.header.get("attempt"), code)
        return status

    def _follow(self, attempt: Attempt, later: object, code: object) -> NoReturn:
        """Go to the attempt that a leader says is under way, or some way towards it: nobody can use up the numbers."""
        if not isinstance(later, int) or later <= attempt.number:
            raise RoundFailed("the leader names no later attempt", code="leader_lost")
        self.number = max(self.number, min(later, attempt.number + MAX_AHEAD))
        why = attempt.waiting_reason or "a later attempt is under way"
        raise RoundFailed(why, code=known_code(code))

    def why_over(self, number: int) -> dict[str, str]:
        """Why this node has given up an attempt, for whoever still asks for it; empty where it does not know."""
        failure = attempt.failure if (attempt := self._attempts.get(number)) else None
        return {"reason": str(failure), "code": failure.code} if failure is not None else {}

    def waiting(self) -> tuple[str, str]:
        """What this node's current attempt waits for: one sentence, one word."""
        if self.depositor.is_sending:
            return "Uploading this node's contribution ahead of the round, as its line is slow.", ""
        attempt = self._attempt(self.number)
        return attempt.waiting_reason, attempt.waiting_code

    async def send(self, attempt: Attempt, plan: Plan, mine: Contribution) -> None:
        """Give every reducer its chunks."""
        await self.mishaps.at("reduce")
        left = await self.depositor.forward(self._key(attempt), plan, mine)
        mine = replace(mine, chunks=self.mishaps.spoil("reduce", mine.chunks))
        await asyncio.gather(*(self._send_to(peer, attempt, plan, mine) for peer in left))

    async def _send_to(self, peer: str, attempt: Attempt, plan: Plan, mine: Contribution) -> None:
        chunks = plan.chunks_of(peer)
        message = Message(self._key(attempt) | {"chunks": chunks}, [mine.chunks[chunk] for chunk in chunks])
        began_s = self.clock()
        try:
            call = self.wire.call(peer, "contribute", message, timeout_s=self.rules.bulk_s)
            await while_live(self.directory, peer, call)
            if peer != self.me:
                batch = f"{attempt.parent} {attempt.number}"
                self.uplink.sent(batch, message.blob_bytes, self.clock() - began_s)
        except PeerError as exc:
            # The reducer, not the sender, decides what arrived; the leader hears it from there.
            logger.info("Reducer %s did not take this node's chunks: %s", peer[-6:], exc)

    def _others(self) -> list[str]:
        return [r.peer_id for r in self.directory.members() if self.directory.can_call(r)]

    # attempts

    def _attempt(self, number: int) -> Attempt:
        if number not in self._attempts:
            self._attempts[number] = Attempt(self.chain.tip.head, number)
        return self._attempts[number]

    def enter(self, parent: str, number: int, caller: str) -> Attempt:
        """The attempt that a peer speaks of, if it may. A higher one than any before supersedes those."""
        if parent != self.chain.tip.head:
            raise PeerError("that is not the round this node is in", code="round_failed")
        if number < self.number:
            raise PeerError("a later attempt is under way", code="round_failed")
        if number > self.number:
            self._raised[caller] += 1
            if self._raised[caller] > MAX_RAISES or not self.directory.is_member(caller):
                raise PeerError("this peer may not begin another attempt", code="round_failed")
            self.number = number
            for old in self._attempts.values():
                if old.number < number:
                    old.fail(RoundFailed("a later attempt is under way"))
                    old.stop()
        return self._attempt(number)

    def release(self, number: int, peer: str) -> bool:
        """Let a member that has joined this node's attempt join another leader; False once the group is closed.

        A member joins one leader an attempt, so only one leader has the majority that a proposal needs.
        """
        attempt = self._attempts.get(number)
        if attempt is None or peer not in attempt.joins:
            return True
        if not attempt.closed:
            del attempt.joins[peer]
            attempt.proposals.pop(peer, None)
        return not attempt.closed

    def give_up(self, attempt: Attempt, error: SwarmError) -> None:
        """This attempt comes to nothing; the next one has another leader."""
        attempt.fail(error)
        attempt.stop()
        if attempt.parent == self.chain.tip.head:
            self.number = max(self.number, attempt.number + 1)

    def _key(self, attempt: Attempt) -> dict[str, Any]:
        return {"parent": attempt.parent, "attempt": attempt.number}

    # commit

    async def adopt(self, proof: Proof, committed_at_s: float | None = None) -> bool:
        """Commit what the proof stands for. False if it is not about this node's next round; raises PeerError.

        `committed_at_s`: when that was, on this node's clock; None: now.
        """
        return await self.adoption.adopt(proof, committed_at_s)

    async def adopt_quietly(self, proof: Proof, committed_at_s: float) -> None:
        try:
            await self.adopt(proof, committed_at_s)
        except SwarmError as exc:
            logger.info("Could not take over a committed round yet: %s", exc)
            self.behind.set()

    def commit(
        self, tip: Tip, outcome: Outcome, proof: Proof, committed_at_s: float, *, is_replayed: bool = False
    ) -> None:
        mine = self.mine
        offered = mine is not None and mine.parent == outcome.plan.parent
        self.chain.advance(tip, outcome.plan.parent, proof)
        joins = {join.signer: parse(Join, join.text) for join in outcome.plan.joins}
        uplinks = {peer: join.upload_bytes_s for peer, join in joins.items()}
        self.depositor.round_over(outcome.plan, uplinks, outcome.included)
        self.directory.say(round=tip.round, head=tip.head, state_digest=tip.digest, swarm_tokens=tip.state.tokens)
        attempts = list(self._attempts.values())
        self._leave_round()
        self.enter_stage("idle")
        stage_s, self._stage_s = self._stage_s, {}
        # Overlapped, the moment that peers tell is the one at which the leader offered its contribution.
        late_s = stage_s.get("commit", 0.0) if self.rules.overlapped else self.clock() - committed_at_s
        if offered and self.me in outcome.included:
            self._transfer_s = stage_s.get("reduce", 0.0) + stage_s.get("commit", 0.0)
        included = self.me in outcome.included
        self._deliver(Committed(tip, outcome, included, offered, stage_s, max(0.0, late_s), is_replayed))
        for attempt in attempts:
            attempt.finish()
            attempt.stop()

    def _leave_round(self) -> None:
        self._attempts, self.number = {}, 0
        self.mine, self.accepted = None, None
        self.shunned = set()
        self.wronged = False
        self._raised.clear()
        self.adoption.clear()
        self.results.clear()
        self.depositary.clear()
        oldest = self.chain.tip.round - LATELY
        self.joined_at = {peer: round_ for peer, round_ in self.joined_at.items() if round_ >= oldest}

    def restart_at(self, tip: Tip) -> None:
        """Go on from a downloaded state."""
        for attempt in self._attempts.values():
            attempt.fail(RoundFailed("this node starts again from a downloaded state"))
            attempt.stop()
        self.chain.replace(tip)
        self._leave_round()
        self.directory.say(round=tip.round, head=tip.head, state_digest=tip.digest, swarm_tokens=tip.state.tokens)

    # upkeep

    @property
    def stage_seconds(self) -> float:
        """Since this node entered the stage in which it is."""
        return self.clock() - self._stage_at_s

    def enter_stage(self, stage: str) -> None:
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
        self.results.close()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

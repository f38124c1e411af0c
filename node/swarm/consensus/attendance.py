"""The member's side of one attempt: the member attends until the round is committed or the attempt has failed.

`attend` is a long poll. The request states what the member already has, and its vote. The leader answers as soon as it
has more: the plan, an outcome to vote on, the certificate, or the reason why the attempt is over.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any, Literal

from node.errors import PeerError, RoundFailed, SwarmError
from node.host.printable import printable
from node.swarm.allreduce.reducer import Reducer
from node.swarm.consensus.ballot import Attempt, Ballot, LocalContribution, StageTimer, first
from node.swarm.consensus.commit import Committer
from node.swarm.consensus.context import CALL_S, Context
from node.swarm.consensus.depositary import Sender
from node.swarm.consensus.group_closing import PATIENCE_RATIO, WAITING_CODES
from node.swarm.consensus.voter import Voter
from node.swarm.membership.peer_table import while_live
from node.swarm.messages import Document, Plan, Proof, check_plan, parse, read
from node.swarm.transport.wire import MALFORMED_ERRORS, Message

logger = logging.getLogger(__name__)

BACK_OFF_S = 0.3
LEADER_PATIENCE_S = 45.0
MOST_STRANGE = 20
"""After this many answers in a row from peers that do not lead, the attempt is given up."""
VOTE_AGAIN_S = 1.0
"""Pause before a member tries again to fetch a mean."""


class Attendance:
    """Takes this node through an attempt as a member."""

    def __init__(
        self, ctx: Context, ballot: Ballot, stages: StageTimer, committer: Committer, voter: Voter, sender: Sender
    ) -> None:
        self._ctx, self._ballot, self._stages = ctx, ballot, stages
        self._committer, self._voter, self._sender = committer, voter, sender

    async def attend(self, attempt: Attempt, mine: LocalContribution, join: Document) -> None:
        """Attend from the join to the commit. Every wait has a timeout. Raises RoundFailed, PeerError."""
        ctx = self._ctx
        attempt.patient_until_s, strange = ctx.clock() + self._patience_s(), 0
        while not attempt.ended.is_set() and ctx.chain.tip.head == mine.parent:
            if attempt.has:
                if ctx.clock() > attempt.deadline_s:
                    raise RoundFailed("the attempt took too long", code="timeout")
            else:
                self._ballot.follow_members()
                if ctx.clock() > attempt.patient_until_s and self._enough_members():
                    raise RoundFailed("the leader did not close its group in time", code="leader_lost")
            target = attempt.holder or ctx.leader_at(attempt.number)
            if not target:  # This node is downloading a state, and so is every other one.
                await first((attempt.ended,), BACK_OFF_S)
                continue
            if not attempt.holder and target != ctx.me and not ctx.peer_table.is_member(target):
                raise RoundFailed("the leader of this attempt is away", code="leader_lost")
            if ctx.peer_table.is_evicted(target):
                raise RoundFailed("the leader has signed two outcomes", code="leader_lost")
            attempt.asked.add(target)
            asked_at_s = ctx.clock()
            status = await self._ask(attempt, target, mine, join)
            if status == "again":
                continue
            is_holder = status in ("wait", "plan", "proposal")
            attempt.holder = target if is_holder else ""
            strange = 0 if is_holder else strange + 1
            if strange > MOST_STRANGE:
                raise RoundFailed("the members do not agree on a leader", code="leader_lost")
            if status not in ("plan", "proposal") and ctx.clock() - asked_at_s < BACK_OFF_S:
                await first((attempt.ended, attempt.has_news), BACK_OFF_S)
        attempt.raise_failure()

    def _patience_s(self) -> float:
        """Seconds to wait until the leader closes the group: longer than any rule keeps a group open."""
        return LEADER_PATIENCE_S + PATIENCE_RATIO * (self._ctx.chain.tip.round_s or 0.0)

    def _enough_members(self) -> bool:
        return len(self._ctx.peer_table.members()) >= self._ctx.rules.closing.min_peers

    async def _ask(self, attempt: Attempt, target: str, mine: LocalContribution, join: Document) -> str:
        """Attend once. Returns the status of the answer, or `again` without an answer. Raises RoundFailed, PeerError.

        The caller repeats the request if this node has voted meanwhile, and once if the connection broke.
        """
        reply = await self._call(attempt, target, join)
        if reply is None:
            return "again"
        try:
            status, proof = self._take(attempt, target, mine, reply)
        except MALFORMED_ERRORS as exc:
            raise PeerError(f"the leader's answer has the wrong form ({type(exc).__name__})") from exc
        if proof is not None:
            committed_at_s = self._ctx.clock() - self._ctx.stated_age_s(reply.header)
            await self._committer.adopt(proof, committed_at_s)
        return status

    def _take(self, attempt: Attempt, target: str, mine: LocalContribution, reply: Message) -> tuple[str, Proof | None]:
        """Act on the leader's answer. Returns its status, and the certificate that it holds, which is to be adopted."""
        header, status = reply.header, str(reply.header.get("status"))
        attempt.waiting_reason = printable(header.get("reason"), 200)
        code = header.get("code")
        attempt.waiting_code = code if code in WAITING_CODES else ""
        blob = reply.blobs[0] if reply.blobs else b""
        if status == "ahead":
            return status, parse(Proof, blob)
        if status == "stale":
            if attempt.has:
                self._ballot.accuse(target, header.get("suspect"))
            attempt.raise_failure()  # This node's own reason is better than the leader's.
            self._ballot.follow(attempt, header.get("attempt"), code)
        elif status == "plan" and not attempt.has:
            self.take_plan(attempt, target, Document.model_validate_json(blob), mine)
        elif status == "proposal" and attempt.has != "proposal":
            attempt.support = {str(peer): (int(number), str(vote)) for peer, number, vote in header.get("support", ())}
            self._take_proposal(attempt, target, Document.model_validate_json(blob), str(header.get("hashes")))
        elif status in ("plan", "proposal"):
            return "wait", None
        return status, None

    async def _call(self, attempt: Attempt, target: str, join: Document) -> Message | None:
        """Make one long poll. Returns None if this node has news for the leader, or if the connection broke once."""
        ctx = self._ctx
        header: dict[str, Any] = {"attempt": attempt.number, "join": join.model_dump(), "has": attempt.has}
        known = self._ballot.accepted
        claims = [known.model_dump_json().encode()] if known is not None and known.attempt < attempt.number else []
        if attempt.vote is not None:
            header["vote"] = attempt.vote
        attempt.has_news.clear()
        hold_s = ctx.peer_table.timings.hold_s
        timeout_s = hold_s + ctx.answer_s
        if not attempt.has:  # A leader that gossips, but never answers, uses up this node's patience only.
            timeout_s = min(timeout_s, max(0.0, attempt.patient_until_s - ctx.clock()) + hold_s + CALL_S)
        poll = ctx.wire.call(target, "attend", Message(header, claims), timeout_s=timeout_s)
        call = asyncio.ensure_future(while_live(ctx.peer_table, target, poll))
        news = [asyncio.ensure_future(event.wait()) for event in (attempt.has_news, attempt.ended)]
        try:
            await asyncio.wait([call, *news], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return None
            reply = call.result()
        except PeerError as exc:
            if exc.code in ("unreachable", "timeout"):
                ctx.peer_table.suspect(target)
            if exc.code == "unreachable" and not attempt.has_broken and not ctx.peer_table.is_gone(target):
                attempt.has_broken = True
                await first((attempt.ended,), BACK_OFF_S)
                return None
            raise RoundFailed(f"the leader {target[-6:]} does not answer", code="leader_lost") from exc
        finally:
            for task in (call, *news):
                task.cancel()
            await asyncio.gather(call, *news, return_exceptions=True)
        attempt.has_broken = False
        return reply

    def take_plan(self, attempt: Attempt, leader: str, document: Document, mine: LocalContribution) -> None:
        """Check the leader's plan, prepare to reduce, and start to send this node's chunks. Raises PeerError."""
        ctx, plan = self._ctx, read(document, Plan)
        joins = check_plan(plan, ctx.rules.bounds, attempt.parent, ctx.next_round)
        ctx.amendments_after(plan)
        if (
            not document.signer == plan.leader == leader
            or plan.attempt != attempt.number
            or not ctx.peer_table.is_member(leader)
        ):
            raise PeerError("a plan does not come from the leader of this attempt")
        if ctx.me not in joins or joins[ctx.me].tokens != mine.tokens:
            raise PeerError("a plan does not contain this node's join")
        if attempt.planned.is_set():
            return
        self._lead_by(attempt, leader, "plan")
        attempt.weights, attempt.given = joins, plan
        if ctx.me in plan.reducers:
            weights = {peer: join.tokens for peer, join in joins.items()}
            norms = {peer: join.norm for peer, join in joins.items()}
            encode = partial(ctx.feedback.encode, ctx.next_round)
            attempt.reducer = Reducer(ctx.layout, plan.chunks_of(ctx.me), weights, norms, encode)
        attempt.planned.set()
        self._stages.enter("reduce")
        attempt.sending = ctx.tasks.spawn(self._sender.send(attempt, plan, mine))

    def _lead_by(self, attempt: Attempt, leader: str, has: Literal["plan", "proposal"]) -> None:
        if attempt.leader not in ("", leader):
            raise PeerError("this attempt has another leader")
        if not attempt.has:
            attempt.deadline_s = self._ctx.clock() + 3 * self._ctx.rules.bulk_s
        attempt.leader, attempt.has = leader, has

    def _take_proposal(self, attempt: Attempt, leader: str, document: Document, hashes: str) -> None:
        self._lead_by(attempt, leader, "proposal")
        self._stages.enter("commit")
        attempt.voting = self._ctx.tasks.spawn(self._vote(attempt, leader, document, hashes))

    async def _vote(self, attempt: Attempt, leader: str, document: Document, hashes: str) -> None:
        """Vote or refuse; the next request tells the leader. If the mean cannot be fetched, refuse and try again."""
        await self._ctx.hooks.at("commit")
        while not attempt.ended.is_set():
            try:
                vote = await self._voter.vote(attempt, leader, document, hashes)
            except SwarmError as exc:
                logger.info("This node does not vote for the outcome of leader %s: %s", leader[-6:], exc)
                attempt.vote = ""
                attempt.has_news.set()
                if exc.code not in ("unreachable", "timeout"):
                    return
                await first((attempt.ended,), VOTE_AGAIN_S)
            else:
                attempt.vote = self._ctx.hooks.vote(vote)
                attempt.has_news.set()
                return

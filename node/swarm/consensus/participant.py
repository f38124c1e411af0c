"""A node's part in the rounds, from a contribution to a commit.

    offer -> join the leader -> PLAN -> send chunks to their reducers -> collect, average -> PROPOSE -> accept -> COMMIT

Every step is a short call that can be repeated. A failure ends the attempt, and the next attempt has another leader.
Contributions do not change until the commit. Calls are keyed (parent, attempt); a node follows the highest attempt that
it has seen. PROTOCOL.md states the rules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from node.errors import PeerError, RoundFailed
from node.swarm.allreduce.result_store import ResultCache
from node.swarm.chain.chain import Chain, Tip
from node.swarm.consensus.ballot import Attempt, Ballot, LocalContribution, StageTimer, first, known_code
from node.swarm.consensus.commit import Committed, Committer
from node.swarm.consensus.context import CALL_S, Context, Rules
from node.swarm.consensus.depositary import Depositary, Sender
from node.swarm.consensus.fault_hooks import FaultHooks
from node.swarm.consensus.group_closing import PATIENCE_RATIO, WAITING_CODES
from node.swarm.consensus.handlers import Handlers
from node.swarm.consensus.leader import Leader
from node.swarm.consensus.voter import Voter
from node.swarm.faults import Faults
from node.swarm.membership.peer_table import PeerTable, while_live
from node.swarm.messages import (
    LEAST_STEP_S,
    MOST_SETTLE_S,
    MOST_STEP_S,
    Document,
    Join,
    Proof,
    joins_of,
    parse,
)
from node.swarm.transport.wire import Message, Wire, printable

logger = logging.getLogger(__name__)

BACK_OFF_S = 0.3
LEADER_PATIENCE_S = 45.0

Deliver = Callable[[Committed | RoundFailed], None]


class Participant:
    """All of a node's rounds, one after the other. Lives on one event loop; `deliver` is called on it.

    Builds the parts of the consensus and owns the ballot.
    """

    def __init__(
        self, wire: Wire, peer_table: PeerTable, rules: Rules, chain: Chain, faults: Faults, deliver: Deliver
    ) -> None:
        def others() -> list[str]:
            return [r.peer_id for r in peer_table.members() if peer_table.can_call(r)]

        clock = asyncio.get_running_loop().time
        self.ctx = Context(
            wire=wire,
            peer_table=peer_table,
            rules=rules,
            chain=chain,
            hooks=FaultHooks(faults, chain, peer_table),
            results=ResultCache(wire, peer_table, rules.layout_at, chain.store, rules.bulk_s, others),
            clock=clock,
        )
        self.ballot = Ballot(chain, peer_table)
        self.stages = StageTimer(clock)
        self.sender = Sender(self.ctx, self.ballot)
        self.depositary = Depositary(self.ctx)
        self.committer = Committer(self.ctx, self.ballot, self.stages, self._on_commit)
        leader = Leader(self.ctx, self.ballot, self.committer)
        voter = Voter(self.ctx, self.ballot, self.committer)
        handlers = Handlers(
            self.ctx, self.ballot, self.stages, self.committer, voter, leader, self.sender, self.depositary
        )
        self._deliver = deliver
        self._has_restored = False
        self._offered = asyncio.Event()
        wire.serve(handlers.services())

    def offer(self, contribution: LocalContribution) -> None:
        """Take part with this contribution in the round after its parent. The newest offer counts."""
        self.ballot.mine, self.ballot.offered_at_s = contribution, self.ctx.clock()
        self._offered.set()

    def waiting(self) -> tuple[str, str]:
        """What the current attempt waits for: one sentence and one of WAITING_CODES, both empty if nothing."""
        if self.sender.is_depositing:
            return "Uploading this node's contribution before the round, because its uplink is slow.", ""
        attempt = self.ballot.current
        return attempt.waiting_reason, attempt.waiting_code

    def restart_at(self, tip: Tip) -> None:
        """Continue from a downloaded state."""
        self.committer.restart_at(tip)
        self.depositary.clear()

    def _on_commit(self, committed: Committed) -> None:
        outcome, proof = committed.outcome, committed.tip.proof
        joins = joins_of(proof.outcome) if proof is not None else {}
        uplinks = {peer: join.upload_bytes_s for peer, join in joins.items()}
        self.sender.round_over(outcome.plan, uplinks, outcome.included)
        self.depositary.clear()
        self._deliver(committed)

    async def run(self) -> None:
        """Take part in rounds for ever."""
        ctx, ballot = self.ctx, self.ballot
        while True:
            await self._offered.wait()
            self._offered.clear()
            mine = ballot.mine
            if mine is not None and mine.parent == ctx.chain.tip.head:
                await self._take_part(mine)

    async def _take_part(self, mine: LocalContribution) -> None:
        ctx, ballot = self.ctx, self.ballot
        self.stages.enter("rendezvous")
        await self._restore()
        await self.sender.deposit(mine)
        failures = 0
        while ctx.chain.tip.head == mine.parent and ballot.mine is mine:
            attempt = ballot.current
            try:
                await self._attend(attempt, mine)
            except (RoundFailed, PeerError) as exc:
                ballot.give_up(attempt, exc)
                failures += 1
                ballot.distrusts_reducers |= exc.code in ("rejected", "bad_norm")
                logger.info("Round %d, attempt %d failed: %s", ctx.next_round, attempt.number, exc)
                self._deliver(RoundFailed(str(exc), code=known_code(exc.code)))
                self.stages.enter("rendezvous")
                await asyncio.sleep(min(3.0, BACK_OFF_S * failures))

    async def _restore(self) -> None:
        """Continue with the vote and the attempt of an earlier process, if it was in this round."""
        if self._has_restored:
            return
        self._has_restored = True
        saved = await asyncio.to_thread(self.ctx.chain.store.load_ballot, self.ctx.chain.tip.head)
        if saved is not None and saved.parent == self.ctx.chain.tip.head:
            self.ballot.restore(saved)

    async def _attend(self, attempt: Attempt, mine: LocalContribution) -> None:
        """From joining to commit, or RoundFailed. Every wait ends: with an event, a dead leader, or the bulk time."""
        ctx = self.ctx
        await ctx.hooks.at("rendezvous")
        content = Join(
            run=ctx.rules.run,
            parent=mine.parent,
            state=ctx.chain.tip.digest,
            tokens=mine.tokens,
            step_s=min(max(mine.step_s, LEAST_STEP_S), MOST_STEP_S),
            round_s=ctx.chain.tip.round_s,
            norm=mine.norm,
            # All members would wait for a reducer on a slow uplink.
            reduces=ctx.me in ctx.peer_table.callable_members() and not self.sender.lead_s,
            upload_bytes_s=ctx.upload_bytes_s,
            transfer_s=self.committer.transfer_s,
            settle_s=min(max(mine.settle_s, 0.0), MOST_SETTLE_S),
            evaluation_loss=mine.evaluation_loss,
        )
        join = ctx.hooks.join(ctx.peer_table.identity, content)
        if attempt.number > 0:
            # A join promises to vote in no lower attempt, also after a crash.
            await asyncio.to_thread(ctx.chain.store.save_ballot, self.ballot.to_save(attempt))
        strange, patient_until_s = 0, ctx.clock() + self._patience_s()
        while not attempt.planned.is_set():
            if self._enough_members() and ctx.clock() > patient_until_s:
                raise RoundFailed("the leader closes no group", code="leader_lost")
            target = attempt.holder or ctx.leader_at(attempt.number)
            attempt.asked.add(target)
            status = await self._join(attempt, target, join)
            attempt.holder = target if status == "wait" else ""
            if status == "ahead" or attempt.ended.is_set():
                break
            strange = 0 if status == "wait" else strange + 1
            if strange > 20:
                raise RoundFailed("no leader could be agreed on", code="leader_lost")
            await first(
                (attempt.planned, attempt.ended), ctx.peer_table.timings.rejoin_s if status == "wait" else BACK_OFF_S
            )
        deadline_s = ctx.clock() + 3 * ctx.rules.bulk_s
        while not attempt.ended.is_set() and ctx.chain.tip.head == mine.parent:
            if attempt.leader and not ctx.peer_table.is_member(attempt.leader):
                raise RoundFailed(f"the leader {attempt.leader[-6:]} is gone", code="leader_lost")
            if ctx.clock() > deadline_s:
                raise RoundFailed("the attempt took too long", code="timeout")
            await first((attempt.ended,), 0.5)
        attempt.raise_failure()

    def _patience_s(self) -> float:
        """How long to wait for a leader to close the group: longer than any rule keeps a group open."""
        return LEADER_PATIENCE_S + PATIENCE_RATIO * (self.ctx.chain.tip.round_s or 0.0)

    def _enough_members(self) -> bool:
        return len(self.ctx.peer_table.members()) >= self.ctx.rules.closing.min_peers

    async def _join(self, attempt: Attempt, target: str, join: Document) -> str:
        """Tell the leader that this node is ready. Returns the answer's status. Raises RoundFailed if it is gone."""
        ctx, ballot = self.ctx, self.ballot
        header: dict[str, Any] = {"attempt": attempt.number, "join": join.model_dump()}
        if (known := ballot.accepted) is not None and known.attempt < attempt.number:
            header["accepted"] = [known.attempt, known.outcome.model_dump(), known.hashes, known.vote]
        try:
            call = ctx.wire.call(target, "join", Message(header), timeout_s=CALL_S)
            reply = await while_live(ctx.peer_table, target, call)
        except PeerError as exc:
            if exc.code in ("unreachable", "timeout"):
                ctx.peer_table.suspect(target)
            raise RoundFailed(f"the leader {target[-6:]} does not answer", code="leader_lost") from exc
        status = str(reply.header.get("status"))
        code = reply.header.get("code")
        attempt.waiting_reason = printable(reply.header.get("reason"), 200)
        attempt.waiting_code = code if code in WAITING_CODES else ""
        if status == "ahead":
            committed_at_s = ctx.clock() - ctx.stated_age_s(reply.header)
            await self.committer.adopt(parse(Proof, reply.blobs[0] if reply.blobs else b""), committed_at_s)
        elif status == "stale":
            attempt.raise_failure()  # This node's own reason is better than the leader's.
            ballot.follow(attempt, reply.header.get("attempt"), code)
        return status

    async def close(self) -> None:
        self.ctx.results.close()
        await self.ctx.tasks.close()

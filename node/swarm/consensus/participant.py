"""A node's part in the rounds, from a contribution to a commit.

    offer -> attend -> PLAN -> send chunks to their reducers -> collect, average -> PROPOSAL -> vote -> CERTIFICATE

Every step is a call that can be repeated. A failure ends the attempt, and the next attempt has another leader.
Contributions do not change until the commit. The key of a call is (parent, attempt). `Ballot.follow_members` says when
a node goes to a later attempt. PROTOCOL.md states the rules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from node.errors import PeerError, RoundFailed
from node.swarm.allreduce.incoming import Incoming
from node.swarm.allreduce.result_feedback import ResultFeedback
from node.swarm.allreduce.result_store import ResultCache
from node.swarm.chain.chain import Chain, Tip
from node.swarm.consensus.attendance import BACK_OFF_S, Attendance
from node.swarm.consensus.ballot import Attempt, Ballot, LocalContribution, StageTimer, known_code
from node.swarm.consensus.commit import Committed, Committer
from node.swarm.consensus.context import Context, KeptStates, NoStates, Rules, rules_after
from node.swarm.consensus.depositary import Depositary, Sender
from node.swarm.consensus.fault_hooks import FaultHooks
from node.swarm.consensus.handlers import Handlers
from node.swarm.consensus.leader import LOOK_S, Leader
from node.swarm.consensus.voter import Voter
from node.swarm.faults import Faults
from node.swarm.governance.amendment_pool import AmendmentPool
from node.swarm.membership.peer_table import PeerTable
from node.swarm.messages import (
    LEAST_STEP_S,
    MOST_SETTLE_S,
    MOST_STEP_S,
    Join,
    joins_of,
)
from node.swarm.transport.wire import Wire

logger = logging.getLogger(__name__)

PAUSED_LOOK_S = 0.5
MOST_EMPTY = 16
"""While the run is paused, rounds follow each other until an amendment applies that is at most so many rounds away."""
RETURN_GRACE_S = 30.0
"""Time for members that are ahead to send their rounds, before a node that came back replays its own."""

Deliver = Callable[[Committed | RoundFailed], None]


class Participant:
    """Takes a node through its rounds, one after the other. Lives on one event loop, and calls `deliver` there.

    Builds the parts of the consensus and owns the ballot.
    """

    def __init__(
        self,
        wire: Wire,
        peer_table: PeerTable,
        rules: Rules,
        chain: Chain,
        faults: Faults,
        deliver: Deliver,
        pending_file: Path | None = None,
        states: KeptStates | None = None,
    ) -> None:
        """Build the parts.

        Args:
            rules: those of the manifest.
            pending_file: keeps amendments that are pending over a restart.
            states: the states to which a rollback can go back; None for none.
        """
        charter = rules.amended.charter if rules.amended is not None else None
        self.pool = AmendmentPool(
            wire, peer_table, charter, lambda: (chain.tip.state.amendments, chain.tip.round + 1), pending_file
        )
        self._followed = rules_after(rules, chain.tip).paused(False)
        """The rules that the parts of this node follow."""
        self.ctx = self._make_context(wire, peer_table, rules, chain, faults, states or NoStates())
        self.ballot = Ballot(chain, peer_table, self.ctx.clock, self.ctx.can_commit)
        self.stages = StageTimer(self.ctx.clock)
        self.sender = Sender(self.ctx, self.ballot)
        self.depositary = Depositary(self.ctx)
        self.committer = Committer(self.ctx, self.ballot, self.stages, self._on_commit)
        leader = Leader(self.ctx, self.ballot, self.committer)
        voter = Voter(self.ctx, self.ballot, self.committer)
        self._attendance = Attendance(self.ctx, self.ballot, self.stages, self.committer, voter, self.sender)
        self._handlers = Handlers(self.ctx, self.ballot, voter, leader, self.depositary, Incoming(self.ctx.clock))
        self._deliver = deliver
        self._offered = asyncio.Event()
        wire.serve(self._handlers.services())

    def _make_context(
        self, wire: Wire, peer_table: PeerTable, rules: Rules, chain: Chain, faults: Faults, states: KeptStates
    ) -> Context:
        def others() -> list[str]:
            return [r.peer_id for r in peer_table.members() if peer_table.can_call(r)]

        now = self._followed
        return Context(
            wire=wire,
            peer_table=peer_table,
            manifest_rules=rules,
            chain=chain,
            hooks=FaultHooks(faults, chain, peer_table),
            results=ResultCache(wire, peer_table, now.result_layout_at, chain.store, now.bulk_s, others),
            feedback=ResultFeedback(now.feedback, now.result_layout_at, len(now.layouts), chain.store, chain.tip.head),
            pool=self.pool,
            states=states,
            clock=asyncio.get_running_loop().time,
        )

    def offer(self, contribution: LocalContribution) -> None:
        """Take part in the round after the contribution's parent. A newer offer replaces an older one."""
        self.ballot.mine, self.ballot.offered_at_s = contribution, self.ctx.clock()
        self._offered.set()

    def waiting(self) -> tuple[str, str]:
        """What the current attempt waits for: one sentence and one of WAITING_CODES, each of which may be empty."""
        if self.sender.is_depositing:
            return "Uploading this node's contribution before the round, because its uplink is slow.", ""
        attempt = self.ballot.current
        return attempt.waiting_reason, attempt.waiting_code

    def restart_at(self, tip: Tip) -> None:
        """Continue from a downloaded state."""
        accepted = self.ctx.chain.tip.state.amendments
        self.committer.restart_at(tip)
        self.depositary.clear()
        self.pool.add_again(accepted)
        self.pool.round_over()
        self._follow_rules()

    def _follow_rules(self) -> None:
        """Adjust the parts that keep sizes and layouts, if the rules of the new round are others."""
        ctx, rules = self.ctx, self.ctx.rules.paused(False)
        if rules == self._followed:
            return
        self._followed = rules
        ctx.chain.store.follow(len(rules.layouts))
        ctx.results.follow(rules.result_layout_at, rules.bulk_s)
        ctx.feedback.follow(rules.feedback, rules.result_layout_at, len(rules.layouts))
        self.depositary.follow(rules)
        ctx.wire.serve(self._handlers.services())

    def _on_commit(self, committed: Committed) -> None:
        outcome, proof = committed.outcome, committed.tip.proof
        joins = joins_of(proof.outcome) if proof is not None else {}
        uplinks = {peer: joins[peer].upload_bytes_s for peer in committed.tip.last_weights}
        self.sender.round_over(outcome.plan, uplinks, outcome.included)
        self.depositary.clear()
        self.pool.round_over()
        self._follow_rules()
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

    async def accept_amendments(self) -> None:
        """While the run is paused, take part in the rounds that accept amendments. Runs for ever."""
        while True:
            await asyncio.sleep(PAUSED_LOOK_S)
            tip = self.ctx.chain.tip
            if self.ctx.rules.is_paused and not self.ballot.offers(tip.head) and self._must_go_on(tip):
                step_s = tip.round_s / tip.inner_steps if tip.round_s else 1.0
                self.offer(LocalContribution(tip.head, (), tokens=1, step_s=step_s, norm=0.0))

    def _must_go_on(self, tip: Tip) -> bool:
        """Whether a paused run needs another round: for a pending amendment, or until an accepted one applies.

        A replaceable amendment may not be acceptable, so it makes rounds only shortly before it would apply.
        """
        amended, next_round = self.ctx.manifest_rules.amended, tip.round + 1
        assert amended is not None  # Otherwise, the run could not be paused.
        starts, pending = amended.starts(tip.state.amendments), self.pool.next()
        if pending is not None:
            if not pending.amendment.is_replaceable:
                return True
            starts = (*starts, pending.amendment.from_round)
        return any(next_round < start <= next_round + MOST_EMPTY for start in starts)

    async def _take_part(self, mine: LocalContribution) -> None:
        ctx, ballot = self.ctx, self.ballot
        self.stages.enter("rendezvous")
        await self._restore()
        await self.sender.deposit(mine)
        failures = 0
        while ctx.chain.tip.head == mine.parent and ballot.mine is mine:
            ballot.skip_to(ctx.next_led(ballot.number))
            attempt = ballot.current
            try:
                await self._attend(attempt, mine)
            except (RoundFailed, PeerError) as exc:
                ballot.give_up(attempt, exc)
                failures += 1
                ballot.distrusts_reducers |= exc.code in ("rejected", "bad_norm")
                logger.info("Attempt %d of round %d failed: %s", attempt.number, ctx.next_round, exc)
                self._deliver(RoundFailed(str(exc), code=known_code(exc.code)))
                self.stages.enter("rendezvous")
                await asyncio.sleep(min(3.0, BACK_OFF_S * failures))

    async def _restore(self) -> None:
        """Continue where this node was in this round, in an earlier process or before a lost fork.

        If it has committed the round, it replays its result. If members are ahead, it first gives them a chance to send
        their rounds. If it has voted, it continues with its vote.
        """
        ctx, parent = self.ctx, self.ctx.chain.tip.head
        until_s = ctx.clock() + RETURN_GRACE_S
        while ctx.chain.next_aside() is not None and self.ballot.is_overtaken() and ctx.clock() < until_s:
            ctx.behind.set()
            await asyncio.sleep(LOOK_S)
        while ctx.chain.next_aside() is not None:
            await self.committer.replay_aside()
        if self.ballot.accepted is None and ctx.chain.store.has_vote(parent):
            accepted = await asyncio.to_thread(ctx.chain.store.load_accepted, parent)
            if parent == ctx.chain.tip.head:
                self.ballot.accepted = self.ballot.accepted or accepted

    async def _attend(self, attempt: Attempt, mine: LocalContribution) -> None:
        """Sign a join, and attend the attempt. Raises RoundFailed or PeerError if the attempt fails."""
        ctx = self.ctx
        await ctx.hooks.at("rendezvous")
        known = self.ballot.accepted
        content = Join(
            run=ctx.rules.run,
            parent=mine.parent,
            attempt=attempt.number,
            accepted=known.outcome.hash if known is not None and known.attempt < attempt.number else "",
            state=ctx.chain.tip.digest,
            tokens=mine.tokens,
            step_s=min(max(mine.step_s, LEAST_STEP_S), MOST_STEP_S),
            round_s=ctx.chain.tip.round_s,
            norm=mine.norm,
            # A member on a slow uplink does not reduce, because all members would wait for it.
            reduces=ctx.me in ctx.peer_table.callable_members() and not self.sender.is_slow,
            upload_bytes_s=ctx.upload_bytes_s,
            transfer_s=self.committer.transfer_s,
            settle_s=min(max(mine.settle_s, 0.0), MOST_SETTLE_S),
            evaluation_loss=mine.evaluation_loss,
            training_loss=mine.training_loss,
            keeps=await ctx.kept_state(),
        )
        join = ctx.hooks.join(ctx.peer_table.identity, content)
        # By its join, the member promises not to vote in a lower attempt, and to join no other leader in this one.
        # After a crash, it does not know which leader it joined.
        await self.ballot.save(attempt.parent, attempt.number + 1)
        ctx.peer_table.update_own(attempt=attempt.number)
        await self._attendance.attend(attempt, mine, join)

    async def close(self) -> None:
        self.ctx.results.close()
        await self.ctx.tasks.close()

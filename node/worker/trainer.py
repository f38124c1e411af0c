"""The operations of one node's DiLoCo training, which `loop` repeats.

The main thread owns a trainer. It reaches the swarm's thread through `SwarmThread.offer` and the mailbox only.
"""

from __future__ import annotations

import logging
import math
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from node.config.amendments import decode_list
from node.config.manifest import RunConfig, SyncConfig
from node.config.schema import CheckpointConfig
from node.diloco.fragments import Ranges
from node.diloco.schedule import is_time_up, progress, swarm_tokens_at
from node.errors import MachineError, QuotaError, RoundFailed, TrainingError
from node.status import Activity, Phase
from node.swarm.chain.chain import Tip
from node.swarm.consensus.ballot import LocalContribution
from node.swarm.consensus.commit import Committed
from node.swarm.consensus.context import Rules, rules_after
from node.swarm.messages import MOST_LOSS, RoundOutcome
from node.training.algorithm import inner_learning_rate
from node.training.checkpoint import DISK_FULL, Checkpoint
from node.worker.checkpointing import Checkpointer, CheckpointSchedule, outer_checkpoint
from node.worker.contribution import ContributionTracker, FragmentUpdate
from node.worker.counters import WorkCounters
from node.worker.credit_file import CreditFile
from node.worker.duties import Duties
from node.worker.encoder import RESIDUAL, Encoder, is_encodable
from node.worker.evaluation import Evaluation
from node.worker.inner_trainer import InnerTrainer, needs_inputs
from node.worker.reporter import Reporter
from node.worker.round_diagnostics import ExclusionNotice
from node.worker.round_log import RoundLog
from node.worker.sampler import TextSampler
from node.worker.session import Session
from node.worker.step_faults import StepFaults

logger = logging.getLogger(__name__)

POLL_PAUSED_S = 0.5
MAX_RESETS = 3
"""How many times in a row a node resets diverged parameters to the anchor before it gives up."""
BELOW_QUORUM_RATIO = 2.0
"""With too few peers for a round, a node trains for this many round lengths before it waits."""
POLL_S = 0.1


@dataclass(slots=True)
class Progress:
    """Progress of the inner phase since the anchor, or since the newest contribution was sent."""

    steps: int = 0
    offset_ratio: float = 0.0
    """Share of the round that was over when this node joined. Used under the policy `steps` only."""
    losses: list[float] = field(default_factory=list)
    """Mean loss of each step of this process, nats per token."""

    @property
    def mean_loss(self) -> float | None:
        """The mean of `losses`; None without any, or if it is too large for a join."""
        mean = statistics.fmean(self.losses) if self.losses else math.inf
        return mean if mean < MOST_LOSS else None


class Amended(Exception):
    """An amendment changes how the trainer works, so another trainer continues from this one's checkpoint."""


class Trainer:
    def __init__(
        self,
        session: Session,
        inner: InnerTrainer,
        cfg: CheckpointConfig,
        reporter: Reporter,
        counters: WorkCounters,
        exclusion: ExclusionNotice,
        duties: Duties,
        check: Callable[[], None],
        on_contribution_over: Callable[[], None],
    ) -> None:
        """Resume from the session's checkpoint, or start from its downloaded state.

        `exclusion` outlives this trainer, as a node may still be excluded after it rejoins. `check` raises StopAsked.
        `on_contribution_over` is called when the round of a contribution is committed, even if the round excludes it.
        """
        tip, checkpoint = session.start.take()
        assert tip is not None
        self._session, self._terms, self._inner = session, session.terms_after(tip), inner
        self._made_for = self._run
        """The settings at this trainer's start."""
        inner.use(self._run)
        self._reporter, self._counters = reporter, counters
        self._check, self._on_contribution_over = check, on_contribution_over
        self._duties = duties
        self.tip: Tip = tip
        self._first_head = self.tip.head
        """The head at which this trainer began, or at which it has discarded its work after a rollback."""
        self._progress = Progress()
        self._settle_s = 0.0
        """Time from the newest commit that this node waited for to its next inner step."""
        self._is_settling = self._is_behind = False
        self._resets = 0
        self._last_step: tuple[float, float] | None = None
        """(loss, learning rate) of the newest inner step."""
        fragments, saved = self._run.sync.fragment_count, self._usable(checkpoint)
        self._contributions = ContributionTracker(fragments, saved.extra.get("owed", ()) if saved else ())
        self._encoder = Encoder(self._rules.layouts, self._run.sync, saved.optimizer if saved else {})
        self._evaluation = Evaluation(inner)
        self._sampler = TextSampler(self._run.sample, inner, session.folder)
        reporter.set_samples(self._sampler.newest)
        self._round_log = RoundLog(session, reporter, counters, exclusion)
        self._checkpointer = Checkpointer(session.store, session.source, session.swarm.faults, duties.saved)
        self._schedule = CheckpointSchedule(self.tip.round, cfg.every_s, fragments)
        self._credit_file = CreditFile(session.folder, session.manifest)
        self._faults = StepFaults(session.swarm.faults, lambda: session.swarm.view.peer_id, lambda: self.tip)
        self._begin(saved)
        self._report_position()

    def _usable(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """A checkpoint as far as it fits the settings; None without one."""
        if checkpoint is None:
            return None
        saved, discarded = _fitting(checkpoint, self._run)
        self._counters.totals.tokens_discarded += discarded
        return saved

    def _begin(self, saved: Checkpoint | None) -> None:
        """Load the parameters and open the text."""
        is_on_disk = saved is not None and not saved.extra.get("unsaved")
        self._begun_at = self._saved_at = self._position if is_on_disk else None
        """The positions of the newest checkpoint that was begun, and of the newest one on the disk. None if there is
        none, and after a reset to the anchor."""
        if saved is None:
            self._inner.start(self.tip.state.anchor)
            self._start_text()
        else:
            self._inner.resume(saved)
            if not saved.text:  # The checkpoint of a founder, whose first round is not 0 if the run continues another.
                self._inner.text.start_round(self.tip.round + 1)
            self._inner.text.use_weights(self._run.weights_at(self._tokens))
            self._progress = Progress(saved.inner_step)
            self._reporter.set_evaluation_loss(saved.extra.get("evaluation_loss"), None)

    @property
    def _run(self) -> RunConfig:
        """The settings of the round after the tip."""
        return self._terms.run

    @property
    def _rules(self) -> Rules:
        """The rules of the round after the tip."""
        return rules_after(self._session.rules, self.tip)

    @property
    def _position(self) -> tuple[str, int]:
        """(head, number of all inner steps ever made). A second checkpoint of one position would add nothing."""
        return self.tip.head, self._counters.totals.inner_steps

    def align_to(self, tip: Tip, *, is_new: bool) -> None:
        """Start at the others' point of the round, given by `tip`. `is_new` means that it has made no inner steps."""
        if tip.head != self.tip.head:
            return
        self.tip = tip
        if is_new and self._run.round.policy == "steps" and tip.round_s:
            age_s = time.monotonic() - tip.anchor_at_s
            self._progress.offset_ratio = min(1.0, max(0.0, age_s / tip.round_s))

    @property
    def run_is_complete(self) -> bool:
        return self._session.is_last(self.tip)

    @property
    def _tokens(self) -> int:
        """The tokens that the schedules follow."""
        return self._session.schedule_tokens(self.tip)

    @property
    def end_reason(self) -> str:
        """Why the run is complete."""
        if self._terms.is_stopped:
            return f"The run was stopped by an amendment, after {self.tip.state.tokens} tokens."
        return f"The run is complete: {self._run.total_tokens} tokens."

    @property
    def run_is_paused(self) -> bool:
        """Whether an amendment has paused the run, so that nobody trains."""
        return self._terms.is_paused and not self.run_is_complete

    def _start_text(self) -> None:
        """Read the text of the round after the tip."""
        self._inner.text.start_round(self.tip.round + 1)
        self._inner.text.use_weights(self._run.weights_at(self._tokens))

    # the inner phase of a round

    @property
    def has_contribution_in_flight(self) -> bool:
        return self._contributions.in_flight is not None

    @property
    def must_synchronize(self) -> bool:
        """Whether a contribution is due, or the one in flight must be committed before further inner steps.

        In a run that is paused or complete, no inner step is allowed.

        While a contribution is in flight, blocking rounds allow no inner step, and overlapped rounds allow as many as a
        round has. The first round is always blocking, as its length is unknown.
        """
        if self._terms.is_paused or self.run_is_complete:
            return True
        if self.has_contribution_in_flight:
            return self._run.sync.mode == "blocking" or self.tip.round_s is None or self._done_ratio >= 1.0
        return self._is_phase_over() and self._contributions.pending_tokens(self._next_fragment) > 0

    def _is_phase_over(self) -> bool:
        """Whether the inner phase is over.

        It is over after H steps, or, with policy `time`, as soon as one more step would end too late.
        """
        policy, round_s = self._run.round, self.tip.round_s
        if policy.policy == "time" and round_s is not None:
            is_below_quorum = self._session.swarm.view.training < policy.min_peers
            return is_time_up(
                self._elapsed_s,
                round_s=round_s * (BELOW_QUORUM_RATIO if is_below_quorum else 1.0),
                step_s=self._inner.step_s or 0.0,
                grace_s=self._rules.closing.grace_s(round_s),
                lead_s=self._upload_lead_s,
            )
        return self._done_ratio >= 1.0 or self._first_round_is_due()

    def _first_round_is_due(self) -> bool:
        """Whether another member has made its H steps, which ends the first round under the policy `time`."""
        if self._run.round.policy == "steps" or self.tip.round_s is not None:
            return False
        rows = self._session.swarm.view.rows
        return any(row.phase == Phase.SYNCING for row in rows if not row.this_node and row.round == self.tip.round)

    @property
    def _next_fragment(self) -> int:
        """The fragment of the round after the tip."""
        return (self.tip.round + 1) % self._run.sync.fragment_count

    @property
    def _next_ranges(self) -> Ranges:
        return self._rules.layout_at(self.tip.round + 1).ranges

    @property
    def _done_ratio(self) -> float:
        """Progress of the inner phase. A value of 1 or more means that the phase is over."""
        inner_steps = self.tip.inner_steps
        return progress(
            self._run.round.policy,
            inner_step=self._progress.steps + round(self._progress.offset_ratio * inner_steps),
            inner_steps=inner_steps,
            elapsed_s=self._elapsed_s,
            round_s=self.tip.round_s,
        )

    @property
    def _elapsed_s(self) -> float:
        """Time since the start of the round, or since the contribution in flight was sent."""
        in_flight = self._contributions.in_flight
        return time.monotonic() - (in_flight.sent_at if in_flight is not None else self.tip.anchor_at_s)

    @property
    def _upload_lead_s(self) -> float:
        """The time before the end of a round at which the contribution is due; above 0 for a slow uplink."""
        upload_s = self._session.swarm.view.lead_s
        return upload_s + self._encoder.last_encoding_s if upload_s else 0.0

    def inner_step(self) -> None:
        """Make one step of the inner optimizer on the next batch."""
        if self._is_settling:
            self._is_settling, self._settle_s = False, max(0.0, time.monotonic() - self.tip.anchor_at_s)
        self._faults.before_step()
        lr = self._learning_rate()
        try:
            result = self._inner.step(lr, self._faults, self._after_micro_batch)
        except TrainingError as exc:
            if self._resets >= MAX_RESETS:
                raise
            self._reset_to_anchor(f"The local parameters no longer train ({exc})")
            return
        if result is None:
            self._reporter.enter_no_text(self._inner.text.problem)
            return
        self._reporter.leave_no_text()
        if self._reporter.state.code == "no_text":
            self.report_training()
        self._progress.steps += 1
        if not result.tokens:
            logger.warning("An inner step was skipped: its loss or gradient is not finite.")
            return
        self._contributions.add_tokens(result.tokens)
        self._last_step = (result.loss, lr)
        self._progress.losses.append(result.loss)
        if self._reporter.is_due:
            self._report_step()

    def _learning_rate(self) -> float:
        """The learning rate for the swarm's token count, which includes tokens that are being averaged."""
        run = self._run
        first_round_tokens = run.round.first_round_tokens or run.tokens_per_inner_step * self.tip.inner_steps
        round_tokens = self.tip.last_round_tokens or first_round_tokens
        anchor_tokens = self._tokens + (round_tokens if self.has_contribution_in_flight else 0)
        return inner_learning_rate(run, swarm_tokens_at(anchor_tokens, self._done_ratio, round_tokens))

    def _after_micro_batch(self) -> None:
        """Report, and obey orders, between the micro-batches of a step, because a step may take long."""
        if self._reporter.is_due:  # Report the previous step here, or steps longer than the interval never show.
            self._report_step()
        self._report_and_check()

    def attend(self) -> None:
        """Check background work, start a checkpoint that is due, report, and obey orders. Called between two steps."""
        self._check_checkpoint()
        self._encoder.check()
        if not self._checkpointer.is_busy and self._schedule.is_due(self._checkpointer.save_s):
            if self._position != self._saved_at:
                self._begin_checkpoint()
            else:
                self._schedule.taken(self.tip.round)
        self._report_and_check()

    def _check_checkpoint(self) -> None:
        """Tell the owner if the disk was too full for the newest checkpoint. Training goes on until the next one.

        Raises the other errors of the checkpoint.
        """
        try:
            if self._checkpointer.check():
                self._saved_at = self._begun_at
                self._reporter.notice(DISK_FULL, "")
        except MachineError as exc:
            self._tell_full_disk(exc)

    def _tell_full_disk(self, error: MachineError) -> None:
        """Tell the owner that the disk is full. Raises any other error."""
        if error.code not in (DISK_FULL, QuotaError.code):
            raise error
        logger.warning("%s", error)
        if error.code == QuotaError.code:  # The quota has told the owner already.
            return
        self._reporter.notice(DISK_FULL, str(error))

    def _report_and_check(self) -> None:
        self._reporter.tell()
        self._check()

    def _reset_to_anchor(self, why: str) -> None:
        """Discard this node's inner steps, and report a failed round."""
        self._resets += 1
        self._begun_at = self._saved_at = None
        error = RoundFailed(f"{why}: this node discards them and continues from the anchor.", code="not_finite")
        logger.warning("%s", error)
        self._inner.reset_to(self.tip.state.anchor)
        self._progress = Progress()
        local = self._inner.replica.take(self._next_ranges, on_host=False)
        self._count_discarded(self._contributions.discard_pending(local))
        self._round_log.round_failed(error, self.tip)

    # the outer step

    def send_pseudo_gradient(self) -> None:
        """Encode the pseudo-gradient of the next fragment on the encoder's thread, which then hands it to the swarm."""
        damage = self._faults.before_contribution(self._inner.replica)
        local = self._inner.replica.take(self._next_ranges, on_host=False)
        if not is_encodable(local):
            self._reset_to_anchor("The local parameters are no longer all finite numbers")
            return
        self._resets = 0
        self._report_step()
        swarm, parent, evaluation_loss = self._session.swarm, self.tip.head, self._evaluation.loss
        typical_step_s = self.tip.round_s / self.tip.inner_steps if self.tip.round_s else 1.0
        step_s = self._inner.step_s or typical_step_s
        fragment = self._next_fragment
        tokens = min(self._contributions.pending_tokens(fragment), self._run.max_contribution_tokens)
        sync = self._run.sync
        settle_s = self._settle_s if sync.mode == "blocking" else 0.0
        loss = self._progress.mean_loss

        def offer(chunks: Sequence[bytes], norm: float) -> None:
            sent = damage(chunks)
            swarm.offer(LocalContribution(parent, sent, tokens, step_s, norm, evaluation_loss, settle_s, loss))

        needs_sent = sync.mode != "blocking" and sync.merge == "correction"
        self._contributions.send(fragment, self._progress.steps, time.monotonic(), local if needs_sent else None)
        self._progress = Progress()
        self._inner.text.start_round(self.tip.round + 2)
        self._encoder.begin(fragment, self.tip.state.anchor, local, offer)

    def wait_for_outer_step(self) -> None:
        """Block until the round after the tip is committed, even if it excludes this node's contribution."""
        head, began_at = self.tip.head, time.monotonic()
        with self._counters.doing(Activity.SYNC_WAIT):
            while self.tip.head == head:
                self._process_mail(POLL_S, blocked_since=began_at)
                self._reporter.enter_waiting(self._session.swarm.view, self.tip.round + 1)
                self.attend()
        self._is_settling = True

    def wait_for_amendment(self) -> None:
        """Wait until an amendment resumes or stops the run. The swarm's thread takes part in the rounds meanwhile."""
        reason = "Those who steer this run have paused it. This node goes on by itself when they resume it."
        with self._counters.doing(Activity.PAUSED):
            while self.run_is_paused:
                self._reporter.enter(Phase.SYNCING, reason, "run_paused")
                self._process_mail(POLL_PAUSED_S)
                self.attend()
        self._is_settling = False

    def apply_committed_rounds(self) -> None:
        """Apply all rounds that the swarm has committed so far."""
        while not self._session.swarm.mailbox.empty():
            self._process_mail()
            self._report_and_check()

    @property
    def _has_caught_up(self) -> bool:
        """Whether no further committed round is waiting or known."""
        return self._session.swarm.mailbox.empty() and not self._is_behind

    def _process_mail(self, timeout_s: float = 0.0, blocked_since: float | None = None) -> None:
        """Process one item of the mailbox, if one arrives within `timeout_s`. Raises errors of the swarm."""
        try:
            mail = self._session.swarm.mailbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if isinstance(mail, Committed):
            self._apply(mail, time.monotonic() - blocked_since if blocked_since is not None else 0.0)
        elif isinstance(mail, RoundFailed):
            self._round_log.round_failed(mail, self.tip)
        else:
            raise mail

    def _apply(self, committed: Committed, blocked_s: float) -> None:
        """Make the committed round the tip, update the parameters of its fragment, and record the round."""
        if self._schedule.is_wanted and not self._checkpointer.is_busy:
            self._begin_checkpoint()
        began_at = time.monotonic()
        fragment, ranges = self._next_fragment, self._next_ranges
        old, self.tip, self._is_behind = self.tip, committed.tip, committed.is_behind
        if not committed.is_replayed:
            self._credit_file.round_over(old, self.tip)
        if self._terms.is_paused:
            self._apply_paused(committed)
            return
        is_newest = self._has_caught_up
        peer_id = self._session.swarm.view.peer_id
        recorded = self.tip.last_weights.get(peer_id, 0) if committed.included else None
        update = self._contributions.round_over(fragment, recorded, self._progress.steps, is_newest=is_newest)
        contributed = update.contribution is not None
        self._count(update, committed)
        if is_newest:
            worked = contributed or update.is_carried or update.discarded_tokens > 0
            self._round_log.update_exclusion_notice(
                committed, worked=worked, round_s=old.round_s, step_s=self._inner.step_s
            )
        sent = min(update.contribution.tokens, self._run.max_contribution_tokens) if update.contribution else None
        self._encoder.round_over(fragment, self.tip.round, recorded is not None and recorded == sent)
        if recorded not in (None, sent):  # It was sent before a restart.
            self._encoder.forget(fragment)
        self._faults.before_merge()
        self._update_parameters(update, ranges, old)
        self._reporter.tell()
        if not contributed:
            self._progress = Progress()
        if self._has_caught_up and not committed.is_replayed:
            self._evaluation.round_over(self.tip, peer_id, self._report_and_check)
            self._sampler.round_over(self.tip, self._report_and_check)
            self._reporter.set_samples(self._sampler.newest)
        self._start_text()
        if (phase := self._run.phase_at(self._tokens)) != self._run.phase_at(self._session.schedule_tokens(old)):
            logger.info("Phase %d of the run begins.", phase)
        record = self._round_log.round_over(
            committed, blocked_s=blocked_s, apply_s=time.monotonic() - began_at, step_s=self._inner.step_s
        )
        self._reporter.set_evaluation_loss(self._evaluation.loss, record)
        self._duties.round_over(record, self.tip)
        self._report_position()
        if self._has_caught_up:
            self._schedule.round_over(self.tip.round, is_needed=self._duties.needs_checkpoint(self.tip))
        if contributed:
            self._on_contribution_over()
        self._follow_amendments(committed.outcome)

    def _apply_paused(self, committed: Committed) -> None:
        """Record a round of a paused run, which has no contribution and changes no parameter."""
        self._round_log.round_over(replace(committed, mean_norm=None), blocked_s=0.0, apply_s=0.0, step_s=None)
        self._report_position()
        if self._has_caught_up:
            self._schedule.round_over(self.tip.round)
        self._follow_amendments(committed.outcome)

    def _follow_amendments(self, outcome: RoundOutcome) -> None:
        """Use the settings of the round after the tip, and log what this round has accepted.

        Raises Amended if they need another trainer. The parameters have no contribution in flight then.
        """
        if outcome.plan.amendment is not None:
            amendment = outcome.plan.amendment.amendment
            logger.info(
                "Round %d has accepted amendment %d by %s: %s, from round %d.",
                outcome.round, amendment.number, ", ".join(outcome.plan.amendment.signatures), amendment.describe(),
                amendment.from_round,
            )  # fmt: skip
        before, self._terms = self._terms, self._session.terms_after(self.tip)
        if self._session.rules.is_rolled_back(self.tip):
            done = [one for one in decode_list(self.tip.state.amendments) if one.rewound_tokens is not None]
            to_round = done[-1].signed.amendment.to_round
            logger.warning("An amendment has taken the run back to the state after round %s.", to_round)
            raise Amended
        if before == self._terms:
            return
        if not self._terms.is_stopped:
            logger.info("Amended settings apply from round %d on.", self.tip.round + 1)
        self._report_position()
        if needs_inputs(before.run, self._run) or before.run.sync != self._run.sync:
            raise Amended
        self._inner.use(self._run)
        self._start_text()

    def _update_parameters(self, update: FragmentUpdate, ranges: Ranges, old: Tip) -> None:
        """Merge the fragment's local parameters with the new anchor. All other parameters stay as they are."""

        def merge(part: Tensor, at: slice, place: slice) -> Tensor:
            new_anchor = self.tip.state.anchor[place].to(part.device)
            old_anchor = old.state.anchor[place].to(part.device) if update.is_carried else new_anchor
            return update.merge(part, at, old_anchor, new_anchor, self._run.sync.mix_alpha)

        self._inner.replica.change(ranges, merge)

    def _count(self, update: FragmentUpdate, committed: Committed) -> None:
        """Count merged and discarded tokens. Each of the F fragments has every token, so a round counts 1/F of them."""
        fragments = self._run.sync.fragment_count
        self._counters.totals.contributions_carried += update.is_carried
        self._counters.count_tokens(
            committed.tip.round,
            merged=update.counted_tokens // fragments,
            discarded=update.discarded_tokens // fragments,
            is_replayed=committed.is_replayed,
        )

    def _count_discarded(self, tokens: int) -> None:
        self._counters.totals.tokens_discarded += tokens // self._run.sync.fragment_count

    # checkpoints and the end

    def save(self, *, cancels: bool = True) -> None:
        """Write a checkpoint of outer and local state to the disk.

        Raises MachineError if the disk does not take it, or `limits.disk_gb` leaves no room.

        An older checkpoint that is being written is cancelled, so that a stop does not write two, unless `cancels` is
        false. Nothing is written if the newest checkpoint is still up to date.
        """
        self._forget_after_rollback()
        if cancels and self._begun_at != self._position:
            self._checkpointer.cancel()
        try:
            self._wait_for_checkpoint()
        except MachineError as exc:  # It is that of an earlier attempt.
            self._tell_full_disk(exc)
        self._check_checkpoint()
        if self._position == self._saved_at:
            return
        self._begin_checkpoint()
        self._wait_for_checkpoint()
        if self._checkpointer.refusal:
            what = f"The checkpoint of round {self.tip.round} is not written, and the older checkpoint is kept."
            raise QuotaError(f"{what} {self._checkpointer.refusal}")

    def save_if_possible(self, *, cancels: bool = True) -> None:
        """Save, or tell the owner that the disk is full. Call this where the node goes on without the checkpoint."""
        try:
            self.save(cancels=cancels)
        except MachineError as exc:
            self._tell_full_disk(exc)

    def _wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint is written, and keep reporting, as gigabytes take a while."""
        with self._counters.doing(Activity.CHECKPOINT):
            while not self._checkpointer.wait(POLL_S):
                self._reporter.tell()

    def _needed_rounds(self) -> frozenset[int]:
        """The rounds to which the run may go back soon."""
        known = [one.signed for one in decode_list(self.tip.state.amendments)]
        known += self._session.swarm.view.pending_amendments
        amendments = [signed.amendment for signed in known]
        return frozenset(
            one.to_round for one in amendments if one.to_round is not None and one.from_round > self.tip.round
        )

    def _begin_checkpoint(self) -> None:
        """Start to write a checkpoint. Training continues meanwhile, and `attend` raises the errors of the write."""
        self._check_checkpoint()
        with self._counters.doing(Activity.CHECKPOINT):
            self._session.store.needed = self._needed_rounds()
            self._checkpointer.begin(self._checkpoint(), self.tip)
            self._begun_at = self._position
        self._schedule.taken(self.tip.round)

    def _checkpoint(self) -> Checkpoint:
        counters = self._counters.save(self._counters.counters(self._session.swarm.view))
        sent_steps, pending = self._contributions.for_checkpoint(self._next_fragment)
        evaluation_loss = self._reporter.training.evaluation_loss
        outer = outer_checkpoint(self._session.manifest, self.tip)
        return replace(
            outer,
            local=self._inner.replica.parameters,
            optimizer=self._inner.replica.optimizer_state() | self._encoder.tensors(),
            inner_step=sent_steps + self._progress.steps,
            text=self._inner.text_state,
            extra=outer.extra
            | {
                "ledger": counters,
                "owed": pending,
                "evaluation_loss": evaluation_loss,
                "made_for": _inputs_of(self._made_for),
            },
        )

    def hand_over(self) -> Checkpoint:
        """End this trainer after Amended. Returns the checkpoint from which a trainer with the new settings goes on.

        Its extra value `unsaved` says that the disk did not take it.

        After a rollback it has the anchor's parameters and no other work of this node.
        """
        self._encoder.wait()
        self.save_if_possible()
        self._check_checkpoint()
        checkpoint = self._checkpoint()
        is_saved = self._position == self._saved_at
        return checkpoint if is_saved else replace(checkpoint, extra=checkpoint.extra | {"unsaved": True})

    def _forget_after_rollback(self) -> None:
        """Discard this node's work if the newest round has taken the run back to an earlier state."""
        if self.tip.head == self._first_head or not self._session.rules.is_rolled_back(self.tip):
            return
        self._first_head = self.tip.head
        self._encoder.wait()
        self._count_discarded(self._contributions.discard_pending())
        self._inner.reset_to(self.tip.state.anchor)
        self._inner.reset_history()
        self._begun_at = self._saved_at = None
        self._progress = Progress()
        for fragment in range(self._made_for.sync.fragment_count):
            self._encoder.forget(fragment)

    def abandon(self) -> None:
        """Wait for background work, and discard this node's work, because its chain has lost."""
        self._encoder.wait()
        with suppress(MachineError):
            self._wait_for_checkpoint()
        if (in_flight := self._contributions.in_flight) is not None:
            self._count_discarded(in_flight.tokens)
        self._count_discarded(self._contributions.discard_pending())

    # reports

    def report_training(self) -> None:
        overlaps = self.has_contribution_in_flight and self._run.sync.mode != "blocking"
        self._reporter.enter_training(self.tip.round + 1, overlaps=overlaps)

    def _report_step(self) -> None:
        """Report the newest step. Call only when a report is due, as it takes noticeable time."""
        if self._last_step is not None:
            self._reporter.set_step(*self._last_step, self._progress.steps, self._inner.tokens_per_second)
            self._report_time_left()

    def _report_time_left(self) -> None:
        """Report the time until the next contribution is due."""
        done_ratio = min(1.0, self._done_ratio)
        by_clock = self._run.round.policy == "time" and self.tip.round_s is not None
        length_s = self.tip.round_s if by_clock else self.tip.inner_steps * (self._inner.step_s or 0.0)
        lead_s = self._upload_lead_s if by_clock else 0.0
        left_s = max(0.0, (1 - done_ratio) * length_s - lead_s) if length_s else None
        self._reporter.set_sync_progress(done_ratio, left_s, self.tip.round_s if by_clock else None)

    def _report_position(self) -> None:
        """Report the node's position in the run."""
        self._reporter.set_position(self._session.manifest, self._terms, self.tip)
        self._reporter.set_inner_steps(self._progress.steps, self.tip.inner_steps)
        self._report_time_left()


def _inputs_of(run: RunConfig) -> dict[str, Any]:
    """The settings that decide which parts of a checkpoint a trainer can use."""
    return {
        "sync": run.sync.model_dump(mode="json"),
        "sources": list(run.data.sources),
        "sources_per_member": run.data.sources_per_member,
        # The built-in text is cut into rows of this length, and the position counts in them.
        "row_length": run.inner.sequence_length if run.data.is_builtin else 0,
    }


def _fitting(saved: Checkpoint, run: RunConfig) -> tuple[Checkpoint, int]:
    """Return the part of a checkpoint that a trainer with these settings can use, and the tokens that it drops.

    After another text, the position in it does not count. After another way to exchange contributions, the residuals do
    not, and after other fragments, the node starts from the anchor.
    """
    made_for, now = saved.extra.get("made_for"), _inputs_of(run)
    if made_for is None or made_for == now:
        return saved, 0
    # A checkpoint of an earlier version has fewer of these settings.
    if any(made_for.get(name, now[name]) != now[name] for name in ("sources", "sources_per_member", "row_length")):
        saved = replace(saved, text={})
    if made_for["sync"] == now["sync"]:
        return saved, 0
    kept = {name: tensor for name, tensor in saved.optimizer.items() if not name.startswith(RESIDUAL)}
    saved = replace(saved, optimizer=kept)
    if _fragments(made_for["sync"]) == _fragments(now["sync"]):
        return saved, 0
    owed = sum(tokens for tokens, _ in saved.extra.get("owed", ()))
    saved = replace(saved, local=None, inner_step=0, extra={**saved.extra, "owed": ()})
    return saved, owed // _fragments(made_for["sync"])


def _fragments(sync: dict[str, Any]) -> int:
    return SyncConfig.model_validate(sync).fragment_count

"""One node's side of DiLoCo: the steps that `loop` strings together. Knows its own parameters, the tip, the mailbox.

The main thread owns everything here. The swarm's thread is reached through `offer` and the mailbox, and nothing else.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from node.config import CheckpointConfig
from node.diloco.schedule import is_time_up, learning_rate, progress, swarm_tokens_at
from node.errors import MachineError, RoundFailed, TrainingError
from node.status import Activity, Phase
from node.swarm.attempt import Contribution
from node.swarm.chain import Tip
from node.swarm.faults import spoil_blobs
from node.swarm.rendezvous import grace_seconds, role_of
from node.swarm.rounds import Committed
from node.worker import shown
from node.worker.accounts import Accounts
from node.worker.books import Books
from node.worker.evaluation import Evaluation
from node.worker.ledger import Ledger
from node.worker.left_out import LeftOut
from node.worker.local import Local
from node.worker.outgoing import Outgoing, are_numbers
from node.worker.saver import Calendar, Saver
from node.worker.session import Session
from node.worker.snapshot import checkpoint_of
from node.worker.teller import Teller

logger = logging.getLogger(__name__)

MAX_DROPPED = 3
"""Times in a row that a node may go back to the anchor because its parameters are no numbers; then it gives up."""
WAITING_RATIO = 2.0
POLL_S = 0.1


@dataclass(slots=True)
class Progress:
    """Where this node is in its round: since the anchor, or since it sent its newest contribution."""

    steps: int = 0
    offset: float = 0.0
    """Share of the round that was over when this node came to it; under `steps` only."""


class Trainer:
    """Anchor, progress and rounds of one node. `round_over` is called when a contribution of this node has landed."""

    def __init__(
        self,
        session: Session,
        local: Local,
        saves: CheckpointConfig,
        teller: Teller,
        ledger: Ledger,
        left_out: LeftOut,
        check: Callable[[], None],
        round_over: Callable[[], None],
    ) -> None:
        """`left_out` outlives this trainer: a node that rejoins may go on being left out."""
        assert session.tip is not None
        self.session, self.run, self.local = session, session.manifest.run, local
        self.teller, self.ledger, self._check, self._round_over = teller, ledger, check, round_over
        self.tip: Tip = session.tip
        self.progress = Progress()
        self._books = Books(session, teller, ledger, left_out)
        self._accounts = Accounts(self.run.sync.fragment_count)
        self._saver = Saver(session.store, session.source, session.swarm.faults)
        self._calendar = Calendar(self.tip.round, saves.every_s, self.run.sync.fragment_count)
        self._evaluation = Evaluation(self.run.evaluation, local)
        self._dropped = 0
        self._settle_s = 0.0
        """From the newest commit that this node waited for to its first inner step after it."""
        self._is_settling = False
        """This node has waited for a commit, and not done a step since."""
        self._newest: tuple[float, float] | None = None
        """Loss and learning rate of the newest inner step; None before the first."""
        self.resume()

    # position

    def resume(self) -> None:
        """Go on from the session's checkpoint, or from its downloaded state."""
        session, saved = self.session, self.session.checkpoint
        tensors = saved.optimizer if saved is not None else {}
        self._outgoing = Outgoing(session.rules.grids, self.run.sync, tensors)
        if saved is None:
            self.local.begin(self.tip.state.anchor)
            self.local.text.start_round(self.tip.round + 1)
        else:
            self.local.resume(saved)
            self.progress = Progress(saved.inner_step)
            self._accounts = Accounts(self.run.sync.fragment_count, saved.extra.get("owed", ()))
            shown.evaluation(self.teller, saved.extra.get("evaluation_loss"), None)
        self._show_position()

    def save(self) -> None:
        """A checkpoint of outer and local state, on the disk when this returns. Raises MachineError if that is full."""
        self._wait_saved()
        self._begin_save()
        self._wait_saved()

    def _wait_saved(self) -> None:
        """Until nothing is being written; telling of it, as gigabytes take their time."""
        with self.ledger.doing(Activity.CHECKPOINT):
            while not self._saver.wait(POLL_S):
                self.teller.tell()

    def _begin_save(self) -> None:
        """Training goes on while it is written; `breathe` tells of a disk that does not take it."""
        with self.ledger.doing(Activity.CHECKPOINT):
            ledger = self.ledger.save(self.ledger.counters(self.session.swarm.view))
            sent_steps, owed = self._accounts.for_checkpoint(self._next)
            checkpoint = checkpoint_of(
                self.session.manifest,
                self.tip,
                local=self.local.replica.parameters,
                optimizer=self.local.replica.moments() | self._outgoing.tensors(),
                inner_step=sent_steps + self.progress.steps,
                text=self.local.place,
                extra={"ledger": ledger, "owed": owed, "evaluation_loss": self.teller.training.evaluation_loss},
            )
            self._saver.begin(checkpoint, self.tip)
        self._calendar.taken(self.tip.round)

    # the inner loop

    @property
    def _next(self) -> int:
        """The fragment whose round is the next one."""
        return (self.tip.round + 1) % self.run.sync.fragment_count

    @property
    def done_ratio(self) -> float:
        """Share of the round's inner phase that is over, since the anchor or since sending; ready from 1 on."""
        policy, inner_steps = self.run.round.policy, self.tip.inner_steps
        steps = self.progress.steps + round(self.progress.offset * inner_steps)
        past_s, round_s = self._elapsed_s, self.tip.round_s
        return progress(policy, inner_step=steps, inner_steps=inner_steps, elapsed_s=past_s, round_s=round_s)

    @property
    def _elapsed_s(self) -> float:
        """Since the round's start, or since sending."""
        flight = self._accounts.flight
        return time.monotonic() - (flight.at_s if flight is not None else self.tip.anchor_at_s)

    @property
    def _lead_s(self) -> float:
        """How long before the end of a round this node's contribution is due: for a slow uplink."""
        upload_s = self.session.swarm.view.lead_s
        return upload_s + self._outgoing.seconds if upload_s else 0.0

    @property
    def in_flight(self) -> bool:
        return self._accounts.flight is not None

    def must_sync(self) -> bool:
        """A contribution is due; or one is in flight, and nothing may be done before it has landed.

        Blocking rounds allow no step meanwhile, overlapped ones as many as a round has; the first one, whose length
        nobody knows, is a blocking one.
        """
        if self.in_flight:
            return self.run.sync.mode == "blocking" or self.tip.round_s is None or self.done_ratio >= 1.0
        return self._is_due()

    def _is_due(self) -> bool:
        """By the clock, and with too few peers there for a round: train on to twice its length; wait only then.

        By the clock no step is begun that would end too late, but for the first of a contribution.
        """
        rounds, round_s = self.run.round, self.tip.round_s
        if rounds.policy == "time" and round_s is not None:
            below_quorum = self.session.swarm.view.training < rounds.min_peers
            is_ready = is_time_up(
                self._elapsed_s,
                round_s=round_s * (WAITING_RATIO if below_quorum else 1.0),
                step_s=self.local.step_s or 0.0,
                grace_s=grace_seconds(round_s),
                lead_s=self._lead_s,
            )
        else:
            is_ready = self.done_ratio >= 1.0 or self._first_round_is_due()
        return is_ready and self._accounts.tokens(self._next) > 0

    def _first_round_is_due(self) -> bool:
        """By the clock, while nobody knows how long a round lasts: when the first member has done its H steps."""
        if self.run.round.policy == "steps" or self.tip.round_s is not None:
            return False
        others = (row for row in self.session.swarm.view.rows if not row.this_node and row.round == self.tip.round)
        return any(row.phase == Phase.SYNCING for row in others)

    def inner_step(self) -> None:
        """One AdamW step on the next batch, at the learning rate of the swarm's tokens."""
        faults = self.session.swarm.faults
        if self._is_settling:
            self._is_settling, self._settle_s = False, max(0.0, time.monotonic() - self.tip.anchor_at_s)
        faults.meet("inner", self.tip.round + 1, self._role)
        lr = self._learning_rate()
        try:
            result = self.local.step(lr, faults, self.tip.round + 1, self._between_passes)
        except TrainingError as exc:
            if not self.progress.steps or self._dropped >= MAX_DROPPED:
                raise
            self._drop(f"The local parameters no longer train ({exc})")
            return
        if result is None:
            shown.no_text(self.teller, self.local.text.problem)
            return
        if self.teller.state.code == "no_text":
            self.show_training()
        self.progress.steps += 1
        if not result.tokens:
            logger.warning("An inner step came to nothing: its loss or gradient is no finite number; it is left out.")
            return
        self._accounts.earn(result.tokens)
        self._newest = (result.loss, lr)
        if self.teller.is_due:
            self._show_step()

    def _between_passes(self) -> None:
        """Within a step, which may take long: tell, and obey, unless other ranks would wait for this one."""
        if self.teller.is_due:  # The step before, else steps of more than a second would never be shown.
            self._show_step()
        self.teller.tell()
        if not self.local.replica.is_shared:
            self._check()

    def breathe(self) -> None:
        """Tell, and obey, between two inner steps."""
        self._saver.check()
        self._outgoing.check()
        if self._calendar.is_due and not self._saver.is_busy:
            self._begin_save()
        self._tell_and_obey()

    def _tell_and_obey(self) -> None:
        """Raises what the check raises: StopAsked."""
        self.teller.tell()
        self._check()

    def _learning_rate(self) -> float:
        run = self.run
        usual = run.round.first_round_tokens or run.tokens_per_inner_step * self.tip.inner_steps
        round_tokens = self.tip.last_round_tokens or usual
        # What is in flight will be in the anchor before long.
        anchor_tokens = self.tip.state.tokens + (round_tokens if self.in_flight else 0)
        inner = run.inner
        return learning_rate(
            swarm_tokens_at(anchor_tokens, self.done_ratio, round_tokens),
            peak=inner.lr,
            warmup_tokens=inner.warmup_tokens,
            total_tokens=run.total_tokens,
            min_ratio=inner.min_lr_ratio,
        )

    # the outer step

    def offer(self) -> None:
        """Hand the pseudo-gradient to the swarm, once it is encoded; training goes on beside that."""
        spoilt = self.session.swarm.faults.spoils("inner", self.tip.round + 1, self._role)
        if spoilt in ("nan", "garbage"):
            self.local.spoil(spoilt)
        fragment, ranges = self._next, self.session.rules.grid_at(self.tip.round + 1).ranges
        parent, swarm, evaluated = self.tip.head, self.session.swarm, self._evaluation.newest
        usual_s = self.tip.round_s / self.tip.inner_steps if self.tip.round_s else 1.0
        step_s = self.local.step_s or usual_s
        tokens = min(self._accounts.tokens(fragment), self.run.max_contribution_tokens)
        sent = self.local.replica.take(ranges, on_host=False)
        if not are_numbers(sent):
            self._drop("The local parameters are not all finite numbers any more")
            return
        self._dropped = 0
        settle_s = self._settle_s if self.run.sync.mode == "blocking" else 0.0
        self._show_step()

        def hand_over(chunks: Sequence[bytes], norm: float) -> None:
            wrong = spoil_blobs(spoilt, chunks) if spoilt == "shape" else chunks
            swarm.offer(Contribution(parent, wrong, tokens, step_s, norm, evaluated, settle_s))

        keeps = self.run.sync.mode != "blocking" and self.run.sync.merge == "correction"
        self._accounts.send(fragment, self.progress.steps, time.monotonic(), sent if keeps else None)
        self.progress = Progress()
        self.local.text.start_round(self.tip.round + 2)
        self._outgoing.begin(fragment, self.tip.state.anchor, sent, hand_over)

    def _drop(self, why: str) -> None:
        """Back to the anchor: what this node did since is of no use to anybody, and it says so."""
        self._dropped += 1
        error = RoundFailed(f"{why}: this node drops them and goes on from the swarm's.", code="not_finite")
        logger.warning("%s", error)
        self.local.mend(self.tip.state.anchor)
        self.progress = Progress()
        self._discard(self._accounts.give_up())
        self._books.round_failed(error, self.tip)

    def _discard(self, tokens: int) -> None:
        """Nobody will ever count these, each of them once for every fragment."""
        self.ledger.tokens_discarded += tokens // self.run.sync.fragment_count

    def _role(self) -> str:
        """In the next round, for faults on purpose."""
        return role_of(self.session.swarm.view.peer_id, self.tip.head, list(self.tip.last_weights))

    def await_commit(self) -> None:
        """Stand still until the round is over, whoever's contributions it holds."""
        before = self.tip.head
        began_s = time.monotonic()
        with self.ledger.doing(Activity.SYNC_WAIT):
            while self.tip.head == before:
                self.obey_mail(timeout_s=POLL_S, blocked_since_s=began_s)
                self._outgoing.check()
                shown.waiting(self.teller, self.session.swarm.view, self.tip.round + 1)
                self._tell_and_obey()
        self._is_settling = True

    def obey_mail(self, timeout_s: float = 0.0, blocked_since_s: float | None = None) -> None:
        """Take in what the swarm has committed, with or without this node."""
        try:
            mail = self.session.swarm.mailbox.get(timeout_s > 0, timeout_s or None)
        except queue.Empty:
            return
        if isinstance(mail, Committed):
            blocked_s = time.monotonic() - blocked_since_s if blocked_since_s is not None else 0.0
            self._apply(mail, blocked_s)
        elif isinstance(mail, RoundFailed):
            self._books.round_failed(mail, self.tip)
        else:
            raise mail

    def obey_all_mail(self) -> None:
        """Take in everything that has been committed so far."""
        while not self.session.swarm.mailbox.empty():
            self.obey_mail()
            self._tell_and_obey()

    def take_age(self, tip: Tip, *, fresh: bool) -> None:
        """Be as far into the round as the others are. `fresh`: this node has just come, it has no steps of its own."""
        if tip.head != self.tip.head:
            return
        self.tip = tip
        if fresh and self.run.round.policy == "steps" and tip.round_s:
            age_s = time.monotonic() - tip.anchor_at_s
            self.progress.offset = min(1.0, max(0.0, age_s / tip.round_s))

    def _apply(self, done: Committed, blocked_s: float) -> None:
        """The round's fragment goes to the new anchor, or with it; the other parameters stay as they are."""
        if self._calendar.is_wanted and not self._saver.is_busy:
            self._begin_save()
        began_s = time.monotonic()
        fragment, ranges = self._next, self.session.rules.grid_at(self.tip.round + 1).ranges
        old, self.tip = self.tip, done.tip
        is_newest = self.session.swarm.mailbox.empty()
        landing = self._accounts.land(fragment, done.included, self.progress.steps, is_newest=is_newest)
        self.ledger.carried += landing.is_carried
        self.ledger.count_tokens(
            done.tip.round,
            merged=landing.counted_tokens // self.run.sync.fragment_count,
            discarded=landing.discarded_tokens // self.run.sync.fragment_count,
            is_replayed=done.is_replayed,
        )
        if is_newest:  # Of rounds that this node replays it had no chance to be a part.
            worked = landing.flight is not None or landing.is_carried or landing.discarded_tokens > 0
            self._books.look_if_left_out(done, worked=worked, round_s=old.round_s, step_s=self.local.step_s)
        self._outgoing.landed(fragment, done.included and landing.flight is not None)

        def moved(part: Tensor, at: slice, place: slice) -> Tensor:
            after = self.tip.state.anchor[place].to(part.device)
            before = old.state.anchor[place].to(part.device) if landing.is_carried else after
            return landing.moved(part, at, before, after, self.run.sync.mix_alpha)

        self.local.replica.change(ranges, moved)
        self.teller.tell()
        if landing.flight is None:
            self.progress = Progress()
        if self.session.swarm.mailbox.empty() and not done.is_replayed:  # Of rounds in a row, the last one will do.
            self._evaluation.follow(self.tip, self.session.swarm.view.peer_id, self._tell_and_obey)
        self.local.text.start_round(self.tip.round + 1)
        apply_s = time.monotonic() - began_s
        record = self._books.round_over(done, blocked_s=blocked_s, apply_s=apply_s, step_s=self.local.step_s)
        shown.evaluation(self.teller, self._evaluation.newest, record)
        self._show_position()
        if self.session.swarm.mailbox.empty():
            self._calendar.round_over(self.tip.round)
        if landing.flight is not None:
            self._round_over()

    def finish(self) -> None:
        """Nothing is encoded or written from here on; what could not be written is no matter any more."""
        self._outgoing.wait()
        with suppress(MachineError):
            self._wait_saved()

    def give_up_work(self) -> None:
        """This node's line of rounds leads nowhere: what is in no record yet never will be in one."""
        if (flight := self._accounts.flight) is not None:
            self._discard(flight.tokens)
        self._discard(self._accounts.give_up())

    def run_is_complete(self) -> bool:
        return self.tip.state.tokens >= self.run.total_tokens

    # telling

    def _show_step(self) -> None:
        """The newest one; only where somebody is about to be told, as it costs more than it seems."""
        if self._newest is None:
            return
        shown.step(self.teller, *self._newest, self.progress.steps, self.local.tokens_per_second)
        self._show_wait()

    def _show_wait(self) -> None:
        """How far it is to the next contribution."""
        done = min(1.0, self.done_ratio)
        by_clock = self.run.round.policy == "time" and self.tip.round_s is not None
        length_s = self.tip.round_s if by_clock else self.tip.inner_steps * (self.local.step_s or 0.0)
        lead_s = self._lead_s if by_clock else 0.0
        shown.waits(self.teller, done, max(0.0, (1 - done) * length_s - lead_s) if length_s else None)

    def _show_position(self) -> None:
        """Where the node stands in the run."""
        shown.position(self.teller, self.session, self.tip)
        shown.steps(self.teller, self.progress.steps, self.tip.inner_steps)
        self._show_wait()

    def show_training(self) -> None:
        overlaps = self.in_flight and self.run.sync.mode != "blocking"
        shown.training(self.teller, self.tip.round + 1, overlaps=overlaps)

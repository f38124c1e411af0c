"""One node's side of DiLoCo: the steps that `loop` strings together. Knows the model, the data and the mailbox.

The main thread owns everything here. The swarm's thread is reached through `offer` and the mailbox, and nothing else.
"""

from __future__ import annotations

import logging
import math
import queue
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from node.config import Config
from node.diloco.outer import carry, pseudo_gradient
from node.diloco.schedule import learning_rate, progress, swarm_tokens_at
from node.errors import RoundFailed, SwarmError, TrainingError
from node.status import Activity, Outcome, Phase
from node.swarm.attempt import Contribution
from node.swarm.chain import Tip
from node.swarm.faults import spoil_blobs
from node.swarm.rendezvous import role_of
from node.swarm.rounds import Committed
from node.training.data import Corpus, Stream, held_out_batches
from node.training.device import Chosen
from node.training.evaluate import evaluate
from node.training.inner import InnerLoop
from node.training.model import flatten, load_flat_
from node.worker.ledger import Ledger
from node.worker.minutes import failed_record, record_of
from node.worker.session import Session, invite_of
from node.worker.snapshot import checkpoint_of
from node.worker.teller import Teller

logger = logging.getLogger(__name__)

MAX_CARRIED = 2
"""Rounds for which a contribution that was left out is kept."""
CHECKPOINT_ROUNDS = 4
"""A checkpoint at least so often: joiners replay from it, and peers keep the results of 8 rounds."""
MAX_DROPPED = 3
"""Times in a row that a node may go back to the anchor because its parameters are no numbers; then it gives up."""
WAITING_RATIO = 2.0
STEP_TIMES = 21
"""Inner steps whose median is this node's step time."""
POLL_S = 0.1


@dataclass(slots=True)
class Progress:
    """What this node has done since its anchor."""

    steps: int = 0
    tokens: int = 0
    """That stand behind the next contribution, carried ones included."""
    offset: float = 0.0
    """Share of the round that was over when this node came to it; under `steps` only."""
    carried: int = 0
    """Rounds in a row whose result did not include this node's contribution."""


class Trainer:
    """Model, optimizer, data and anchor of one node."""

    def __init__(
        self,
        config: Config,
        session: Session,
        model: nn.Module,
        corpus: Corpus,
        chosen: Chosen,
        teller: Teller,
        ledger: Ledger,
        check: Callable[[], None],
    ) -> None:
        assert session.tip is not None
        self.config, self.session, self.run = config, session, session.manifest.run
        self.teller, self.ledger, self._check = teller, ledger, check
        self.tip: Tip = session.tip
        self.progress = Progress()
        self._model, self._corpus, self._chosen = model, corpus, chosen
        self._inner = InnerLoop(model, self.run.inner, chosen.device, chosen.precision, config.devices.micro_batch)
        evaluation = self.run.evaluation
        inner = self.run.inner
        self._held_out = held_out_batches(corpus, evaluation.batches, inner.batch_size, inner.sequence_length)
        self._stream = self._new_stream()
        self._step_s: deque[float] = deque(maxlen=STEP_TIMES)
        self._checkpoint_at_s = time.monotonic()
        self._checkpoint_round = self.tip.round
        self._traffic_before = (0, 0)
        self._dropped = 0
        self.resume()

    # position

    def resume(self) -> None:
        """Go on from the session's checkpoint, or from its downloaded state."""
        saved = self.session.checkpoint
        if saved is None:
            load_flat_(self._model, self.tip.state.anchor)
            self._show_position()
            return
        load_flat_(self._model, saved.anchor if saved.local is None else saved.local)
        if saved.optimizer:
            self._inner.load_state_tensors(saved.optimizer)
        done = saved.extra.get("progress", {})
        self.progress = Progress(saved.inner_step, done.get("tokens", 0), 0.0, done.get("carried", 0))
        self._stream = self._new_stream(saved.data_round, saved.data_position)
        self._show_position()

    def _new_stream(self, round_: int | None = None, position: int = 0) -> Stream:
        """The node's own text of a round (of the next one); no rank, no world size: peer id and round suffice."""
        self._data_round = self.tip.round + 1 if round_ is None else round_
        peer_id = self.session.swarm.view.peer_id
        return Stream(self._corpus, self.session.manifest.run_id, peer_id, self._data_round, position)

    def save(self) -> None:
        """A checkpoint of outer and local state. Raises MachineError where the disk does not take it."""
        with self.ledger.doing(Activity.CHECKPOINT):
            ledger = self.ledger.save(self.ledger.counters(self.session.swarm.view))
            done = {"tokens": self.progress.tokens, "carried": self.progress.carried}
            checkpoint = checkpoint_of(
                self.session.manifest,
                self.tip,
                local=flatten(self._model),
                optimizer=self._inner.state_tensors(),
                position=(self.progress.steps, self._data_round, self._stream.position),
                extra={"ledger": ledger, "progress": done},
            )
            self.session.store.save(checkpoint)
            self.session.source.publish(self.tip)
        self._checkpoint_at_s, self._checkpoint_round = time.monotonic(), self.tip.round

    # the inner loop

    @property
    def done_ratio(self) -> float:
        """Share of the round's inner phase that is over; ready from 1 on."""
        policy, inner_steps = self.run.round.policy, self.run.round.inner_steps
        elapsed_s = time.monotonic() - self.tip.anchor_at_s
        steps = self.progress.steps + round(self.progress.offset * inner_steps)
        return progress(
            policy, inner_step=steps, inner_steps=inner_steps, elapsed_s=elapsed_s, round_s=self.tip.round_s
        )

    def round_is_due(self) -> bool:
        """By the clock, and with too few peers there for a round: train on to twice its length; wait only then."""
        rounds = self.run.round
        below_quorum = rounds.policy == "time" and self.session.swarm.view.training < rounds.min_peers
        ready = self.done_ratio >= (WAITING_RATIO if below_quorum else 1.0) or self._first_round_is_due()
        return ready and self.progress.tokens > 0

    def _first_round_is_due(self) -> bool:
        """By the clock, while nobody knows how long a round lasts: when the first member has done its H steps."""
        if self.run.round.policy == "steps" or self.tip.round_s is not None:
            return False
        others = (row for row in self.session.swarm.view.rows if not row.this_node and row.round == self.tip.round)
        return any(row.phase == Phase.SYNCING for row in others)

    def inner_step(self) -> None:
        """One AdamW step on the next batch, at the learning rate of the swarm's tokens."""
        self.session.swarm.faults.meet("inner", self.tip.round + 1, self._role)
        began_s = time.monotonic()
        lr = self._learning_rate()
        with self.ledger.doing(Activity.DATA):
            batch = self._stream.next_batch(self.run.inner.batch_size, self.run.inner.sequence_length)
        try:
            with self.ledger.doing(Activity.COMPUTE):
                result = self._inner.step(batch, lr)
                self._be_slow(time.monotonic() - began_s)
        except TrainingError as exc:
            if not self.progress.steps or self._dropped >= MAX_DROPPED:
                raise
            self._drop(f"The local parameters no longer train ({exc})")
            return
        step_s = time.monotonic() - began_s
        self.progress.steps += 1
        self.progress.tokens += result.tokens
        self._step_s.append(step_s)
        self.ledger.step_done(step_s, result.tokens)
        self._show_step(result.loss, lr, result.tokens)

    def _be_slow(self, step_s: float) -> None:
        """A fault on purpose: a device that needs longer for the same."""
        time.sleep(max(0.0, self.session.swarm.faults.slowness() - 1) * step_s)

    def breathe(self) -> None:
        """Tell, and obey, between two inner steps."""
        self.teller.tell()
        self._check()

    def _learning_rate(self) -> float:
        run = self.run
        usual = run.round.first_round_tokens or run.tokens_per_inner_step * run.round.inner_steps
        tokens = swarm_tokens_at(self.tip.state.tokens, self.done_ratio, self.tip.last_round_tokens or usual)
        inner = run.inner
        return learning_rate(
            tokens,
            peak=inner.lr,
            warmup_tokens=inner.warmup_tokens,
            total_tokens=run.total_tokens,
            min_ratio=inner.min_lr_ratio,
        )

    # the outer step

    def offer(self) -> bool:
        """Hand the encoded pseudo-gradient to the swarm. False, after dropping it, where it is not all numbers."""
        spoilt = self.session.swarm.faults.spoils("inner", self.tip.round + 1, self._role)
        if spoilt in ("nan", "garbage"):
            load_flat_(self._model, torch.full_like(self.tip.state.anchor, math.nan if spoilt == "nan" else 1.0))
        gradient: Tensor = pseudo_gradient(self.tip.state.anchor, flatten(self._model))
        grid = self.session.rules.grid
        try:
            chunks = [grid.codec.encode(gradient[start:end]) for start, end in grid.bounds]
        except ValueError:
            self._drop("The local parameters are not all finite numbers any more")
            return False
        self._dropped = 0
        norm = grid.norm(chunks)
        if spoilt == "shape":
            chunks = list(spoil_blobs(spoilt, chunks))
        step_s = statistics.median(self._step_s) if self._step_s else self.tip.round_s or 1.0
        tokens = min(self.progress.tokens, self.run.max_contribution_tokens)
        self.session.swarm.offer(Contribution(self.tip.head, chunks, tokens, step_s, norm))
        return True

    def _drop(self, why: str) -> None:
        """Back to the anchor: what this node did since is of no use to anybody, and it says so."""
        self._dropped += 1
        error = RoundFailed(f"{why}: this node drops them and goes on from the swarm's.", code="not_finite")
        logger.warning("%s", error)
        load_flat_(self._model, self.tip.state.anchor)
        moments = self._inner.state_tensors()
        if not all(bool(torch.isfinite(moment).all()) for moment in moments.values()):
            self._inner.load_state_tensors({name: torch.zeros_like(moment) for name, moment in moments.items()})
        self.progress = Progress()
        self._count_failure(error)

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
                self._show_waiting()
                self.teller.tell()
                self._check()

    def obey_mail(self, timeout_s: float = 0.0, blocked_since_s: float | None = None) -> None:
        """Take in what the swarm has committed, with or without this node."""
        try:
            mail = self.session.swarm.mailbox.get(timeout=timeout_s) if timeout_s else self._mail_now()
        except queue.Empty:
            return
        if isinstance(mail, Committed):
            blocked_s = time.monotonic() - blocked_since_s if blocked_since_s is not None else 0.0
            self._apply(mail, blocked_s)
        elif isinstance(mail, RoundFailed):
            self._count_failure(mail)
        else:
            raise mail

    def _count_failure(self, error: RoundFailed) -> None:
        self.ledger.failures[error.code] += 1
        self.ledger.rounds[Outcome.FAILED] += 1
        self.teller.tell_round(failed_record(self.tip.round + 1, error, self.tip.state.tokens))

    def obey_all_mail(self) -> None:
        """Take in everything that has been committed so far."""
        while not self.session.swarm.mailbox.empty():
            self.obey_mail()

    def take_age(self, tip: Tip, *, fresh: bool) -> None:
        """Be as far into the round as the others are. `fresh`: this node has just come, it has no steps of its own."""
        if tip.head != self.tip.head:
            return
        self.tip = tip
        if fresh and self.run.round.policy == "steps" and tip.round_s:
            age_s = time.monotonic() - tip.anchor_at_s
            self.progress.offset = min(1.0, max(0.0, age_s / tip.round_s))

    def _mail_now(self) -> Committed | RoundFailed | SwarmError:
        return self.session.swarm.mailbox.get_nowait()

    def _apply(self, done: Committed, blocked_s: float) -> None:
        """Included: local := new anchor. Left out: local += new anchor - old anchor, and the tokens are kept."""
        began_s = time.monotonic()
        old, self.tip = self.tip, done.tip
        keep = not done.included and self.progress.tokens > 0 and self.progress.carried < MAX_CARRIED
        if keep:
            load_flat_(self._model, carry(flatten(self._model), old.state.anchor, self.tip.state.anchor))
            self.progress = Progress(0, self.progress.tokens, 0.0, self.progress.carried + 1)
            self.ledger.carried += 1
        else:
            load_flat_(self._model, self.tip.state.anchor)
            self.progress = Progress()
        self._stream = self._new_stream()
        self._close_books(done, blocked_s, time.monotonic() - began_s)
        if not keep:
            self._evaluate()
        self._show_position()
        if self._checkpoint_is_due():
            self.save()

    def _close_books(self, done: Committed, blocked_s: float, apply_s: float) -> None:
        view = self.session.swarm.view
        traffic = (sum(view.sent_bytes.values()), sum(view.received_bytes.values()))
        moved = (traffic[0] - self._traffic_before[0], traffic[1] - self._traffic_before[1])
        self._traffic_before = traffic
        names = {row.peer_id: row.name for row in view.rows}
        record = record_of(done, view.peer_id, names, blocked_s=blocked_s, apply_s=apply_s, moved_bytes=moved)
        for stage, seconds in done.stage_s.items():
            self.ledger.durations[f"sync.{stage}"].append(seconds)
            if blocked_s:
                self.ledger.durations[f"blocked.{stage}"].append(seconds)
        attempted = done.offered and record.outcome is not Outcome.ALONE
        included = done.included and attempted
        self.ledger.round_done(record.outcome, attempted=attempted, included=included, at_s=time.time())
        self.teller.round_over(record)
        loss = self.teller.training.loss
        logger.info(
            "Round %d: %s with %d of %d members in %.1f s%s; digest %s.",
            record.round,
            record.outcome,
            len(done.outcome.included),
            len(record.members),
            blocked_s,
            f", loss {loss:.3f}" if loss is not None else "",
            record.state_digest[:12],
        )

    def _evaluate(self) -> None:
        """Loss of the anchor, which the model holds just now, on the held-out split."""
        if not self._held_out or self.tip.round % self.run.evaluation.every_rounds:
            return
        with self.ledger.doing(Activity.EVALUATE):
            loss = evaluate(self._model, self._held_out, self._chosen.device, self._chosen.precision)
        self.teller.training = self.teller.training.model_copy(update={"evaluation_loss": loss})

    def _checkpoint_is_due(self) -> bool:
        if not self.session.swarm.mailbox.empty():
            return False  # Rounds are being replayed: the last of them will do.
        since_s, since_rounds = time.monotonic() - self._checkpoint_at_s, self.tip.round - self._checkpoint_round
        # All nodes keep the same rounds, too, so that a joiner finds several that serve one state.
        is_common = (self.tip.round + 1) % CHECKPOINT_ROUNDS == 0
        return is_common or since_s >= self.config.checkpoint.every_s or since_rounds >= CHECKPOINT_ROUNDS

    def run_is_complete(self) -> bool:
        return self.tip.state.tokens >= self.run.total_tokens

    # telling

    def _show_step(self, loss: float, lr: float, tokens: int) -> None:
        rate = tokens / statistics.fmean(self._step_s)
        self.teller.training = self.teller.training.model_copy(
            update={"loss": loss, "learning_rate": lr, "inner_step": self.progress.steps, "tokens_per_second": rate}
        )
        ratio = min(1.0, self.done_ratio)
        step_s = statistics.median(self._step_s)
        round_s = self.tip.round_s if self.run.round.policy == "time" else None
        eta_s = (1 - ratio) * (round_s or self.run.round.inner_steps * step_s)
        self.teller.sync = self.teller.sync.model_copy(update={"progress_ratio": ratio, "eta_s": eta_s})

    def _show_position(self) -> None:
        """Where the node stands in the run."""
        session, tip = self.session, self.tip
        self.teller.run = self.teller.run.model_copy(
            update={
                "manifest_hash": session.manifest.hash,
                "invite": invite_of(session.manifest, session.swarm.view.addresses),
                "round": tip.round,
                "swarm_tokens": tip.state.tokens,
                "head": tip.head,
                "state_digest": tip.digest,
            }
        )
        self.teller.training = self.teller.training.model_copy(
            update={"inner_step": self.progress.steps, "inner_steps": self.run.round.inner_steps}
        )

    def show_training(self) -> None:
        self.teller.enter(Phase.TRAINING, f"Training towards round {self.tip.round + 1}.", "training")

    def _show_waiting(self) -> None:
        view = self.session.swarm.view
        stage = f" ({view.stage})" if view.stage != "idle" else ""
        reason = view.waiting_reason or f"Averaging round {self.tip.round + 1}{stage}."
        self.teller.enter(Phase.SYNCING, reason, view.waiting_code or "syncing")

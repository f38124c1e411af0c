"""What this node trains with, and shares with nobody: model, inner optimizer, text, step times. Knows no swarm,
but the faults on purpose."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from node.manifest import RunConfig
from node.status import Activity
from node.swarm.faults import Faults
from node.training.checkpoint import Checkpoint
from node.training.evaluate import evaluate
from node.training.inner import StepResult
from node.training.replica import Replica
from node.training.text import Reader
from node.worker.ledger import Ledger
from node.worker.spoilt import spoilt

STEP_TIMES = 21
"""Inner steps whose median is this node's step time."""
REST_STEPS = 8
REST_SHARE = 1e-6
"""Every eighth slept step changes the parameters, each time by more, so that there is something to send."""


class Local:
    """One node's own parameters and what moves them."""

    def __init__(
        self,
        run: RunConfig,
        replica: Replica,
        text: Callable[[dict[str, Any] | None], Reader],
        held_out: Sequence[Tensor],
        ledger: Ledger,
    ) -> None:
        """`text`: a reader that goes on from the place given."""
        self._run, self._held_out, self._ledger = run, held_out, ledger
        self.replica = replica
        self._open_text = text
        self._text: Reader | None = None
        self._unfinished: dict[str, Any] | None = None
        """Where the text stood before a step that has not come to its end."""
        self._rests = 0
        self._step_s: deque[float] = deque(maxlen=STEP_TIMES)

    # text

    @property
    def text(self) -> Reader:
        """From `begin` or `resume` on."""
        assert self._text is not None
        return self._text

    @property
    def place(self) -> dict[str, Any]:
        """In the text, behind the last step that is done; for a checkpoint."""
        return self.text.state if self._unfinished is None else self._unfinished

    def begin(self, anchor: Tensor) -> None:
        """Go on from an anchor, fp32 [P], without a past of this node's own; text that was read stays read."""
        self.replica.load(anchor)
        if self._text is None:
            self._text = self._open_text(None)

    def close(self) -> None:
        if self._text is not None:
            self._text.close()

    def forget(self) -> None:
        """Optimizer and step times begin again; the text goes on."""
        moments = self.replica.moments()
        self.replica.load_moments({name: torch.zeros_like(moment) for name, moment in moments.items()})
        self._step_s.clear()

    # parameters

    def resume(self, saved: Checkpoint) -> None:
        self.replica.load(saved.anchor if saved.local is None else saved.local)
        if saved.optimizer:
            self.replica.load_moments(saved.optimizer)
        self.close()
        self._text = self._open_text(saved.text)

    def mend(self, anchor: Tensor) -> None:
        """Back to the anchor; moments that are no numbers begin again."""
        self.replica.load(anchor)
        moments = self.replica.moments()
        if not all(bool(torch.isfinite(moment).all()) for moment in moments.values()):
            self.replica.load_moments({name: torch.zeros_like(moment) for name, moment in moments.items()})

    def spoil(self, kind: str) -> None:
        """A fault on purpose: parameters that are no numbers, or rubbish."""
        self.replica.load(torch.full_like(self.replica.parameters, math.nan if kind == "nan" else 1.0))

    # steps

    def step(self, lr: float, faults: Faults, round_: int, between: Callable[[], None]) -> StepResult | None:
        """One inner step on the next batch; None where there is no text yet. Raises what `InnerLoop.step` raises.

        `faults`, on purpose, those of `round_`. `between` is called after each micro-batch, and may end the step.
        """
        began_s = time.monotonic()
        if rest_s := faults.rest_s():
            return self._rest(rest_s)
        before = self.text.state
        with self._ledger.doing(Activity.DATA):
            batch = self.text.next_batch()
        if batch is None:
            return None
        self._unfinished = before
        with self._ledger.doing(Activity.COMPUTE):
            result = self.replica.step(batch, lr, lambda rows: spoilt(faults, round_, rows), between)
            self._unfinished = None
            time.sleep(max(0.0, faults.slowness() - 1) * (time.monotonic() - began_s))
        self._count(time.monotonic() - began_s, result.tokens)
        self._ledger.skipped_steps += not result.tokens
        return result

    def _rest(self, seconds: float) -> StepResult:
        began_s, self._rests = time.monotonic(), self._rests + 1
        with self._ledger.doing(Activity.COMPUTE):
            if self._rests % REST_STEPS == 1:
                self.replica.nudge(REST_SHARE * self._rests)
            time.sleep(max(0.0, began_s + seconds - time.monotonic()))
        result = StepResult(0.0, 0.0, self._run.tokens_per_inner_step)
        self._count(seconds, result.tokens)
        return result

    def _count(self, step_s: float, tokens: int) -> None:
        self._step_s.append(step_s)
        self._ledger.step_done(step_s, tokens)

    @property
    def step_s(self) -> float | None:
        """Median of the newest steps, seconds."""
        return statistics.median(self._step_s) if self._step_s else None

    @property
    def tokens_per_second(self) -> float:
        per_step = self._run.inner.batch_size * self._run.inner.sequence_length
        return per_step / statistics.fmean(self._step_s) if self._step_s else 0.0

    @property
    def evaluates(self) -> bool:
        return bool(self._held_out)

    def evaluate(self, anchor: Tensor, between: Callable[[], None]) -> float:
        """Loss of an anchor, fp32 [P], on the held-out split, nats per token. The parameters stay as they are.

        Within the run's budget of time; `between` is called before each micro-batch, and may end it by raising.
        """
        rows = self.replica.inner.micro_batch
        parts = [part for batch in self._held_out for part in torch.split(batch, rows or len(batch))]

        def loss_of(part: Tensor) -> float:
            between()
            return self.replica.loss_of(part)

        with self._ledger.doing(Activity.EVALUATE):
            own = self.replica.parameters
            self.replica.load(anchor)
            try:
                return evaluate(loss_of, parts, budget_s=self._run.evaluation.budget_s)
            finally:
                self.replica.load(own)

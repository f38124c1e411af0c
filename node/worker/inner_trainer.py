"""The inner loop of one node: its model, inner optimizer, text and step times. It has no connection to the swarm."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from node.config.manifest import RunConfig
from node.config.schema import Config
from node.status import Activity
from node.training.checkpoint import Checkpoint
from node.training.inner import StepResult, evaluate
from node.training.model import build_model, prepare_layers
from node.training.replica import Replica
from node.training.text import Reader, TextDataset, open_text
from node.training.tokenizer import Tokenizer
from node.worker.counters import WorkCounters
from node.worker.step_faults import StepFaults

STEP_TIMES = 21
"""The node's step time is the median of this many newest inner steps."""
LEAST_SAMPLED_TOKENS = 8
"""A sample that the time limit has made shorter is not shown."""


@dataclass(frozen=True, slots=True)
class TrainingInputs:
    library: TextDataset
    held_out: Sequence[Tensor]
    """Batches for evaluation, int64 cpu [B, T + 1]."""
    model: nn.Module


def needs_inputs(old: RunConfig, new: RunConfig) -> bool:
    """Whether amended settings need other text or batches than this node has loaded."""

    def loaded(run: RunConfig) -> tuple[object, ...]:
        data = run.data.model_copy(update={"weights": ()})
        return data, run.inner.batch_size, run.inner.sequence_length, run.evaluation.batches

    return loaded(old) != loaded(new)


def load_inputs(run: RunConfig, config: Config) -> TrainingInputs:
    """Load text and model. Raises MachineError or ConfigError as `open_text` does."""
    library = open_text(run, config.node.text_folder, config.node.hub_cache)
    model = build_model(run.model, seed=0)
    prepare_layers(model, config.devices)
    return TrainingInputs(library, library.held_out(), model)


class InnerTrainer:
    """Runs inner steps on the run's text. Used by the main thread only."""

    def __init__(
        self,
        run: RunConfig,
        replica: Replica,
        open_reader: Callable[[dict[str, Any] | None], Reader],
        held_out: Sequence[Tensor],
        counters: WorkCounters,
        tokenizer: Tokenizer,
    ) -> None:
        """`open_reader` opens a reader at the given state; None means the start of the text."""
        self._tokenizer = tokenizer
        self.run, self._held_out, self._counters = run, held_out, counters
        self.replica = replica
        self._open_reader = open_reader
        self._text: Reader | None = None
        self._text_before_step: dict[str, Any] | None = None
        """The reader's state before a step that has not ended."""
        self._step_s: deque[float] = deque(maxlen=STEP_TIMES)

    def use(self, run: RunConfig) -> None:
        """Train by these settings from now on. They have the same text, batches and optimizer (`needs_inputs`)."""
        self.run = run

    @property
    def text(self) -> Reader:
        """The open reader. Available after `start` or `resume`."""
        assert self._text is not None
        return self._text

    @property
    def text_state(self) -> dict[str, Any]:
        """The reader's state after the last completed step, for a checkpoint."""
        return self.text.state if self._text_before_step is None else self._text_before_step

    def start(self, anchor: Tensor) -> None:
        """Start from an anchor, fp32 [P]. The reader keeps its position if it is open."""
        self.replica.load(anchor)
        if self._text is None:
            self._text = self._open_reader(None)

    def resume(self, saved: Checkpoint) -> None:
        self.replica.load(saved.anchor if saved.local is None else saved.local)
        if saved.optimizer:
            self.replica.load_optimizer_state(saved.optimizer)
        self.close()
        self._text = self._open_reader(saved.text)

    def close(self) -> None:
        if self._text is not None:
            self._text.close()

    def reset_to(self, anchor: Tensor) -> None:
        """Go back to an anchor, fp32 [P]. Resets the optimizer if its state is not finite."""
        self.replica.load(anchor)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in self.replica.optimizer_state().values()):
            self._reset_optimizer()

    def reset_history(self) -> None:
        """Reset optimizer and step times. The reader keeps its position."""
        self._reset_optimizer()
        self._step_s.clear()

    def _reset_optimizer(self) -> None:
        tensors = self.replica.optimizer_state()
        self.replica.load_optimizer_state({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})

    def step(self, lr: float, faults: StepFaults, after_micro_batch: Callable[[], None]) -> StepResult | None:
        """Make one inner step on the next batch. Returns None if no text is ready yet. Raises as `InnerLoop.step` does.

        `after_micro_batch` may end the step by raising.
        """
        began_at = time.monotonic()
        with self._counters.doing(Activity.COMPUTE):
            result = faults.simulate_step(self.replica, self.run.tokens_per_inner_step)
        if result is None:
            state_before = self.text.state
            with self._counters.doing(Activity.DATA):
                batch = self.text.next_batch()
            if batch is None:
                return None
            self._text_before_step = state_before
            with self._counters.doing(Activity.COMPUTE):
                result = self.replica.step(batch, lr, faults.loss_factor, after_micro_batch)
                self._text_before_step = None
                faults.slow_down(began_at)
        step_s = time.monotonic() - began_at
        self._step_s.append(step_s)
        self._counters.step_done(step_s, result.tokens)
        return result

    @property
    def step_s(self) -> float | None:
        """Median time of the newest steps; None before the first step."""
        return statistics.median(self._step_s) if self._step_s else None

    @property
    def tokens_per_second(self) -> float:
        return self.run.tokens_per_inner_step / statistics.fmean(self._step_s) if self._step_s else 0.0

    @property
    def can_evaluate(self) -> bool:
        return bool(self._held_out)

    def evaluate(self, anchor: Tensor, before_micro_batch: Callable[[], None]) -> float:
        """The loss of an anchor, fp32 [P], on the held-out split, in nats per token, within the run's time budget.

        `before_micro_batch` may end the evaluation by raising. The local parameters are restored in any case.
        """
        rows = self.replica.inner.micro_batch
        micro_batches = [part for batch in self._held_out for part in torch.split(batch, rows or len(batch))]

        def loss_of(micro_batch: Tensor) -> float:
            before_micro_batch()
            return self.replica.loss_of(micro_batch)

        with self._at(anchor):
            return evaluate(loss_of, micro_batches, budget_s=self.run.evaluation.budget_s)

    def continue_prompts(self, anchor: Tensor, budget_s: float, before_token: Callable[[], None]) -> list[str | None]:
        """How an anchor, fp32 [P], continues each prompt of the run; None where the time did not suffice.

        Each prompt has an equal share of `budget_s`, which is exceeded by at most one token. `before_token` may end the
        work by raising. The local parameters are restored in any case.
        """
        prompts, end_s, began_at_s = self.run.sample.prompts, 0.0, time.monotonic()

        def is_over() -> bool:
            before_token()
            return time.monotonic() >= end_s

        texts = []
        with self._at(anchor):
            for number, prompt in enumerate(prompts, 1):
                end_s = began_at_s + budget_s * number / len(prompts)
                texts.append(self._continue(prompt, is_over))
        return texts

    def _continue(self, prompt: str, is_over: Callable[[], bool]) -> str | None:
        tokenizer, cfg = self._tokenizer, self.run.sample
        tokens = tokenizer.prompt(prompt)
        room = self.run.model.max_position_embeddings - len(tokens)
        if room < 1:
            return None
        found, is_complete = self.replica.inner.sample(
            tokens,
            most=min(cfg.tokens, room),
            end=tokenizer.end,
            vocabulary=tokenizer.size,
            temperature=cfg.temperature,
            is_over=is_over,
        )
        return tokenizer.decode(found) if is_complete or len(found) >= LEAST_SAMPLED_TOKENS else None

    @contextmanager
    def _at(self, anchor: Tensor) -> Iterator[None]:
        """Replace the local parameters by an anchor for this block, which counts as evaluation."""
        with self._counters.doing(Activity.EVALUATE):
            local = self.replica.parameters
            try:
                self.replica.load(anchor)
                yield
            finally:
                self.replica.load(local)

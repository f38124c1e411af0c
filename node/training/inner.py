"""The inner loop's step (forward, backward, clip, optimizer) and evaluation, for one model on one device.

With fp16, gradients are scaled so that small ones do not underflow, and unscaled before they are clipped; nothing
outside the step sees the scale.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from node.config.manifest import InnerConfig
from node.errors import MachineError, TrainingError
from node.training.model import LossKind, NextTokenLoss, autocast, compile_layers
from node.training.optimizers import Optimizers
from node.training.ranks import Ranks, full_tensor
from node.training.sampling import sample_tokens

MOST_SKIPPED = 32
"""Inner steps in a row that may be skipped; finding a scale for fp16 takes half of them."""
FIRST_SCALE = 65536.0

FaultHook = Callable[[int], float]
"""Injects faults. It is called with the rows of each try, may raise, and returns a factor for the loss."""
Callback = Callable[[], None]
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float
    """Mean cross-entropy before the step, nats per token."""
    grad_norm: float
    """L2 norm of the gradient before clipping."""
    tokens: int
    """0 for a skipped step, whose loss or gradient was not finite."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How this machine computes a step. It changes the result only by rounding."""

    precision: str = "fp32"
    """`fp32`, `bf16` or `fp16`."""
    micro_batch: int = 0
    """Rows per forward pass; 0 means the whole batch."""
    loss: LossKind = "whole"
    """How `next_token_loss` computes the loss."""
    compiled: bool = False
    """Whether the layers are compiled."""


FP32 = Execution()


def out_of_memory_error() -> MachineError:
    return MachineError(
        "The GPU's memory does not suffice for a single sequence: close what else uses the GPU, or set "
        "devices.activation_checkpointing.",
        code="out_of_memory",
    )


class InnerLoop:
    """Makes inner steps and owns the optimizer. Moves `model` to `device` and changes its parameters in place."""

    def __init__(
        self,
        model: nn.Module,
        cfg: InnerConfig,
        device: torch.device,
        how: Execution = FP32,
        ranks: Ranks | None = None,
    ) -> None:
        compile_layers(model, compiled=how.compiled)
        loss: nn.Module = NextTokenLoss(model, how.loss)
        self._ranks = ranks
        # Shard the model before it is moved, as a device may not hold all of it.
        self._loss = ranks.shard(loss, model.get_submodule("model.layers").children()) if ranks is not None else loss
        self._model = model.to(device).train()
        self._device, self._precision = device, how.precision
        self.micro_batch = how.micro_batch
        """Halved when the memory does not suffice, and smaller with fewer threads."""
        self._fitted = how.micro_batch, torch.get_num_threads()
        """The rows that fit, and the number of threads with which they were timed."""
        self._clip_norm = cfg.clip_norm
        self._parameters = list(model.parameters())
        self._optimizers = Optimizers(model, cfg)
        self._scaler = torch.amp.GradScaler(device.type, FIRST_SCALE, enabled=how.precision == "fp16")
        self._skipped_in_a_row = 0

    def use_threads(self, number: int) -> None:
        """Set the number of threads.

        With fewer threads, a processor computes fewer rows at once, because a long pass would look like a hang.
        """
        torch.set_num_threads(number)
        rows, threads = self._fitted
        if rows and self._device.type == "cpu":
            self.micro_batch = max(1, rows * min(number, threads) // threads)

    def step(
        self, batch: Tensor, lr: float, fault_hook: FaultHook | None = None, after_micro_batch: Callback = lambda: None
    ) -> StepResult:
        """Make one inner step on `batch`, int64 [B, T + 1] on any device.

        If `after_micro_batch` raises, the step ends on all ranks and changes nothing. If the loss or gradient is not
        finite, the step changes nothing and counts no tokens.

        Raises TrainingError after MOST_SKIPPED such steps in a row, and MachineError if the memory does not suffice for
        one row. A sharded model raises torch.OutOfMemoryError instead: the other ranks wait in a collective that never
        ends, so all ranks must restart.
        """
        try:
            loss, norm = self._compute_gradient(batch, lr, fault_hook, after_micro_batch)
            is_finite = math.isfinite(loss) and math.isfinite(norm)
            if is_finite:
                for optimizer in self._optimizers.each:
                    self._scaler.step(optimizer)
            self._scaler.update()
        finally:
            self._optimizers.zero_grad()
        if is_finite:
            self._skipped_in_a_row = 0
            return StepResult(loss, norm, batch[:, 1:].numel())
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MOST_SKIPPED:
            self._skipped_in_a_row = 0
            if self._scaler.is_enabled():
                # Each skipped step has halved the scale. After a reset, all gradients would underflow.
                self._scaler.update(FIRST_SCALE)
            raise TrainingError(
                f"Training diverged: {MOST_SKIPPED} steps in a row were skipped, the last with loss {loss} and "
                f"gradient norm {norm}. Go back to the last checkpoint, and lower run.inner.lr if it happens again."
            )
        return StepResult(loss, norm, 0)

    def _compute_gradient(
        self, batch: Tensor, lr: float, fault_hook: FaultHook | None, after_micro_batch: Callback
    ) -> tuple[float, float]:
        """Leave the clipped gradient of the batch on the parameters. Returns the loss and the norm before clipping."""
        self._optimizers.set_lr(lr)
        total = self._backward_within_memory(batch.to(self._device, non_blocking=True), fault_hook, after_micro_batch)
        for optimizer in self._optimizers.each:
            self._scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        # Read both at once, as each read on a GPU waits for all queued work.
        loss_value, norm_value = torch.stack((total, full_tensor(norm))).tolist()
        return float(loss_value), float(norm_value)

    def _backward_within_memory(
        self, batch: Tensor, fault_hook: FaultHook | None, after_micro_batch: Callback
    ) -> Tensor:
        """Leave the gradient of the whole batch on the parameters. Returns the loss, fp32 [] on the device.

        After each failed allocation, it tries again with smaller micro-batches.
        """
        ranks = self._ranks
        own, most_rows = (batch, len(batch)) if ranks is None else (ranks.own_rows(batch), -(-len(batch) // ranks.size))
        while True:
            try:
                factor = self._together(lambda: fault_hook(self.micro_batch or len(own)) if fault_hook else 1.0)
                total = self._backward(own, len(batch), most_rows, after_micro_batch) * factor
            except torch.OutOfMemoryError as exc:
                if ranks is not None and ranks.is_sharded:
                    raise
                self._halve_micro_batch(most_rows, exc)
            else:
                if ranks is None:
                    return total
                ranks.sum_gradients_(self._parameters)
                return ranks.sum_(total)

    def _together(self, action: Callable[[], T]) -> T:
        return action() if self._ranks is None else self._ranks.together(action)

    def _halve_micro_batch(self, rows: int, cause: torch.OutOfMemoryError) -> None:
        """Halve the micro-batch. Raises MachineError if it is a single row."""
        self._optimizers.zero_grad()
        previous = self.micro_batch or rows
        if previous <= 1:
            raise out_of_memory_error() from cause
        self.micro_batch = previous // 2
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        logger.warning(
            "Out of memory with %d sequences at once. Training continues with %d at once.", previous, self.micro_batch
        )

    def _backward(self, own: Tensor, rows: int, most_rows: int, after_micro_batch: Callback = lambda: None) -> Tensor:
        """Add the gradients of this process's share of the mean loss over all `rows`. Returns that share, fp32 [].

        All ranks make as many micro-batches as the one with `most_rows`; the last one of another may be empty.
        """
        total = torch.zeros((), device=self._device)
        factor = self._ranks.loss_factor if self._ranks is not None else 1.0

        def process(part: Tensor) -> None:
            if len(part):
                with autocast(self._device, self._precision):
                    loss = self._loss(part)
                share = len(part) / rows
                self._scaler.scale(loss * (share * factor)).backward()
                total.add_(loss.detach() * share)
            after_micro_batch()

        micro_batch = self.micro_batch or most_rows
        for start in range(0, most_rows, micro_batch):
            self._together(partial(process, own[start : start + micro_batch]))
        return total

    @torch.no_grad()
    def loss_of(self, batch: Tensor) -> float:
        """The mean cross-entropy, in nats per token, of a batch, int64 [B, T + 1] on any device. Changes nothing."""
        self._model.eval()
        total = 0.0
        try:
            for part in torch.split(batch, self.micro_batch or len(batch)):
                with autocast(self._device, self._precision):
                    loss = self._loss(part.to(self._device, non_blocking=True))
                total += float(loss) * len(part) / len(batch)
        finally:
            self._model.train()
        return total

    def sample(self, prompt: Sequence[int], **options: Any) -> tuple[list[int], bool]:
        """Continue a prompt like `sample_tokens`, which takes the `options`. Not for a sharded model."""
        self._model.eval()
        # A compiled layer would be compiled again for each new length.
        is_compiled = any(module._compiled_call_impl is not None for module in self._model.modules())
        eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        try:
            with eager, autocast(self._device, self._precision):
                return sample_tokens(self._model, prompt, **options)
        finally:
            self._model.train()

    def probe(self, batch: Tensor) -> None:
        """Make a forward and backward pass of a micro-batch, without effect. Raises torch.OutOfMemoryError."""
        try:
            self._backward(batch.to(self._device), len(batch), len(batch))
        finally:
            self._optimizers.zero_grad()

    @torch.no_grad()
    def perturb(self, ratio: float) -> None:
        """Multiply all parameters by 1 + `ratio`, so that a node with simulated steps has something to send."""
        for parameter in self._parameters:
            parameter.mul_(1 + ratio)

    def state_tensors(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return `Optimizers.state_tensors` and, with fp16, `scale`: fp32 [2] of (scale, steps since it grew)."""
        tensors = self._optimizers.state_tensors(device)
        if self._scaler.is_enabled():
            state = self._scaler.state_dict()
            tensors["scale"] = torch.tensor([state["scale"], state["_growth_tracker"]])
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load the result of `state_tensors`. Raises KeyError or ValueError if it does not fit the model."""
        self._optimizers.load_state_tensors(tensors)
        if self._scaler.is_enabled() and "scale" in tensors:
            scale, tracker = tensors["scale"].tolist()
            state = self._scaler.state_dict() | {"scale": scale or FIRST_SCALE, "_growth_tracker": int(tracker)}
            self._scaler.load_state_dict(state)


def evaluate(
    loss_of: Callable[[Tensor], float],
    batches: Iterable[Tensor],
    *,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Return the mean cross-entropy over all tokens of the batches, in nats per token; nan without batches.

    Each batch is int64 [B, T + 1]. After `budget_s` seconds the remaining batches are skipped, but never the first one.
    """
    total_nats, tokens, end_s = 0.0, 0, clock() + budget_s
    for batch in batches:
        if tokens and clock() >= end_s:
            break
        count = batch[:, 1:].numel()
        total_nats += loss_of(batch) * count
        tokens += count
    return total_nats / tokens if tokens else math.nan

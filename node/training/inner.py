"""The inner loop's step: forward, backward, clip, optimizer. Knows one model and one device.

Knows no round and no data source. With fp16, gradients are scaled so that small ones survive, and unscaled before they
are clipped; nothing outside the step sees the scale.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from node.errors import MachineError, TrainingError
from node.manifest import InnerConfig
from node.training.model import NextTokenLoss, autocast
from node.training.optimizers import Optimizers
from node.training.ranks import Ranks, whole

MOST_SKIPPED = 32
"""Inner steps in a row that may come to nothing; finding a scale for fp16 takes half of them."""
FIRST_SCALE = 65536.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float
    """Mean cross-entropy before the step, nats per token."""
    grad_norm: float
    """L2 norm of the gradient before clipping."""
    tokens: int
    """0: a step that was skipped, as loss or gradient were no finite number."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a step is computed here; what it comes to does not depend on it, but for rounding."""

    precision: str = "fp32"
    """`fp32`, `bf16` or `fp16`."""
    micro_batch: int = 0
    """Rows per forward pass; 0: the whole batch."""
    chunked_loss: bool = False
    """Whether the logits are made for a part of the tokens at a time, twice."""


def no_room_for_one() -> MachineError:
    return MachineError(
        "The GPU's memory does not suffice for a single sequence: close what else uses the GPU, or set "
        "devices.activation_checkpointing.",
        code="out_of_memory",
    )


FP32 = Execution()
Spoil = Callable[[int], float]
Between = Callable[[], None]


class InnerLoop:
    """Owns the optimizer. Moves `model` to `device` and changes its parameters in place."""

    def __init__(
        self,
        model: nn.Module,
        cfg: InnerConfig,
        device: torch.device,
        how: Execution = FP32,
        ranks: Ranks | None = None,
    ) -> None:
        loss: nn.Module = NextTokenLoss(model, chunked=how.chunked_loss)
        self._ranks = ranks
        # Sharded before it is moved: a device may not hold all of it.
        self._loss = ranks.wrap(loss, model.get_submodule("model.layers").children()) if ranks is not None else loss
        self._model = model.to(device).train()
        self._device, self._how = device, how
        self.micro_batch = how.micro_batch
        """Halved where the memory does not suffice."""
        self._clip_norm = cfg.clip_norm
        self._parameters = list(model.parameters())
        self._optimizers = Optimizers(model, cfg)
        self._scaler = torch.amp.GradScaler(device.type, FIRST_SCALE, enabled=how.precision == "fp16")
        self._skipped_in_a_row = 0

    def step(self, batch: Tensor, lr: float, spoil: Spoil | None = None, between: Between = lambda: None) -> StepResult:
        """One inner step on `batch`, int64 [B, T + 1] on any device.

        `between` is called after each micro-batch; what it raises ends the step, which then changes nothing.
        `spoil`: faults on purpose; asked with the rows of each try, it may raise, and gives a factor for the loss.

        A loss or gradient that is no finite number changes nothing, and the step counts no tokens. Raises TrainingError
        after MOST_SKIPPED of them in a row, and MachineError if the memory does not suffice for one row. Of a sharded
        model torch.OutOfMemoryError: the other ranks stand inside a pass, and only their end helps them out of it.
        """
        try:
            loss, norm = self._gradient(batch, lr, spoil, between)
            is_finite = math.isfinite(loss) and math.isfinite(norm)
            if is_finite:
                for optimizer in self._optimizers.each:
                    self._scaler.step(optimizer)
            self._scaler.update()
        finally:
            self._zero_grad()
        if is_finite:
            self._skipped_in_a_row = 0
            return StepResult(loss, norm, batch[:, 1:].numel())
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MOST_SKIPPED:
            self._skipped_in_a_row = 0
            raise TrainingError(
                f"Training diverged: loss {loss}, gradient norm {norm}, {MOST_SKIPPED} steps in a row; they changed "
                "nothing. Go back to the last checkpoint, and lower run.inner.lr if it comes again."
            )
        return StepResult(loss, norm, 0)

    def _gradient(self, batch: Tensor, lr: float, spoil: Spoil | None, between: Between) -> tuple[float, float]:
        """The clipped gradient of the batch, on the parameters; its loss and its norm before clipping."""
        self._optimizers.set_lr(lr)
        total = self._backward_that_fits(batch.to(self._device, non_blocking=True), spoil, between)
        for optimizer in self._optimizers.each:
            self._scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        # One read for both: on a GPU each one waits for all that is queued.
        loss_value, norm_value = torch.stack((total, whole(norm))).tolist()
        return float(loss_value), float(norm_value)

    def _backward_that_fits(self, batch: Tensor, spoil: Spoil | None, between: Between) -> Tensor:
        """The loss of the whole batch, with its gradient on the parameters, after as many tries as it takes."""
        own = self._ranks.own_rows(batch) if self._ranks is not None else batch
        while True:
            failure: torch.OutOfMemoryError | None = None
            try:
                factor = spoil(self.micro_batch or len(own)) if spoil is not None else 1.0
                total = self._backward(own, len(batch), between) * factor
            except torch.OutOfMemoryError as exc:
                if self._ranks is not None and self._ranks.is_sharded:
                    raise
                failure = exc
            if self._ranks is None and failure is None:
                return total
            if self._ranks is not None and self._ranks.agree(failure is None):
                self._ranks.sum_gradients_(self._parameters)
                return self._ranks.sum_(total)
            self._halve(len(own), failure)

    def _halve(self, rows: int, exc: torch.OutOfMemoryError | None) -> None:
        """Half as many rows at once from here on; MachineError where one row is too many."""
        self._zero_grad()
        before = self.micro_batch or rows
        if before <= 1:
            raise no_room_for_one() from exc
        self.micro_batch = before // 2
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning("Out of memory with %d sequences at once: from here on %d.", before, self.micro_batch)

    def _backward(self, own: Tensor, rows: int, between: Between = lambda: None) -> Tensor:
        """Gradients of this process's part of the mean loss over all rows; returns that part, fp32 on the device."""
        total = torch.zeros((), device=self._device)
        factor = self._ranks.loss_factor if self._ranks is not None else 1.0
        for part in torch.split(own, self.micro_batch or len(own)):
            with autocast(self._device, self._how.precision):
                loss = self._loss(part)
            share = len(part) / rows
            self._scaler.scale(loss * (share * factor)).backward()
            total += loss.detach() * share
            between()
        return total

    @torch.no_grad()
    def loss_of(self, batch: Tensor) -> float:
        """Mean cross-entropy of a batch, int64 [B, T + 1], nats per token; as evaluation has it. Changes nothing."""
        self._model.eval()
        total = 0.0
        try:
            for part in torch.split(batch, self.micro_batch or len(batch)):
                with autocast(self._device, self._how.precision):
                    loss = self._loss(part.to(self._device, non_blocking=True))
                total += float(loss) * len(part) / len(batch)
        finally:
            self._model.train()
        return total

    def probe(self, batch: Tensor) -> None:
        """Forward and backward of a micro-batch that changes nothing. Raises torch.OutOfMemoryError."""
        try:
            self._backward(batch.to(self._device), len(batch))
        finally:
            self._zero_grad()

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers.each:
            optimizer.zero_grad()

    @torch.no_grad()
    def nudge(self, share: float) -> None:
        """All parameters times 1 + `share`: for a step that is only slept, so that there is something to send."""
        for parameter in self._parameters:
            parameter.mul_(1 + share)

    def state_tensors(self) -> dict[str, Tensor]:
        """The optimizer's, as `Optimizers.state_tensors`, and with fp16 `scale`: fp32 [2], the steps since it grew."""
        if not self._scaler.is_enabled():
            return self._optimizers.state_tensors()
        told = self._scaler.state_dict()
        return self._optimizers.state_tensors() | {"scale": torch.tensor([told["scale"], told["_growth_tracker"]])}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state_tensors` gave. KeyError or ValueError if it does not fit the model."""
        self._optimizers.load_state_tensors(tensors)
        if self._scaler.is_enabled() and "scale" in tensors:
            scale, tracker = tensors["scale"].tolist()
            told = self._scaler.state_dict() | {"scale": scale or FIRST_SCALE, "_growth_tracker": int(tracker)}
            self._scaler.load_state_dict(told)

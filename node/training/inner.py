"""The inner loop's step: forward, backward, clip, AdamW. Knows one model and one device.

Knows no round and no data source.

AdamW as in DiLoCo (arXiv 2311.08105, table 5): the values come from the manifest, the learning rate from the caller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from node.errors import MachineError, TrainingError
from node.manifest import InnerConfig
from node.training.model import autocast, next_token_loss, unflatten_like


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float
    """Mean cross-entropy before the step, nats per token."""
    grad_norm: float
    """L2 norm of the gradient before clipping."""
    tokens: int


class InnerLoop:
    """Owns the optimizer. Moves `model` to `device` and changes its parameters in place."""

    def __init__(
        self, model: nn.Module, cfg: InnerConfig, device: torch.device, precision: str, micro_batch: int = 0
    ) -> None:
        """`micro_batch`: rows per forward pass; 0: the whole batch. `precision`: fp32 or bf16."""
        self._model = model.to(device).train()
        self._device = device
        self._precision = precision
        self._micro_batch = micro_batch
        self._clip_norm = cfg.clip_norm
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self._parameters if p.dim() >= 2], "weight_decay": cfg.weight_decay},
                {"params": [p for p in self._parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=cfg.lr,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            fused=True,
        )

    def step(self, batch: Tensor, lr: float) -> StepResult:
        """One inner step on `batch`, int64 [B, T + 1] on any device.

        Raises TrainingError before anything is changed if the loss or the gradient is not finite, and MachineError if
        the GPU's memory does not suffice.
        """
        try:
            loss = self._backward(batch.to(self._device, non_blocking=True))
            norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
            # One read for both: on a GPU each one waits for all that is queued.
            loss_value, norm_value = torch.stack((loss, norm)).tolist()
            if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
                raise TrainingError(
                    f"Training diverged: loss {loss_value}, gradient norm {norm_value}; this step changed nothing. "
                    "Go back to the last checkpoint, and lower run.inner.lr if it comes again."
                )
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        except torch.OutOfMemoryError as exc:
            raise MachineError(
                "The GPU's memory does not suffice for this batch: set devices.micro_batch to a smaller number, "
                "or close what else uses the GPU.",
                code="out_of_memory",
            ) from exc
        finally:
            self._optimizer.zero_grad()
        return StepResult(loss=loss_value, grad_norm=norm_value, tokens=batch[:, 1:].numel())

    @torch.no_grad()
    def nudge(self, share: float) -> None:
        """All parameters times 1 + `share`: for a step that is only slept, so that there is something to send."""
        for parameter in self._parameters:
            parameter.mul_(1 + share)

    def _backward(self, batch: Tensor) -> Tensor:
        """Gradients of the batch's mean loss; returns that mean, fp32 scalar on the device."""
        total = torch.zeros((), device=self._device)
        for part in torch.split(batch, self._micro_batch or len(batch)):
            with autocast(self._device, self._precision):
                loss = next_token_loss(self._model, part)
            share = len(part) / len(batch)
            (loss * share).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() * share
        return total

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies for a checkpoint, cpu: `exp_avg` and `exp_avg_sq` fp32 [P] in `flatten`'s order, `step` fp32 [1].

        All zeros before the first step. Loading them gives the same bits from there on.
        """
        parameters = sum(p.numel() for p in self._parameters)
        moments = {key: torch.zeros(parameters) for key in ("exp_avg", "exp_avg_sq")}
        step, at = torch.zeros(1), 0
        for parameter in self._parameters:
            end, state = at + parameter.numel(), self._optimizer.state[parameter]
            for key, flat in moments.items():
                if key in state:
                    flat[at:end].copy_(state[key].flatten())
            if "step" in state:
                step = state["step"].detach().to("cpu", torch.float32, copy=True).reshape(1)
            at = end
        return moments | {"step": step}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state_tensors` gave. KeyError or ValueError if it does not fit the model."""
        parts = {key: unflatten_like(self._model, tensors[key]) for key in ("exp_avg", "exp_avg_sq")}
        step = tensors["step"].reshape(())
        for name, parameter in self._model.named_parameters():
            self._optimizer.state[parameter] = {
                "step": step.to(parameter.device, torch.float32, copy=True),
                **{key: part[name].to(parameter.device, copy=True) for key, part in parts.items()},
            }

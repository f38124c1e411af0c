"""The inner optimizer: AdamW for all parameters, or Muon for the matrices of the layers and AdamW for the rest.

AdamW as in DiLoCo (arXiv 2311.08105, table 5). Muon orthogonalises the momentum of a matrix and scales its update to
the size of AdamW's (arXiv 2502.16982), so one learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from node.config.manifest import InnerConfig
from node.training.ranks import full_tensor, place_like

MUON_MOMENTUM = 0.95
_ADAMW_KEYS = ("exp_avg", "exp_avg_sq")
_MUON_KEYS = ("momentum_buffer",)


def is_for_muon(name: str, parameter: Tensor) -> bool:
    """Whether the parameter is a matrix inside a layer. AdamW gets embeddings, the head and all that is no matrix."""
    return parameter.dim() == 2 and ".layers." in name


class Optimizers:
    """The optimizers of one model; each parameter belongs to one of them. They change parameters in place."""

    def __init__(self, model: nn.Module, cfg: InnerConfig) -> None:
        by_muon: list[Tensor] = []
        by_adamw: list[Tensor] = []
        for name, parameter in model.named_parameters():
            (by_muon if cfg.optimizer == "muon" and is_for_muon(name, parameter) else by_adamw).append(parameter)
        adamw = torch.optim.AdamW(
            [
                {"params": [p for p in by_adamw if p.dim() >= 2], "weight_decay": cfg.weight_decay},
                {"params": [p for p in by_adamw if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=cfg.lr,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            fused=True,
        )
        self._states: list[tuple[torch.optim.Optimizer, Sequence[Tensor], tuple[str, ...]]] = [
            (adamw, by_adamw, _ADAMW_KEYS)
        ]
        if by_muon:
            muon = torch.optim.Muon(
                by_muon,
                lr=cfg.lr,
                weight_decay=cfg.weight_decay,
                momentum=MUON_MOMENTUM,
                adjust_lr_fn="match_rms_adamw",
            )
            self._states.append((muon, by_muon, _MUON_KEYS))
        self.each = [optimizer for optimizer, _, _ in self._states]

    def set_lr(self, lr: float) -> None:
        for optimizer in self.each:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad()

    def state_tensors(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Copy the state, fp32: `step` [1] on the cpu, and per state key a vector on `device` in `flatten`'s order.

        All values are zero before the first step. Training that continues from loaded tensors gives the same bits.
        """
        tensors = {"step": torch.zeros(1)}
        for optimizer, parameters, keys in self._states:
            for key in keys:
                flat, at = torch.zeros(sum(p.numel() for p in parameters), device=device), 0
                for parameter in parameters:
                    state = optimizer.state[parameter]
                    if key in state:
                        flat[at : at + parameter.numel()].copy_(full_tensor(state[key]).flatten())
                    at += parameter.numel()
                tensors[key] = flat
            step = next((s["step"] for p in parameters if "step" in (s := optimizer.state[p])), None)
            if step is not None:
                tensors["step"] = step.detach().to("cpu", torch.float32, copy=True).reshape(1)
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load the result of `state_tensors`. Raises KeyError or ValueError if it does not fit the model."""
        step = tensors["step"].reshape(())
        for optimizer, parameters, keys in self._states:
            sizes = [p.numel() for p in parameters]
            for key in keys:
                if tensors[key].shape != (sum(sizes),):
                    raise ValueError(f"{key} of shape {tuple(tensors[key].shape)} does not fit {sum(sizes)} parameters")
            parts = {key: torch.split(tensors[key], sizes) for key in keys}
            for i, parameter in enumerate(parameters):
                state = {key: place_like(part[i].view(parameter.shape), parameter) for key, part in parts.items()}
                if keys == _ADAMW_KEYS:
                    state["step"] = step.to(parameter.device, torch.float32, copy=True)
                optimizer.state[parameter] = state

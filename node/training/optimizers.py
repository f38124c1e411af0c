"""The inner optimizer: AdamW, or Muon for the layers' matrices beside it. Knows parameters, and no step's order.

AdamW as in DiLoCo (arXiv 2311.08105, table 5). Muon orthogonalises the momentum of a matrix; its update is scaled to
the size that AdamW's has (arXiv 2502.16982), so one learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from node.manifest import InnerConfig
from node.training.ranks import like, whole

MUON_MOMENTUM = 0.95
_ADAMW_KEYS = ("exp_avg", "exp_avg_sq")
_MUON_KEYS = ("momentum_buffer",)


def is_for_muon(name: str, parameter: Tensor) -> bool:
    """Matrices inside the layers; embeddings and the head are AdamW's, and whatever is no matrix."""
    return parameter.dim() == 2 and ".layers." in name


class Optimizers:
    """All parameters of one model, each with one optimizer. Changes them in place."""

    def __init__(self, model: nn.Module, cfg: InnerConfig) -> None:
        named = list(model.named_parameters())
        by_muon = [p for name, p in named if cfg.optimizer == "muon" and is_for_muon(name, p)]
        taken = {id(p) for p in by_muon}
        by_adamw = [p for _, p in named if id(p) not in taken]
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
        self.each: list[torch.optim.Optimizer] = [adamw]
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
            self.each.append(muon)
            self._states.append((muon, by_muon, _MUON_KEYS))

    def set_lr(self, lr: float) -> None:
        for group in self._groups():
            group["lr"] = lr

    def _groups(self) -> Iterable[dict[str, object]]:
        return (group for optimizer in self.each for group in optimizer.param_groups)

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies, cpu: of each key the values of all parameters that have it, fp32, in `flatten`'s order; `step` [1].

        All zeros before the first step. Loading them gives the same bits from there on.
        """
        found = {"step": torch.zeros(1)}
        for optimizer, parameters, keys in self._states:
            size = sum(p.numel() for p in parameters)
            for key in keys:
                flat, at = torch.zeros(size), 0
                for parameter in parameters:
                    state = optimizer.state[parameter]
                    if key in state:
                        flat[at : at + parameter.numel()].copy_(whole(state[key]).flatten())
                    at += parameter.numel()
                found[key] = flat
            step = next((s["step"] for p in parameters if "step" in (s := optimizer.state[p])), None)
            if step is not None:
                found["step"] = step.detach().to("cpu", torch.float32, copy=True).reshape(1)
        return found

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state_tensors` gave. KeyError or ValueError if it does not fit the model."""
        step = tensors["step"].reshape(())
        for optimizer, parameters, keys in self._states:
            sizes = [p.numel() for p in parameters]
            for key in keys:
                if tensors[key].shape != (sum(sizes),):
                    raise ValueError(f"{key} of shape {tuple(tensors[key].shape)} does not fit {sum(sizes)} parameters")
            parts = {key: torch.split(tensors[key], sizes) for key in keys}
            for i, parameter in enumerate(parameters):
                state = {key: like(part[i].view(parameter.shape), parameter) for key, part in parts.items()}
                if keys == _ADAMW_KEYS:
                    state["step"] = step.to(parameter.device, torch.float32, copy=True)
                optimizer.state[parameter] = state

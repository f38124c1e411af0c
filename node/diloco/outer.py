"""The outer step: SGD with Nesterov momentum on the averaged pseudo-gradient. Knows tensors; no network, no codec.

All nodes must get the same bits, whatever their machine. So every operation here is fp32, elementwise and exactly
rounded: multiply and add stay separate (no `alpha=`, `addcmul` or `lerp`, which may become a fused multiply-add), the
two hyper-parameters are rounded to fp32 first, and denormal numbers must not be flushed to zero.

DiLoCo, arXiv 2311.08105, algorithm 1: theta is the anchor, Delta the mean pseudo-gradient, H the inner steps. Shape
suffixes are left out: each tensor here is the flat [P] vector of all parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_NORMAL = 2.0**-126
"""Smallest normal number of fp32; half of it is denormal."""


@dataclass(frozen=True, slots=True)
class OuterState:
    """What all nodes share after a round. Never changed in place: threads share it as a snapshot."""

    anchor: Tensor
    """Outer parameters, fp32 [P], cpu."""
    momentum: Tensor
    """Outer momentum buffer, fp32 [P], cpu."""
    round: int
    """Last committed round; -1 at genesis."""
    tokens: int
    """Tokens of the whole swarm that stand behind the anchor."""

    def __post_init__(self) -> None:
        for name, x in (("anchor", self.anchor), ("momentum", self.momentum)):
            if x.dtype != torch.float32 or x.device.type != "cpu" or x.dim() != 1 or not x.is_contiguous():
                raise ValueError(f"The {name} must be one contiguous fp32 vector on the cpu.")
        if self.anchor.shape != self.momentum.shape:
            raise ValueError(f"Anchor {tuple(self.anchor.shape)} and momentum {tuple(self.momentum.shape)} differ.")
        if self.round < -1 or self.tokens < 0:
            raise ValueError(f"Round {self.round} and tokens {self.tokens} must be at least -1 and 0.")


def genesis(anchor: Tensor) -> OuterState:
    """The state before round 0: the founder's initial parameters fp32 [P] on the cpu, zero momentum."""
    return OuterState(anchor=anchor, momentum=torch.zeros_like(anchor), round=-1, tokens=0)


def pseudo_gradient(anchor: Tensor, local: Tensor) -> Tensor:
    """anchor - local, [P], on the device of both. It points uphill: the outer step *subtracts* it."""
    if anchor.shape != local.shape:
        raise ValueError(f"Anchor {tuple(anchor.shape)} and local parameters {tuple(local.shape)} differ in shape.")
    return anchor - local


def outer_step(state: OuterState, mean: Tensor, *, lr: float, momentum: float, tokens: int) -> OuterState:
    """One outer step on the mean pseudo-gradient, fp32 [P] on the cpu; a new state, `state` is left as it is.

    As `torch.optim.SGD(nesterov=True)` with a zero initial buffer: m' = mu m + g, anchor' = anchor - lr (g + mu m').
    `tokens` are those of this round. Allocates the new state and nothing beside it.
    """
    _require_denormals()
    if mean.shape != state.anchor.shape or mean.dtype != torch.float32 or mean.device.type != "cpu":
        raise ValueError(f"The mean must be fp32 {tuple(state.anchor.shape)} on the cpu.")
    if tokens < 0:
        raise ValueError(f"A round cannot have {tokens} tokens.")
    lr_scalar = torch.tensor(lr, dtype=torch.float32)
    mu_scalar = torch.tensor(momentum, dtype=torch.float32)
    buffer = torch.mul(state.momentum, mu_scalar)
    buffer.add_(mean)
    anchor = torch.mul(buffer, mu_scalar)
    anchor.add_(mean)
    anchor.mul_(lr_scalar)
    torch.sub(state.anchor, anchor, out=anchor)
    return OuterState(anchor=anchor, momentum=buffer, round=state.round + 1, tokens=state.tokens + tokens)


def carry(local: Tensor, old_anchor: Tensor, new_anchor: Tensor) -> Tensor:
    """local + (new - old), [P], on the device of all three: moves a left-out contribution to the new anchor.

    Its pseudo-gradient against the new anchor is, up to rounding, the one it had against the old.
    """
    if not local.shape == old_anchor.shape == new_anchor.shape:
        raise ValueError("Local parameters and both anchors must have one shape.")
    moved = torch.sub(new_anchor, old_anchor)
    return moved.add_(local)


def _require_denormals() -> None:
    """Momentum without gradient decays into the denormals: a node that flushed them would fall off the chain."""
    if not (torch.tensor([SMALLEST_NORMAL]) * 0.5).item():
        raise ArithmeticError(
            "This thread flushes denormal numbers to zero, so its outer state would differ from the others': "
            "call torch.set_flush_denormal(False), or remove the library that turned flushing on."
        )

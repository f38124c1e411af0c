"""The outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient, and the rules that move a node's
local parameters to a new anchor.

DiLoCo, arXiv 2311.08105, algorithm 1: theta is the anchor, Delta the mean pseudo-gradient, H the inner steps. Every
tensor here is fp32, either the flat vector [P] of all parameters or a fragment [P_f] of it. All nodes must compute the
same bits on every machine, so `outer_step` uses only elementwise, exactly rounded operations: multiply and add stay
separate (no `alpha=`, `addcmul` or `lerp`, which may become a fused multiply-add), the two hyper-parameters are rounded
to fp32 first, and denormal numbers must not be flushed to zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_NORMAL = 2.0**-126
"""Smallest normal number of fp32; half of it is denormal."""
STEP_ELEMENTS = 2**18
"""Elements that `outer_step` processes at a time, so that its six passes stay in the cache."""


@dataclass(frozen=True, slots=True)
class OuterState:
    """The state that all nodes share after a round. Never changed in place: threads share it as a snapshot."""

    anchor: Tensor
    """Outer parameters, fp32 [P], cpu."""
    momentum: Tensor
    """Outer momentum buffer, fp32 [P], cpu."""
    round: int
    """Last committed round; -1 at genesis."""
    tokens: int
    """Tokens that the whole swarm trained on up to this anchor."""

    def __post_init__(self) -> None:
        for name, x in (("anchor", self.anchor), ("momentum", self.momentum)):
            if x.dtype != torch.float32 or x.device.type != "cpu" or x.dim() != 1 or not x.is_contiguous():
                raise ValueError(f"The {name} must be one contiguous fp32 vector on the cpu.")
        _require_one_shape(self.anchor, self.momentum)
        if self.round < -1 or self.tokens < 0:
            raise ValueError(f"Round {self.round} and tokens {self.tokens} must be at least -1 and 0.")


def genesis(anchor: Tensor) -> OuterState:
    """The state before round 0: the initial parameters, fp32 [P] on the cpu, and zero momentum."""
    return OuterState(anchor=anchor, momentum=torch.zeros_like(anchor), round=-1, tokens=0)


def pseudo_gradient(anchor: Tensor, local: Tensor) -> Tensor:
    """anchor - local, on the device of both. It points uphill: the outer step *subtracts* it."""
    _require_one_shape(anchor, local)
    return anchor - local


def outer_step(state: OuterState, mean: Tensor, *, lr: float, momentum: float, tokens: int) -> OuterState:
    """One outer step on the mean pseudo-gradient, fp32 [P] on the cpu. Returns a new state; `state` stays as it is.

    As `torch.optim.SGD(nesterov=True)` with a zero initial buffer: m' = mu m + g, anchor' = anchor - lr (g + mu m').
    `tokens` are those of this round. Allocates only the new state. Raises ValueError for a mean that does not fit, and
    ArithmeticError on a thread that flushes denormal numbers.
    """
    _require_denormals()
    if mean.shape != state.anchor.shape or mean.dtype != torch.float32 or mean.device.type != "cpu":
        raise ValueError(f"The mean must be fp32 {tuple(state.anchor.shape)} on the cpu.")
    if tokens < 0:
        raise ValueError(f"A round cannot have {tokens} tokens.")
    lr_scalar = torch.tensor(lr, dtype=torch.float32)
    mu_scalar = torch.tensor(momentum, dtype=torch.float32)
    buffer, anchor = torch.empty_like(state.momentum), torch.empty_like(state.anchor)
    for start in range(0, mean.numel(), STEP_ELEMENTS):
        part = slice(start, start + STEP_ELEMENTS)
        g, m, new = mean[part], buffer[part], anchor[part]
        torch.mul(state.momentum[part], mu_scalar, out=m)
        m.add_(g)
        torch.mul(m, mu_scalar, out=new)
        new.add_(g)
        new.mul_(lr_scalar)
        torch.sub(state.anchor[part], new, out=new)
    return OuterState(anchor=anchor, momentum=buffer, round=state.round + 1, tokens=state.tokens + tokens)


def carry(local: Tensor, old_anchor: Tensor, new_anchor: Tensor) -> Tensor:
    """local + (new_anchor - old_anchor): moves a contribution that a round left out to the new anchor.

    The pseudo-gradient against the new anchor equals the one against the old anchor, up to rounding.
    """
    _require_one_shape(local, old_anchor, new_anchor)
    return torch.sub(new_anchor, old_anchor).add_(local)


def mix(local: Tensor, new_anchor: Tensor, alpha: float) -> Tensor:
    """alpha local + (1 - alpha) new_anchor: merges the inner steps that were made while the round was reduced.

    Streaming DiLoCo, arXiv 2501.18512, eq. 3, where alpha is 0.5. With alpha 0 it is the blocking algorithm.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"The mix needs an alpha from 0 to 1, not {alpha}.")
    _require_one_shape(local, new_anchor)
    return torch.lerp(new_anchor, local, alpha)


def correct(local: Tensor, sent: Tensor, new_anchor: Tensor) -> Tensor:
    """new_anchor + (local - sent): moves the progress since the contribution was sent to the new anchor.

    Without inner steps since then it is the blocking algorithm.
    """
    _require_one_shape(local, sent, new_anchor)
    return torch.sub(local, sent).add_(new_anchor)


def _require_one_shape(*vectors: Tensor) -> None:
    if len({x.shape for x in vectors}) != 1:
        raise ValueError(f"The vectors differ in shape: {', '.join(str(tuple(x.shape)) for x in vectors)}.")


def _require_denormals() -> None:
    """Raise if denormals are flushed. Momentum without gradient decays into them, so the node would leave the chain."""
    if not (torch.tensor([SMALLEST_NORMAL]) * 0.5).item():
        raise ArithmeticError(
            "This thread flushes denormal numbers to zero, so its outer state would differ from the others': "
            "call torch.set_flush_denormal(False), or remove the library that turned flushing on."
        )

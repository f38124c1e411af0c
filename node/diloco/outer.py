"""The outer optimizers, which apply the averaged pseudo-gradient to the anchor, and the rules that move a node's local
parameters to a new anchor.

DiLoCo, arXiv 2311.08105, algorithm 1: theta is the anchor, Delta the mean pseudo-gradient, H the inner steps. Every
tensor here is fp32, either the flat vector [P] of all parameters or a fragment [P_f] of it. All nodes must compute the
same bits on every machine, so `outer_step` uses only elementwise, exactly rounded operations: multiply and add stay
separate (no `alpha=`, `addcmul` or `lerp`, which may become a fused multiply-add), all hyper-parameters are rounded to
fp32 first, and denormal numbers must not be flushed to zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from node.diloco.buffers import vectors
from node.diloco.credit import EMPTY, CreditTable

SMALLEST_NORMAL = 2.0**-126
"""Smallest normal number of fp32; half of it is denormal."""
STEP_ELEMENTS = 2**18
"""Elements that `outer_step` processes at a time, so that its six passes stay in the cache."""
TINY = 2.0**-60
"""A decay factor below this one changes nothing in fp32, when it is subtracted from 1."""


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """How a mean pseudo-gradient g changes the anchor. All start with moments of zero.

    sgd        anchor' = anchor - lr g
    momentum   m' = mu m + g                   anchor' = anchor - lr m'
    nesterov   m' = mu m + g                   anchor' = anchor - lr (g + mu m')
    adam       m' = mu m + (1 - mu) g          anchor' = anchor - lr c m' / (sqrt(v') + eps sqrt(1 - beta2^t))
               v' = beta2 v + (1 - beta2) g^2  c = sqrt(1 - beta2^t) / (1 - mu^t), with t counted from 1

    The first three are `torch.optim.SGD`, the last one `torch.optim.Adam` (arXiv 1412.6980, algorithm 1).
    """

    name: Literal["nesterov", "momentum", "sgd", "adam"] = "nesterov"
    momentum: float = 0.9
    """mu, from 0 to below 1. `sgd` does not use it."""
    beta2: float = 0.99
    """Only `adam` uses it and `eps`."""
    eps: float = 0.1

    @property
    def moments(self) -> int:
        """Moments that the outer state holds for each parameter."""
        return 2 if self.name == "adam" else 1


@dataclass(frozen=True, slots=True)
class OuterState:
    """The state that all nodes share after a round. Never changed in place: threads share it as a snapshot."""

    anchor: Tensor
    """Outer parameters, fp32 [P], cpu."""
    momentum: Tensor
    """The momentum buffer, fp32 [P], cpu. With `adam` the first moments and then the second ones, fp32 [2 P]."""
    round: int
    """Last committed round; -1 at genesis."""
    tokens: int
    """Tokens that the whole swarm trained on up to this anchor."""
    credit: CreditTable = EMPTY
    """Who contributed these tokens."""
    amendments: bytes = b""
    """The accepted amendments of the run (`config.amendments.encode_list`)."""

    def __post_init__(self) -> None:
        for name, x in (("anchor", self.anchor), ("momentum", self.momentum)):
            if x.dtype != torch.float32 or x.device.type != "cpu" or x.dim() != 1 or not x.is_contiguous():
                raise ValueError(f"The {name} must be one contiguous fp32 vector on the cpu.")
        count, moments = self.anchor.numel(), self.momentum.numel()
        if moments not in (count, 2 * count):
            raise ValueError(f"The momentum must be one or two values a parameter, not {moments} for {count}.")
        if self.round < -1 or self.tokens < 0:
            raise ValueError(f"Round {self.round} and tokens {self.tokens} must be at least -1 and 0.")

    @property
    def moments(self) -> int:
        """Moments for each parameter: 1, or 2 with `adam`."""
        return max(1, self.momentum.numel() // max(1, self.anchor.numel()))


def genesis(anchor: Tensor, moments: int = 1) -> OuterState:
    """The state before round 0: the initial parameters, fp32 [P] on the cpu, and moments of zero."""
    return OuterState(anchor=anchor, momentum=torch.zeros(moments * anchor.numel()), round=-1, tokens=0)


def pseudo_gradient(anchor: Tensor, local: Tensor) -> Tensor:
    """anchor - local, on the device of both. It points uphill: the outer step *subtracts* it."""
    _require_one_shape(anchor, local)
    return anchor - local


def outer_step(
    state: OuterState, mean: Tensor, optimizer: OuterOptimizer, *, lr: float, tokens: int, number: int | None = None
) -> OuterState:
    """One outer step on the mean pseudo-gradient, fp32 [P] on the cpu. Returns a new state; `state` stays as it is.

    `tokens` are those of this round; `credited` adds to whom they belong. `number` counts the earlier outer steps of
    these parameters; by default it is that of all rounds. Allocates only the new state. Raises ValueError for a mean or
    moments that do not fit, and ArithmeticError on a thread that flushes denormal numbers.
    """
    _require_denormals()
    if mean.shape != state.anchor.shape or mean.dtype != torch.float32 or mean.device.type != "cpu":
        raise ValueError(f"The mean must be fp32 {tuple(state.anchor.shape)} on the cpu.")
    if state.moments != optimizer.moments:
        raise ValueError(f"The optimizer {optimizer.name} needs {optimizer.moments} moments, not {state.moments}.")
    if tokens < 0:
        raise ValueError(f"A round cannot have {tokens} tokens.")
    momentum, anchor = vectors.empty(state.momentum.numel()), vectors.empty(state.anchor.numel())
    buffers = momentum.view(optimizer.moments, -1)
    old_buffers = state.momentum.view(optimizer.moments, -1)
    steps = (state.round + 1 if number is None else number) + 1
    biases = (1 - _power(optimizer.momentum, steps), 1 - _power(optimizer.beta2, steps))
    for start in range(0, mean.numel(), STEP_ELEMENTS):
        part = slice(start, start + STEP_ELEMENTS)
        new = anchor[part]
        if optimizer.name == "adam":
            _adam(optimizer, lr, biases, mean[part], old_buffers[:, part], buffers[:, part], new)
        else:
            _sgd(optimizer, lr, mean[part], old_buffers[0, part], buffers[0, part], new)
        torch.sub(state.anchor[part], new, out=new)
    return replace(state, anchor=anchor, momentum=momentum, round=state.round + 1, tokens=state.tokens + tokens)


def credited(state: OuterState, tokens: Mapping[str, int]) -> OuterState:
    """The state after an outer step, with the tokens of this round's contributors, by peer id, in the credit."""
    return replace(state, credit=state.credit.after(state.round, tokens))


def paused(state: OuterState) -> OuterState:
    """The state after a round of a paused run, which has no contribution."""
    return replace(state, round=state.round + 1)


def rolled_back(state: OuterState, to: OuterState) -> OuterState:
    """A state with the parameters and the momentum of an earlier one. Round, tokens and credit stay."""
    return replace(state, anchor=to.anchor, momentum=to.momentum)


def _sgd(optimizer: OuterOptimizer, lr: float, g: Tensor, old: Tensor, m: Tensor, change: Tensor) -> None:
    """Write the new momentum to `m`, and to `change` what is subtracted from the anchor."""
    mu = _fp32(0.0 if optimizer.name == "sgd" else optimizer.momentum)
    torch.mul(old, mu, out=m)
    m.add_(g)
    if optimizer.name == "nesterov":
        torch.mul(m, mu, out=change)
        change.add_(g)
    else:
        change.copy_(m)
    change.mul_(_fp32(lr))


def _adam(
    optimizer: OuterOptimizer,
    lr: float,
    biases: tuple[float, float],
    g: Tensor,
    old: Tensor,
    new: Tensor,
    change: Tensor,
) -> None:
    """Write the new moments to `new`, fp32 [2, n], and to `change` what is subtracted from the anchor.

    `biases` are 1 - mu^t and 1 - beta2^t.
    """
    mu, beta2, root = optimizer.momentum, optimizer.beta2, math.sqrt(biases[1])
    torch.mul(old[0], _fp32(mu), out=new[0])
    torch.mul(g, _fp32(1 - mu), out=change)
    new[0].add_(change)
    torch.mul(old[1], _fp32(beta2), out=new[1])
    torch.mul(g, g, out=change)
    change.mul_(_fp32(1 - beta2))
    new[1].add_(change)
    np.sqrt(new[1].numpy(), out=change.numpy())  # It rounds exactly; `torch.sqrt` does not in MKL.
    change.add_(_fp32(optimizer.eps * root))
    torch.div(new[0], change, out=change)
    change.mul_(_fp32(lr * root / biases[0]))


def _power(base: float, exponent: int) -> float:
    """base to the power of exponent, with the same rounding on every machine; 0 where it is negligible against 1."""
    result = 1.0
    for _ in range(exponent):
        result *= base
        if result < TINY:
            return 0.0
    return result


def _fp32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


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

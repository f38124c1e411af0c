"""In special cases, DiLoCo on a small network in plain torch equals known algorithms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from node.diloco.aggregate import weighted_mean
from node.diloco.codec import make_codec
from node.diloco.outer import OuterOptimizer, OuterState, carry, genesis, outer_step, pseudo_gradient

INPUTS, HIDDEN = 8, 16
PARAMETERS = HIDDEN * INPUTS + HIDDEN + HIDDEN
INNER_LR = 0.05


def loss_of(flat: Tensor, x_BI: Tensor) -> Tensor:
    """Loss of a two-layer network that learns |sum of inputs|. `flat` holds its parameters, fp32 [P]."""
    weight_HI, bias_H, out_H = flat.split([HIDDEN * INPUTS, HIDDEN, HIDDEN])
    y_B = torch.tanh(x_BI @ weight_HI.view(HIDDEN, INPUTS).T + bias_H) @ out_H
    loss: Tensor = (y_B - x_BI.sum(1).abs()).square().mean()
    return loss


def initial() -> Tensor:
    return torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(0)) * 0.3


def batch(peer: int, step: int, rows: int = 16) -> Tensor:
    return torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(1000 * peer + step))


def sgd(flat: Tensor, batches: list[Tensor]) -> Tensor:
    for x_BI in batches:
        leaf = flat.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(leaf, x_BI), leaf)
        flat = flat - INNER_LR * gradient
    return flat


def round_of(
    state: OuterState, batches_by_peer: list[list[Tensor]], *, lr: float, momentum: float, codec: str = "fp32"
) -> OuterState:
    """One round, encoded like a real one. The weight of a peer is its number of rows."""
    coder = make_codec(codec)
    parts, weights = [], []
    for batches in batches_by_peer:
        delta = pseudo_gradient(state.anchor, sgd(state.anchor, batches))
        parts.append(coder.decode(coder.encode(delta), PARAMETERS))
        weights.append(sum(len(b) for b in batches))
    mean = coder.decode(coder.encode(weighted_mean(parts, weights)), PARAMETERS)
    return outer_step(state, mean, OuterOptimizer(momentum=momentum), lr=lr, tokens=sum(weights))


@pytest.mark.parametrize("inner_steps", [1, 5])
def test_diloco_with_one_peer_outer_lr_1_and_no_momentum_equals_local_training(inner_steps: int) -> None:
    state, local = genesis(initial()), initial()
    for number in range(6):
        batches = [batch(0, number * inner_steps + i) for i in range(inner_steps)]
        state = round_of(state, [batches], lr=1.0, momentum=0.0)
        local = sgd(local, batches)
    assert (local - initial()).abs().max() > 0.05
    torch.testing.assert_close(state.anchor, local, rtol=1e-5, atol=1e-6)
    assert state.tokens == 6 * inner_steps * 16


@pytest.mark.parametrize("rows", [[16, 16, 16], [16, 8, 40]])
def test_diloco_with_one_inner_sgd_step_equals_data_parallel_sgd(rows: list[int]) -> None:
    state, together = genesis(initial()), initial()
    for step in range(8):
        batches = [batch(peer, step, n) for peer, n in enumerate(rows)]
        state = round_of(state, [[b] for b in batches], lr=1.0, momentum=0.0)
        together = sgd(together, [torch.cat(batches)])
    torch.testing.assert_close(state.anchor, together, rtol=1e-5, atol=2e-6)


def test_training_with_the_fp16_codec_converges_like_training_with_fp32() -> None:
    states = {}
    for codec in ("fp32", "fp16"):
        state = genesis(initial())
        for number in range(10):
            by_peer = [[batch(peer, number * 5 + i) for i in range(5)] for peer in range(3)]
            state = round_of(state, by_peer, lr=0.7, momentum=0.9, codec=codec)
        states[codec] = state
    held_out = batch(99, 0, 512)
    exact, coded = states["fp32"].anchor, states["fp16"].anchor
    assert not torch.equal(exact, coded)
    # In each round, encoding the mean and the parts adds a relative error of at most 2^-10.
    moved = (exact - initial()).abs().max()
    assert (exact - coded).abs().max() < 10 * 2**-10 * moved
    assert loss_of(coded, held_out) == pytest.approx(loss_of(exact, held_out).item(), rel=5e-3)


def test_carried_work_of_a_member_that_missed_a_round_counts_in_full() -> None:
    """The outer lr is 1. Peer b misses round 0 and contributes its carried work in round 1."""
    start = initial()
    work_a = [sgd(start, [batch(0, i) for i in range(3)])]
    state_1 = outer_step(genesis(start), pseudo_gradient(start, work_a[0]), OuterOptimizer("sgd"), lr=1.0, tokens=1)
    late = sgd(start, [batch(1, i) for i in range(3)])
    carried = carry(late, start, state_1.anchor)
    state_2 = outer_step(state_1, pseudo_gradient(state_1.anchor, carried), OuterOptimizer("sgd"), lr=1.0, tokens=1)
    expected = start + (work_a[0] - start) + (late - start)
    torch.testing.assert_close(state_2.anchor, expected, rtol=1e-5, atol=1e-6)

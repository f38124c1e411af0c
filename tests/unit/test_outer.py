"""Tests of the outer step, of its agreement with torch.optim, and of the moves to a new anchor."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from node.diloco.outer import OuterOptimizer, OuterState, carry, correct, genesis, mix, outer_step, pseudo_gradient

LR, MOMENTUM = 0.7, 0.9
SIZES = (1, 7, 64, 1003, 100_001)
OLD, SENT, NOW, NEW = (torch.tensor(x) for x in ([0.0, 0.0, 0.0], [1.0, -2.0, 4.0], [1.5, -3.0, 4.0], [0.5, 1.0, 2.0]))


def vector(n: int, seed: int) -> torch.Tensor:
    """A vector with magnitudes from denormal to 1e6, and with some zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n) * 10.0 ** rng.integers(-44, 7, n)
    values[rng.random(n) < 0.05] = 0.0
    return torch.from_numpy(values.astype(np.float32))


def state_of(n: int) -> OuterState:
    return OuterState(anchor=vector(n, 1), momentum=vector(n, 2), round=4, tokens=1000)


def step(state: OuterState, mean: torch.Tensor, tokens: int = 1) -> OuterState:
    return outer_step(state, mean, OuterOptimizer(momentum=MOMENTUM), lr=LR, tokens=tokens)


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


def test_initial_outer_state_has_no_momentum_and_no_round() -> None:
    state = genesis(vector(10, 0))
    assert (state.round, state.tokens) == (-1, 0)
    assert torch.equal(state.momentum, torch.zeros(10))


def test_outer_step_counts_rounds_and_tokens_and_changes_no_input() -> None:
    state, mean = state_of(1003), vector(1003, 3)
    before = [t.clone() for t in (state.anchor, state.momentum, mean)]
    after = step(state, mean, tokens=50)
    assert (after.round, after.tokens) == (5, 1050)
    for old, now in zip(before, (state.anchor, state.momentum, mean), strict=True):
        assert bits(old) == bits(now)
    tensors = (state.anchor, state.momentum, mean, after.anchor, after.momentum)
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 5


@pytest.mark.parametrize("n", SIZES)
def test_outer_step_has_the_same_bits_as_separate_numpy_operations(n: int) -> None:
    state, g = state_of(n), vector(n, 3)
    after = step(state, g)
    mu, lr = np.float32(MOMENTUM), np.float32(LR)
    buffer = state.momentum.numpy() * mu + g.numpy()
    anchor = state.anchor.numpy() - lr * (g.numpy() + mu * buffer)
    assert buffer.dtype == anchor.dtype == np.float32
    assert np.array_equal(after.momentum.numpy().view(np.int32), buffer.view(np.int32))
    assert np.array_equal(after.anchor.numpy().view(np.int32), anchor.view(np.int32))
    if n > 1000:
        fused = (state.momentum.double() * float(mu) + g.double()).float()
        assert bits(fused) != bits(after.momentum), "these inputs would not detect a fused multiply-add"


def nearest(exact: Fraction) -> np.float32:
    """The fp32 number nearest to `exact`. Of two equally near numbers, it is the even one."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda c: (abs(Fraction(float(c)) - exact), int(np.float32(c).view(np.int32)) & 1))


def test_outer_step_rounds_exact_values_to_fp32_after_each_operation() -> None:
    n = 400
    state, g = state_of(n), vector(n, 3)
    after = step(state, g)
    mu, lr = Fraction(float(np.float32(MOMENTUM))), Fraction(float(np.float32(LR)))
    for i in range(n):
        m, gi, a = (Fraction(float(t[i])) for t in (state.momentum, g, state.anchor))
        buffer = Fraction(float(nearest(Fraction(float(nearest(m * mu))) + gi)))
        inside = Fraction(float(nearest(Fraction(float(nearest(buffer * mu))) + gi)))
        delta = Fraction(float(nearest(inside * lr)))
        assert float(after.momentum[i]) == float(buffer)
        assert float(after.anchor[i]) == float(nearest(a - delta))


def test_number_of_threads_does_not_change_the_bits_of_the_outer_step() -> None:
    state, g = state_of(200_003), vector(200_003, 3)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(step(state, g))
    finally:
        torch.set_num_threads(threads)
    assert len({tuple(bits(r.anchor)) for r in results}) == 1
    assert len({tuple(bits(r.momentum)) for r in results}) == 1


@pytest.mark.parametrize(
    ("optimizer", "theirs", "moments"),
    [
        (OuterOptimizer("nesterov"), partial(SGD, momentum=0.9, nesterov=True), ("momentum_buffer",)),
        (OuterOptimizer("momentum"), partial(SGD, momentum=0.9), ("momentum_buffer",)),
        (OuterOptimizer("sgd"), SGD, ()),
        (OuterOptimizer("adam", 0.8, 0.95, 0.1), partial(Adam, betas=(0.8, 0.95), eps=0.1), ("exp_avg", "exp_avg_sq")),
    ],
    ids=["nesterov", "momentum", "sgd", "adam"],
)
def test_outer_step_follows_the_optimizer_of_torch(
    optimizer: OuterOptimizer, theirs: Callable[..., Optimizer], moments: tuple[str, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(500, generator=generator)
    parameter = torch.nn.Parameter(start.clone())
    torch_optimizer = theirs([parameter], lr=LR)
    state = genesis(start, optimizer.moments)
    for _ in range(20):
        g = torch.randn(500, generator=generator)
        parameter.grad = g.clone()
        torch_optimizer.step()
        state = outer_step(state, g, optimizer, lr=LR, tokens=1)
    torch.testing.assert_close(state.anchor, parameter.detach(), rtol=1e-5, atol=2e-5)
    if moments:
        expected = torch.cat([torch_optimizer.state[parameter][name] for name in moments])
        torch.testing.assert_close(state.momentum, expected, rtol=1e-5, atol=1e-5)
    assert state.round == 19


def test_adam_has_the_same_bits_as_separate_numpy_operations() -> None:
    n, optimizer = 100_001, OuterOptimizer("adam", 0.9, 0.99, 0.1)
    g, old = vector(n, 3).clamp(-1e15, 1e15), torch.cat([vector(n, 2), vector(n, 5).abs()])
    state = OuterState(anchor=vector(n, 1), momentum=old, round=4, tokens=0)
    after = outer_step(state, g, optimizer, lr=LR, tokens=1, number=1)
    f = np.float32
    first = old[:n].numpy() * f(0.9) + g.numpy() * f(1 - 0.9)
    second = old[n:].numpy() * f(0.99) + g.numpy() * g.numpy() * f(1 - 0.99)
    root = math.sqrt(1 - 0.99 * 0.99)
    change = first / (np.sqrt(second) + f(0.1 * root)) * f(LR * root / (1 - 0.9 * 0.9))
    assert after.momentum.numpy().tobytes() == np.concatenate([first, second]).tobytes()
    assert after.anchor.numpy().tobytes() == (state.anchor.numpy() - change).tobytes()


@pytest.mark.parametrize("name", ["nesterov", "momentum", "sgd", "adam"])
def test_every_outer_optimizer_subtracts_the_pseudo_gradient(name: Any) -> None:
    optimizer = OuterOptimizer(name)
    after = outer_step(
        genesis(torch.zeros(2), optimizer.moments), torch.tensor([1.0, -1.0]), optimizer, lr=LR, tokens=1
    )
    assert after.anchor[0] < 0 < after.anchor[1]


def test_outer_step_refuses_moments_of_another_optimizer() -> None:
    with pytest.raises(ValueError, match="adam needs 2 moments, not 1"):
        outer_step(genesis(torch.zeros(3)), torch.zeros(3), OuterOptimizer("adam"), lr=LR, tokens=1)


def test_pseudo_gradient_points_from_the_local_parameters_to_the_anchor() -> None:
    assert torch.equal(pseudo_gradient(torch.tensor([3.0]), torch.tensor([1.0])), torch.tensor([2.0]))


def test_outer_step_is_refused_on_a_thread_that_flushes_denormals() -> None:
    state = genesis(torch.zeros(3))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        with pytest.raises(ArithmeticError, match="set_flush_denormal"):
            step(state, torch.ones(3))
    finally:
        torch.set_flush_denormal(False)
    assert step(state, torch.ones(3)).round == 0


@pytest.mark.parametrize("mean", [torch.ones(4), torch.ones(3, dtype=torch.float64), torch.ones(3, 1)])
def test_outer_step_refuses_a_mean_of_wrong_shape_or_dtype(mean: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="mean must be fp32"):
        step(genesis(torch.zeros(3)), mean)


@pytest.mark.parametrize(
    ("anchor", "momentum", "number"),
    [
        (torch.zeros(3, dtype=torch.float64), torch.zeros(3), 0),
        (torch.zeros(3), torch.zeros(4), 0),
        (torch.zeros(6)[::2], torch.zeros(3), 0),
        (torch.zeros(3), torch.zeros(3), -2),
    ],
)
def test_an_invalid_outer_state_is_refused(anchor: torch.Tensor, momentum: torch.Tensor, number: int) -> None:
    with pytest.raises(ValueError, match=r"must be|differ"):
        OuterState(anchor=anchor, momentum=momentum, round=number, tokens=0)


# moves to a new anchor


def test_carrying_local_parameters_to_a_new_anchor_keeps_the_pseudo_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new, local = (torch.randn(1000, generator=generator) for _ in range(3))
    before = [t.clone() for t in (local, old, new)]
    moved = carry(local, old, new)
    torch.testing.assert_close(pseudo_gradient(new, moved), pseudo_gradient(old, local), rtol=0, atol=2e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, (local, old, new), strict=True))
    assert torch.equal(carry(new, old, old), new)


def test_mixing_interpolates_between_the_new_anchor_and_the_local_parameters() -> None:
    assert mix(NOW, NEW, 0.5).tolist() == [1.0, -1.0, 3.0]
    assert torch.equal(mix(NOW, NEW, 0.0), NEW), "alpha 0 is the blocking algorithm"
    assert torch.equal(mix(NOW, NEW, 1.0), NOW)
    for alpha in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="alpha"):
            mix(NOW, NEW, alpha)


def test_correction_applies_the_steps_since_sending_to_the_new_anchor() -> None:
    assert correct(NOW, SENT, NEW).tolist() == [1.0, 0.0, 2.0]
    assert torch.equal(correct(SENT, SENT, NEW), NEW), "without steps it is the blocking algorithm"


def test_every_inner_step_counts_once_with_the_correction() -> None:
    """For one peer with outer lr 1 and no momentum, the anchor gets the sent steps, and the rest is sent next."""
    state = outer_step(genesis(OLD), pseudo_gradient(OLD, SENT), OuterOptimizer("sgd"), lr=1.0, tokens=1)
    local = correct(NOW, SENT, state.anchor)
    assert torch.equal(local, NOW)
    assert torch.equal(pseudo_gradient(state.anchor, local), SENT - NOW)


def test_moves_to_a_new_anchor_refuse_vectors_of_different_shape() -> None:
    short = NEW[:1]
    for merge in (
        lambda: pseudo_gradient(OLD, short),
        lambda: carry(NOW, OLD, short),
        lambda: mix(NOW, short, 0.5),
        lambda: correct(NOW, short, NEW),
    ):
        with pytest.raises(ValueError, match="differ in shape"):
            merge()

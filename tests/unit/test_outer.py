"""The outer step: its bits, its sign, its agreement with torch.optim."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from node.diloco.outer import OuterState, carry, genesis, outer_step, pseudo_gradient

LR, MOMENTUM = 0.7, 0.9
SIZES = (1, 7, 64, 1003, 100_001)


def vector(n: int, seed: int) -> torch.Tensor:
    """Magnitudes from denormal to 1e6, and some zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n) * 10.0 ** rng.integers(-44, 7, n)
    values[rng.random(n) < 0.05] = 0.0
    return torch.from_numpy(values.astype(np.float32))


def state_of(n: int) -> OuterState:
    return OuterState(anchor=vector(n, 1), momentum=vector(n, 2), round=4, tokens=1000)


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


def test_genesis_has_no_momentum_and_no_round() -> None:
    state = genesis(vector(10, 0))
    assert (state.round, state.tokens) == (-1, 0)
    assert torch.equal(state.momentum, torch.zeros(10))


def test_step_counts_and_leaves_its_inputs_alone() -> None:
    state, mean = state_of(1003), vector(1003, 3)
    before = [t.clone() for t in (state.anchor, state.momentum, mean)]
    after = outer_step(state, mean, lr=LR, momentum=MOMENTUM, tokens=50)
    assert (after.round, after.tokens) == (5, 1050)
    for old, now in zip(before, (state.anchor, state.momentum, mean), strict=True):
        assert bits(old) == bits(now)
    storages = {
        t.untyped_storage().data_ptr() for t in (state.anchor, state.momentum, mean, after.anchor, after.momentum)
    }
    assert len(storages) == 5


@pytest.mark.parametrize("n", SIZES)
def test_bits_are_those_of_numpy_single_operations(n: int) -> None:
    state, g = state_of(n), vector(n, 3)
    after = outer_step(state, g, lr=LR, momentum=MOMENTUM, tokens=1)
    mu, lr = np.float32(MOMENTUM), np.float32(LR)
    buffer = state.momentum.numpy() * mu + g.numpy()
    anchor = state.anchor.numpy() - lr * (g.numpy() + mu * buffer)
    assert buffer.dtype == anchor.dtype == np.float32
    assert np.array_equal(after.momentum.numpy().view(np.int32), buffer.view(np.int32))
    assert np.array_equal(after.anchor.numpy().view(np.int32), anchor.view(np.int32))


@pytest.mark.parametrize("n", SIZES)
def test_bits_are_those_of_single_operations_in_double_rounded_once(n: int) -> None:
    """A product or sum of two fp32 numbers, computed in fp64 and rounded to fp32, is the exactly rounded one."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32).double()

    state, g = state_of(n), vector(n, 3)
    after = outer_step(state, g, lr=LR, momentum=MOMENTUM, tokens=1)
    mu, lr = float(np.float32(MOMENTUM)), float(np.float32(LR))
    buffer = rounded(rounded(state.momentum.double() * mu) + g.double())
    step = rounded(rounded(rounded(buffer * mu) + g.double()) * lr)
    anchor = rounded(state.anchor.double() - step)
    assert bits(after.momentum) == bits(buffer.float())
    assert bits(after.anchor) == bits(anchor.float())
    if n > 1000:
        fused = (state.momentum.double() * mu + g.double()).float()
        assert bits(fused) != bits(after.momentum), "these inputs would not notice a fused multiply-add"


def nearest(exact: Fraction) -> np.float32:
    """The fp32 number next to `exact`; of two equally near the even one."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda c: (abs(Fraction(float(c)) - exact), int(np.float32(c).view(np.int32)) & 1))


def test_values_are_those_of_exact_fractions_rounded_after_each_operation() -> None:
    n = 400
    state, g = state_of(n), vector(n, 3)
    after = outer_step(state, g, lr=LR, momentum=MOMENTUM, tokens=1)
    mu, lr = Fraction(float(np.float32(MOMENTUM))), Fraction(float(np.float32(LR)))
    for i in range(n):
        m, gi, a = (Fraction(float(t[i])) for t in (state.momentum, g, state.anchor))
        buffer = Fraction(float(nearest(Fraction(float(nearest(m * mu))) + gi)))
        inside = Fraction(float(nearest(Fraction(float(nearest(buffer * mu))) + gi)))
        step = Fraction(float(nearest(inside * lr)))
        assert float(after.momentum[i]) == float(buffer)
        assert float(after.anchor[i]) == float(nearest(a - step))


def test_thread_count_does_not_change_the_bits() -> None:
    state, g = state_of(200_003), vector(200_003, 3)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(outer_step(state, g, lr=LR, momentum=MOMENTUM, tokens=1))
    finally:
        torch.set_num_threads(threads)
    assert len({tuple(bits(r.anchor)) for r in results}) == 1
    assert len({tuple(bits(r.momentum)) for r in results}) == 1


def test_follows_torch_sgd_with_nesterov() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(500, generator=generator)
    parameter = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([parameter], lr=LR, momentum=MOMENTUM, nesterov=True)
    state = genesis(start)
    for _ in range(20):
        g = torch.randn(500, generator=generator)
        parameter.grad = g.clone()
        sgd.step()
        state = outer_step(state, g, lr=LR, momentum=MOMENTUM, tokens=1)
    torch.testing.assert_close(state.anchor, parameter.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(state.momentum, sgd.state[parameter]["momentum_buffer"], rtol=1e-5, atol=1e-5)
    assert state.round == 19


def test_pseudo_gradient_points_from_local_to_anchor() -> None:
    assert torch.equal(pseudo_gradient(torch.tensor([3.0]), torch.tensor([1.0])), torch.tensor([2.0]))


def test_carry_keeps_the_pseudo_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new, local = (torch.randn(1000, generator=generator) for _ in range(3))
    before = [t.clone() for t in (local, old, new)]
    moved = carry(local, old, new)
    torch.testing.assert_close(pseudo_gradient(new, moved), pseudo_gradient(old, local), rtol=0, atol=2e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, (local, old, new), strict=True))
    assert torch.equal(carry(new, old, old), new)


def test_a_thread_that_flushes_denormals_is_refused() -> None:
    state = genesis(torch.zeros(3))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        with pytest.raises(ArithmeticError, match="set_flush_denormal"):
            outer_step(state, torch.ones(3), lr=LR, momentum=MOMENTUM, tokens=1)
    finally:
        torch.set_flush_denormal(False)
    assert outer_step(state, torch.ones(3), lr=LR, momentum=MOMENTUM, tokens=1).round == 0


@pytest.mark.parametrize("mean", [torch.ones(4), torch.ones(3, dtype=torch.float64), torch.ones(3, 1)])
def test_a_mean_that_does_not_fit_is_refused(mean: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="mean must be fp32"):
        outer_step(genesis(torch.zeros(3)), mean, lr=LR, momentum=MOMENTUM, tokens=1)


@pytest.mark.parametrize(
    ("anchor", "momentum", "number"),
    [
        (torch.zeros(3, dtype=torch.float64), torch.zeros(3), 0),
        (torch.zeros(3), torch.zeros(4), 0),
        (torch.zeros(6)[::2], torch.zeros(3), 0),
        (torch.zeros(3), torch.zeros(3), -2),
    ],
)
def test_a_state_that_is_none_is_refused(anchor: torch.Tensor, momentum: torch.Tensor, number: int) -> None:
    with pytest.raises(ValueError, match=r"must be|differ"):
        OuterState(anchor=anchor, momentum=momentum, round=number, tokens=0)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shape"):
        pseudo_gradient(torch.zeros(3), torch.zeros(1))
    with pytest.raises(ValueError, match="shape"):
        carry(torch.zeros(3), torch.zeros(3), torch.zeros(1))

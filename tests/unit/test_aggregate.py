"""Tests of the weighted mean, the clipping of contributions and the sum of squares."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from node.diloco.aggregate import clip_scales, norm_bound, shares, square_norm, weighted_mean


def parts(count: int, n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(n, generator=generator) for _ in range(count)]


def test_shares_of_weights_are_fp32_values_that_sum_to_one() -> None:
    found = shares([1, 2, 4, 10**12])
    assert [float(np.float32(s)) for s in found] == found
    assert sum(found) == pytest.approx(1.0, abs=1e-7)
    assert shares([7]) == [1.0]
    assert shares([3, 3]) == [0.5, 0.5]


@pytest.mark.parametrize("n", [0, 1, 7, 1003, 100_001])
def test_weighted_mean_has_the_same_bits_as_separate_numpy_operations(n: int) -> None:
    vectors, weights = parts(5, n), [3, 1, 4, 1, 5]
    before = [v.clone() for v in vectors]
    total: np.ndarray[Any, Any] = np.float32(shares(weights)[0]) * vectors[0].numpy()
    for share, vector in zip(shares(weights)[1:], vectors[1:], strict=True):
        total = total + np.float32(share) * vector.numpy()
    mean = weighted_mean(vectors, weights)
    assert np.array_equal(mean.numpy().view(np.int32), total.view(np.int32))
    assert torch.equal(weighted_mean(vectors, weights, [1.0] * 5), mean), "scales of one change no bit"
    assert all(torch.equal(a, b) for a, b in zip(before, vectors, strict=True)), "the parts stay as they are"


def test_weighted_mean_of_one_vector_is_a_copy_of_it() -> None:
    (only,) = parts(1, 100)
    mean = weighted_mean([only], [123])
    assert torch.equal(mean, only)
    assert mean.data_ptr() != only.data_ptr()


def test_weighted_mean_depends_on_the_order_of_the_vectors() -> None:
    vectors, weights = parts(5, 10_000), [3, 1, 4, 1, 5]
    rotations = [[(i + shift) % 5 for i in range(5)] for shift in range(5)]
    results = {
        weighted_mean([vectors[i] for i in order], [weights[i] for i in order]).numpy().tobytes() for order in rotations
    }
    assert len(results) > 1


@pytest.mark.parametrize("weights", [[], [0], [1, 0], [2, -1]])
def test_weighted_mean_refuses_weights_below_one(weights: list[int]) -> None:
    with pytest.raises(ValueError, match=r"[Ww]eight"):
        weighted_mean([torch.ones(2) for _ in weights], weights)


@pytest.mark.parametrize("second", [torch.ones(3), torch.ones(1), torch.ones(2, dtype=torch.float64)])
def test_weighted_mean_refuses_vectors_of_different_shape_or_dtype(second: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="one shape"):
        weighted_mean([torch.ones(2), second], [1, 1])


def test_weighted_mean_keeps_no_more_than_two_vectors_of_an_iterator() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def vectors() -> Iterator[torch.Tensor]:
        for number in range(6):
            vector = torch.full((4,), float(number))
            made.append(weakref.ref(vector))
            alive.append(sum(one() is not None for one in made))
            yield vector

    assert torch.equal(
        weighted_mean(vectors(), [1] * 6), weighted_mean([torch.full((4,), float(n)) for n in range(6)], [1] * 6)
    )
    assert max(alive) == 2


def test_number_of_weights_must_be_the_number_of_vectors() -> None:
    with pytest.raises(ValueError, match="shorter than"):
        weighted_mean([torch.ones(2), torch.ones(2)], [1])
    with pytest.raises(ValueError, match="do not match"):
        clip_scales([1.0], [1, 1])


def test_clipping_shortens_contributions_longer_than_twice_the_lower_median() -> None:
    ones = [1] * 5
    assert clip_scales([1.0, 1.5, 0.5], ones[:3]) == [1.0, 1.0, 1.0]
    assert clip_scales([1.0, 100.0, 1.0, 1.0, 1.0], ones) == pytest.approx([1.0, 0.02, 1.0, 1.0, 1.0])
    assert clip_scales([1.0, 100.0], ones[:2]) == pytest.approx([1.0, 0.02]), "of two members the smaller counts"
    assert clip_scales([7.0], [1]) == [1.0]
    assert clip_scales([], []) == []
    assert clip_scales([0.0, 0.0], [1, 1]) == [1.0, 1.0]
    assert clip_scales([0.0, 0.0, 5.0], ones[:3]) == [1.0, 1.0, 0.0]


def test_clipping_limit_grows_in_proportion_to_the_tokens_of_a_contribution() -> None:
    assert clip_scales([1.0, 1.0, 6.0], [100, 100, 300]) == [1.0, 1.0, 1.0]
    assert clip_scales([1.0, 1.0, 12.0], [100, 100, 300]) == pytest.approx([1.0, 1.0, 0.5])
    assert clip_scales([1.0, 1.0, 2.0], [100, 100, 1]) == [1.0, 1.0, 1.0], "fewer steps lower no limit"


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), -1.0])
def test_clipping_refuses_norms_that_are_negative_or_not_finite(norm: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        clip_scales([1.0, norm], [1, 1])


def test_mean_of_clipped_vectors_is_within_its_norm_bound_and_one_liar_moves_it_little() -> None:
    vectors, weights = parts(5, 10_000), [3, 1, 4, 1, 5]
    honest = weighted_mean(vectors, weights)
    vectors[1] = vectors[1] * 100
    norms = [v.norm().item() for v in vectors]
    mean = weighted_mean(vectors, weights, clip_scales(norms, weights))
    assert mean.norm().item() <= norm_bound(weights, norms) * (1 + 1e-5)
    assert (mean - honest).norm() < 0.5 * honest.norm()
    assert (weighted_mean(vectors, weights) - honest).norm() > 5 * honest.norm(), "unclipped, it would dominate"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("values", ["random", "equal"])
def test_sum_of_squares_of_a_long_vector_has_a_relative_error_below_1e_12(values: str, threads: int) -> None:
    n = 5_000_000
    random = torch.randn(n, generator=torch.Generator().manual_seed(3)) * 1e-3
    x = random if values == "random" else torch.full((n,), 1e-4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = square_norm(x)
    finally:
        torch.set_num_threads(before)
    assert found == pytest.approx(math.fsum(np.square(x.numpy(), dtype=np.float64)), rel=1e-12)


def test_sum_of_squares_is_0_for_an_empty_vector_and_infinite_beyond_fp32() -> None:
    assert square_norm(torch.empty(0)) == 0
    assert square_norm(torch.tensor([3.0, 4.0])) == 25
    assert square_norm(torch.tensor([1e19])) == pytest.approx(1e38, rel=1e-6)
    assert square_norm(torch.tensor([1e19, 1e19, 1e19, 1e19])) == math.inf
    assert square_norm(torch.tensor([3e38])) == math.inf

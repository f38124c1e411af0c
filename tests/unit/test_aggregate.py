"""The weighted mean: values, bits, order, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from node.diloco.aggregate import clip_scales, norm_bound, shares, square_norm, weighted_mean


def parts(count: int, n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(n, generator=generator) for _ in range(count)]


def test_shares_are_fp32_and_sum_to_one() -> None:
    found = shares([1, 2, 4, 10**12])
    assert [float(np.float32(s)) for s in found] == found
    assert sum(found) == pytest.approx(1.0, abs=1e-7)
    assert shares([7]) == [1.0]
    assert shares([3, 3]) == [0.5, 0.5]


@pytest.mark.parametrize("n", [0, 1, 7, 1003, 100_001])
def test_bits_are_those_of_numpy_single_operations(n: int) -> None:
    vectors, weights = parts(5, n), [3, 1, 4, 1, 5]
    total = np.float32(shares(weights)[0]) * vectors[0].numpy()
    for share, vector in zip(shares(weights)[1:], vectors[1:], strict=True):
        total = total + np.float32(share) * vector.numpy()
    assert np.array_equal(weighted_mean(vectors, weights).numpy().view(np.int32), total.view(np.int32))


def test_it_is_the_weighted_mean_and_leaves_its_inputs_alone() -> None:
    vectors, weights = parts(4, 1000), [10, 20, 30, 40]
    before = [v.clone() for v in vectors]
    mean = weighted_mean(vectors, weights)
    expected = sum(v.double() * w / 100 for v, w in zip(vectors, weights, strict=True))
    torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, vectors, strict=True))


def test_one_part_is_itself_and_a_fresh_tensor() -> None:
    (only,) = parts(1, 100)
    mean = weighted_mean([only], [123])
    assert torch.equal(mean, only)
    assert mean.data_ptr() != only.data_ptr()


def test_arrival_order_does_not_matter_once_sorted_and_does_if_not() -> None:
    vectors, weights, names = parts(5, 10_000), [3, 1, 4, 1, 5], ["e", "b", "d", "a", "c"]
    results, unsorted = set(), set()
    for shift in range(5):
        arrived = [(i + shift) % 5 for i in range(5)]
        canonical = sorted(arrived, key=lambda i: names[i])
        for order, found in ((canonical, results), (arrived, unsorted)):
            mean = weighted_mean([vectors[i] for i in order], [weights[i] for i in order])
            found.add(mean.numpy().tobytes())
    assert len(results) == 1
    assert len(unsorted) > 1, "these inputs would not notice a wrong order"


@pytest.mark.parametrize("weights", [[], [0], [1, 0], [2, -1]])
def test_weights_without_meaning_are_refused(weights: list[int]) -> None:
    with pytest.raises(ValueError, match=r"[Ww]eight"):
        weighted_mean([torch.ones(2) for _ in weights], weights)


@pytest.mark.parametrize("second", [torch.ones(3), torch.ones(1), torch.ones(2, dtype=torch.float64)])
def test_parts_that_do_not_fit_are_refused(second: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="one shape"):
        weighted_mean([torch.ones(2), second], [1, 1])


def test_each_part_needs_its_weight() -> None:
    with pytest.raises(ValueError, match="2 parts and 1 weights"):
        weighted_mean([torch.ones(2), torch.ones(2)], [1])


def test_clipping_shortens_what_is_longer_than_twice_the_lower_median() -> None:
    ones = [1] * 5
    assert clip_scales([1.0, 1.5, 0.5], ones[:3]) == [1.0, 1.0, 1.0]
    assert clip_scales([1.0, 100.0, 1.0, 1.0, 1.0], ones) == pytest.approx([1.0, 0.02, 1.0, 1.0, 1.0])
    assert clip_scales([1.0, 100.0], ones[:2]) == pytest.approx([1.0, 0.02]), "with two, the smaller one counts"
    assert clip_scales([7.0], [1]) == [1.0]
    assert clip_scales([], []) == []
    assert clip_scales([0.0, 0.0], [1, 1]) == [1.0, 1.0]
    assert clip_scales([0.0, 0.0, 5.0], ones[:3]) == [1.0, 1.0, 0.0]


def test_who_did_more_steps_may_be_longer_in_proportion_and_who_did_fewer_not_less() -> None:
    assert clip_scales([1.0, 1.0, 6.0], [100, 100, 300]) == [1.0, 1.0, 1.0]
    assert clip_scales([1.0, 1.0, 12.0], [100, 100, 300]) == pytest.approx([1.0, 1.0, 0.5])
    assert clip_scales([1.0, 1.0, 2.0], [100, 100, 1]) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), -1.0])
def test_norms_that_are_none_are_refused(norm: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        clip_scales([1.0, norm], [1, 1])


def test_norms_and_weights_must_match() -> None:
    with pytest.raises(ValueError, match="do not match"):
        clip_scales([1.0], [1, 1])


def test_the_mean_of_clipped_parts_keeps_within_the_bound_and_one_liar_moves_it_little() -> None:
    vectors, weights = parts(5, 10_000), [3, 1, 4, 1, 5]
    honest = weighted_mean(vectors, weights)
    vectors[1] = vectors[1] * 100
    norms = [v.norm().item() for v in vectors]
    mean = weighted_mean(vectors, weights, clip_scales(norms, weights))
    assert mean.norm().item() <= norm_bound(weights, norms) * (1 + 1e-5)
    assert (mean - honest).norm() < 0.5 * honest.norm()
    assert (weighted_mean(vectors, weights) - honest).norm() > 5 * honest.norm(), "unclipped, it would rule"


def test_scales_of_one_change_no_bit() -> None:
    vectors, weights = parts(3, 5_000), [3, 1, 4]
    assert torch.equal(weighted_mean(vectors, weights, [1.0] * 3), weighted_mean(vectors, weights))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("values", ["random", "equal"])
def test_the_sum_of_squares_of_a_long_vector_is_good_to_1e_12(values: str, threads: int) -> None:
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


def test_the_sum_of_squares_of_nothing_is_0_and_beyond_fp32_infinite() -> None:
    assert square_norm(torch.empty(0)) == 0
    assert square_norm(torch.tensor([3.0, 4.0])) == 25
    assert square_norm(torch.tensor([1e19])) == pytest.approx(1e38, rel=1e-6)
    assert square_norm(torch.tensor([1e19, 1e19, 1e19, 1e19])) == math.inf
    assert square_norm(torch.tensor([3e38])) == math.inf

"""The weighted mean of clipped contributions.

The result depends on the order of the parts, so all nodes pass them in one order (by peer id). Each multiplication and
addition is rounded by itself, so every machine gets the same bits. Norms and scales are Python floats (fp64), computed
in one order from numbers that all nodes have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median_low

import torch
from torch import Tensor

CLIP_RATIO = 2.0
"""A contribution whose norm exceeds this many times the median norm is scaled down to that limit."""
SQUARE_ELEMENTS = 2**18
"""Elements that `square_norm` converts to fp64 at a time: 2 MiB, which fits in a core's cache."""
FP32_MAX = torch.finfo(torch.float32).max


def shares(weights: Sequence[int]) -> list[float]:
    """Return w_i / sum(w), each rounded to fp32. Weights are tokens. Raises ValueError for none, or for one below 1."""
    if not weights:
        raise ValueError("A mean needs at least one weight.")
    if min(weights) < 1:
        raise ValueError(f"Weights must be at least 1, not {min(weights)}.")
    total = sum(weights)
    return [_to_fp32(weight / total) for weight in weights]


def clip_scales(norms: Sequence[float], weights: Sequence[int]) -> list[float]:
    """min(1, limit_i / norm_i), rounded to fp32, with limit_i = CLIP_RATIO * median(norms) * max(1, w_i / median(w)).

    `norms` are the L2 norms of the whole contributions, `weights` their tokens. With more tokens than the median, the
    limit grows in proportion, because an honest pseudo-gradient grows no faster. Medians are the lower ones, so of two
    members the smaller value counts. A contribution of zeros keeps scale 1. Raises ValueError for a norm that is
    negative or not finite.
    """
    if not all(math.isfinite(norm) and norm >= 0 for norm in norms):
        raise ValueError("Norms must be finite and not negative.")
    if len(norms) != len(weights):
        raise ValueError(f"{len(norms)} norms and {len(weights)} weights do not match.")
    if not norms:
        return []
    norm, weight = median_low(norms), median_low(weights)
    limits = [CLIP_RATIO * norm * max(1.0, w / weight) for w in weights]
    return [1.0 if n <= limit else _to_fp32(limit / n) for n, limit in zip(norms, limits, strict=True)]


def norm_bound(weights: Sequence[int], norms: Sequence[float]) -> float:
    """Upper bound of the norm of the weighted mean of clipped contributions: sum of share_i * scale_i * norm_i."""
    scales = clip_scales(norms, weights)
    return sum(s * c * n for s, c, n in zip(shares(weights), scales, norms, strict=True))


def contribution_cosine(norms: Sequence[float], weights: Sequence[int], norm_of_mean: float) -> float | None:
    """The mean cosine similarity of all pairs of contributions, from the norms that all members know.

    With a_i = share_i scale_i |part_i|, it is (|mean|^2 - sum a_i^2) / ((sum a_i)^2 - sum a_i^2): pairs count by the
    product of their lengths in the mean. None for fewer than two contributions that are not zero.

    Args:
        norms: the L2 norm of each part, before clipping.
        norm_of_mean: the norm of their `weighted_mean`. If it is that of a mean that was encoded with an error e,
            independent of the mean, the result is too high by |e|^2 / ((sum a_i)^2 - sum a_i^2).
    """
    scales = clip_scales(norms, weights)
    lengths = [share * scale * norm for share, scale, norm in zip(shares(weights), scales, norms, strict=True)]
    own = sum(length**2 for length in lengths)
    pairs = sum(lengths) ** 2 - own
    return max(-1.0, min(1.0, (norm_of_mean**2 - own) / pairs)) if 0 < pairs < math.inf else None


def square_norm(x: Tensor) -> float:
    """Sum of squares of fp32 [n], with a relative error below 1e-12; infinite where it exceeds the range of fp32.

    Squares are added in fp64: the error of an fp32 sum would depend on the thread count and on the values.
    """
    scratch = torch.empty(min(x.numel(), SQUARE_ELEMENTS), dtype=torch.float64, device=x.device)
    sums = []
    for start in range(0, x.numel(), SQUARE_ELEMENTS):
        part = x[start : start + SQUARE_ELEMENTS]
        wide = scratch[: part.numel()].copy_(part)
        sums.append(torch.dot(wide, wide).item())
    total = math.fsum(sums)
    return total if total <= FP32_MAX else math.inf


def weighted_mean(parts: Iterable[Tensor], weights: Sequence[int], scales: Sequence[float] | None = None) -> Tensor:
    """Return the sum of share_i * scale_i * part_i in the given order, fp32 [n]. The parts, fp32 [n], do not change.

    Each part is needed only until the next one, so an iterator keeps one of them in memory. `scales` are those of
    `clip_scales`; None means all 1. share_i * scale_i is rounded to fp32 before it multiplies. Raises ValueError for
    parts that differ in shape, number or dtype.
    """
    factors = [s * c for s, c in zip(shares(weights), scales or [1.0] * len(weights), strict=True)]
    total, product = None, None
    for part, factor in zip(parts, factors, strict=True):
        if part.dtype != torch.float32 or (total is not None and part.shape != total.shape):
            raise ValueError("All parts of a mean must be fp32 and of one shape.")
        if total is None:
            total = torch.mul(part, _scalar(factor, part))
        else:
            product = torch.mul(part, _scalar(factor, part), out=product)
            total.add_(product)
    assert total is not None  # There is at least one weight.
    return total


def _to_fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)

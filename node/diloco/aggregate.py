"""The weighted mean of contributions, clipped. Knows tensors and weights; not who sent them, nor how they were encoded.

The result depends on the order, so the caller gives the parts in one order that all agree on (by peer id). Each
multiplication and each addition is rounded by itself, so every machine gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

CLIP_RATIO = 2.0
"""Contributions longer than so many times the median norm are shortened to it."""


def shares(weights: Sequence[int]) -> list[float]:
    """w_i / sum(w), each rounded to fp32. ValueError when there is no weight, or one below 1 (weights are tokens)."""
    if not weights:
        raise ValueError("A mean needs at least one weight.")
    if min(weights) < 1:
        raise ValueError(f"Weights must be at least 1, not {min(weights)}.")
    total = sum(weights)
    return [torch.tensor(weight / total, dtype=torch.float32).item() for weight in weights]


def clip_scales(norms: Sequence[float]) -> list[float]:
    """min(1, CLIP_RATIO * median / norm_i), each rounded to fp32: what a contribution is multiplied with.

    `norms`: L2 norms of the whole contributions. The median is the lower one, so with two members the smaller counts.
    Honest norms differ with the number of inner steps, hence the ratio; a contribution of zeros stays as it is.
    """
    if not all(math.isfinite(norm) and norm >= 0 for norm in norms):
        raise ValueError("Norms must be finite and not negative.")
    limit = CLIP_RATIO * sorted(norms)[(len(norms) - 1) // 2] if norms else 0.0
    scales = [1.0 if norm <= limit or norm == 0 else limit / norm for norm in norms]
    return [torch.tensor(scale, dtype=torch.float32).item() for scale in scales]


def norm_bound(weights: Sequence[int], norms: Sequence[float]) -> float:
    """No weighted mean of clipped contributions with these norms is longer: sum of share_i * scale_i * norm_i."""
    return sum(s * c * n for s, c, n in zip(shares(weights), clip_scales(norms), norms, strict=True))


def weighted_mean(parts: Sequence[Tensor], weights: Sequence[int], scales: Sequence[float] | None = None) -> Tensor:
    """sum of share_i * scale_i * part_i in the order given, fp32 [n]; the parts, fp32 [n] each, are left as they are.

    `scales` are those of `clip_scales`; None: all 1. share_i * scale_i is rounded to fp32 once, before it multiplies.
    """
    if len(parts) != len(weights) or (scales is not None and len(scales) != len(parts)):
        raise ValueError(f"{len(parts)} parts and {len(weights)} weights do not match.")
    factors = [s * c for s, c in zip(shares(weights), scales or [1.0] * len(parts), strict=True)]
    first = parts[0]
    if any(part.shape != first.shape or part.dtype != torch.float32 for part in parts):
        raise ValueError("All parts of a mean must be fp32 and of one shape.")
    total = torch.mul(first, _scalar(factors[0], first))
    product = torch.empty_like(total)
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        torch.mul(part, _scalar(factor, part), out=product)
        total.add_(product)
    return total


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)

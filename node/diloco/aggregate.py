"""The weighted mean of contributions. Knows tensors and weights; not who sent them, nor how they were encoded.

The result depends on the order, so the caller gives the parts in one order that all agree on (by peer id). Each
multiplication and each addition is rounded by itself, so every machine gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def shares(weights: Sequence[int]) -> list[float]:
    """w_i / sum(w), each rounded to fp32. ValueError when there is no weight, or one below 1 (weights are tokens)."""
    if not weights:
        raise ValueError("A mean needs at least one weight.")
    if min(weights) < 1:
        raise ValueError(f"Weights must be at least 1, not {min(weights)}.")
    total = sum(weights)
    return [torch.tensor(weight / total, dtype=torch.float32).item() for weight in weights]


def weighted_mean(parts: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """sum of share_i * part_i in the order given, fp32 [n]; the parts, fp32 [n] each, are left as they are."""
    if len(parts) != len(weights):
        raise ValueError(f"{len(parts)} parts and {len(weights)} weights do not match.")
    factors = shares(weights)
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

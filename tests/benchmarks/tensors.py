"""The vectors that peers average in the round benchmark, and their expected mean."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

SAMPLE = 1000
"""Number of elements that are checked at either end of the vector."""
SCALE = 1e-3
TOLERANCE = 1e-5
"""Tolerance of the check. It covers two roundings to fp16 of values up to 5e-3, with a margin."""


def contribution(rank: int, parameters: int) -> Tensor:
    """The vector of a peer, fp32 [P], at the scale of a pseudo-gradient. Its two ends do not depend on P."""
    generator = torch.Generator().manual_seed(1000 + rank)
    vector = torch.randn(parameters, generator=generator) * SCALE
    for part, ends in zip((vector[:SAMPLE], vector[-SAMPLE:]), _ends(rank), strict=True):
        part.copy_(ends)
    return vector


def ends_of(vector: Tensor) -> tuple[Tensor, Tensor]:
    """The two ends of a vector, which `check_mean` checks."""
    return vector[:SAMPLE].clone(), vector[-SAMPLE:].clone()


def check_mean(ends: Sequence[Tensor], peers: int) -> None:
    """Check that these are the ends of the contributions' mean, up to rounding to fp16. Raises ValueError otherwise."""
    expected = [torch.stack(ends).mean(0) for ends in zip(*(_ends(rank) for rank in range(peers)), strict=True)]
    for part, wanted in zip(ends, expected, strict=True):
        error = (part - wanted).abs().max().item()
        if error > TOLERANCE:
            raise ValueError(f"The average is wrong by {error:.2e}: this round counts for nothing.")


@lru_cache
def _ends(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SAMPLE, generator=generator) * SCALE, torch.randn(SAMPLE, generator=generator) * SCALE

"""Samples a model greedily, without its cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


@torch.no_grad()
def likeliest_tokens(model: nn.Module, prompt: Sequence[int], most: int, end: int | None = None) -> list[int]:
    """At most `most` tokens after the prompt, before `end`. The model reads the whole text for each of them."""
    found: list[int] = []
    while len(found) < most:
        token = int(model(input_ids=torch.tensor([[*prompt, *found]])).logits[0, -1].argmax())
        if token == end:
            break
        found.append(token)
    return found

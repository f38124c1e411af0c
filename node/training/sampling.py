"""Samples a continuation of a prompt from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def sample_tokens(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    most: int,
    end: int,
    vocabulary: int,
    temperature: float,
    device: torch.device,
    is_over: Callable[[], bool],
) -> tuple[list[int], bool]:
    """Continue a prompt by at most `most` tokens, with a fixed seed. Temperature 0 takes the likeliest token.

    Returns the tokens, and whether they are complete: not if `is_over`, which is called before each token, ended them,
    or the logits are not finite. Tokens are below `vocabulary`, and `end` is not among them.
    """
    generator = torch.Generator().manual_seed(0)
    found: list[int] = []
    cache, feed = None, torch.tensor([list(prompt)], dtype=torch.long, device=device)
    while len(found) < most:
        if is_over():
            return found, False
        output = model(input_ids=feed, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[0, -1, :vocabulary].float().cpu()
        if not torch.isfinite(logits).all():
            return found, False
        token = _choose(logits, temperature, generator)
        if token == end:
            break
        found.append(token)
        feed = torch.tensor([[token]], dtype=torch.long, device=device)
    return found, True


def _choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not temperature:
        return int(logits_V.argmax())
    return int(torch.multinomial(torch.softmax(logits_V / temperature, -1), 1, generator=generator))

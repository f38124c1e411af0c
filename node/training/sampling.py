"""Samples tokens from a model one by one, and turns them into text that can be shown at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

UNFINISHED = 3
"""Most replacement characters that stand for the beginning of one character: UTF-8 has at most 4 bytes."""


def sample(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    temperature: float,
    top_p: float = 1.0,
    seed: int | None = None,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Yield the tokens that continue `prompt`, until the logits are not finite. The caller stops within the context.

    With `temperature` 0, each token is the likeliest. `top_p` keeps the likeliest tokens whose probabilities add up to
    it (arXiv 1904.09751). Without a seed, each call samples differently; the global random state stays as it is. All
    tokens are below `vocabulary`.
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    tokens, cache = list(prompt), None
    while True:
        logits_V, cache = _next_logits(model, tokens, cache)
        logits_V = logits_V[:vocabulary]
        if not torch.isfinite(logits_V).all():
            return
        token = int(logits_V.argmax()) if temperature == 0 else _draw(logits_V, temperature, top_p, generator)
        yield token
        tokens = [token]


def sample_tokens(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    most: int,
    end: int,
    vocabulary: int,
    temperature: float,
    is_over: Callable[[], bool],
) -> tuple[list[int], bool]:
    """Continue a prompt by at most `most` tokens, with a fixed seed.

    Returns the tokens without `end`, and whether the text is complete. It is not if `is_over` returned True or the
    logits were not finite. `is_over` is called before each token.
    """
    found: list[int] = []
    tokens = sample(model, prompt, temperature=temperature, seed=0, vocabulary=vocabulary)
    while len(found) < most:
        token = None if is_over() else next(tokens, None)
        if token is None:
            return found, False
        if token == end:
            break
        found.append(token)
    return found, True


@torch.no_grad()
def _next_logits(model: nn.Module, tokens: list[int], cache: Any) -> tuple[Tensor, Any]:
    """Logits [V] after `tokens`, which follow those in the cache, on the cpu, and the cache with them."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    ids = torch.tensor([tokens], device=device)
    output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[0, -1].float().cpu(), output.past_key_values


def _draw(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    # In fp64 and from the largest logit on, because a temperature may be tiny.
    probabilities_V = ((logits_V.double() - logits_V.max()) / temperature).softmax(0)
    sorted_V, order_V = probabilities_V.sort(descending=True)
    before_V = sorted_V.cumsum(0) - sorted_V
    before_V[0] = -1.0  # The likeliest token is always kept.
    sorted_V[before_V >= top_p] = 0.0
    return int(order_V[torch.multinomial(sorted_V, 1, generator=generator)])


class TextStream:
    """The text of tokens as they are sampled. A part is released when no later token can change it.

    The text ends before the first of the `stop` texts.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode, self._tokens, self._stop = decode, list(prompt), stop
        self._prompt_length = len(decode(prompt))
        self._released = self._prompt_length
        self.is_stopped = False
        """Whether a stop text has come. Then all of the text is released."""

    def add(self, token: int) -> str:
        """Add a token. Returns the text that it releases."""
        self._tokens.append(token)
        # Decoded with the prompt, because some tokenizers drop a space at the beginning.
        text = self._decode(self._tokens)
        unfinished = min(UNFINISHED, len(text) - len(text.rstrip("\N{REPLACEMENT CHARACTER}")))
        return self._release(text, len(text) - unfinished)

    def rest(self) -> str:
        """Return what is not released yet, after the last token."""
        if self.is_stopped:
            return ""
        text = self._decode(self._tokens)
        released = self._release(text, len(text))
        return released if self.is_stopped else released + text[self._released :]

    def _release(self, text: str, end: int) -> str:
        start = self._released
        found = [at for word in self._stop if (at := text.find(word, start, end)) >= 0]
        self.is_stopped = bool(found)
        end = min(found) if found else end - max((_begun(text[start:end], word) for word in self._stop), default=0)
        self._released = max(start, end)
        return text[start : self._released]


def _begun(text: str, word: str) -> int:
    """The number of characters at the end of `text` with which `word` may begin."""
    return next((n for n in range(min(len(word), len(text)), 0, -1) if text.endswith(word[:n])), 0)

"""Sampling from a model token by token, and the text that is released meanwhile."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from node.config.manifest import ModelConfig
from node.training.model import build_model
from node.training.sampling import TextStream, sample
from node.training.tokenizer import ByteTokenizer
from tests.unit.greedy_sample import likeliest_tokens

TINY = ModelConfig(hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False)  # fmt: skip
PROMPT = [256, *b"def f("]


class Fixed(nn.Module):
    """A model whose next token always has these probabilities."""

    def __init__(self, *probabilities: float) -> None:
        super().__init__()
        self.logits = torch.tensor([[probabilities]]).log()
        self.past_key_values = None

    def forward(self, **_: object) -> Fixed:
        return self


def drawn(*probabilities: float, count: int = 400, temperature: float = 1.0, top_p: float = 1.0) -> list[int]:
    tokens = islice(sample(Fixed(*probabilities), [0], temperature=temperature, top_p=top_p, seed=1), count)
    found = list(tokens)
    return [found.count(token) for token in range(len(probabilities))]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_likeliest_tokens_are_those_of_the_model_without_a_cache(kind: str) -> None:
    model = build_model(TINY.model_copy(update={"type": kind}), seed=5).eval()
    assert list(islice(sample(model, PROMPT, temperature=0), 20)) == likeliest_tokens(model, PROMPT, 20)


def test_a_seed_repeats_a_sample_and_leaves_the_global_random_state() -> None:
    model = build_model(TINY, seed=5).eval()
    before = torch.get_rng_state()
    first, second, third = (list(islice(sample(model, PROMPT, temperature=1.0, seed=seed), 20)) for seed in (1, 1, -1))
    assert first == second != third
    without = [list(islice(sample(model, PROMPT, temperature=1.0), 20)) for _ in range(2)]
    assert without[0] != without[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_have_the_probabilities_of_the_model_at_the_temperature() -> None:
    half, quarter, also = drawn(0.5, 0.25, 0.25, count=2000)
    assert 900 < half < 1100 and 400 < quarter < 600 and 400 < also < 600
    assert drawn(0.5, 0.25, 0.25, temperature=0.1)[0] > 390
    assert drawn(0.5, 0.3, 0.2, temperature=5e-324) == [400, 0, 0]


@pytest.mark.parametrize(("top_p", "kept"), [(0.0, 1), (0.4, 1), (0.6, 2), (0.8, 3), (1.0, 4)])
def test_top_p_keeps_the_likeliest_tokens_that_add_up_to_it(top_p: float, kept: int) -> None:
    counts = drawn(0.1, 0.5, 0.15, 0.25, top_p=top_p)
    by_likelihood = [counts[token] for token in (1, 3, 2, 0)]
    assert [count > 0 for count in by_likelihood] == [True] * kept + [False] * (4 - kept)


@given(
    st.text("aäb€😀", max_size=12).map(lambda text: list(text.encode())) | st.lists(st.integers(0, 257), max_size=20),
    st.lists(st.text("aäb€😀", min_size=1, max_size=3), max_size=3),
)
def test_released_text_never_changes_and_ends_before_the_first_stop(tokens: list[int], stop: list[str]) -> None:
    decode = ByteTokenizer().decode
    stream = TextStream(decode, PROMPT, stop)
    text, used = "", 0
    for token in tokens:
        text += stream.add(token)
        used += 1
        assert decode(tokens).startswith(text)
        if stream.is_stopped:
            break
    text += stream.rest()
    whole = decode(tokens[:used])
    found = [at for word in stop if (at := whole.find(word)) >= 0]
    assert text == whole[: min(found, default=len(whole))]
    assert stream.is_stopped == bool(found)


def test_text_is_released_as_soon_as_no_later_token_can_change_it() -> None:
    stream = TextStream(ByteTokenizer().decode, PROMPT, ["END"])
    released = [stream.add(byte) for byte in "x€yEx".encode()]
    assert released == ["x", "", "", "€", "y", "", "Ex"]

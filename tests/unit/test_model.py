"""Tests of a model's parameter count, its flattened parameters, its changes in place, and its loss."""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from node.config.manifest import ModelConfig
from node.diloco.fragments import elements, put_, strided, take
from node.training.model import (
    build_model,
    change_flat_,
    flatten,
    forward,
    load_flat_,
    next_token_loss,
    take_flat,
    unit_elements,
)

TINY = ModelConfig(hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip


def test_seed_determines_the_model_and_torchs_global_generator_is_unchanged() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = flatten(build_model(TINY, seed=1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one, flatten(build_model(TINY, seed=1)))
    assert not torch.equal(one, flatten(build_model(TINY, seed=2)))


def test_new_model_is_in_fp32_and_training_mode_and_has_no_cache() -> None:
    model = build_model(TINY, seed=0)
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).past_key_values is None
    config: Any = model.config
    assert config._attn_implementation == "sdpa"


def test_loss_is_the_causal_next_token_cross_entropy() -> None:
    model = build_model(TINY, seed=0)
    batch = torch.randint(0, 258, (3, 21), generator=torch.Generator().manual_seed(0))
    logits = forward(model, batch[:, :-1])
    picked = logits.log_softmax(-1).gather(-1, batch[:, 1:, None])
    assert next_token_loss(model, batch).item() == pytest.approx(-picked.mean().item(), rel=1e-6)
    changed = batch.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 258
    again = forward(model, changed[:, :-1])
    assert torch.equal(logits[:, :10], again[:, :10]), "no token sees later ones"
    assert not torch.equal(logits[:, 10:], again[:, 10:])


def test_a_flattened_model_loads_into_another() -> None:
    model, other = build_model(TINY, seed=1), build_model(TINY, seed=2)
    flat = flatten(model)
    assert flat.dtype == torch.float32
    assert torch.equal(flat[: 258 * 16].view(258, 16), next(model.parameters())), "the first parameter"
    load_flat_(other, flat)
    assert torch.equal(flatten(other), flat)
    batch = torch.arange(20)[None]
    assert torch.equal(forward(model, batch), forward(other, batch))
    flat.zero_()
    assert flatten(model).abs().sum() > 0, "the vector is a copy"
    with pytest.raises(ValueError, match="does not fit"):
        load_flat_(model, flat[:-1])


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_fragments_of_a_model_are_taken_and_changed_in_place(fragments: int) -> None:
    model = build_model(TINY, seed=1)
    units = unit_elements(TINY)
    for ranges in (*strided(units, fragments), ((5, 300), (301, 302))):
        before = flatten(model)
        assert torch.equal(take_flat(model, ranges), take(before, ranges))
        fragment, vector = torch.rand(elements(ranges)), torch.rand(len(before))

        def add(part: Tensor, at: slice, place: slice, f: Tensor = fragment, v: Tensor = vector) -> Tensor:
            return part + f[at] * v[place]

        change_flat_(model, ranges, add)
        expected = before.clone()
        put_(expected, ranges, take(before, ranges) + fragment * take(vector, ranges))
        assert torch.equal(flatten(model), expected)


def test_importing_the_model_imports_no_transformers_and_building_it_prints_nothing(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from node.config.manifest import ModelConfig
from node.training import inner, model, pretrained, text
from node.training.tokenizer import ByteTokenizer
assert not {"transformers", "datasets", "pyarrow"} & set(sys.modules)
cfg = ModelConfig(hidden_size=16, num_hidden_layers=1)
flat = model.flatten(model.build_model(cfg, seed=0))
pretrained.export_model(cfg, flat, Path(sys.argv[1]), card="", tokenizer=ByteTokenizer())
"""
    command = [sys.executable, "-c", code, str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize(("heads", "tied"), [(2, True), (1, False)])
@pytest.mark.parametrize(
    ("kind", "head_dim"), [("llama", 0), ("llama", 16), ("mistral", 0), ("qwen2", 0), ("qwen3", 6)]
)
def test_computed_unit_sizes_are_those_of_the_built_model(
    heads: int, tied: bool, kind: Literal["llama", "mistral", "qwen2", "qwen3"], head_dim: int
) -> None:
    cfg = ModelConfig(
        type=kind, head_dim=head_dim, tie_word_embeddings=tied, vocab_size=50, hidden_size=8, intermediate_size=16,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=heads,
    )  # fmt: skip
    units, model = unit_elements(cfg), build_model(cfg, seed=0)
    named = [(name, p.numel()) for name, p in model.named_parameters()]
    assert sum(units) == sum(count for _, count in named) == len(flatten(model))
    assert len(units) == 5 and len(set(units[1:4])) == 1
    ends, done = list(accumulate(units)), 0
    for name, count in named:
        unit = next(i for i, end in enumerate(ends) if done < end)
        assert (f".layers.{unit - 1}." in name) == (0 < unit < 4), name
        done += count
        assert done <= ends[unit], "no tensor is in two units"

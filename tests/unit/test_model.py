"""The model: counted, flattened and exported without a parameter lost."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from node.diloco.fragments import elements, put_, strided, take
from node.errors import DataFolderError
from node.manifest import ModelConfig
from node.training.folder import export_folder, load_start
from node.training.model import (
    build_model,
    change_flat_,
    flatten,
    forward,
    load_flat_,
    next_token_loss,
    parameter_count,
    take_flat,
    unit_elements,
)
from node.training.tokenizer import Bytes

TINY = ModelConfig(hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_exactly(tied: bool) -> None:
    cfg = TINY.model_copy(update={"tie_word_embeddings": tied})
    attention = 2 * 16 * 16 + 2 * 16 * 8
    expected = 258 * 16 * (1 if tied else 2) + 2 * (attention + 3 * 16 * 40 + 2 * 16) + 16
    assert parameter_count(cfg) == expected
    assert flatten(build_model(cfg, seed=0)).shape == (expected,)


def test_counting_needs_no_memory() -> None:
    huge = ModelConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                       num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False)  # fmt: skip
    assert parameter_count(huge) == 70_553_706_496


def test_the_seed_alone_decides_and_the_global_state_is_untouched() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = flatten(build_model(TINY, seed=1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one, flatten(build_model(TINY, seed=1)))
    assert not torch.equal(one, flatten(build_model(TINY, seed=2)))


def test_the_model_is_fp32_trains_and_keeps_no_cache() -> None:
    model = build_model(TINY, seed=0)
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    output = model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    assert output.past_key_values is None
    assert model.config._attn_implementation == "sdpa"


def test_the_loss_is_causal_next_token_cross_entropy() -> None:
    model = build_model(TINY, seed=0)
    batch = torch.randint(0, 258, (3, 21), generator=torch.Generator().manual_seed(0))
    logits = forward(model, batch[:, :-1])
    picked = logits.log_softmax(-1).gather(-1, batch[:, 1:, None])
    assert next_token_loss(model, batch).item() == pytest.approx(-picked.mean().item(), rel=1e-6)
    changed = batch.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 258
    again = forward(model, changed[:, :-1])
    assert torch.equal(logits[:, :10], again[:, :10]), "no token sees those after it"
    assert not torch.equal(logits[:, 10:], again[:, 10:])


def test_flattening_goes_there_and_back() -> None:
    model, other = build_model(TINY, seed=1), build_model(TINY, seed=2)
    flat = flatten(model)
    assert flat.dtype == torch.float32
    assert torch.equal(flat[: 258 * 16].view(258, 16), model.get_input_embeddings().weight), "the first parameter"
    load_flat_(other, flat)
    assert torch.equal(flatten(other), flat)
    batch = torch.arange(20)[None]
    assert torch.equal(forward(model, batch), forward(other, batch))
    flat.zero_()
    assert flatten(model).abs().sum() > 0, "the vector is a copy"
    with pytest.raises(ValueError, match="does not fit"):
        load_flat_(model, flat[:-1])


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_fragments_are_taken_and_changed_in_place(fragments: int) -> None:
    model = build_model(TINY, seed=1)
    units = unit_elements(TINY)
    for ranges in (*strided(units, fragments), ((5, 300), (301, 302))):
        before = flatten(model)
        assert torch.equal(take_flat(model, ranges), take(before, ranges))
        fragment, vector = torch.rand(elements(ranges)), torch.rand(len(before))

        def grown(part: Tensor, at: slice, place: slice, f: Tensor = fragment, v: Tensor = vector) -> Tensor:
            return part + f[at] * v[place]

        change_flat_(model, ranges, grown)
        expected = before.clone()
        put_(expected, ranges, take(before, ranges) + fragment * take(vector, ranges))
        assert torch.equal(flatten(model), expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_an_export_loads_elsewhere_with_the_same_logits_and_can_be_started_from(
    tmp_path: Path, tied: bool, kind: str
) -> None:
    from transformers import AutoModelForCausalLM

    cfg = TINY.model_copy(update={"tie_word_embeddings": tied, "type": kind})
    model = build_model(cfg, seed=3)
    target = tmp_path / "new" / "export"
    export_folder(
        cfg, flatten(model), target, card="# A model\n\nTrained by volunteers, größtenteils.\n", tokenizer=Bytes()
    )
    loaded = AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    batch = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=batch).logits, forward(model, batch))
    assert (target / "README.md").read_text(encoding="utf-8").startswith("# A model")
    assert json.loads((target / "config.json").read_text())["model_type"] == kind
    again, flat = load_start(ModelConfig(start=str(target)), tmp_path / "cache")
    assert again == cfg.model_copy(update={"start": "export"})
    assert torch.equal(flat, flatten(model))
    assert list(target.glob("*.safetensors"))
    assert [p.name for p in target.parent.iterdir()] == ["export"], "no temporary folder stays"


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    flat = flatten(build_model(TINY, seed=0))
    with pytest.raises(DataFolderError, match="another folder"):
        export_folder(TINY, flat, tmp_path, card="", tokenizer=Bytes())
    with pytest.raises(ValueError, match="does not fit"):
        export_folder(TINY, flat[:-1], tmp_path / "out", card="", tokenizer=Bytes())
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    export_folder(TINY, flat, tmp_path / "empty", card="", tokenizer=Bytes())
    assert (tmp_path / "empty" / "config.json").exists()


def test_the_module_brings_no_transformers_and_the_library_stays_silent(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from node.manifest import ModelConfig
from node.training import evaluate, folder, inner, model, text
from node.training.tokenizer import Bytes
assert "transformers" not in sys.modules
cfg = ModelConfig(hidden_size=16, num_hidden_layers=1)
folder.export_folder(cfg, model.flatten(model.build_model(cfg, seed=0)), Path(sys.argv[1]), card="", tokenizer=Bytes())
"""
    command = [sys.executable, "-c", code, str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize(("heads", "tied"), [(2, True), (1, False)])
@pytest.mark.parametrize(
    ("kind", "head_dim"), [("llama", 0), ("llama", 16), ("mistral", 0), ("qwen2", 0), ("qwen3", 6)]
)
def test_units_are_what_stands_before_the_layers_the_layers_and_the_rest_in_order(
    heads: int, tied: bool, kind: Literal["llama", "mistral", "qwen2", "qwen3"], head_dim: int
) -> None:
    cfg = ModelConfig(
        type=kind,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        vocab_size=50,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=heads,
    )
    units = unit_elements(cfg)
    named = [(name, p.numel()) for name, p in build_model(cfg, seed=0).named_parameters()]
    assert sum(units) == sum(count for _, count in named) == parameter_count(cfg)
    assert len(units) == 5 and len(set(units[1:4])) == 1
    ends, done = list(accumulate(units)), 0
    for name, count in named:
        unit = next(i for i, end in enumerate(ends) if done < end)
        assert (f".layers.{unit - 1}." in name) == (0 < unit < 4), name
        done += count
        assert done <= ends[unit], "no tensor lies in two units"

"""An exported model loads in `transformers`, can start a run, and overwrites no files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from node.config.manifest import ModelConfig
from node.errors import DataFolderError
from node.training.model import build_model, flatten, forward
from node.training.pretrained import export_model, load_pretrained
from node.training.tokenizer import ByteTokenizer

TINY = ModelConfig(hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_exported_model_has_the_same_logits_in_transformers_and_can_start_a_run(
    tmp_path: Path, tied: bool, kind: str
) -> None:
    from transformers import AutoModelForCausalLM

    cfg = TINY.model_copy(update={"tie_word_embeddings": tied, "type": kind})
    model = build_model(cfg, seed=3)
    target = tmp_path / "new" / "export"
    export_model(cfg, flatten(model), target, card="# A model\n\ngrößtenteils\n", tokenizer=ByteTokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    batch = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=batch).logits, forward(model, batch))
    assert (target / "README.md").read_text(encoding="utf-8").startswith("# A model")
    assert json.loads((target / "config.json").read_text())["model_type"] == kind
    assert loaded.config.use_cache and loaded.generation_config.use_cache, "without it, generating text is slow"
    again, flat = load_pretrained(ModelConfig(start=str(target)), tmp_path / "cache")
    assert again == cfg.model_copy(update={"start": "export"})
    assert torch.equal(flat, flatten(model))
    assert list(target.glob("*.safetensors"))
    assert [p.name for p in target.parent.iterdir()] == ["export"], "no temporary folder is left"


def test_an_export_overwrites_no_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    flat = flatten(build_model(TINY, seed=0))
    with pytest.raises(DataFolderError, match="another folder"):
        export_model(TINY, flat, tmp_path, card="", tokenizer=ByteTokenizer())
    with pytest.raises(ValueError, match="does not fit"):
        export_model(TINY, flat[:-1], tmp_path / "out", card="", tokenizer=ByteTokenizer())
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    export_model(TINY, flat, tmp_path / "empty", card="", tokenizer=ByteTokenizer())
    assert (tmp_path / "empty" / "config.json").exists()

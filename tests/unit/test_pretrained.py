"""An exported model loads in `transformers`, can start a run, and overwrites no files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from node.config.manifest import ModelConfig
from node.errors import ConfigError, DataFolderError, MachineError
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
    (tmp_path / "link").symlink_to("empty")
    export_model(TINY, flat, tmp_path / "link", card="", tokenizer=ByteTokenizer())
    assert (tmp_path / "empty" / "config.json").exists()


def test_an_export_into_the_working_folder_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataFolderError, match="name a new folder inside it"):
        export_model(TINY, torch.empty(0), Path(), card="", tokenizer=ByteTokenizer())


def changed_export(folder: Path, config: dict[str, object], without: str = "") -> ModelConfig:
    """An exported model with other entries of config.json, and without one of its parameters."""
    export_model(TINY, flatten(build_model(TINY, seed=3)), folder, card="", tokenizer=ByteTokenizer())
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if without:
        tensors = load_file(folder / "model.safetensors")
        save_file({k: v for k, v in tensors.items() if k != without}, folder / "model.safetensors", {"format": "pt"})
    return ModelConfig(start=str(folder))


def test_no_run_starts_from_a_model_that_lacks_parameters(tmp_path: Path) -> None:
    """The library gives them random values."""
    cfg = changed_export(tmp_path / "model", {}, without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ConfigError, match=r"lacks 1 of its parameters, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        load_pretrained(cfg, tmp_path / "cache")
    cfg = changed_export(tmp_path / "wide", {"intermediate_size": 48})
    with pytest.raises(ConfigError):
        load_pretrained(cfg, tmp_path / "cache")


def test_a_model_names_no_code_for_its_attention_and_is_not_quantized(tmp_path: Path) -> None:
    cfg = changed_export(tmp_path / "model", {"attn_implementation": "own/kernels", "_attn_implementation": "own/k"})
    assert torch.equal(load_pretrained(cfg, tmp_path / "cache")[1], flatten(build_model(TINY, seed=3)))
    cfg = changed_export(tmp_path / "small", {"quantization_config": {"quant_method": "bitsandbytes"}})
    with pytest.raises(ConfigError, match="has quantized parameters"):
        load_pretrained(cfg, tmp_path / "cache")


def test_a_model_that_does_not_fit_is_refused_before_its_parameters_are_read(tmp_path: Path) -> None:
    cfg = changed_export(tmp_path / "model", {})
    (tmp_path / "model" / "model.safetensors").unlink()

    def check(shape: ModelConfig) -> None:
        raise MachineError(f"{shape.num_hidden_layers} layers do not fit.")

    with pytest.raises(MachineError, match="2 layers do not fit"):
        load_pretrained(cfg, tmp_path / "cache", check)

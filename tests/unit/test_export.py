"""`diloco-node export`: model, card, record and GGUF, whole or not at all, and checked by `verify`."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from node.cli import main
from node.config.manifest import Manifest, RunConfig
from node.diloco.credit import CreditTable
from node.diloco.outer import OuterState
from node.errors import MachineError, UsageError
from node.publication.model_folder import GGUF_FILE, hash_of
from node.publication.stores import RECORD_FILE
from node.swarm.identity import new_identity
from node.training.gguf_file import import_gguf, write_gguf
from node.training.model import build_model, flatten, forward, load_flat_
from node.training.tokenizer import ByteTokenizer, FastTokenizer
from tests.swarm.harness import environment, tiny
from tests.unit.data_folder import make_data_folder, save_state

SHAPE = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
ALICE, BOB = (new_identity().peer_id for _ in range(2))


def run_of(**model: Any) -> RunConfig:
    return RunConfig.model_validate(tiny(purpose="To test exports.", model={**SHAPE, **model}))


def make_trained(path: Path, run: RunConfig, amendments: bytes = b"") -> tuple[Manifest, torch.Tensor, str]:
    """A data folder after round 1. Returns manifest, parameters and digest."""
    manifest = make_data_folder(path, run)
    anchor = flatten(build_model(run.model, seed=9))
    credit = CreditTable().after(0, {ALICE: 100}).after(1, {ALICE: 200, BOB: 100})
    state = OuterState(anchor, torch.rand_like(anchor), 1, 400, credit, amendments)
    return manifest, anchor, save_state(path, manifest, state)


def export(folder: Path, target: Path, *flags: str) -> int:
    return main(["export", str(target), "--data-dir", str(folder), *flags])


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    make_trained(tmp_path / "node", run_of())
    assert export(tmp_path / "node", tmp_path / "out") == 0
    return tmp_path / "out"


@pytest.mark.parametrize("tied", [True, False])
def test_exported_model_has_the_logits_of_the_node(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = run_of(tie_word_embeddings=tied)
    _, anchor, _ = make_trained(tmp_path / "node", run)
    assert export(tmp_path / "node", tmp_path / "out") == 0
    own = build_model(run.model, seed=0)
    load_flat_(own, anchor)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    batch = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "out").encode("def f(größe):")])
    with torch.no_grad():
        difference = loaded(input_ids=batch).logits - forward(own, batch)
    assert difference.abs().max() < 1e-3


def test_card_names_state_contributors_settings_and_command(tmp_path: Path) -> None:
    manifest, _, digest = make_trained(tmp_path / "node", run_of())
    assert export(tmp_path / "node", tmp_path / "my out") == 0
    card = (tmp_path / "my out" / "README.md").read_text(encoding="utf-8")
    for words in (
        "# tiny\n", "To test exports.", "| round | 1 |", "| tokens of the swarm | 400 of", "1.500 nats",
        "perplexity 4.5",
        "| contributors | 2 |", manifest.hash, digest, "cd" * 32, "`diloco-node export 'my out'`",
        f"| `{ALICE}` | 300 | 75.0% | 2 |\n| `{BOB}` | 100 | 25.0% | 1 |",
    ):  # fmt: skip
        assert words in card
    settings = json.loads(card.partition("```json\n")[2].partition("```")[0])
    assert settings["model"]["hidden_size"] == 32 and settings["inner"] and settings["sync"]
    assert str(tmp_path) not in card


# Verification


def test_verify_accepts_an_export_and_names_its_state(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(exported)]) == 0
    record = json.loads((exported / RECORD_FILE).read_bytes())
    said = capsys.readouterr()
    assert record["state_digest"] in said.out and record["round"] == 1 and "valid" in said.out
    assert said.err == ""
    assert set(record["files"]) == {path.name for path in exported.iterdir()} - {RECORD_FILE}


def rewrite(folder: Path, **values: Any) -> None:
    path = folder / RECORD_FILE
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **values}))


def use_other_parameters(folder: Path) -> None:
    """Replace the parameters, and hide it from the list of files."""
    model: Any = build_model(run_of().model, seed=10)
    model.save_pretrained(folder)
    names = json.loads((folder / RECORD_FILE).read_bytes())["files"]
    rewrite(folder, files={name: hash_of(folder / name) for name in names})


def change_config(folder: Path, **values: Any) -> None:
    """Change how the model computes or is loaded, and hide it from the list of files."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **values}))
    names = json.loads((folder / RECORD_FILE).read_bytes())["files"]
    rewrite(folder, files={name: hash_of(folder / name) for name in names})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: (folder / "README.md").write_text("x"), "README.md has changed"),
        (lambda folder: (folder / "config.json").unlink(), "cannot be read"),
        (lambda folder: (folder / RECORD_FILE).write_text("{"), "is damaged"),
        (lambda folder: (folder / RECORD_FILE).unlink(), "cannot be read"),
        (lambda folder: rewrite(folder, round=2), "contradicts itself"),
        (lambda folder: rewrite(folder, tokens=401), "contradicts itself"),
        (lambda folder: rewrite(folder, manifest_hash="ab" * 32), "contradicts itself"),
        (lambda folder: rewrite(folder, leaves=["ab" * 32, "cd" * 32]), "contradicts itself"),
        (lambda folder: rewrite(folder, leaves=["ab" * 32]), "is damaged"),
        (lambda folder: rewrite(folder, parameters=10**18), "is damaged"),
        (lambda folder: rewrite(folder, files={"../node/manifest.json": "00"}), "cannot be read|has changed"),
        (use_other_parameters, "its parameters are not those of round 1"),
        (lambda folder: change_config(folder, rms_norm_eps=0.5), "config.json describes another model"),
        (
            lambda folder: change_config(folder, num_attention_heads=8, num_key_value_heads=4, head_dim=4),
            "config.json describes another model",
        ),
        (lambda folder: change_config(folder, auto_map={"AutoModel": "evil.py--Model"}), "names code to load"),
    ],
    ids=[
        "file", "no file", "no JSON", "no record", "round", "tokens", "run", "leaf", "few leaves", "size", "path",
        "parameters", "norm", "heads", "code",
    ],
)  # fmt: skip
def test_verify_refuses_a_changed_export(
    exported: Path, change: Any, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(exported)
    assert main(["verify", str(exported)]) == 2
    said = capsys.readouterr().err
    assert any(words in said for words in problem.split("|")), said


# GGUF


def test_gguf_holds_the_tensors_as_llama_cpp_expects_them(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    run = run_of(tie_word_embeddings=False)
    make_trained(tmp_path / "node", run)
    assert export(tmp_path / "node", tmp_path / "out", "--gguf") == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / GGUF_FILE).tensors}
    own = dict(build_model(run.model, seed=9).named_parameters())
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        **{
            f"blk.{layer}.{theirs}": f"model.layers.{layer}.{ours}"
            for layer in range(2)
            for theirs, ours in {
                "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
                "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
                "ffn_down": "mlp.down_proj",
            }.items()
        },
    }  # fmt: skip
    assert set(tensors) == {f"{name}.weight" for name in names}
    for theirs, ours in names.items():
        tensor, expected = tensors[f"{theirs}.weight"], own[f"{ours}.weight"].detach()
        is_vector = expected.dim() == 1
        assert tensor.tensor_type == (gguf.GGMLQuantizationType.F32 if is_vector else gguf.GGMLQuantizationType.F16)
        heads = {"attn_q": 4, "attn_k": 2}.get(theirs.split(".")[-1])
        if heads:
            expected = neighbouring(expected, heads)
        assert np.array_equal(tensor.data, expected.numpy() if is_vector else expected.half().numpy()), theirs


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_as_transformers_reads_it_has_the_logits_of_the_node(tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    run = run_of(tie_word_embeddings=tied)
    _, anchor, _ = make_trained(tmp_path / "node", run)
    assert export(tmp_path / "node", tmp_path / "out", "--gguf") == 0
    own = build_model(run.model, seed=0)
    load_flat_(own, anchor)
    loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out"))
    found = load_gguf_checkpoint(str(tmp_path / "out" / GGUF_FILE), return_tensors=True, model_to_load=loaded)
    left = loaded.load_state_dict(found["tensors"], strict=False)
    assert left.unexpected_keys == [] and set(left.missing_keys) <= ({"lm_head.weight"} if tied else set())
    batch = torch.randint(SHAPE["vocab_size"], (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = forward(own, batch)
        difference = loaded.float()(input_ids=batch).logits - logits
    assert difference.abs().max() < 1e-3 < logits.abs().max() / 10


def neighbouring(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Row i and row i + D / 2 of each head of D rows, side by side."""
    rows = []
    width = matrix.shape[0] // heads
    for head in range(heads):
        for i in range(width // 2):
            rows += [matrix[head * width + i], matrix[head * width + i + width // 2]]
    return torch.stack(rows)


def fields_of(file: Path) -> dict[str, Any]:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def test_gguf_has_shape_and_byte_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    make_trained(tmp_path / "node", run_of())
    assert export(tmp_path / "node", tmp_path / "out", "--gguf") == 0
    found = fields_of(tmp_path / "out" / GGUF_FILE)
    expected = {
        "general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 32,
        "llama.block_count": 2, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.feed_forward_length": 64, "llama.rope.dimension_count": 8, "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": 260, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257, "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert (
        len(tokens) == 260 and tokens[ord("a")] == "a" and tokens[256:] == ["<begin>", "<end>", "[PAD258]", "[PAD259]"]
    )
    assert (kinds[ord("a")], kinds[256:]) == (1, [3, 3, 5, 5]), "normal, control, unused"


def make_llama_tokenizer() -> FastTokenizer:
    """A small tokenizer built as those of Llama 2, which fall back to bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    bytes_of = {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    words = ["<s>", "</s>", "▁", "a", "b", "ab", "▁ab", "▁a"]
    vocab = {"<unk>": 0, **bytes_of, **{word: 257 + number for number, word in enumerate(words)}}
    inner = Tokenizer(
        models.BPE(vocab=vocab, merges=[("a", "b"), ("▁", "ab"), ("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return FastTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, **special))


def test_gguf_keeps_a_matrix_with_a_weight_beyond_fp16_in_fp32(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    cfg = run_of().model
    ByteTokenizer().save(tmp_path)
    tensors = build_model(cfg, seed=1).state_dict()
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = 70_000.0
    write_gguf(cfg, tensors, tmp_path, tmp_path / GGUF_FILE, name="x")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / GGUF_FILE).tensors}
    assert found["blk.0.ffn_up.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert found["blk.0.ffn_up.weight"].data[3, 4] == 70_000.0
    assert found["blk.1.ffn_up.weight"].tensor_type == gguf.GGMLQuantizationType.F16


def test_gguf_has_the_merges_of_a_tokenizer_like_that_of_llama_as_scores(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    cfg = run_of(vocab_size=266).model
    make_llama_tokenizer().save(tmp_path)
    write_gguf(cfg, build_model(cfg, seed=1).state_dict(), tmp_path, tmp_path / GGUF_FILE, name="x")
    found = fields_of(tmp_path / GGUF_FILE)
    scores = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True))
    assert all(left > right for left, right in pairwise([scores["ab"], scores["▁ab"], scores["▁a"]]))
    kinds = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"], strict=True))
    assert [kinds[token] for token in ("<unk>", "<0x0A>", "<s>", "ab", "[PAD265]")] == [2, 6, 3, 1, 5]
    assert found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.add_space_prefix"] is True


def test_gguf_marks_added_tokens_so_that_llama_cpp_finds_them_as_a_whole(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from tokenizers import AddedToken

    tokenizer = make_llama_tokenizer()
    tokenizer._inner.add_tokens([AddedToken("  ", special=False, normalized=False)])
    tokenizer.save(tmp_path)
    cfg = run_of(vocab_size=266).model
    write_gguf(cfg, build_model(cfg, seed=1).state_dict(), tmp_path, tmp_path / GGUF_FILE, name="x")
    found = fields_of(tmp_path / GGUF_FILE)
    kinds = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"], strict=True))
    assert kinds["  "] == 4, "user-defined"


def test_tokenizer_that_cuts_or_fills_up_texts_encodes_all_of_them(tmp_path: Path) -> None:
    whole = make_llama_tokenizer()
    cutting = make_llama_tokenizer()._inner
    cutting.backend_tokenizer.enable_truncation(4)
    cutting.backend_tokenizer.enable_padding(length=4, pad_id=0, pad_token="<unk>")
    for text in ("ab" * 20, "a"):
        assert FastTokenizer(cutting).encode(text) == whole.encode(text)


def test_gguf_refuses_models_and_tokenizers_that_it_cannot_express(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="qwen3 cannot be written as GGUF"):
        import_gguf(run_of(type="qwen3").model)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MachineError, match="pip install gguf"):
        import_gguf(run_of().model)
    monkeypatch.undo()
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    ByteTokenizer().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    spec["pre_tokenizer"] = {"type": "Whitespace"}
    path.write_text(json.dumps(spec))
    with pytest.raises(UsageError, match="Whitespace"):
        write_gguf(run_of().model, {}, tmp_path, tmp_path / GGUF_FILE, name="x")
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
    path.write_text(json.dumps(spec))
    with pytest.raises(UsageError, match="ByteLevel"):
        write_gguf(run_of().model, {}, tmp_path, tmp_path / GGUF_FILE, name="x")


# Whole or not at all

KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from node.cli import main
from node.publication.model_folder import verify_model_folder
folder, parent = Path(sys.argv[1]), Path(sys.argv[2])
target, random = parent / "out", random.Random(4)
for name in ("first", "second"):  # The first one also imports.
    seconds = time.monotonic()
    assert main(["export", str(parent / name), "--data-dir", str(folder)]) == 0
    seconds = time.monotonic() - seconds
for number in range(25):
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(["export", str(target), "--data-dir", str(folder)]))
    if number % 2:  # While it writes, which takes a few milliseconds.
        known, ends_at = set(parent.glob(".out-*")), time.monotonic() + 20
        while not set(parent.glob(".out-*")) - known and time.monotonic() < ends_at:
            pass
        time.sleep(random.uniform(0, 0.01))
    else:
        time.sleep(random.uniform(0, seconds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if target.exists():
        verify_model_folder(target, parent / "cache")
        target.rename(parent / f"whole-{number}")
        print("whole")
    else:
        print("leftover" if any(parent.glob(".out-*")) else "nothing")
"""


def test_a_killed_export_leaves_no_part_of_a_folder(tmp_path: Path) -> None:
    make_trained(tmp_path / "node", run_of())
    words = [sys.executable, "-c", KILLS, str(tmp_path / "node"), str(tmp_path)]
    done = subprocess.run(words, env=environment({}), capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    kinds = done.stdout.split("\n")[2:-1]
    assert len(kinds) == 25 and "leftover" in kinds, "some were killed while they wrote"
    assert export(tmp_path / "node", tmp_path / "out") == 0
    assert not list(tmp_path.glob(".out-*")), "the next export removes what they have left"

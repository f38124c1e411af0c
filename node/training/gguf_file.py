"""GGUF files for llama.cpp: the model in fp16 and its tokenizer. Only writing one needs the package `gguf`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from node.config.manifest import ModelConfig
from node.errors import MachineError, UsageError

TYPES = ("llama", "mistral")
"""Model types that llama.cpp computes as its architecture `llama`."""
ARCHITECTURE = "llama"
NO_MERGES = ("<begin> <end>",)
"""A merge that never applies. llama.cpp needs the list of merges, and `gguf` writes no empty one."""


def import_gguf(cfg: ModelConfig) -> Any:
    """Return the package `gguf`. Raises UsageError for other models than TYPES, MachineError if it is missing."""
    if cfg.type not in TYPES:
        raise UsageError(
            f"A model of type {cfg.type} cannot be written as GGUF here: export it without --gguf, and convert the "
            "folder with llama.cpp's convert_hf_to_gguf.py."
        )
    try:
        import gguf
    except ImportError as exc:
        raise MachineError(
            "The package gguf is missing: install it with `pip install gguf`, or export without --gguf.", code="no_gguf"
        ) from exc
    return gguf


def write_gguf(cfg: ModelConfig, tensors: Mapping[str, Tensor], folder: Path, file: Path, *, name: str) -> None:
    """Write a file with these tensors, named as in `transformers`, and the tokenizer that is saved in `folder`.

    Matrices become fp16 and vectors fp32, as in llama.cpp's own converter. A matrix with a weight beyond the range of
    fp16 stays fp32. Raises UsageError for a tokenizer that this function cannot express.
    """
    gguf = import_gguf(cfg)
    vocabulary = _read_vocabulary(folder, cfg.vocab_size)
    writer = gguf.GGUFWriter(file, ARCHITECTURE)
    writer.add_name(name)
    writer.add_vocab_size(cfg.vocab_size)
    writer.add_context_length(cfg.max_position_embeddings)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_block_count(cfg.num_hidden_layers)
    writer.add_head_count(cfg.num_attention_heads)
    writer.add_head_count_kv(cfg.num_key_value_heads)
    writer.add_key_length(cfg.head_width)
    writer.add_value_length(cfg.head_width)
    writer.add_rope_dimension_count(cfg.head_width)
    writer.add_rope_freq_base(cfg.rope_theta)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    vocabulary.write(gguf, writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, cfg.num_hidden_layers)
    for key, tensor in tensors.items():
        if key == "lm_head.weight" and cfg.tie_word_embeddings:
            continue  # llama.cpp takes the input embedding.
        fits = tensor.dim() > 1 and bool(tensor.abs().max() <= np.finfo(np.float16).max)
        values = _paired(cfg, key, tensor.numpy()).astype(np.float16 if fits else np.float32)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _paired(cfg: ModelConfig, key: str, values: Any) -> Any:
    """Order the rows of query and key matrices as llama.cpp expects them.

    Its rotary embedding turns neighbouring rows of a head of width D. That of `transformers` turns row i with row
    i + D / 2.
    """
    heads = {"q_proj.weight": cfg.num_attention_heads, "k_proj.weight": cfg.num_key_value_heads}
    count = heads.get(".".join(key.split(".")[-2:]))
    if count is None:
        return values
    rows = values.shape[0]
    return values.reshape(count, 2, rows // count // 2, -1).swapaxes(1, 2).reshape(values.shape)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A BPE tokenizer in the words of llama.cpp."""

    model: str
    """`gpt2` works on bytes, and `llama` on characters, with bytes for those that it does not know."""
    tokens: list[str]
    kinds: list[str]
    """Names of `gguf.TokenType`."""
    merges: list[str]
    adds_space: bool
    special: dict[str, int]
    """Token ids of `bos`, `eos` and `unk`."""
    chat_template: str

    def write(self, gguf: Any, writer: Any) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre("gpt-2" if self.model == "gpt2" else "default")
        writer.add_token_list(self.tokens)
        writer.add_token_types([gguf.TokenType[kind] for kind in self.kinds])
        if self.model == "gpt2":
            writer.add_token_merges(self.merges or NO_MERGES)
        else:
            # llama.cpp merges the pair whose token has the highest score first.
            ranks: dict[str, int] = {}
            for rank, pair in enumerate(self.merges):
                ranks.setdefault(pair.replace(" ", ""), rank)
            writer.add_token_scores([-float(ranks.get(token, 0)) for token in self.tokens])
            writer.add_add_space_prefix(self.adds_space)
        for kind, token in self.special.items():
            getattr(writer, f"add_{kind}_token_id")(token)
        writer.add_add_bos_token("bos" in self.special)
        writer.add_add_eos_token(False)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def _read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """Read a saved fast tokenizer. Raises UsageError if llama.cpp would split text differently."""
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = folder / "chat_template.jinja"
    bpe, added = spec["model"], spec["added_tokens"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe.get("merges", ())]
    steps = [step for part in ("normalizer", "pre_tokenizer") for step in _flat(spec[part])]
    model = _model_of(bpe, steps, pairs)
    ids = {**bpe["vocab"], **{token["content"]: token["id"] for token in added}}
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], ["UNUSED"] * size
    # llama.cpp finds control and user-defined tokens as a whole in a text.
    own_kinds = {token["content"]: "CONTROL" if token["special"] else "USER_DEFINED" for token in added}
    for text, number in ids.items():
        kinds[number] = own_kinds.get(text, "NORMAL")
        tokens[number] = text.replace("\u2581", " ") if kinds[number] == "USER_DEFINED" else text
        if model == "llama" and len(text) == 6 and text.startswith("<0x"):
            kinds[number] = "BYTE"
    names = {"bos": config.get("bos_token"), "eos": config.get("eos_token"), "unk": bpe.get("unk_token")}
    special = {kind: ids[text] for kind, text in names.items() if text in ids}
    if "unk" in special:
        kinds[special["unk"]] = "UNKNOWN"
    return Vocabulary(
        model=model,
        tokens=tokens,
        kinds=kinds,
        merges=pairs,
        adds_space=any(s["type"] == "Prepend" or s.get("prepend_scheme", "never") != "never" for s in steps),
        special=special,
        chat_template=template.read_text(encoding="utf-8") if template.exists() else "",
    )


def _flat(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be a sequence of others."""
    if part is None:
        return []
    inner = part.get("normalizers") or part.get("pretokenizers")
    return [part] if inner is None else [step for one in inner for step in _flat(one)]


def _model_of(bpe: Mapping[str, Any], steps: list[Mapping[str, Any]], merges: list[str]) -> str:
    kinds = [step["type"] for step in steps]
    is_gpt2 = bpe["type"] == "BPE" and kinds == ["ByteLevel"] and not steps[0].get("add_prefix_space")
    if is_gpt2 and (steps[0]["use_regex"] or not merges):
        return "gpt2"
    if bpe["type"] == "BPE" and bpe.get("byte_fallback") and set(kinds) <= {"Prepend", "Replace", "Metaspace"}:
        return "llama"
    raise UsageError(
        f"The tokenizer of this run ({bpe['type']}, {', '.join(kinds) or 'no steps'}) cannot be written as GGUF here: "
        "export without --gguf, and convert the folder with llama.cpp's convert_hf_to_gguf.py."
    )

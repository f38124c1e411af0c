"""The model: a Llama from `transformers`, as one flat vector and as a Hugging Face folder. Knows no data, no optimizer.

Everybody's vector has the same order: `named_parameters()`, a tied matrix once, each tensor row-major. P is its length.
Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from node.diloco.fragments import Ranges, elements
from node.errors import DataFolderError
from node.manifest import ModelConfig
from node.training.data import BEGIN, END


def build_model(cfg: ModelConfig, *, seed: int) -> nn.Module:
    """A freshly initialised model, fp32 on the CPU, in training mode. The global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _llama(cfg)


def parameter_count(cfg: ModelConfig) -> int:
    """P, without memory for a single one of them."""
    with torch.device("meta"):
        return sum(p.numel() for p in _llama(cfg).parameters())


def unit_elements(cfg: ModelConfig) -> list[int]:
    """Elements of each unit in `flatten`'s order: what stands before the layers, each layer, what comes after them.

    Without the library, which takes seconds to load; a test holds it to what the library builds.
    """
    width, kv_width = cfg.hidden_size, cfg.hidden_size // cfg.num_attention_heads * cfg.num_key_value_heads
    attention = 2 * width * width + 2 * width * kv_width
    layer = attention + 3 * width * cfg.intermediate_size + 2 * width
    embedding = cfg.vocab_size * width
    return [embedding, *[layer] * cfg.num_hidden_layers, width + (0 if cfg.tie_word_embeddings else embedding)]


def forward(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """Logits [B, T, V] in the dtype that the model computes in. No cache, no mask but the causal one."""
    logits_BTV: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
    return logits_BTV


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy, nats per token, fp32 scalar. `batch`: int64 [B, T + 1] on the model's device."""
    logits_BTV = forward(model, batch[:, :-1])
    return nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), batch[:, 1:].flatten())


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Matrix products in bf16 if `precision` is bf16; parameters, norms and losses stay fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@torch.no_grad()
def flatten(model: nn.Module) -> Tensor:
    """A copy of all parameters, fp32 cpu [P]."""
    flat = torch.empty(sum(p.numel() for p in model.parameters()), dtype=torch.float32)
    at = 0
    for parameter in model.parameters():
        flat[at : at + parameter.numel()].copy_(parameter.flatten())
        at += parameter.numel()
    return flat


def unflatten_like(model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """Views into `flat` [P], one per parameter name and shaped like it."""
    expected = sum(p.numel() for p in model.parameters())
    if flat.shape != (expected,):
        raise ValueError(f"A vector of shape {tuple(flat.shape)} does not fit this model of {expected} parameters.")
    names, parameters = zip(*model.named_parameters(), strict=True)
    parts = torch.split(flat, [p.numel() for p in parameters])
    return {name: part.view(p.shape) for name, p, part in zip(names, parameters, parts, strict=True)}


@torch.no_grad()
def load_flat_(model: nn.Module, flat: Tensor) -> None:
    """Overwrite all parameters in place, on whatever device they are. `flat`: [P]. ValueError if it does not fit."""
    parts = unflatten_like(model, flat)
    for name, parameter in model.named_parameters():
        parameter.copy_(parts[name])


@torch.no_grad()
def take_flat(model: nn.Module, ranges: Ranges) -> Tensor:
    """A copy of some parameters, fp32 cpu [P_f]; `ranges` are of the vector that `flatten` gives."""
    taken = torch.empty(elements(ranges), dtype=torch.float32)
    for part, at, _ in _parts(model, ranges):
        taken[at].copy_(part)
    return taken


@torch.no_grad()
def change_flat_(model: nn.Module, ranges: Ranges, change: Callable[[Tensor, slice, slice], Tensor]) -> None:
    """Overwrite those parameters in place, a part at a time, by what `change` makes of the part.

    `change` gets the part, [n] on its device, its place in the fragment [P_f], and that in the vector [P]; it returns
    [n], on any device.
    """
    for part, at, place in _parts(model, ranges):
        part.copy_(change(part, at, place))


def _parts(model: nn.Module, ranges: Ranges) -> Iterator[tuple[Tensor, slice, slice]]:
    """Flat views of what the ranges have of each parameter, with its places in the fragment and in the vector."""
    first = 0
    for parameter in model.parameters():
        end, at = first + parameter.numel(), 0
        for low, high in ranges:
            start, stop = max(low, first), min(high, end)
            if start < stop:
                part = parameter.detach().view(-1)[start - first : stop - first]
                yield part, slice(at + start - low, at + stop - low), slice(start, stop)
            at += high - low
        first = end


def export_folder(cfg: ModelConfig, flat: Tensor, folder: Path, *, card: str) -> None:
    """Write what `AutoModelForCausalLM.from_pretrained(folder)` reads, and `card` as README.md; whole or not at all.

    DataFolderError if `folder` holds files already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataFolderError(f"{folder} holds files already: name another folder for the export, or remove it.")
    model = build_model(cfg, seed=0)
    load_flat_(model, flat)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(temporary)  # type: ignore[operator]  # nn.Module's __getattr__ hides it
        (temporary / "README.md").write_text(card, encoding="utf-8")
        temporary.chmod(0o755)
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _llama(cfg: ModelConfig) -> nn.Module:
    # Here, not above: it takes seconds, and a node that only relays never needs it.
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = LlamaConfig(  # type: ignore[call-arg]  # the last two belong to its base
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=cfg.num_hidden_layers,
        num_attention_heads=cfg.num_attention_heads,
        num_key_value_heads=cfg.num_key_value_heads,
        max_position_embeddings=cfg.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
        rms_norm_eps=cfg.rms_norm_eps,
        tie_word_embeddings=cfg.tie_word_embeddings,
        use_cache=False,
        bos_token_id=BEGIN,
        eos_token_id=END,
        dtype="float32",
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)

"""The model, of `transformers`' Llama family, and its parameters as one flat vector.

All nodes use the order of `named_parameters()`, with a tied matrix once and each tensor row-major. Its length is P.
Shapes: B rows, T tokens, V vocabulary, N = B T, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from node.config.manifest import Manifest, ModelConfig
from node.config.schema import DevicesConfig
from node.diloco.fragments import Ranges, elements
from node.training.ranks import full_tensor, is_sharded, place_like

LOSS_TOKENS = 4096
"""A chunked loss holds the logits of this many tokens at a time."""
CPU = torch.device("cpu")

Change = Callable[[Tensor, slice, slice], Tensor]
LossKind = Literal["whole", "chunked", "compiled"]


def build_model(cfg: ModelConfig, *, seed: int) -> nn.Module:
    """Make a newly initialised model, fp32 on the cpu, in training mode. The global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _build(cfg)


def unit_elements(cfg: ModelConfig) -> list[int]:
    """Elements of each unit in `flatten`'s order: everything before the layers, each layer, everything after them.

    Their sum is P. Computed without `transformers`, which takes seconds to import.
    """
    width, head = cfg.hidden_size, cfg.head_width
    query_width, kv_width = cfg.num_attention_heads * head, cfg.num_key_value_heads * head
    attention = 2 * width * query_width + 2 * width * kv_width
    attention += {"qwen2": query_width + 2 * kv_width, "qwen3": 2 * head}.get(cfg.type, 0)
    layer = attention + 3 * width * cfg.intermediate_size + 2 * width
    embedding = cfg.vocab_size * width
    return [embedding, *[layer] * cfg.num_hidden_layers, width + (0 if cfg.tie_word_embeddings else embedding)]


def has_stated_size(manifest: Manifest) -> bool:
    """Whether the manifest's number of parameters is that of its model. It decides how much a joiner downloads."""
    return manifest.parameters == sum(unit_elements(manifest.run.model))


def prepare_layers(model: nn.Module, devices: DevicesConfig) -> None:
    """Set up activation checkpointing, if configured. Call before the first step."""
    if devices.activation_checkpointing:
        for layer in model.get_submodule("model.layers").children():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_layers(model: nn.Module, *, compiled: bool) -> None:
    """Let the layers be compiled at their next call, or call them as they are.

    torch compiles them for the first size that they meet. For a second size, it compiles slower kernels that take any
    size.
    """
    for layer in model.get_submodule("model.layers").children():
        if compiled:
            layer.compile()
        else:
            layer._compiled_call_impl = None


def forward(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """Logits [B, T, V] in the dtype that the model computes in, with a causal mask and no cache."""
    logits_BTV: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
    return logits_BTV


def next_token_loss(model: nn.Module, batch: Tensor, how: LossKind = "whole") -> Tensor:
    """Return the mean cross-entropy, nats per token, fp32 []. `batch` is int64 [B, T + 1] on the model's device.

    `whole` computes all logits at once. `chunked` computes them for LOSS_TOKENS at a time, and again in the backward
    pass, so that the logits of a large vocabulary are never in memory all at once. `compiled` computes all at once with
    torch.compile, which keeps them in half precision only.
    """
    if how == "whole":
        logits_BTV = forward(model, batch[:, :-1])
        return nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), batch[:, 1:].flatten())
    body, head = model.get_submodule("model"), model.get_submodule("lm_head")
    hidden_ND = body(input_ids=batch[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    targets_N = batch[:, 1:].flatten()
    if how == "compiled":
        total: Tensor = _compiled_loss()(head, hidden_ND, targets_N)
        return total / targets_N.numel()
    total = torch.zeros((), device=hidden_ND.device)
    for hidden, targets in zip(torch.split(hidden_ND, LOSS_TOKENS), torch.split(targets_N, LOSS_TOKENS), strict=True):
        total = total + checkpoint(_summed_loss, head, hidden, targets, use_reentrant=False)
    return total / targets_N.numel()


def _summed_loss(head: nn.Module, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    return nn.functional.cross_entropy(head(hidden_ND).float(), targets_N, reduction="sum")


@cache
def _compiled_loss() -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    return torch.compile(_summed_loss)


class NextTokenLoss(nn.Module):
    """`next_token_loss` as a module: FSDP needs a module whose call is the whole forward pass."""

    def __init__(self, model: nn.Module, how: LossKind = "whole") -> None:
        super().__init__()
        self.language_model, self._how = model, how

    def forward(self, batch: Tensor) -> Tensor:
        return next_token_loss(self.language_model, batch, self._how)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Compute matrix products in half precision if `precision` is bf16 or fp16; all else stays fp32."""
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, half, enabled=precision != "fp32")


def flatten(model: nn.Module) -> Tensor:
    """A copy of all parameters, fp32 cpu [P]."""
    return take_flat(model, ((0, sum(p.numel() for p in model.parameters())),))


def load_flat_(model: nn.Module, flat: Tensor) -> None:
    """Overwrite all parameters in place. `flat` is [P] on any device. Raises ValueError if it does not fit."""
    size = sum(p.numel() for p in model.parameters())
    if flat.shape != (size,):
        raise ValueError(f"A vector of shape {tuple(flat.shape)} does not fit this model of {size} parameters.")
    change_flat_(model, ((0, size),), lambda _part, _at, place: flat[place])


@torch.no_grad()
def take_flat(model: nn.Module, ranges: Ranges, device: torch.device = CPU) -> Tensor:
    """Copy a fragment to fp32 [P_f] on `device`. `ranges` are those of the vector that `flatten` returns."""
    taken = torch.empty(elements(ranges), dtype=torch.float32, device=device)
    for _, _, part, at, _ in _parts(model, ranges):
        taken[at].copy_(part)
    return taken


@torch.no_grad()
def change_flat_(model: nn.Module, ranges: Ranges, change: Change) -> None:
    """Overwrite a fragment in place, one part of a parameter at a time.

    `change` gets the part, [n] on its device, and the part's slices of the fragment [P_f] and of the whole vector [P].
    It returns the new values, [n] on any device.
    """
    for parameter, flat, part, at, place in _parts(model, ranges):
        part.copy_(change(part, at, place))
        if is_sharded(parameter):  # Otherwise `part` is a view of the parameter.
            parameter.copy_(place_like(flat.view(parameter.shape), parameter))


def _parts(model: nn.Module, ranges: Ranges) -> Iterator[tuple[Tensor, Tensor, Tensor, slice, slice]]:
    """Yield (parameter, all of it flat, view of a part, the part's slices of fragment and vector).

    Each part is the overlap of one parameter with one range.
    """
    first = 0
    for parameter in model.parameters():
        end, at = first + parameter.numel(), 0
        for low, high in ranges:
            start, stop = max(low, first), min(high, end)
            if start < stop:
                flat = full_tensor(parameter.detach()).view(-1)
                part = flat[start - first : stop - first]
                yield parameter, flat, part, slice(at + start - low, at + stop - low), slice(start, stop)
            at += high - low
        first = end


def silence_transformers() -> None:
    """Turn off the progress bars and warnings of `transformers`."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _build(cfg: ModelConfig) -> nn.Module:
    # Imported here, as the import takes seconds and a node that only relays never needs it.
    from transformers import AutoConfig, AutoModelForCausalLM

    silence_transformers()
    own: dict[str, Any] = {"sliding_window": None} if cfg.type == "mistral" else {}
    if cfg.type != "qwen2" or cfg.head_dim:
        own["head_dim"] = cfg.head_width
    config = AutoConfig.for_model(
        cfg.type,
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
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
        **own,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="sdpa"
    )
    return model

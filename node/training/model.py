"""The model: of `transformers`' Llama family, as one flat vector. Knows no data, no optimizer, no file.

Everybody's vector has the same order: `named_parameters()`, a tied matrix once, each tensor row-major. P is its length.
Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from node.diloco.fragments import Ranges, elements
from node.manifest import ModelConfig
from node.training.ranks import is_sharded, like, whole

LOSS_TOKENS = 4096
CPU = torch.device("cpu")


def build_model(cfg: ModelConfig, *, seed: int) -> nn.Module:
    """A freshly initialised model, fp32 on the CPU, in training mode. The global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _build(cfg)


def parameter_count(cfg: ModelConfig) -> int:
    """P, without memory for a single one of them."""
    with torch.device("meta"):
        return sum(p.numel() for p in _build(cfg).parameters())


def unit_elements(cfg: ModelConfig) -> list[int]:
    """Elements of each unit in `flatten`'s order: what stands before the layers, each layer, what comes after them.

    Without the library, which takes seconds to load; a test holds it to what the library builds.
    """
    width, head = cfg.hidden_size, cfg.head_width
    query_width, kv_width = cfg.num_attention_heads * head, cfg.num_key_value_heads * head
    attention = 2 * width * query_width + 2 * width * kv_width
    attention += {"qwen2": query_width + 2 * kv_width, "qwen3": 2 * head}.get(cfg.type, 0)
    layer = attention + 3 * width * cfg.intermediate_size + 2 * width
    embedding = cfg.vocab_size * width
    return [embedding, *[layer] * cfg.num_hidden_layers, width + (0 if cfg.tie_word_embeddings else embedding)]


def forward(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """Logits [B, T, V] in the dtype that the model computes in. No cache, no mask but the causal one."""
    logits_BTV: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
    return logits_BTV


def next_token_loss(model: nn.Module, batch: Tensor, *, chunked: bool = False) -> Tensor:
    """Mean cross-entropy, nats per token, fp32 scalar. `batch`: int64 [B, T + 1] on the model's device.

    `chunked`: the logits are made for LOSS_TOKENS at a time and once more on the way back, so that those of a large
    vocabulary never lie in memory all at once.
    """
    if not chunked:
        logits_BTV = forward(model, batch[:, :-1])
        return nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), batch[:, 1:].flatten())
    body, head = model.get_submodule("model"), model.get_submodule("lm_head")
    hidden_ND = body(input_ids=batch[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    targets_N = batch[:, 1:].flatten()
    total = torch.zeros((), device=hidden_ND.device)
    for hidden, targets in zip(torch.split(hidden_ND, LOSS_TOKENS), torch.split(targets_N, LOSS_TOKENS), strict=True):
        total = total + checkpoint(_summed_loss, head, hidden, targets, use_reentrant=False)
    return total / targets_N.numel()


class NextTokenLoss(nn.Module):
    """`next_token_loss` as a module, whose call is the forward pass and nothing else is."""

    def __init__(self, model: nn.Module, *, chunked: bool) -> None:
        super().__init__()
        self.language_model, self._chunked = model, chunked

    def forward(self, batch: Tensor) -> Tensor:
        return next_token_loss(self.language_model, batch, chunked=self._chunked)


def _summed_loss(head: nn.Module, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    return nn.functional.cross_entropy(head(hidden_ND).float(), targets_N, reduction="sum")


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Matrix products in half precision if `precision` is bf16 or fp16; parameters, norms and losses stay fp32."""
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, half, enabled=precision != "fp32")


def prepare(model: nn.Module, *, recompute: bool, compiled: bool) -> None:
    """Before the first step. `recompute`: activations of a layer are made again on the way back; `compiled`: layers by
    `torch.compile`."""
    for layer in model.get_submodule("model.layers").children():
        if recompute:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if compiled:
            layer.compile()


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
def take_flat(model: nn.Module, ranges: Ranges, device: torch.device = CPU) -> Tensor:
    """A copy of some parameters, fp32 [P_f] on `device`; `ranges` are of the vector that `flatten` gives."""
    taken = torch.empty(elements(ranges), dtype=torch.float32, device=device)
    for _, _, part, at, _ in _parts(model, ranges):
        taken[at].copy_(part)
    return taken


@torch.no_grad()
def change_flat_(model: nn.Module, ranges: Ranges, change: Callable[[Tensor, slice, slice], Tensor]) -> None:
    """Overwrite those parameters in place, a part at a time, by what `change` makes of the part.

    `change` gets the part, [n] on its device, its place in the fragment [P_f], and that in the vector [P]; it returns
    [n], on any device.
    """
    for parameter, flat, part, at, place in _parts(model, ranges):
        part.copy_(change(part, at, place))
        if is_sharded(parameter):  # Else `part` is a view of it.
            parameter.copy_(like(flat.view(parameter.shape), parameter))


def _parts(model: nn.Module, ranges: Ranges) -> Iterator[tuple[Tensor, Tensor, Tensor, slice, slice]]:
    """Of each parameter: it; all of it, flat; a view of what a range has of that, with its place in the fragment, and
    in the vector."""
    first = 0
    for parameter in model.parameters():
        end, at = first + parameter.numel(), 0
        for low, high in ranges:
            start, stop = max(low, first), min(high, end)
            if start < stop:
                flat = whole(parameter.detach()).view(-1)
                part = flat[start - first : stop - first]
                yield parameter, flat, part, slice(at + start - low, at + stop - low), slice(start, stop)
            at += high - low
        first = end


def _build(cfg: ModelConfig) -> nn.Module:
    # Here, not above: it takes seconds, and a node that only relays never needs it.
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    own: dict[str, Any] = {"mistral": {"sliding_window": None}}.get(cfg.type, {})
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

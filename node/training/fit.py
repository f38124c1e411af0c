"""What a run needs of a machine, by formula, and how its steps are computed here, by trying. Knows torch; no swarm.

Bytes a parameter on the device: 4 of weights, 4 of gradients, AdamW's 8 (Muon's 4 where it has the parameter), 4 of
what is being sent, and in half precision 2 of the weights' copy. On the host: 4 of each of anchor and momentum, before
and after an outer step, 4 of the pseudo-gradient, up to 4 of what travels, 12 of a checkpoint's weights and moments;
with error feedback 8 of its residual, before and after a round. All of it pageable: nothing is pinned.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from node.config import Config, DevicesConfig
from node.diloco.codec import make_codec
from node.errors import MachineError
from node.manifest import ModelConfig, RunConfig
from node.quota import LEAST_BYTES, META_BYTES, quota_bytes
from node.training.device import Chosen, available_memory_bytes, free_gpu_memory_bytes
from node.training.inner import Execution, InnerLoop
from node.training.model import LOSS_TOKENS, prepare, unit_elements

GB = 1e9
DEVICE_BYTES = 20
HALF_BYTES = 2
HOST_BYTES = 36
FEEDBACK_BYTES = 8
"""On the host besides; half of it in each checkpoint, too."""
BASE_BYTES = 0.7 * GB
"""Python, torch, libp2p's daemon and the supervisor."""
CHECKPOINT_BYTES = 20
"""A parameter: anchor, momentum, local weights and two moments, all fp32."""
KEPT_RESULTS = 8
LOGIT_BYTES = 12
"""An entry of the logits: as computed, as fp32, and its gradient."""
MOST_LOGITS_BYTES = 1 * GB
CPU_RATIO = 0.5
"""Of the free memory that activations may take on a CPU, which ends a process that asks for more."""
WORTH_RATIO = 1.05
"""Twice the sequences at once have to be so much faster, else fewer do."""
PROBES = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one node with one rank; `shortages` counts the others."""

    device_bytes: float
    """Without activations."""
    row_bytes: float
    """Activations of one sequence, on the device."""
    host_bytes: float
    disk_bytes: float
    least_disk_bytes: float
    """Without whatever may go: the newest checkpoint, the one that is being written, and a round's result."""


def needs_of(run: RunConfig, config: Config, precision: str) -> Needs:
    parameters = sum(unit_elements(run.model))
    payload = make_codec(run.sync.codec).encoded_bytes(parameters)
    half = 0 if precision == "fp32" else HALF_BYTES
    feedback = FEEDBACK_BYTES if run.sync.has_feedback else 0
    saved = CHECKPOINT_BYTES + feedback // 2
    return Needs(
        device_bytes=(DEVICE_BYTES + half) * parameters,
        row_bytes=row_bytes(run, config.devices, precision),
        host_bytes=(HOST_BYTES + feedback) * parameters + BASE_BYTES,
        disk_bytes=(config.checkpoint.keep + 1) * saved * parameters + KEPT_RESULTS * payload,
        least_disk_bytes=2 * (saved * parameters + META_BYTES) + payload,
    )


def row_bytes(run: RunConfig, devices: DevicesConfig, precision: str) -> float:
    """Activations of one sequence of T tokens, kept from the way there to the way back.

    A layer keeps of each token its inputs in fp32; in the precision of the products what the norms give, what attention
    takes and gives, and four times the width of the feed-forward layer. An estimate: a test holds it to what autograd
    keeps.
    """
    model, tokens = run.model, run.inner.sequence_length
    computed = 4 if precision == "fp32" else 2
    layer = _layer_numbers(model) * computed + 16 * model.hidden_size
    if devices.activation_checkpointing:
        kept = 4 * model.hidden_size * model.num_hidden_layers + layer
    else:
        kept = layer * model.num_hidden_layers
    logits = float(LOGIT_BYTES * model.vocab_size)
    if _is_chunked(run, devices, 1):
        logits = logits * min(1.0, LOSS_TOKENS / tokens)
    return float(tokens * (kept + logits))


def _layer_numbers(model: ModelConfig) -> float:
    heads, kv = model.num_attention_heads * model.head_width, model.num_key_value_heads * model.head_width
    return 2 * model.hidden_size + 4 * heads + 3 * kv + 4 * model.intermediate_size


def _is_chunked(run: RunConfig, devices: DevicesConfig, rows: int) -> bool:
    tokens = rows * run.inner.sequence_length
    auto = LOGIT_BYTES * run.model.vocab_size * tokens > MOST_LOGITS_BYTES
    return {"auto": auto, "on": True, "off": False}[devices.chunked_loss]


def check_fit(run: RunConfig, config: Config, chosen: Chosen) -> None:
    """MachineError, with the figures, where the run does not fit into this machine's memory or disk."""
    needs = needs_of(run, config, chosen.precision)
    for what, needed, free, mend in shortages(needs, config, chosen):
        if needed > free:
            raise MachineError(
                f"This run needs {needed / GB:.3g} GB of {what} here, and {free / GB:.3g} GB are free: {mend}.",
                code="does_not_fit",
            )


def shortages(needs: Needs, config: Config, chosen: Chosen) -> Iterator[tuple[str, float, float, str]]:
    """What is needed of each kind, what is free of it, both in bytes, and what to do where that is less."""
    ranks = config.devices.ranks
    host = needs.host_bytes + (ranks - 1) * BASE_BYTES
    device = needs.device_bytes / (ranks if config.devices.sharding == "fsdp" else 1)
    if chosen.device.type == "cuda":
        ratio = config.limits.gpu_memory_ratio
        mend = "end what else uses the GPU, or join a run with a smaller model"
        if ratio:
            mend = f"raise limits.gpu_memory_ratio, {mend}"
        yield "GPU memory", device + needs.row_bytes, free_gpu_memory_bytes(chosen.device, ratio), mend
    else:
        host += ranks * (device + needs.row_bytes)
    yield "memory", host, available_memory_bytes(), "end what else uses memory, or join a run with a smaller model"
    folder = existing(config.node.data_dir)
    mend = f"free some space in {folder}, or choose another folder with --data-dir"
    quota = quota_bytes(config.limits.disk_gb)
    if quota:
        least = needs.least_disk_bytes + LEAST_BYTES
        yield "disk by limits.disk_gb", least, quota, f"set it to {1.05 * least / GB:.2g} or more, or to 0 for no limit"
    # Where there is a limit, the oldest goes when it is reached.
    wanted = min(needs.disk_bytes, quota) if quota else needs.disk_bytes
    yield "disk", wanted - _used(config.node.data_dir), float(shutil.disk_usage(folder).free), mend


def existing(folder: Path) -> Path:
    """It, or the next above it that is there."""
    folder = folder.expanduser()
    while not folder.exists():
        folder = folder.parent
    return folder


def _used(data_dir: Path) -> float:
    """What the checkpoints have of the disk already."""
    return float(sum(path.stat().st_size for path in data_dir.glob("checkpoints/*/*") if path.is_file()))


def shape_execution(model: nn.Module, devices: DevicesConfig) -> None:
    """Have the layers recompute or compile if asked; before the first step."""
    prepare(model, recompute=devices.activation_checkpointing, compiled=devices.compile)


def settle_execution(model: nn.Module, run: RunConfig, chosen: Chosen, devices: DevicesConfig) -> Execution:
    """How steps are computed here, found with a model that `shape_execution` has had. On a GPU, moves it there."""
    batch_size = -(-run.inner.batch_size // devices.ranks)
    how = Execution(chosen.precision, batch_size, _is_chunked(run, devices, 1))
    if devices.micro_batch:
        rows = min(devices.micro_batch, batch_size)
    elif devices.sharding == "fsdp" and devices.ranks > 1:
        rows = 1  # To try more, all ranks would have to.
    elif chosen.device.type == "cuda":
        rows = _tried(model, run, chosen, how)
    else:
        room = CPU_RATIO / devices.ranks * available_memory_bytes() / row_bytes(run, devices, chosen.precision)
        rows = batch_size if room >= batch_size else 1 << max(0, int(room).bit_length() - 1)
    logger.info("Micro-batch of %d of %d sequences, %s.", rows, batch_size, chosen.precision)
    return Execution(chosen.precision, rows, _is_chunked(run, devices, rows))


def _tried(model: nn.Module, run: RunConfig, chosen: Chosen, how: Execution) -> int:
    """The fewest sequences at once that are about as fast as any number that fits."""
    inner = InnerLoop(model, run.inner, chosen.device, how)
    best, best_s, rows, rest = 0, float("inf"), 1, None
    try:
        # What optimizer and sending will need is not free, so it is not to be found free now.
        parameters = sum(p.numel() for p in model.parameters())
        rest = torch.empty((DEVICE_BYTES - 8) * parameters, dtype=torch.uint8, device=chosen.device)
        while rows <= how.micro_batch:
            batch = torch.randint(run.model.vocab_size, (rows, run.inner.sequence_length + 1))
            row_s = _probe_s(inner, batch, chosen.device) / rows
            if row_s * WORTH_RATIO > best_s:
                break
            best, best_s, rows = rows, row_s, 2 * rows
    except torch.OutOfMemoryError:
        pass  # What was found before it is the answer.
    del rest
    torch.cuda.empty_cache()
    if not best:
        raise MachineError(
            "The GPU's memory does not suffice for a single sequence of this run: set "
            "devices.activation_checkpointing, or join a run with a smaller model.",
            code="does_not_fit",
        )
    return best


def _probe_s(inner: InnerLoop, batch: torch.Tensor, device: torch.device) -> float:
    inner.probe(batch)
    torch.cuda.synchronize(device)
    began_s = time.monotonic()
    for _ in range(PROBES):
        inner.probe(batch)
    torch.cuda.synchronize(device)
    return (time.monotonic() - began_s) / PROBES

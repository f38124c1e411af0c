"""Computes the memory and disk that a run needs on this machine, and finds the micro-batch by trying.

On the device, a parameter takes 4 bytes of weights, 4 of gradients, 8 of AdamW's moments (4 of Muon's), 4 of the copy
that is sent, and in half precision 2 of the weights' copy. On the host, it takes 4 bytes each of anchor and momentum
before and after an outer step, 4 of the pseudo-gradient, up to 4 of the encoded data, and 12 of a checkpoint's weights
and moments. Error feedback adds its residuals before and after a round: that of the contribution and, if this node
reduces all chunks, that of the mean, each of 4 bytes, or 1 with LoCo. The outer optimizer `adam` adds 4 bytes of second
moments before and after an outer step. All host memory is pageable.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from node.config.manifest import RunConfig
from node.config.schema import Config, DevicesConfig
from node.diloco.codec import make_codec
from node.errors import MachineError
from node.host.disk_quota import LEAST_BYTES, META_BYTES, lasting_bytes, quota_bytes
from node.host.files import expand_user
from node.host.memory import available_memory_bytes, memory_remedy, memory_size_bytes, own_memory_bytes
from node.training.algorithm import feedback_of, optimizer_of
from node.training.device import ComputeDevice, free_device_bytes
from node.training.inner import Execution, InnerLoop
from node.training.model import LOSS_TOKENS, LossKind, unit_elements

GB = 1e9
DEVICE_BYTES = 20
HALF_BYTES = 2
HOST_BYTES = 36
RANK_BYTES = 8
"""A rank other than the first receives the moments of the optimizer when a node resumes."""
RESIDUALS = 4
"""Residuals of error feedback in memory: of the contribution and of the mean, before and after a round."""
BASE_BYTES = 0.7 * GB
"""Memory of Python, torch, libp2p's daemon and the supervisor."""
TOKEN_BYTES = 8
BATCHES = 4
"""Batches in memory beside those of the evaluation: the one that is trained on, and those that are prepared."""
CHECKPOINT_BYTES = 20
"""Bytes a parameter for anchor, momentum, local weights and two moments, all fp32."""
OUTER_BYTES = 8
"""The part of a checkpoint that is the outer state: anchor and momentum."""
KEPT_RESULTS = 8
LOGIT_BYTES = 12
"""Bytes of one logit as computed, of its fp32 copy, and of its gradient."""
COMPILED_LOGIT_BYTES = 2.5
"""The same for a compiled loss, as measured: a logit in half precision, whose place its gradient takes, and buffers."""
MOST_LOGITS_BYTES = 1 * GB
CPU_RATIO = 0.5
"""Share of the free memory for activations in main memory, where the kernel kills a process that exceeds it."""
MOST_PASS_S = 5.0
"""A pass on the CPU takes at most about this long. The worker sends no heartbeat during a pass, and looks hung after
30 s (`SupervisorTimings.hung_s`)."""
MOST_ROW_S = 15.0
"""A machine that needs longer for one sequence cannot train. While other programs run, it may need twice as long, and
its worker would be killed as hung."""
WORTH_RATIO = 1.05
"""A micro-batch twice as large must be faster by this factor, otherwise the smaller one is used."""
PROBES = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What one node with one rank needs; `compare_resources` adds the other ranks."""

    device_bytes: float
    """Memory of the device without activations."""
    row_bytes: float
    """Activations of one sequence, on the device."""
    host_bytes: float
    disk_bytes: float
    rank_bytes: float
    """Memory of the host for each other rank, in addition to what every process needs."""
    least_disk_bytes: float
    """The newest checkpoint, the checkpoint that is being written, one round's result, and, if rounds are published or
    evaluated, a waiting outer state and the folder that is made of it. All else may be removed."""


def estimate_requirements(run: RunConfig, config: Config, precision: str) -> Requirements:
    """Compute the requirements by formula. `precision` is `fp32`, `bf16` or `fp16`."""
    batch_bytes = TOKEN_BYTES * run.inner.batch_size * (run.inner.sequence_length + 1)
    parameters = sum(unit_elements(run.model))
    result_bytes = make_codec(run.sync.encoding_of_results).encoded_bytes(parameters)
    half = 0 if precision == "fp32" else HALF_BYTES
    rule = feedback_of(run.sync)
    residual = 0.0 if rule is None else rule.bytes_per_parameter
    more_moments = 4 * (optimizer_of(run.outer).moments - 1)
    saved = CHECKPOINT_BYTES + residual + more_moments
    # A round that waits to be published or evaluated, and the folder that is made of it.
    waiting = 2 * (OUTER_BYTES + more_moments) * parameters if config.publish.to or config.evaluate.tasks else 0.0
    return Requirements(
        device_bytes=(DEVICE_BYTES + half) * parameters,
        row_bytes=pass_bytes(run, config.devices, precision),
        host_bytes=(HOST_BYTES + RESIDUALS * residual + 2 * more_moments) * parameters
        + (run.evaluation.batches + BATCHES) * batch_bytes
        + BASE_BYTES,
        disk_bytes=((config.checkpoint.keep + 1) * saved + residual) * parameters
        + KEPT_RESULTS * result_bytes
        + waiting,
        rank_bytes=RANK_BYTES * parameters,
        least_disk_bytes=2 * (saved * parameters + META_BYTES) + residual * parameters + result_bytes + waiting,
    )


def pass_bytes(
    run: RunConfig, devices: DevicesConfig, precision: str, rows: int = 1, *, compiled: bool = False
) -> float:
    """Estimate the bytes of activations that autograd keeps for the backward pass of `rows` sequences.

    For each token, a layer keeps vectors in the precision of the products: the outputs of the norms, once for each
    product that takes them, the inputs and the output of attention, and four of the feed-forward layer's width. It
    keeps four vectors of the model's width in fp32. A compiled layer keeps fewer, as it computes some again. The logits
    of a chunked loss are in memory for LOSS_TOKENS at a time, however many sequences there are. On an H200, the peak
    was within 3 % of these formulas, with `llama-150m` and `llama-1b`.
    """
    model, tokens = run.model, rows * run.inner.sequence_length
    heads, kv = model.num_attention_heads * model.head_width, model.num_key_value_heads * model.head_width
    if compiled:
        products, in_full = 2 * model.hidden_size + 3 * heads + 2 * kv + 3 * model.intermediate_size, 1
    else:
        products, in_full = 5 * model.hidden_size + 2 * heads + 2 * kv + 4 * model.intermediate_size, 4
    layer = products * (4 if precision == "fp32" else 2) + in_full * 4 * model.hidden_size
    if devices.activation_checkpointing:
        kept = 4 * model.hidden_size * model.num_hidden_layers + layer
    else:
        kept = layer * model.num_hidden_layers
    loss = _loss_kind(run, devices, rows, compiled=compiled)
    logits = min(tokens, LOSS_TOKENS) if loss == "chunked" else tokens
    logit_bytes = LOGIT_BYTES if loss != "compiled" else COMPILED_LOGIT_BYTES * (2 if precision == "fp32" else 1)
    return float(tokens * kept + logits * logit_bytes * model.vocab_size)


def _loss_kind(run: RunConfig, devices: DevicesConfig, rows: int, *, compiled: bool) -> LossKind:
    if devices.chunked_loss == "on":
        return "chunked"
    if compiled and not (devices.sharding == "fsdp" and devices.ranks > 1):
        return "compiled"
    logits_bytes = LOGIT_BYTES * run.model.vocab_size * rows * run.inner.sequence_length
    return "chunked" if devices.chunked_loss == "auto" and logits_bytes > MOST_LOGITS_BYTES else "whole"


def peak_bytes(run: RunConfig, config: Config, how: Execution) -> float:
    """The memory of the device that the steps of a node with one rank need, by the formulas of this module."""
    needs = estimate_requirements(run, config, how.precision)
    rows = pass_bytes(run, config.devices, how.precision, how.micro_batch, compiled=how.compiled)
    return needs.device_bytes + rows


def first_lack(run: RunConfig, config: Config, chosen: ComputeDevice) -> tuple[str, str]:
    """What this machine lacks for a run, with the figures, and the remedy. Both are empty if the run fits."""
    needs = estimate_requirements(run, config, chosen.precision)
    for what, needed, free, remedy in compare_resources(needs, config, chosen):
        if needed > free:
            return f"needs {needed / GB:.3g} GB of {what} here, and {free / GB:.3g} GB are free", remedy
    return "", ""


def check_fit(run: RunConfig, config: Config, chosen: ComputeDevice) -> None:
    """Raise MachineError, with the figures, if the run does not fit into this machine's memory or disk."""
    lack, remedy = first_lack(run, config, chosen)
    if lack:
        raise MachineError(f"This run {lack}: {remedy}.", code="does_not_fit")


def compare_resources(
    needs: Requirements, config: Config, chosen: ComputeDevice
) -> Iterator[tuple[str, float, float, str]]:
    """Yield (name, bytes needed, bytes free, remedy if these do not suffice) for each resource."""
    ranks = config.devices.ranks
    host = needs.host_bytes + (ranks - 1) * (BASE_BYTES + needs.rank_bytes)
    device = needs.device_bytes / (ranks if config.devices.sharding == "fsdp" else 1)
    ratio = config.limits.gpu_memory_ratio
    if (free_bytes := free_device_bytes(chosen.device, ratio)) is not None:
        remedy = "end what else uses the GPU, or join a run with a smaller model"
        if ratio:
            remedy = f"raise limits.gpu_memory_ratio, {remedy}"
        yield "GPU memory", device + needs.row_bytes, free_bytes, remedy
    else:
        host += ranks * (device + needs.row_bytes)
    # `host` includes memory that this process already uses, so add that to the free memory. A part of it may be shared
    # with other containers and not count towards this one's limit.
    free_host_bytes = min(available_memory_bytes() + own_memory_bytes(), memory_size_bytes())
    yield "memory", host, free_host_bytes, memory_remedy()
    data_dir = expand_user(config.node.data_dir)
    folder = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    remedy = f"free some space in {folder}, or choose another folder with --data-dir"
    quota = quota_bytes(config.limits.disk_gb)
    if quota:
        least = needs.least_disk_bytes + LEAST_BYTES
        yield "disk by limits.disk_gb", least, quota, f"set it to {1.05 * least / GB:.2g} or more, or to 0 for no limit"
    # At the limit, the oldest files are removed.
    wanted = min(needs.disk_bytes, quota) if quota else needs.disk_bytes
    missing = max(0.0, wanted - lasting_bytes(data_dir))
    yield "disk", missing, float(shutil.disk_usage(folder).free), remedy


def choose_execution(model: nn.Module, run: RunConfig, chosen: ComputeDevice, devices: DevicesConfig) -> Execution:
    """Choose how to compute the steps of a model that `prepare_layers` has prepared. Moves it to the GPU, if any.

    Nothing is compiled to find the micro-batch.
    """
    batch_size = -(-run.inner.batch_size // devices.ranks)
    if devices.micro_batch:
        rows = min(devices.micro_batch, batch_size)
    elif devices.sharding == "fsdp" and devices.ranks > 1:
        rows = 1  # To try more rows, all ranks would be needed.
    elif free_device_bytes(chosen.device, 0) is not None:
        rows = _find_micro_batch(model, run, chosen, devices, batch_size)
    else:
        rows = _cpu_micro_batch(model, run, chosen, devices, batch_size)
    logger.info("Each pass computes %d of the %d sequences of a step, in %s.", rows, batch_size, chosen.precision)
    return execution(run, chosen, devices, rows, compiled=chosen.compiles)


def execution(
    run: RunConfig, chosen: ComputeDevice, devices: DevicesConfig, rows: int, *, compiled: bool = False
) -> Execution:
    """The execution with micro-batches of `rows` sequences."""
    return Execution(chosen.precision, rows, _loss_kind(run, devices, rows, compiled=compiled), compiled)


def _powers_of_two(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]


def _cpu_micro_batch(model: nn.Module, run: RunConfig, chosen: ComputeDevice, devices: DevicesConfig, most: int) -> int:
    """Find the largest micro-batch, up to `most`, that is small enough for the memory and the heartbeats."""
    row_s = _measure_row_s(model, run, chosen, execution(run, chosen, devices, 1))
    if row_s > MOST_ROW_S:
        raise MachineError(
            f"One sequence of this run takes {row_s:.0f} s on this machine, more than the {MOST_ROW_S:.0f} s that "
            "are possible: join a run with a smaller model, or end what else uses the processor.",
            code="too_slow",
        )
    room_bytes = CPU_RATIO / devices.ranks * available_memory_bytes()
    for rows in (most, *reversed(_powers_of_two(most))):
        if pass_bytes(run, devices, chosen.precision, rows) <= room_bytes and rows * row_s <= MOST_PASS_S:
            return rows
    return 1


def _find_micro_batch(
    model: nn.Module, run: RunConfig, chosen: ComputeDevice, devices: DevicesConfig, most: int
) -> int:
    """Find the smallest micro-batch, up to `most`, that is about as fast as any that fits into the GPU's memory."""
    device, best, best_s, reserve = chosen.device, 0, float("inf"), None
    try:
        # Reserve the memory that the optimizer and the sent copy will need.
        parameters = sum(p.numel() for p in model.parameters())
        reserve = torch.empty((DEVICE_BYTES - 8) * parameters, dtype=torch.uint8, device=device)
        for rows in _powers_of_two(most):
            row_s = _measure_row_s(model, run, chosen, execution(run, chosen, devices, rows))
            if row_s * WORTH_RATIO > best_s:
                break
            best, best_s = rows, row_s
    except torch.OutOfMemoryError:
        pass  # The best size so far is the result.
    del reserve
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    if not best:
        raise MachineError(
            "The GPU's memory does not suffice for a single sequence of this run: set "
            "devices.activation_checkpointing, or join a run with a smaller model.",
            code="does_not_fit",
        )
    return best


def _measure_row_s(model: nn.Module, run: RunConfig, chosen: ComputeDevice, how: Execution) -> float:
    """Measure the seconds per sequence of a pass of a micro-batch of random tokens."""
    inner = InnerLoop(model, run.inner, chosen.device, how)
    batch = torch.randint(run.model.vocab_size, (how.micro_batch, run.inner.sequence_length + 1))
    inner.probe(batch)
    _synchronize(chosen.device)
    began_s = time.monotonic()
    for _ in range(PROBES):
        inner.probe(batch)
    _synchronize(chosen.device)
    return (time.monotonic() - began_s) / PROBES / how.micro_batch


def _synchronize(device: torch.device) -> None:
    """Wait until the device has done all queued work. The CPU queues none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

"""Chooses the device that this process computes on, and measures the device's load and memory.

`choose_device` sets the number of threads of the whole process, so call it once, in the process that trains.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from node.config.schema import DevicesConfig
from node.errors import MachineError
from node.host.cores import usable_cores
from node.status import DeviceInfo
from node.training.accelerator import ACCELERATORS, Accelerator, accelerator_of
from node.training.cuda import Cuda, Rocm

DEVICE_FILES = Path("/dev")
GPU_FILES = {"nvidiactl": logging.WARNING, "kfd": logging.WARNING, "dri/renderD*": logging.INFO}
"""Files of GPUs below DEVICE_FILES, and how important it is that torch cannot use one. Most laptops have the last."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    device: torch.device
    precision: str
    """`fp32`, `bf16` or `fp16`."""
    name: str
    """The name to show to people, such as `NVIDIA GeForce RTX 4090`."""
    compiles: bool = False
    """Whether layers and loss are compiled on it."""


def choose_device(
    cfg: DevicesConfig, cpu_threads: int, rank: int = 0, *, gpu_memory_ratio: float = 0.0
) -> ComputeDevice:
    """Resolve `auto` and set torch's threads. Rank n uses GPU n.

    `gpu_memory_ratio` is the share of the GPU's memory that this process may use; 0 means all of it. Raises
    MachineError if the configured GPU or precision is not available.
    """
    torch.set_num_threads(threads_per_rank(cpu_threads, cfg.ranks))
    type_, accelerator = _choose_accelerator(cfg.device)
    device = torch.device("cpu")
    if accelerator.kind != "cpu":
        device = torch.device(type_, rank)
        if accelerator.count() < cfg.ranks:
            raise MachineError(
                f"devices.ranks is {cfg.ranks}, but the number of usable GPUs is {accelerator.count()}: "
                "lower devices.ranks.",
                code="no_gpu",
            )
        if device.type != "cpu":
            torch.accelerator.set_device_index(rank)
        if gpu_memory_ratio:
            accelerator.limit_memory(device, gpu_memory_ratio)
    name, precisions = accelerator.name(device), accelerator.precisions(device)
    precision = precisions[0] if cfg.precision == "auto" else cfg.precision
    if precision not in precisions:
        raise MachineError(
            f"{name} has no {precision}: set devices.precision to {', '.join(precisions)} or auto.",
            code=f"no_{precision}",
        )
    compiles = cfg.compile == "on" or (cfg.compile == "auto" and cfg.ranks == 1 and accelerator.can_compile(device))
    return ComputeDevice(device, precision, name, compiles)


def _choose_accelerator(wanted: str) -> tuple[str, Accelerator]:
    """Return torch's device type for `devices.device`, and the accelerator. Raises MachineError if there is none."""
    for type_, accelerator in ACCELERATORS.items():
        if wanted in ("auto", accelerator.kind) and accelerator.count():
            if wanted == "auto" and accelerator.kind == "cpu":
                _warn_of_unused_gpu()
            return type_, accelerator
    absent = {one.kind: one for one in (Cuda(), Rocm(), *ACCELERATORS.values())}[wanted]
    raise MachineError(
        f"devices.device is {wanted}, but {absent.missing()}, or set devices.device to auto or cpu.", code="no_gpu"
    )


def _warn_of_unused_gpu() -> None:
    for pattern, level in GPU_FILES.items():
        for file in DEVICE_FILES.glob(pattern):
            logger.log(
                level,
                "The processor computes, because torch cannot use the GPU of %s: check that this build of torch is for "
                "it, and that this user may open the file.",
                file,
            )
            return


def threads_per_rank(cpu_threads: int, ranks: int) -> int:
    """Divide `cpu_threads`, at most the usable cores, among the ranks. 0 means all usable cores."""
    cores = usable_cores()
    return max(1, (min(cpu_threads, cores) if cpu_threads else cores) // ranks)


def free_device_bytes(device: torch.device, ratio: float) -> float | None:
    """Bytes that this process may still allocate in the device's own memory, or None if it shares the host's.

    `ratio` is the share of the device's memory that the process may use; 0 means all of it.
    """
    memory = accelerator_of(device).memory_bytes(device)
    if memory is None:
        return None
    free_bytes, size_bytes = memory
    return min(free_bytes, ratio * size_bytes) if ratio else float(free_bytes)


def describe(device: torch.device, *, own: bool = True) -> DeviceInfo:
    """Measure load and memory; unknown figures are None.

    `own` says that this process computes on the device. For another rank's GPU all figures come from the driver, as a
    context of torch on it would take some hundred MB of its memory.
    """
    accelerator = accelerator_of(device)
    figures: dict[str, Any] = dict(accelerator.sensors(device))
    if own and (memory := accelerator.memory_bytes(device)) is not None:
        free_bytes, size_bytes = memory
        figures |= {"memory_used_bytes": size_bytes - free_bytes, "memory_size_bytes": size_bytes}
    return DeviceInfo(kind=accelerator.kind, name=accelerator.name(device), **figures)

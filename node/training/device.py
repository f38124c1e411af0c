"""Chooses the device that this process computes on, and measures the device's load and memory.

`choose_device` sets the number of threads of the whole process, so call it once, in the process that trains.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from node.config.schema import DevicesConfig
from node.errors import MachineError
from node.host.cores import usable_cores
from node.host.memory import memory_size_bytes
from node.host.power_meter import processor_joules
from node.status import DeviceInfo

_BF16_CAPABILITY = (8, 0)
"""First CUDA compute capability with bf16 matrix units (Ampere)."""


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    device: torch.device
    precision: str
    """`fp32`, `bf16` or `fp16`."""
    name: str
    """The name to show to people, such as `NVIDIA GeForce RTX 4090`."""


def choose_device(
    cfg: DevicesConfig, cpu_threads: int, rank: int = 0, *, gpu_memory_ratio: float = 0.0
) -> ComputeDevice:
    """Resolve `auto` and set torch's threads. Rank n uses GPU n.

    `gpu_memory_ratio` is the share of the GPU's memory that this process may use; 0 means all of it. Raises
    MachineError if the configured GPU or precision is not available.
    """
    torch.set_num_threads(threads_per_rank(cpu_threads, cfg.ranks))
    has_gpu = torch.cuda.is_available()
    if cfg.device == "cuda" and not has_gpu:
        raise _no_gpu_error()
    if cfg.device == "cpu" or not has_gpu:
        return ComputeDevice(torch.device("cpu"), "fp32" if cfg.precision == "auto" else cfg.precision, _cpu_name())
    if torch.cuda.device_count() < cfg.ranks:
        raise MachineError(
            f"devices.ranks is {cfg.ranks}, but the number of usable GPUs is {torch.cuda.device_count()}: "
            "lower devices.ranks.",
            code="no_gpu",
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if gpu_memory_ratio:
        torch.cuda.set_per_process_memory_fraction(gpu_memory_ratio, device)
    name = torch.cuda.get_device_name(device)
    has_bf16 = torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY
    if cfg.precision == "bf16" and not has_bf16:
        raise MachineError(f"{name} has no bf16: set devices.precision to fp16, fp32 or auto.", code="no_bf16")
    default = "bf16" if has_bf16 else "fp16"
    return ComputeDevice(device, default if cfg.precision == "auto" else cfg.precision, name)


def _no_gpu_error() -> MachineError:
    if torch.version.cuda is None:
        text = "this PyTorch is built without CUDA: install a CUDA build of torch"
    else:
        text = (
            "no NVIDIA GPU can be used here: check nvidia-smi and that the driver is new enough for CUDA "
            f"{torch.version.cuda}"
        )
    return MachineError(f"devices.device is cuda, but {text}, or set devices.device to auto or cpu.", code="no_gpu")


def threads_per_rank(cpu_threads: int, ranks: int) -> int:
    """Divide `cpu_threads`, at most the usable cores, among the ranks. 0 means all usable cores."""
    cores = usable_cores()
    return max(1, (min(cpu_threads, cores) if cpu_threads else cores) // ranks)


def free_gpu_memory_bytes(device: torch.device, ratio: float) -> float:
    """Bytes that this process may still allocate on the GPU.

    `ratio` is the share of the GPU's memory that the process may use; 0 means all of it.
    """
    free_bytes, size_bytes = torch.cuda.mem_get_info(device)
    return min(free_bytes, ratio * size_bytes) if ratio else float(free_bytes)


def gpu_uuid(device: torch.device) -> str:
    """The GPU's id in the form of NVIDIA's management library."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def describe(device: torch.device, *, own: bool = True) -> DeviceInfo:
    """Measure load and memory; unknown figures are None. A CPU's load is the machine's, its memory this process's.

    `own` says that this process computes on the device. For another rank's GPU, all figures come from the driver, as a
    CUDA context on it would take some hundred MB of its memory.
    """
    if device.type != "cuda":
        return DeviceInfo(
            kind="cpu",
            name=_cpu_name(),
            utilization_ratio=min(1.0, psutil.getloadavg()[0] / (psutil.cpu_count() or 1)),
            memory_used_bytes=psutil.Process().memory_info().rss,
            memory_size_bytes=memory_size_bytes(),
            energy_joules=processor_joules(),
        )
    properties = torch.cuda.get_device_properties(device)
    figures: dict[str, Any] = {"memory_size_bytes": properties.total_memory, **_nvml_figures(device)}
    if own:
        free_bytes, size_bytes = torch.cuda.mem_get_info(device)
        figures |= {"memory_used_bytes": size_bytes - free_bytes, "memory_size_bytes": size_bytes}
    return DeviceInfo(kind="cuda", name=properties.name, **figures)


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def _nvml_figures(device: torch.device) -> dict[str, float]:
    """Read the figures of NVIDIA's management library. Figures that it cannot read are missing."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return {}
    figures: dict[str, float] = {}
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(device).encode())
    except nvml.NVMLError:
        return {}
    readings: dict[str, Callable[[], float]] = {
        "memory_used_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        "utilization_ratio": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "temperature_celsius": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "energy_joules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
    }
    for name, read in readings.items():
        with suppress(nvml.NVMLError):
            figures[name] = read()
    return figures

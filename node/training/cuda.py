"""GPUs that torch calls `cuda`: NVIDIA's, and AMD's with a ROCm build of torch. All words of CUDA are in this module.

The figures of an NVIDIA GPU come from NVML, those of an AMD GPU from torch, which asks the package amdsmi.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_BF16_CAPABILITY = (8, 0)
"""First CUDA compute capability with bf16 matrix units (Ampere)."""
_BF16_ARCHITECTURES = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""Beginnings of the names of AMD's architectures with bf16 matrix units: CDNA 2 and later, RDNA 3 and later."""


class Cuda:
    """NVIDIA GPUs. Implements `accelerator.Accelerator`."""

    kind = "cuda"
    can_encode = True

    def count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def missing(self) -> str:
        if torch.version.cuda is None:
            return "this PyTorch is built without CUDA: install a CUDA build of torch"
        return (
            "no NVIDIA GPU can be used here: check nvidia-smi and that the driver is new enough for CUDA "
            f"{torch.version.cuda}"
        )

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def precisions(self, device: torch.device) -> tuple[str, ...]:
        has_bf16 = torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY
        return ("bf16", "fp16", "fp32") if has_bf16 else ("fp16", "fp32")

    def memory_bytes(self, device: torch.device) -> tuple[int, int] | None:
        free_bytes, size_bytes = torch.cuda.mem_get_info(device)
        return int(free_bytes), int(size_bytes)

    def limit_memory(self, device: torch.device, ratio: float) -> None:
        torch.cuda.set_per_process_memory_fraction(ratio, device)

    def sensors(self, device: torch.device) -> dict[str, float]:
        """All figures come from the driver, because a CUDA context would take some hundred MB of the GPU's memory."""
        size_bytes = torch.cuda.get_device_properties(device).total_memory
        return {"memory_size_bytes": size_bytes, **_nvml_figures(_uuid(device))}

    def can_compile(self, device: torch.device) -> bool:
        has_bf16 = torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY
        return has_bf16 and importlib.util.find_spec("triton") is not None and has_c_compiler()

    def power_id(self, device: torch.device) -> str:
        return _uuid(device)


class Rocm(Cuda):
    """AMD GPUs with a ROCm build of torch. Implements `accelerator.Accelerator`."""

    kind = "rocm"
    can_encode = False  # Nobody has compared the bits of its encoding with those of the host.

    def missing(self) -> str:
        if torch.version.hip is None:
            return "this PyTorch is built without ROCm: install a ROCm build of torch"
        return "no AMD GPU can be used here: check rocminfo, and that this user may open /dev/kfd and /dev/dri"

    def precisions(self, device: torch.device) -> tuple[str, ...]:
        architecture = str(torch.cuda.get_device_properties(device).gcnArchName)
        return ("bf16", "fp16", "fp32") if architecture.startswith(_BF16_ARCHITECTURES) else ("fp16", "fp32")

    def sensors(self, device: torch.device) -> dict[str, float]:
        figures: dict[str, float] = {"memory_size_bytes": torch.cuda.get_device_properties(device).total_memory}
        readings: dict[str, Callable[[], float]] = {
            "memory_used_bytes": lambda: int(torch.cuda.device_memory_used(device)),
            "utilization_ratio": lambda: torch.cuda.utilization(device) / 100,
            "temperature_celsius": lambda: float(torch.cuda.temperature(device)),
            "power_watts": lambda: torch.cuda.power_draw(device) / 1000,
        }
        for name, read in readings.items():
            # amdsmi is a package of its own, and its errors are RuntimeErrors or its own.
            with suppress(Exception):
                figures[name] = read()
        return figures

    def can_compile(self, device: torch.device) -> bool:
        return False  # Nobody has measured it.

    def power_id(self, device: torch.device) -> str:
        return ""  # `gpu_power` speaks NVML only.


def has_c_compiler() -> bool:
    """Whether a C compiler and Python's header files are there, with which triton builds what starts its kernels."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return header.exists() and any(map(shutil.which, ("cc", "gcc", "clang")))


def _uuid(device: torch.device) -> str:
    """The GPU's id in the form of NVML."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _nvml_figures(uuid: str) -> dict[str, float]:
    """Read the figures of NVIDIA's management library. Figures that it cannot read are missing."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return {}
    figures: dict[str, float] = {}
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
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

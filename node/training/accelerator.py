"""The kinds of device that a node can compute on, and what it asks of each.

Everything else uses torch's functions for any device (`torch.accelerator`, `torch.autocast`, `torch.distributed`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil
import torch

from node.host.memory import memory_size_bytes
from node.host.power_meter import processor_joules
from node.host.programs import output_of
from node.training.cuda import Cuda, Rocm


class Accelerator(Protocol):
    """A kind of device."""

    @property
    def kind(self) -> str:
        """`cuda`, `rocm`, `mps`, `xpu` or `cpu`."""

    @property
    def can_encode(self) -> bool:
        """Whether it encodes pseudo-gradients to the same bits as the host. Otherwise they are encoded on the host.

        Top-k may keep others of several equal elements.
        """

    def count(self) -> int:
        """The number of usable devices; 0 if there is none, or torch is not built for it."""

    def missing(self) -> str:
        """If `count` is 0: what is missing and the remedy, as a clause."""
        return ""

    def name(self, device: torch.device) -> str:
        """The name to show to people, such as `NVIDIA GeForce RTX 4090`."""

    def precisions(self, device: torch.device) -> tuple[str, ...]:
        """The supported precisions of matrix products, the default first."""

    def memory_bytes(self, device: torch.device) -> tuple[int, int] | None:
        """The free bytes and the size of the device's own memory, or None if it shares the host's."""
        return None

    def limit_memory(self, device: torch.device, ratio: float) -> None:
        """Let this process use at most this share of a GPU's memory. Does nothing on a processor."""
        return

    def sensors(self, device: torch.device) -> dict[str, float]:
        """The known figures of `DeviceInfo` by name, read without claiming memory of the device."""

    def can_compile(self, device: torch.device) -> bool:
        """Whether `devices.compile = "auto"` compiles: it was measured to be worthwhile, and what it needs is there."""
        return False

    def power_id(self, device: torch.device) -> str:
        """The device's id for `gpu_power`, or an empty string if that cannot limit its power."""
        return ""


class Cpu(Accelerator):
    """The processor. The load is the machine's, and the memory this process's."""

    kind = "cpu"
    can_encode = True

    def count(self) -> int:
        return 1

    def name(self, device: torch.device) -> str:
        with suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return _apple_name() or platform.processor() or platform.machine() or "CPU"

    def precisions(self, device: torch.device) -> tuple[str, ...]:
        return ("fp32", "bf16", "fp16")

    def sensors(self, device: torch.device) -> dict[str, float]:
        figures: dict[str, float] = {
            "utilization_ratio": min(1.0, psutil.getloadavg()[0] / (psutil.cpu_count() or 1)),
            "memory_used_bytes": psutil.Process().memory_info().rss,
            "memory_size_bytes": memory_size_bytes(),
        }
        joules = processor_joules()
        return figures if joules is None else {**figures, "energy_joules": joules}


class Mps(Accelerator):
    """The GPU of an Apple processor, which shares the host's memory."""

    kind = "mps"
    can_encode = False  # It has no fp64.

    def count(self) -> int:
        return 1 if torch.backends.mps.is_available() else 0

    def missing(self) -> str:
        if not torch.backends.mps.is_built():
            return "this PyTorch is built without Metal: use the build for macOS on Apple processors"
        return "Metal needs an Apple processor and macOS 14 or newer"

    def name(self, device: torch.device) -> str:
        return _apple_name() or "Apple GPU"

    def precisions(self, device: torch.device) -> tuple[str, ...]:
        return ("fp32", "fp16", "bf16")

    def limit_memory(self, device: torch.device, ratio: float) -> None:
        torch.mps.set_per_process_memory_fraction(ratio)

    def sensors(self, device: torch.device) -> dict[str, float]:
        return {
            "memory_used_bytes": torch.mps.driver_allocated_memory(),
            "memory_size_bytes": torch.mps.recommended_max_memory(),
        }


class Xpu(Accelerator):
    """Intel GPUs with an XPU build of torch. The package pyzes gives load, temperature and power."""

    kind = "xpu"
    can_encode = False  # Nobody has compared the bits of its encoding with those of the host.

    def count(self) -> int:
        return torch.xpu.device_count() if torch.xpu.is_available() else 0

    def missing(self) -> str:
        return "no Intel GPU can be used here: install an XPU build of torch and Intel's GPU driver"

    def name(self, device: torch.device) -> str:
        return torch.xpu.get_device_name(device)

    def precisions(self, device: torch.device) -> tuple[str, ...]:
        has_bf16 = torch.xpu.is_bf16_supported(including_emulation=False)
        return ("bf16", "fp16", "fp32") if has_bf16 else ("fp16", "fp32")

    def memory_bytes(self, device: torch.device) -> tuple[int, int] | None:
        free_bytes, size_bytes = torch.xpu.mem_get_info(device)
        return int(free_bytes), int(size_bytes)

    def limit_memory(self, device: torch.device, ratio: float) -> None:
        torch.xpu.set_per_process_memory_fraction(ratio, device)

    def sensors(self, device: torch.device) -> dict[str, float]:
        figures: dict[str, float] = {"memory_size_bytes": torch.xpu.get_device_properties(device).total_memory}
        readings: dict[str, Callable[[], float]] = {
            "memory_used_bytes": lambda: torch.xpu.device_memory_used(device),
            "utilization_ratio": lambda: torch.xpu.utilization(device) / 100,
            "temperature_celsius": lambda: torch.xpu.temperature(device),
            "power_watts": lambda: torch.xpu.power_draw(device),
        }
        for name, read in readings.items():
            with suppress(ImportError, RuntimeError):  # No pyzes, or this user may not read the figure.
                figures[name] = read()
        return figures


ACCELERATORS: dict[str, Accelerator] = {
    "cuda": Rocm() if torch.version.hip is not None else Cuda(),
    "xpu": Xpu(),
    "mps": Mps(),
    "cpu": Cpu(),
}
"""By the type of torch's device; `auto` takes the first one with a device. Tests replace entries."""


def accelerator_of(device: torch.device) -> Accelerator:
    return ACCELERATORS[device.type]


def _apple_name() -> str:
    """The name of an Apple processor, or an empty string."""
    if platform.system() != "Darwin":
        return ""
    return output_of("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string").strip()

"""A fake device that can do less than a CPU: no bf16, no sensors (as without NVML), no encoding.

It computes on the CPU, as torch has no other device here. `DILOCO_TEST_DEVICE=limited python -m pytest` runs all tests
on it, those of real nodes included. Tests of what it lacks have the mark `needs_full_device`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

from node.training.accelerator import ACCELERATORS, Accelerator

needs_full_device = pytest.mark.skipif(
    os.environ.get("DILOCO_TEST_DEVICE") == "limited",
    reason="the fake device has no bf16 and no sensors, and executed processes do not have it",
)


@dataclass(frozen=True)
class LimitedDevice(Accelerator):
    kind: str = "cpu"
    devices: int = 1
    memory: tuple[int, int] | None = None
    """Free bytes and size of its own memory, or None."""
    default_precision: str = "fp32"
    can_encode: bool = False

    def count(self) -> int:
        return self.devices

    def missing(self) -> str:
        return "the fake device is missing: add it"

    def name(self, device: torch.device) -> str:
        return "A fake device"

    def precisions(self, device: torch.device) -> tuple[str, ...]:
        return ("fp16", "fp32") if self.default_precision == "fp16" else ("fp32", "fp16")

    def memory_bytes(self, device: torch.device) -> tuple[int, int] | None:
        return self.memory

    def sensors(self, device: torch.device) -> dict[str, float]:
        return {}


def replace_cpu() -> None:
    """Let all of this process, and the processes that it forks, compute on the fake device instead of the CPU."""
    ACCELERATORS["cpu"] = LimitedDevice()

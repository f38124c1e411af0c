"""The choice of the device, and the figures that describe it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.config.schema import DevicesConfig
from node.host.cores import usable_cores
from node.host.memory import memory_size_bytes
from node.training.device import choose_device, describe
from tests.limited_device import needs_full_device


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@needs_full_device
def test_a_cpu_computes_in_fp32_by_default() -> None:
    chosen = choose_device(DevicesConfig(device="cpu"), 1)
    assert (chosen.device.type, chosen.precision) == ("cpu", "fp32")
    assert chosen.name
    assert choose_device(DevicesConfig(device="cpu", precision="bf16"), 1).precision == "bf16"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_owner_is_told_if_the_processor_computes_beside_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("node.training.device.DEVICE_FILES", tmp_path)
    assert choose_device(DevicesConfig(), 1).device.type == "cpu"
    assert caplog.text == ""
    (tmp_path / "kfd").touch()
    choose_device(DevicesConfig(device="cpu"), 1)
    assert caplog.text == "", "the owner chose the processor"
    choose_device(DevicesConfig(), 1)
    assert f"torch cannot use the GPU of {tmp_path}/kfd" in caplog.text


def test_torch_uses_the_configured_threads_but_no_more_than_the_usable_cores() -> None:
    for configured, threads in ((1, 1), (0, usable_cores()), (10_000, usable_cores())):
        choose_device(DevicesConfig(device="cpu"), configured)
        assert torch.get_num_threads() == threads


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_usable_cores_follow_the_cpu_affinity_of_the_process() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@needs_full_device
def test_description_of_a_cpu_has_memory_and_utilization_but_no_temperature() -> None:
    info = describe(torch.device("cpu"))
    assert info.kind == "cpu" and info.name
    assert info.utilization_ratio is not None and 0 <= info.utilization_ratio <= 1
    assert info.memory_size_bytes == memory_size_bytes()
    assert info.memory_used_bytes is not None and 10 * 2**20 < info.memory_used_bytes < info.memory_size_bytes
    assert info.temperature_celsius is None and info.energy_joules is None

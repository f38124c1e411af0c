"""Each kind of device, by a fake one and with torch's functions replaced. No kind but `cpu` runs on this machine."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.config.manifest import InnerConfig, ModelConfig, RunConfig
from node.config.schema import Config, DevicesConfig, NodeConfig
from node.errors import MachineError
from node.host.gpu_power import NotCapped, cap
from node.training import accelerator
from node.training.accelerator import ACCELERATORS, Cpu, Mps, Xpu
from node.training.cuda import Cuda, Rocm
from node.training.device import choose_device, describe
from node.training.fit import check_fit, choose_execution
from node.training.inner import Execution
from node.training.model import build_model
from node.training.replica import Replica
from tests.limited_device import LimitedDevice
from tests.swarm.harness import tiny

GPU = torch.device("cuda", 0)
XPU = torch.device("xpu", 0)
CPU = torch.device("cpu")
TINY = ModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2)


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> LimitedDevice:
    """A GPU with 1 GB of memory, of which 0.6 GB are free, in place of all devices of this machine."""
    device = LimitedDevice("xpu", devices=2, memory=(600_000_000, 1_000_000_000), default_precision="fp16")
    for type_ in ("cuda", "xpu", "mps"):
        monkeypatch.setitem(ACCELERATORS, type_, LimitedDevice(type_, devices=0))
    monkeypatch.setitem(ACCELERATORS, "cpu", device)
    return device


# The limited device


def test_auto_chooses_the_gpu_and_its_own_default_precision(fake: LimitedDevice) -> None:
    chosen = choose_device(DevicesConfig(), 1)
    assert (chosen.name, chosen.precision) == ("A fake device", "fp16")
    assert choose_device(DevicesConfig(precision="fp32"), 1).precision == "fp32"
    assert choose_device(DevicesConfig(ranks=2), 1, 1).device.index == 1


def test_precision_that_the_device_lacks_is_refused_with_those_that_it_has(fake: LimitedDevice) -> None:
    with pytest.raises(
        MachineError, match=r"A fake device has no bf16: set devices\.precision to fp16, fp32 or auto"
    ) as e:
        choose_device(DevicesConfig(precision="bf16"), 1)
    assert e.value.code == "no_bf16"


def test_more_ranks_than_devices_are_refused(fake: LimitedDevice) -> None:
    with pytest.raises(MachineError, match=r"devices\.ranks is 3, but the number of usable GPUs is 2"):
        choose_device(DevicesConfig(ranks=3), 1)


@pytest.mark.parametrize("kind", ["cuda", "rocm", "mps"])
def test_configured_device_that_is_missing_is_refused(fake: LimitedDevice, kind: Any) -> None:
    with pytest.raises(MachineError, match=f"devices.device is {kind}, but .*, or set devices.device to auto") as e:
        choose_device(DevicesConfig(device=kind), 1)
    assert (e.value.exit_code, e.value.code) == (3, "no_gpu")


def test_device_without_sensors_is_described_by_what_torch_knows(fake: LimitedDevice) -> None:
    info = describe(CPU)
    assert (info.kind, info.name) == ("xpu", "A fake device")
    assert (info.memory_used_bytes, info.memory_size_bytes) == (400_000_000, 1_000_000_000)
    assert info.utilization_ratio is None and info.power_watts is None and info.energy_joules is None
    assert describe(CPU, own=False).memory_used_bytes is None


def test_run_that_exceeds_the_devices_own_memory_is_refused(fake: LimitedDevice, tmp_path: Path) -> None:
    config = Config.model_validate({"node": {"data_dir": tmp_path}, "limits": {"gpu_memory_ratio": 0.001}})
    chosen = choose_device(DevicesConfig(), 1)
    check_fit(config.run, Config(node=NodeConfig(data_dir=tmp_path)), chosen)
    with pytest.raises(
        MachineError, match=r"GB of GPU memory here, and 0\.001 GB are free: raise limits\.gpu_memory_ra"
    ):
        check_fit(config.run, config, chosen)


def test_micro_batch_is_found_by_trial_on_a_device_with_memory_of_its_own(fake: LimitedDevice) -> None:
    run = RunConfig.model_validate(tiny(inner={"batch_size": 4, "sequence_length": 16}))
    how = choose_execution(build_model(run.model, seed=0), run, choose_device(DevicesConfig(), 1), DevicesConfig())
    assert how.precision == "fp16" and how.micro_batch in (1, 2, 4)


def test_power_limit_of_a_device_without_nvml_is_refused_with_a_remedy(tmp_path: Path, fake: LimitedDevice) -> None:
    with pytest.raises(NotCapped, match="works only with NVIDIA GPUs"):
        cap(tmp_path, fake.power_id(CPU), 200.0)
    assert list(tmp_path.iterdir()) == []


def test_device_that_cannot_encode_gives_its_parameters_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device `meta` stands for a GPU: what is taken from it stays there only if it may encode."""
    replica = Replica(build_model(TINY, seed=1), InnerConfig(), CPU, Execution())
    taken_to: list[torch.device] = []
    monkeypatch.setattr("node.training.replica.take_flat", lambda model, ranges, device: taken_to.append(device))
    replica._device = torch.device("meta")
    for can_encode in (True, False):
        monkeypatch.setitem(ACCELERATORS, "meta", LimitedDevice(can_encode=can_encode))
        replica.take(((0, 1),), on_host=False)
        replica.take(((0, 1),))
    assert [device.type for device in taken_to] == ["meta", "cpu", "cpu", "cpu"]


def test_parameters_go_to_the_host_if_the_device_lacks_memory_or_has_only_a_part_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica(build_model(TINY, seed=1), InnerConfig(), CPU, Execution())
    taken_to: list[str] = []

    def take(_model: object, _ranges: object, device: torch.device) -> None:
        taken_to.append(device.type)
        if device.type != "cpu":
            raise torch.OutOfMemoryError

    monkeypatch.setattr("node.training.replica.take_flat", take)
    monkeypatch.setitem(ACCELERATORS, "meta", LimitedDevice(can_encode=True))
    replica._device = torch.device("meta")
    replica.take(((0, 1),), on_host=False)
    assert taken_to == ["meta", "cpu"]
    ranks: Any = SimpleNamespace(rank=0, is_sharded=True, broadcast_call=lambda *_: None)
    replica._ranks = ranks
    replica.take(((0, 1),), on_host=False)
    assert taken_to == ["meta", "cpu", "cpu"], "each rank has a part, and the copy is of the whole model"


# NVIDIA and AMD


def properties(**values: Any) -> Any:
    return lambda _: SimpleNamespace(total_memory=8_000_000_000, uuid="0-1", gcnArchName="gfx1100", **values)


@pytest.mark.parametrize(("capability", "first"), [((8, 0), "bf16"), ((12, 0), "bf16"), ((7, 5), "fp16")])
def test_nvidia_gpu_has_bf16_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], first: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    precisions = Cuda().precisions(GPU)
    assert precisions[0] == first and {"fp16", "fp32"} <= set(precisions)


@pytest.mark.parametrize(
    ("architecture", "first"),
    [("gfx90a:sramecc+", "bf16"), ("gfx942", "bf16"), ("gfx1100", "bf16"), ("gfx1201", "bf16"), ("gfx1030", "fp16"),
     ("gfx906", "fp16"), ("gfx908", "fp16")],
)  # fmt: skip
def test_amd_gpu_has_bf16_by_its_architecture(monkeypatch: pytest.MonkeyPatch, architecture: str, first: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=architecture))
    assert Rocm().precisions(GPU)[0] == first


def test_nvidia_sensors_without_nvml_know_only_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties())

    def missing(_: str) -> None:
        raise ImportError

    monkeypatch.setattr("node.training.cuda.importlib.import_module", missing)
    assert Cuda().sensors(GPU) == {"memory_size_bytes": 8_000_000_000}
    assert Cuda().power_id(GPU) == "GPU-0-1"


def test_amd_sensors_come_from_torch_and_missing_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties())
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda _: 5)
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 50)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 120_000)

    def no_amdsmi(_: object) -> float:
        raise ModuleNotFoundError("amdsmi does not seem to be installed or it can't be imported.")

    monkeypatch.setattr(torch.cuda, "temperature", no_amdsmi)
    assert Rocm().sensors(GPU) == {
        "memory_size_bytes": 8_000_000_000, "memory_used_bytes": 5, "utilization_ratio": 0.5, "power_watts": 120.0,
    }  # fmt: skip
    assert Rocm().power_id(GPU) == "" and not Rocm().can_encode


@pytest.mark.parametrize(
    ("version", "kind", "text"),
    [("cuda", Cuda, "check nvidia-smi"), ("hip", Rocm, "check rocminfo")],
)
def test_missing_gpu_is_explained_by_the_build_of_torch(
    monkeypatch: pytest.MonkeyPatch, version: str, kind: type[Cuda], text: str
) -> None:
    monkeypatch.setattr(torch.version, version, None)
    assert "is built without" in kind().missing()
    monkeypatch.setattr(torch.version, version, "13.0")
    assert text in kind().missing()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kind().count() == 0


# Apple


def test_apple_gpu_shares_the_memory_of_the_host_and_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    mps, device = Mps(), torch.device("mps", 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 9)
    assert mps.count() == 1 and mps.memory_bytes(device) is None and mps.precisions(device)[0] == "fp32"
    assert mps.sensors(device) == {"memory_used_bytes": 3, "memory_size_bytes": 9}
    assert not mps.can_encode and mps.power_id(device) == ""


def test_apple_processor_is_named_by_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")

    def sysctl(command: tuple[str, ...], **_: object) -> SimpleNamespace:
        assert command[1:] == ("-n", "machdep.cpu.brand_string")
        return SimpleNamespace(stdout="Apple M2 Pro\n")

    monkeypatch.setattr(subprocess, "run", sysctl)
    assert Mps().name(torch.device("mps", 0)) == "Apple M2 Pro"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert Cpu().name(CPU) == "Apple M2 Pro"

    def no_sysctl(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", no_sysctl)
    assert Mps().name(torch.device("mps", 0)) == "Apple GPU"


@pytest.mark.parametrize(("is_built", "text"), [(False, "without Metal"), (True, "macOS 14")])
def test_missing_apple_gpu_is_explained(monkeypatch: pytest.MonkeyPatch, is_built: bool, text: str) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: is_built)
    assert text in Mps().missing()


# Intel


def test_intel_gpu_reports_what_this_user_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_permitted(_: object) -> float:
        raise RuntimeError("GPU utilization querying is not available. Try running with elevated privileges")

    def no_package(_: object) -> float:
        raise ModuleNotFoundError("pyzes")

    monkeypatch.setattr(torch.xpu, "get_device_properties", properties())
    monkeypatch.setattr(torch.xpu, "device_memory_used", lambda _: 7)
    monkeypatch.setattr(torch.xpu, "utilization", not_permitted)
    monkeypatch.setattr(torch.xpu, "temperature", no_package)
    monkeypatch.setattr(torch.xpu, "power_draw", lambda _: 75.0)
    assert Xpu().sensors(XPU) == {"memory_size_bytes": 8_000_000_000, "memory_used_bytes": 7, "power_watts": 75.0}


@pytest.mark.parametrize(("has_bf16", "first"), [(True, "bf16"), (False, "fp16")])
def test_intel_gpu_has_bf16_if_torch_says_so(monkeypatch: pytest.MonkeyPatch, has_bf16: bool, first: str) -> None:
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda _: (3, 9))
    assert Xpu().precisions(XPU)[0] == first and Xpu().memory_bytes(XPU) == (3, 9)


def test_build_of_torch_decides_between_nvidia_and_amd() -> None:
    assert isinstance(ACCELERATORS["cuda"], Rocm) == (torch.version.hip is not None)
    assert list(ACCELERATORS) == ["cuda", "xpu", "mps", "cpu"], "the CPU is the last choice"
    assert accelerator.accelerator_of(torch.device("xpu", 1)).kind == "xpu"

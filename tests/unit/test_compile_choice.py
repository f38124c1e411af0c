"""When layers are compiled: `devices.compile`, what the device can do, and what happens if the compiler fails."""

from __future__ import annotations

import logging
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from node.config.loader import load
from node.config.manifest import RunConfig
from node.config.schema import Config, DevicesConfig
from node.errors import ConfigError, MachineError
from node.training import cuda
from node.training.accelerator import ACCELERATORS
from node.training.cuda import Cuda, Rocm
from node.training.device import ComputeDevice, choose_device
from node.training.fit import choose_execution, pass_bytes
from node.training.inner import Execution, InnerLoop
from node.training.model import build_model
from node.training.replica import Replica
from node.worker import rank_processes
from tests.limited_device import LimitedDevice
from tests.swarm.harness import tiny

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
RUN = RunConfig.model_validate(tiny())


class Compiling(LimitedDevice):
    def can_compile(self, device: torch.device) -> bool:
        return True


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], "auto"),
        (["--devices.compile=on"], "on"),
        (["--devices.compile=true"], "on"),
        (["--devices.compile"], "on"),
        (["--devices.compile=false"], "off"),
    ],
)
def test_compile_takes_auto_on_off_and_a_boolean(words: list[str], value: str) -> None:
    assert load(file=None, environ={}, flags=words).config.devices.compile == value


def test_compile_takes_a_boolean_of_a_file_and_refuses_other_values(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[devices]\ncompile = true\n")
    assert load(file=file, environ={}, flags=[]).config.devices.compile == "on"
    with pytest.raises(ConfigError, match=r"devices\.compile.*'auto', 'on' or 'off'"):
        load(file=None, environ={}, flags=["--devices.compile=perhaps"])


@pytest.mark.parametrize(
    ("wanted", "can", "compiles"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_auto_compiles_only_on_a_device_that_can(
    wanted: Any, can: bool, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = (Compiling if can else LimitedDevice)("cuda", devices=1)
    monkeypatch.setitem(ACCELERATORS, "cpu", device)
    for type_ in ("cuda", "xpu", "mps"):
        monkeypatch.setitem(ACCELERATORS, type_, LimitedDevice(type_, devices=0))
    threads = torch.get_num_threads()
    assert choose_device(DevicesConfig(compile=wanted), 1).compiles is compiles
    torch.set_num_threads(threads)


def test_auto_does_not_compile_for_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCELERATORS, "cpu", Compiling("cuda", devices=2))
    for type_ in ("cuda", "xpu", "mps"):
        monkeypatch.setitem(ACCELERATORS, type_, LimitedDevice(type_, devices=0))
    threads = torch.get_num_threads()
    assert not choose_device(DevicesConfig(ranks=2), 1).compiles
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("capability", "triton", "compiler", "can"),
    [
        ((9, 0), True, True, True),
        ((7, 5), True, True, False),
        ((9, 0), False, True, False),
        ((9, 0), True, False, False),
    ],
)
def test_an_nvidia_gpu_compiles_with_bf16_triton_and_a_c_compiler(
    capability: tuple[int, int], triton: bool, compiler: bool, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: object() if triton else None))
    monkeypatch.setattr(cuda, "importlib", found)
    monkeypatch.setattr(cuda, "has_c_compiler", lambda: compiler)
    assert Cuda().can_compile(GPU) is can
    assert not Rocm().can_compile(GPU)


def test_a_c_compiler_without_the_header_files_of_python_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert not cuda.has_c_compiler()
    (tmp_path / "Python.h").touch()
    assert cuda.has_c_compiler()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert not cuda.has_c_compiler()


def fail(*_: object) -> None:
    raise RuntimeError("cc: not found\nand a hundred lines more")


@pytest.mark.filterwarnings("ignore")  # Ignore the warnings of torch's compiler.
def test_auto_trains_without_compiled_layers_if_the_compiler_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = start_with_a_broken_compiler("auto", monkeypatch)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told.startswith("This node trains without compiled layers") and "install a C++ compiler" in told
    assert told.endswith("(cc: not found)")
    batch = torch.randint(RUN.model.vocab_size, (4, RUN.inner.sequence_length + 1))
    assert replica.step(batch, 1e-3).tokens == 4 * RUN.inner.sequence_length


@pytest.mark.filterwarnings("ignore")
def test_a_compiler_that_fails_ends_a_node_that_must_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match=r"set devices\.compile to off"):
        start_with_a_broken_compiler("on", monkeypatch)


def test_the_warm_up_compiles_steps_and_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that was compiled later would look like a hang."""
    seen: list[tuple[str, torch.Size]] = []
    for name in ("probe", "loss_of"):
        monkeypatch.setattr(InnerLoop, name, lambda _, batch, name=name: seen.append((name, batch.shape)))
    Replica(build_model(RUN.model, seed=0), RUN.inner, CPU, Execution()).warm_up(4, 64)
    assert seen == [("probe", (4, 65)), ("loss_of", (4, 65))]


@pytest.mark.parametrize(("ranks", "rows"), [(1, [3, 2]), (3, [3, 2]), (8, [3, 1])])
def test_the_warm_up_compiles_each_size_of_micro_batch_that_a_step_has(ranks: int, rows: list[int]) -> None:
    run = RUN.model_copy(update={"inner": RUN.inner.model_copy(update={"batch_size": 8})})
    replica = MagicMock()
    replica.inner.micro_batch = 3
    rank_processes._warm_up(replica, run, Execution(compiled=True), ranks)
    assert [call.args[0] for call in replica.warm_up.call_args_list] == rows


def start_with_a_broken_compiler(wanted: Any, monkeypatch: pytest.MonkeyPatch) -> Replica:
    config, model = Config(devices=DevicesConfig(compile=wanted, micro_batch=2)), build_model(RUN.model, seed=0)
    device = ComputeDevice(CPU, "fp32", "a CPU", compiles=True)
    how = choose_execution(model, RUN, device, config.devices)
    assert how.compiled
    monkeypatch.setattr(InnerLoop, "probe", fail)
    replica = rank_processes._start_alone(RUN, config, device, model, how)
    assert all(layer._compiled_call_impl is None for layer in model.get_submodule("model.layers").children())
    return replica


def test_compiled_layers_need_less_memory_by_the_formula() -> None:
    devices = DevicesConfig()
    plain, compiled = (pass_bytes(RUN, devices, "bf16", 32, compiled=how) for how in (False, True))
    assert 0.4 * plain < compiled < 0.8 * plain

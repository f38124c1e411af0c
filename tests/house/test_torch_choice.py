"""`.ci/torch` decides which build of torch `make` installs, on a fake machine of which it sees uname, GPU and pip."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "torch"
CPU_INDEX = "https://torch.example/cpu"


class Machine:
    """Programs that answer as the machine would, in a folder that comes first in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.devices = folder / "bin", folder / "dev"
        self.folder.mkdir()
        self.devices.mkdir()
        self.set("uname", "case $1 in -s) echo Linux;; -m) echo x86_64;; esac")
        self.set("python", "true")
        self.set("nvidia-smi", "exit 9")

    def set(self, program: str, script: str) -> None:
        file = self.folder / program
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def choose(self, **variables: str) -> tuple[str, str]:
        """Run the script. Returns the index that it prints, and what it says to people."""
        environment = {
            "PATH": f"{self.folder}:/usr/bin:/bin", "DEVICES": str(self.devices),
            "TORCH_CPU_INDEX": CPU_INDEX, **variables,
        }  # fmt: skip
        done = subprocess.run(
            [SCRIPT, self.folder / "python"], env=environment, capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip(), done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_machine_without_a_gpu_takes_torch_without_cuda_and_says_so(machine: Machine) -> None:
    index, said = machine.choose()
    assert index == CPU_INDEX
    assert "0.4 GB" in said and "without CUDA" in said and "TORCH=cuda" in said


@pytest.mark.parametrize("sign", ["driver", "nvidia-smi"])
def test_machine_with_a_gpu_takes_torch_with_cuda_and_names_its_size(machine: Machine, sign: str) -> None:
    if sign == "driver":
        (machine.devices / "nvidiactl").touch()
    else:
        machine.set("nvidia-smi", "exit 0")
    index, said = machine.choose()
    assert index == "" and "3 GB" in said and "TORCH=cpu" in said


def test_owner_decides_against_the_guess(machine: Machine) -> None:
    assert machine.choose(TORCH="cuda")[0] == ""
    (machine.devices / "nvidiactl").touch()
    assert machine.choose(TORCH="cpu")[0] == CPU_INDEX
    assert machine.choose(TORCH_INDEX_URL="https://torch.example/rocm")[0] == "https://torch.example/rocm"


def test_index_that_pip_is_set_up_with_decides(machine: Machine) -> None:
    machine.set("python", "echo \"global.extra-index-url='https://mirror.example/simple'\"")
    index, said = machine.choose()
    assert index == "" and "an index of its own" in said
    assert machine.choose(TORCH="cpu")[0] == CPU_INDEX, "unless the owner says so"
    machine.set("python", "echo \":env:.cert='/etc/ca.crt'\"")
    assert machine.choose()[0] == CPU_INDEX


@pytest.mark.parametrize(("system", "machine_type"), [("Linux", "aarch64"), ("Darwin", "arm64")])
def test_other_systems_need_no_index(machine: Machine, system: str, machine_type: str) -> None:
    machine.set("uname", f"case $1 in -s) echo {system};; -m) echo {machine_type};; esac")
    assert machine.choose()[0] == ""


def test_unknown_choice_is_refused(machine: Machine) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        machine.choose(TORCH="gpu")
    assert caught.value.returncode == 2 and "auto, cpu or cuda" in caught.value.stderr


def test_lock_file_names_no_index_and_no_address() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 50
    assert [line for line in lines if "://" in line or "@" in line or line.startswith("-")] == []

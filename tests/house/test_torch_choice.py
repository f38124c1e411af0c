"""`.ci/torch` decides which build of torch `make` installs, on a fake machine of which it sees uname, GPU and pip."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "torch"
CPU_INDEX = "https://torch.example/cpu"
VERSION = re.findall(r"^torch==\S+", (ROOT / ".ci" / "torch.lock").read_text(encoding="utf-8"), re.MULTILINE)[0]
WITHOUT_CUDA = f"--index-url {CPU_INDEX} {VERSION}"
LOCKED = "--require-hashes --requirement .ci/torch.lock"
"""The build of pip's default index: with CUDA on Linux."""


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
        """Run the script. Returns the arguments of pip that it prints, and what it says to people."""
        environment = {
            "PATH": f"{self.folder}:/usr/bin:/bin", "DEVICES": str(self.devices),
            "TORCH_CPU_INDEX": CPU_INDEX, **variables,
        }  # fmt: skip
        done = subprocess.run(
            [SCRIPT, self.folder / "python"],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        return done.stdout.strip(), done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("machine_type", ["x86_64", "aarch64"])
def test_machine_without_a_gpu_takes_torch_without_cuda_and_says_so(machine: Machine, machine_type: str) -> None:
    machine.set("uname", f"case $1 in -s) echo Linux;; -m) echo {machine_type};; esac")
    arguments, said = machine.choose()
    assert arguments == WITHOUT_CUDA
    assert "0.4 GB" in said and "without CUDA" in said and "TORCH=cuda" in said


@pytest.mark.parametrize("machine_type", ["x86_64", "aarch64"])
@pytest.mark.parametrize("sign", ["driver", "nvidia-smi"])
def test_machine_with_a_gpu_takes_torch_with_cuda_and_names_its_size(
    machine: Machine, sign: str, machine_type: str
) -> None:
    machine.set("uname", f"case $1 in -s) echo Linux;; -m) echo {machine_type};; esac")
    if sign == "driver":
        (machine.devices / "nvidiactl").touch()
    else:
        machine.set("nvidia-smi", "exit 0")
    arguments, said = machine.choose()
    assert arguments == LOCKED and "3 GB" in said and "TORCH=cpu" in said


def test_owner_decides_against_the_guess(machine: Machine) -> None:
    assert machine.choose(TORCH="cuda")[0] == LOCKED
    (machine.devices / "nvidiactl").touch()
    assert machine.choose(TORCH="cpu")[0] == WITHOUT_CUDA
    index = "https://torch.example/rocm"
    assert machine.choose(TORCH_INDEX_URL=index)[0] == f"--index-url {index} {VERSION}"


def test_index_that_pip_is_set_up_with_decides(machine: Machine) -> None:
    machine.set("python", "echo \"global.extra-index-url='https://mirror.example/simple'\"")
    arguments, said = machine.choose()
    assert arguments == VERSION and "an index of its own" in said
    (machine.devices / "nvidiactl").touch()
    assert machine.choose()[0] == VERSION, "also with a GPU"
    assert machine.choose(TORCH="cpu")[0] == WITHOUT_CUDA, "unless the owner says so"
    assert machine.choose(TORCH="cuda")[0] == LOCKED
    (machine.devices / "nvidiactl").unlink()
    machine.set("python", "echo \":env:.cert='/etc/ca.crt'\"")
    assert machine.choose()[0] == WITHOUT_CUDA


def test_index_is_found_in_settings_that_are_longer_than_a_pipe(machine: Machine) -> None:
    """A reader that stops at the first match would end pip with an error, which would look like no match."""
    machine.set("python", "echo \"global.index-url='https://mirror.example/simple'\" && seq 100000")
    assert machine.choose()[0] == VERSION


@pytest.mark.parametrize("machine_type", ["arm64", "x86_64"])
def test_macos_takes_the_build_of_pips_own_index(machine: Machine, machine_type: str) -> None:
    machine.set("uname", f"case $1 in -s) echo Darwin;; -m) echo {machine_type};; esac")
    assert machine.choose()[0] == LOCKED


def test_unknown_choice_is_refused(machine: Machine) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        machine.choose(TORCH="gpu")
    assert caught.value.returncode == 2 and "auto, cpu or cuda" in caught.value.stderr

"""`.ci/again` repeats a few failed tests of real nodes, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.benchmarks.processes import ROOT

ALWAYS = "def test_{0}(): assert False\n"
ONCE = """
def test_{0}():
    import pathlib
    mark = pathlib.Path(__file__).with_name("{0}.mark")
    was = mark.exists()
    mark.touch()
    assert was
"""
REAL, PROTOCOL = "tests/swarm", "tests/contract"


def again(folder: Path, tests: Sequence[tuple[str, str]]) -> tuple[int, str]:
    """Run these tests, each with its folder, and then `.ci/again`. Returns its exit status and output."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "again", folder / ".ci" / "again")
    (folder / ".venv" / "bin").mkdir(parents=True)
    python = folder / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cov --import-mode=importlib\n")
    for number, (place, test) in enumerate(tests):
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / f"test_{number}.py").write_text(test.format(number))
    first = subprocess.run([python, "-m", "pytest", "-q"], cwd=folder, capture_output=True, timeout=60, check=False)
    assert first.returncode == 1
    done = subprocess.run([folder / ".ci" / "again", "1"], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


def test_test_of_real_nodes_that_passes_alone_is_named(tmp_path: Path) -> None:
    status, output = again(tmp_path, [(REAL, ONCE)])
    assert status == 0, output
    assert output.endswith("FAILED BESIDE OTHER TESTS, PASSED ALONE:\ntests/swarm/test_0.py::test_0\n")


def test_test_of_real_connections_is_repeated_and_that_of_the_local_transport_is_not(tmp_path: Path) -> None:
    for name, status in (("p2p", 0), ("local", 1)):
        test = f'import pytest\n\n@pytest.mark.parametrize("kind", ["{name}-1"])\n' + ONCE.strip().replace(
            "()", "(kind)", 1
        )
        (tmp_path / name).mkdir()
        assert again(tmp_path / name, [(PROTOCOL, test)])[0] == status


@pytest.mark.parametrize(
    "tests",
    [[(REAL, ALWAYS)], [(PROTOCOL, ONCE)], [(REAL, ONCE), (PROTOCOL, ONCE)], [(REAL, ONCE)] * 11],
    ids=["fails again", "of the protocol", "one is of the protocol", "eleven failures"],
)
def test_other_failures_remain_failures(tmp_path: Path, tests: list[tuple[str, str]]) -> None:
    assert again(tmp_path, tests)[0] == 1


def test_run_that_was_interrupted_stays_failed() -> None:
    done = subprocess.run([ROOT / ".ci" / "again", "2"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2

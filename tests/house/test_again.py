"""`.ci/again` repeats a few failed tests of real nodes, and nothing else."""

from __future__ import annotations

import os
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
REAL, VIRTUAL = "tests/swarm", "tests/simulation"


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
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # Other plugins take seconds to import.
    first = subprocess.run(
        [python, "-m", "pytest", "-q"], cwd=folder, env=env, capture_output=True, timeout=60, check=False
    )
    assert first.returncode == 1
    script = folder / ".ci" / "again"
    done = subprocess.run([script, "1"], env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


def test_test_of_real_nodes_that_passes_alone_is_named(tmp_path: Path) -> None:
    status, output = again(tmp_path, [(REAL, ONCE)])
    assert status == 0, output
    assert output.endswith("FAILED BESIDE OTHER TESTS, PASSED ALONE:\ntests/swarm/test_0.py::test_0\n")


@pytest.mark.parametrize(
    "tests",
    [[(REAL, ALWAYS)], [(VIRTUAL, ONCE)], [(REAL, ONCE), (VIRTUAL, ONCE)], [(REAL, ONCE)] * 11],
    ids=["fails again", "on virtual time", "one on virtual time", "eleven failures"],
)
def test_other_failures_remain_failures(tmp_path: Path, tests: list[tuple[str, str]]) -> None:
    assert again(tmp_path, tests)[0] == 1


def test_run_that_was_interrupted_stays_failed() -> None:
    done = subprocess.run([ROOT / ".ci" / "again", "2"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2

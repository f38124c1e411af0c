"""`.ci/again` repeats a few failed tests of real nodes, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
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
SLOW = "@pytest.mark.slow"


def again(folder: Path, *tests: str) -> tuple[int, str]:
    """Run these tests, and then `.ci/again`. Returns its exit status and output."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "again", folder / ".ci" / "again")
    (folder / ".venv" / "bin").mkdir(parents=True)
    python = folder / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\naddopts = -p no:cov\n")
    (folder / "test_it.py").write_text("import pytest\n" + "\n".join(tests))
    first = subprocess.run([python, "-m", "pytest", "-q"], cwd=folder, capture_output=True, timeout=60, check=False)
    assert first.returncode == 1
    done = subprocess.run([folder / ".ci" / "again", "1"], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


def test_slow_test_that_passes_alone_is_named(tmp_path: Path) -> None:
    status, output = again(tmp_path, SLOW + ONCE.format("a"))
    assert status == 0 and output.endswith("FAILED BESIDE OTHER TESTS, PASSED ALONE:\ntest_it.py::test_a\n"), output


@pytest.mark.parametrize(
    "tests",
    [
        [f"{SLOW}\n{ALWAYS.format('a')}"],
        [ONCE.format("fast")],
        [SLOW + ONCE.format("a"), ONCE.format("fast")],
        [SLOW + ONCE.format(name) for name in "abcd"],
    ],
    ids=["fails again", "not slow", "one is not slow", "four failures"],
)
def test_other_failures_remain_failures(tmp_path: Path, tests: list[str]) -> None:
    assert again(tmp_path, *tests)[0] == 1


def test_run_that_was_interrupted_stays_failed() -> None:
    done = subprocess.run([ROOT / ".ci" / "again", "2"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2

"""`.ci/progress` reads the output of pip to its end, also with the bash of macOS."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "progress"
BASH_3 = 'read() { builtin read "$@" || return 1; }; export -f read;'
"""bash 3 has the same status at the end of the input and at a timeout."""


@pytest.mark.parametrize("bash", ["", BASH_3], ids=["bash", "bash 3"])
def test_a_pause_of_pip_is_not_the_end_of_its_output(bash: str) -> None:
    pip = "echo Collecting a; sleep 2.5; echo Collecting b; sleep 1.2; echo written >&2"
    command = f"{bash} set -euo pipefail; ({pip}) | bash {SCRIPT} 2"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "written\n")
    assert done.stdout.splitlines()[-1].startswith("  finished after ")
    assert not done.stdout.startswith("  finished after 1 s")

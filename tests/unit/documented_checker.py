"""Runs the checker of certificates in node/CERTIFICATE.md as a process that has no network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[2] / "node" / "CERTIFICATE.md"
RUNNER = """
import contextlib, io, json, runpy, socket, sys, time

def no_network(*_, **__):
    raise OSError("the checker uses the network")

socket.socket.connect = socket.getaddrinfo = socket.create_connection = no_network
program, found = sys.argv[1], []
for file in sys.argv[2:]:
    sys.argv, out, end, began_s = [program, file], io.StringIO(), 0, time.process_time()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as ended:
            end = ended.code
    found.append((end, out.getvalue(), time.process_time() - began_s))
assert not any(name.partition(".")[0] == "node" for name in sys.modules)
print(json.dumps(found))
"""
"""Runs the program on each file. `SystemExit` holds an exit code, or the line for stderr of exit code 1."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checker says about one file."""

    end: int | str | None
    """Its exit code, or the line on stderr with which it ends with exit code 1."""
    out: str
    seconds: float
    """Processor time from the start of the program, not of the interpreter. The first verdict includes the imports."""

    @property
    def is_valid(self) -> bool:
        return not self.end

    @property
    def is_refused_in_one_line(self) -> bool:
        is_line = isinstance(self.end, str) and re.fullmatch(r"not valid: [ -~]{4,300}", self.end) is not None
        return is_line and self.out == ""


def program_text() -> str:
    """The program, which is the only Python on the page."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(program)


@cache
def without_network() -> tuple[str, ...]:
    """The words before a command that take its network away. Empty if this user or system may not."""
    words = ("unshare", "--net")
    if shutil.which(words[0]) is None:
        return ()
    done = subprocess.run([*words, "true"], capture_output=True, timeout=10, check=False)
    return words if done.returncode == 0 else ()


def check_as_a_user(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run the program on one certificate. `folder` is for its files."""
    program, certificate = folder / "check.py", folder / "to-check.json"
    program.write_text(program_text(), encoding="utf-8")
    certificate.write_text(text, encoding="utf-8")
    words = [*without_network(), sys.executable, "-I", str(program), str(certificate)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def check_all(folder: Path, contents: Sequence[bytes]) -> list[Verdict]:
    """Run the program on many files in one process, with sockets that raise. `folder` is for its files."""
    program = folder / "check.py"
    program.write_text(program_text(), encoding="utf-8")
    files = [folder / f"{number}.json" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    words = [*without_network(), sys.executable, "-I", "-c", RUNNER, str(program), *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    verdicts = [Verdict(*found) for found in json.loads(done.stdout)]
    assert len(verdicts) == len(contents)
    return verdicts

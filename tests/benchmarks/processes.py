"""Runs helpers as separate processes, which answer each JSON line with one JSON line.

Each helper leads a session, so all processes that it has started (hivemind's, p2pd) can be ended by its group id.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
END_S = 10.0
TAIL_CHARACTERS = 2000


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(END_S)


def end_all_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that context managers end all child processes."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


class Helper:
    """A process `python -m MODULE ARGUMENTS` that takes orders on stdin. Use it as a context manager."""

    def __init__(
        self, module: str, arguments: Sequence[str], log: Path, environ: Mapping[str, str], *, namespace: str = ""
    ) -> None:
        """`namespace` is the network namespace of the helper. If it is empty, the helper runs in the machine's own."""
        there = ["ip", "netns", "exec", namespace] if namespace else []
        self._module, self._log, self._rest = module, log, b""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [*there, sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env={**inherited, **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end_group(self.process)

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer. Raises RuntimeError with the end of the helper's log if none comes."""
        assert self.process.stdout is not None
        end_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                ready = selector.select(max(0.0, end_s - time.monotonic()))
                data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
                if not data:
                    raise RuntimeError(f"{self._module} {'ended' if ready else 'is silent'}: {self._tail()}")
                self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, timeout_s: float, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.hear(timeout_s)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-TAIL_CHARACTERS:]


def processor_s(pid: int) -> dict[str, float]:
    """The processor seconds that a process and its children have used so far, with p2pd counted separately."""
    total = {"python": 0.0, "p2pd": 0.0}
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        times = process.cpu_times()
        total["p2pd" if process.name() == "p2pd" else "python"] += times.user + times.system
    return total


def answer(content: dict[str, Any]) -> None:
    """Write one answer. Helpers call this."""
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def orders() -> Iterator[dict[str, Any]]:
    """Read orders until stdin ends or the order `end` comes. Helpers call this."""
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("do") == "end":
            return
        yield order


def wait_until(true: Callable[[], object], timeout_s: float, what: str) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} did not happen within {timeout_s:.0f} s")
        time.sleep(0.1)

"""Runs a process of low priority for the rounds that wait for a duty. Training does not wait for it.

The process may hang, crash or be missing. It is started again after a pause, and the owner is told why it failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from node.host.priority import helper_environment
from node.publication.waiting_rounds import WaitingRounds

RETRY_S = 60.0
CLOSE_S = 5.0
LIMIT_S = 24 * 3600.0
"""A process that writes no line for this long hangs, and is killed. Many tasks on a slow machine take hours."""
REASON_LENGTH_MAX = 300
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONIOENCODING": "utf-8",
}


class DutyProcess:
    """A thread starts the process whenever a round waits, and ends it in `close`."""

    def __init__(
        self,
        module: str,
        start: Callable[[], str],
        rounds: WaitingRounds,
        on_line: Callable[[str], None],
        on_failure: Callable[[str], None],
        *,
        command: Sequence[str] = (sys.executable, "-P", "-m"),
        retry_s: float = RETRY_S,
        limit_s: float = LIMIT_S,
    ) -> None:
        """`start` returns the line that the process reads first; the others are called on this object's thread.

        Args:
            on_line: gets each line that the process writes.
            on_failure: gets why the process failed.
        """
        self._command, self._start = (*command, module), start
        self._rounds, self._on_line, self._on_failure = rounds, on_line, on_failure
        self._retry_s, self._limit_s = retry_s, limit_s
        self._woken, self._is_closing = threading.Event(), threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=module.rpartition(".")[2], daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look now whether a round waits. Callable from any thread."""
        self._woken.set()

    def close(self) -> None:
        """Kill the process. The rounds that wait stay for the next start."""
        self._is_closing.set()
        self._woken.set()
        with self._lock:
            if self._process is not None:
                _kill(self._process)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._woken.clear()
            if self._rounds.all() and (reason := self._serve()) is not None and not self._is_closing.is_set():
                self._on_failure(reason)
                self._is_closing.wait(self._retry_s)
                continue
            self._woken.wait(self._retry_s)

    def _serve(self) -> str | None:
        """Run the process to its end. Returns why it failed; None if it did not."""
        with ExitStack() as held:
            try:
                errors = held.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
                with self._lock:
                    if self._is_closing.is_set():
                        return None
                    self._process = subprocess.Popen(
                        self._command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=helper_environment() | ENVIRONMENT,
                        text=True,
                        encoding="utf-8",
                        process_group=0,
                    )
            except OSError as exc:
                return f"its process cannot be started ({exc.strerror})"
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(self._start() + "\n")
            with process.stdout:
                was_late = self._follow(process, process.stdout)
            with self._lock:
                self._process = None
            errors.seek(0)
            lines = [line.strip() for line in errors if line.strip()]
        status = process.returncode
        if was_late:
            return f"it has not ended within {self._limit_s / 3600:g} h"
        if status == 0:
            return None
        return lines[-1][:REASON_LENGTH_MAX] if lines else f"its process has ended with exit status {status}"

    def _follow(self, process: subprocess.Popen[str], output: IO[str]) -> bool:
        """Pass on the lines of the process until it has ended. Returns whether it was killed because it was silent."""
        was_late = threading.Event()

        def kill() -> None:
            was_late.set()
            _kill(process)

        while process.returncode is None:
            timer = threading.Timer(self._limit_s, kill)
            timer.daemon = True
            timer.start()
            try:
                if line := output.readline():
                    self._on_line(line)
                else:
                    process.wait()
            finally:
                timer.cancel()
        return was_late.is_set()


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and those that it has started, which may hold its output open."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

"""Runs `node_main.py` as a process, calls its API over a real port, and ends it by its process id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
"""Timeout for steps that take a second on an idle machine."""
ASK_S = 20.0


def wait_for(what: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """Poll `what` and return its first true value. Raises AssertionError after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain"
        time.sleep(0.03)
    return value


def alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not count as running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Daemon:
    """A supervisor under test. Use as a context manager."""

    def __init__(self, data_dir: Path, behaviour: str = "work", **timings: object) -> None:
        self.data_dir = data_dir
        self.client: httpx.Client | None = None
        command = [sys.executable, str(Path(__file__).with_name("node_main.py")), str(data_dir), behaviour]
        self.process = subprocess.Popen(
            [*command, json.dumps(timings)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        if self.client is not None:
            self.client.close()
        self.process.kill()
        self.process.communicate()

    def until_there(self) -> None:
        """Wait until the supervisor has written its address to api.json. An older file may be there at first."""
        wait_for(lambda: self._address().get("pid") == self.process.pid)

    def _address(self) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            return dict(json.loads((self.data_dir / "api.json").read_text()))
        return {}

    def ready(self) -> Daemon:
        self.until_there()
        address = self._address()
        token = (self.data_dir / "api-token").read_text().strip()
        self.client = httpx.Client(
            base_url=address["url"], headers={"Authorization": f"Bearer {token}"}, timeout=ASK_S, trust_env=False
        )
        return self

    @property
    def http(self) -> httpx.Client:
        assert self.client is not None, "call ready() first"
        return self.client

    def status(self) -> dict[str, Any]:
        return dict(self.http.get("/api/v1/status").json())

    def code(self, path: str) -> int:
        return self.http.get(path).status_code

    def act(self, action: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return self.http.post(f"/api/v1/actions/{action}", json=body or {})

    def until_phase(self, phase: str, code: str | None = None) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            status = self.status()
            return status if status["phase"] == phase and code in (None, status["code"]) else None

        return dict(wait_for(reached))

    def worker_pid(self, other_than: int = 0) -> int:
        """The process id of the current worker, which the fake worker reports as its peer id."""

        def found() -> int:
            pid = int(self.status()["node"]["peer_id"].removeprefix("fake-") or 0)
            return pid if pid != other_than else 0

        return int(wait_for(found))

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str, float]:
        """Send the signal and wait for the end. Returns exit code, stdout, stderr and seconds."""
        began_s = time.monotonic()
        self.process.send_signal(number)
        return *self.end(), time.monotonic() - began_s

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

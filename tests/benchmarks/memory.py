"""Measures the supervisor's resident memory while its worker trains, with and without an open event stream."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

import psutil

from node.commands.client import Client
from node.errors import UsageError
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.processes import ROOT, end_group, wait_until

START_S = 90.0
STOP_S = 30.0
LIMIT_MB = 100.0
SAMPLE_S = 0.25
SHORT_ROUNDS = ("--limits.cpu_threads=1", "--run.round.inner_steps=20")
"""Flags that make rounds short, so that round records pass through the supervisor during the measurement."""


@contextmanager
def running_node(folder: Path, flags: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "node.cli", "run", "--data-dir", str(folder), "--name", "bench"]
    command += ["--api.port=0", "--swarm.listen=/ip4/127.0.0.1/tcp/0", *flags]
    with (folder.parent / "node.log").open("ab") as log:
        node = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        yield node
        node.send_signal(signal.SIGTERM)
        node.wait(STOP_S)
    finally:
        # The worker leads its own process group, but the kernel ends it with the supervisor.
        end_group(node)


def is_training(client: Client) -> bool:
    try:
        status = client.status()
    except UsageError:
        return False
    return bool(status["phase"] == "training" and status["run"]["round"] >= 0)


@contextmanager
def open_stream(folder: Path) -> Iterator[list[int]]:
    """Read the event stream in a thread. Yields a list whose element is the number of lines read so far."""
    url = json.loads((folder / "api.json").read_text(encoding="utf-8"))["url"]
    token = (folder / "api-token").read_text(encoding="utf-8").strip()
    request = Request(f"{url}/api/v1/events", headers={"Authorization": f"Bearer {token}"})
    lines = [0]
    ending = threading.Event()
    with build_opener(ProxyHandler({})).open(request, timeout=STOP_S) as stream:

        def read() -> None:
            while not ending.is_set() and stream.readline():
                lines[0] += 1

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield lines
        finally:
            ending.set()
            reader.join(STOP_S)


def most_resident_mb(process: psutil.Process, seconds: float) -> float:
    most, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        most = max(most, process.memory_info().rss)
        time.sleep(SAMPLE_S)
    return most / 1e6


def measure(seconds: float) -> Result:
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        folder = Path(name) / "node"
        folder.mkdir()
        with running_node(folder, SHORT_ROUNDS) as node:
            client = Client(folder)
            wait_until(lambda: node.poll() is not None or is_training(client), START_S, "the first round")
            supervisor = psutil.Process(node.pid)
            worker_mb = sum(child.memory_info().rss for child in supervisor.children(recursive=True)) / 1e6
            quiet_mb = most_resident_mb(supervisor, seconds)
            with open_stream(folder) as lines:
                stream_mb = most_resident_mb(supervisor, seconds)
                streamed = lines[0]
            torch_is_there = "libtorch" in Path(f"/proc/{node.pid}/maps").read_text(encoding="utf-8")
    if not streamed or torch_is_there:
        raise RuntimeError(f"event lines {streamed}, torch in the supervisor: {torch_is_there}")
    figures = [
        Figure("supervisor memory", "MB", quiet_mb, LIMIT_MB, "MB limit", high=1.0),
        Figure("  with an event stream", "MB", stream_mb, LIMIT_MB, "MB limit", high=1.0),
    ]
    notes = [f"memory: {streamed} lines of events in {seconds:.0f} s; worker and p2pd {worker_mb:.0f} MB"]
    return Result("memory", figures, notes, {"worker_mb": worker_mb})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    return measure(parser.parse_args().seconds).conclude()


if __name__ == "__main__":
    raise SystemExit(main())

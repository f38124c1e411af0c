"""Memory and processor time of real processes, by kind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from node.daemon.process_meter import ProcessMeter
from tests.swarm.harness import wait_for

BUSY = "import sys; print(flush=True)\nwhile True: pass"
WORKER = f"""
import subprocess, sys
p2pd = subprocess.Popen([sys.argv[1], "60"])
rank = subprocess.Popen([sys.executable, "-c", {BUSY!r}], stdout=subprocess.PIPE)
rank.stdout.readline()
print(p2pd.pid, rank.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A process with two children: one named p2pd, and one that is busy."""
    shutil.copy("/bin/sleep", tmp_path / "p2pd")
    words = [sys.executable, "-c", WORKER, str(tmp_path / "p2pd")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    children = [psutil.Process(int(word)) for word in process.stdout.readline().split()]
    yield process, children
    for child in children:
        if child.is_running():
            child.kill()
    process.stdin.close()
    process.stdout.close()
    process.wait(10)


def test_processes_are_summed_by_kind(worker: tuple[subprocess.Popen[str], list[psutil.Process]]) -> None:
    process, (p2pd, rank) = worker
    meter = ProcessMeter(lambda: process.pid)
    meter.sample()
    memory = meter.usage.memory_bytes
    assert memory["supervisor"] > 10 * 2**20
    assert memory["worker"] > 2**20 and memory["rank"] > 2**20
    # Other tests of this process may have daemons of libp2p that still run.
    assert memory["p2pd"] >= p2pd.memory_info().rss // 2 > 0

    def has_computed() -> bool:
        meter.sample()
        return meter.usage.cpu_seconds["rank"] >= 0.1

    wait_for(has_computed, 30, "the busy process computes")
    before_s = meter.usage.cpu_seconds["rank"]
    rank.kill()
    psutil.wait_procs([rank], timeout=10)
    wait_for(lambda: not any(p.pid == rank.pid and p.status() != "zombie" for p in psutil.process_iter()), 10, "gone")
    meter.sample()
    assert meter.usage.cpu_seconds["rank"] >= before_s, "the time of an ended process stays"


def test_without_a_worker_all_children_are_others() -> None:
    meter = ProcessMeter(lambda: None)
    with subprocess.Popen(["/bin/sleep", "30"]) as child:
        meter.sample()
        assert meter.usage.memory_bytes["other"] > 0
        assert meter.usage.memory_bytes["worker"] == meter.usage.memory_bytes["rank"] == 0
        child.kill()


def test_change_of_the_clock_counts_no_processor_time_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = ProcessMeter(lambda: None)
    meter.sample()
    before_s = meter.usage.cpu_seconds["supervisor"]
    assert before_s > 0.2
    created_s = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created_s(self) + 3600)
    meter.sample()
    assert meter.usage.cpu_seconds["supervisor"] < before_s + 0.2


def test_system_that_does_not_list_processes_gives_only_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the node ended with an internal error, under an emulator that gives each thread its own start time."""

    def fail(process: psutil.Process, recursive: bool) -> list[psutil.Process]:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "children", fail)
    meter = ProcessMeter(lambda: 1)
    meter.sample()
    assert meter.usage.memory_bytes["supervisor"] > 0
    assert {kind for kind, size_bytes in meter.usage.memory_bytes.items() if size_bytes} == {"supervisor"}


def test_time_of_a_process_counts_once_if_it_could_not_be_read_in_between(
    worker: tuple[subprocess.Popen[str], list[psutil.Process]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, (_, rank) = worker
    meter = ProcessMeter(lambda: process.pid)

    def has_computed() -> bool:
        meter.sample()
        return meter.usage.cpu_seconds["rank"] >= 0.3

    wait_for(has_computed, 30, "the busy process computes")

    def refuse(*_: object, **__: object) -> None:
        raise psutil.AccessDenied

    for owner, name in ((ProcessMeter, "_kind"), (psutil.Process, "children")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            meter.sample()
        meter.sample()
    times = rank.cpu_times()
    assert meter.usage.cpu_seconds["rank"] <= times.user + times.system

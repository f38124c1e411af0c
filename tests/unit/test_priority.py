"""Low priority: the niceness counts in the process's own session, and between sessions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from node.host.priority import AUTOGROUP, NICENESS
from tests.swarm.harness import environment

ENABLED = Path("/proc/sys/kernel/sched_autogroup_enabled")
needs_autogroups = pytest.mark.skipif(
    not AUTOGROUP.exists() or ENABLED.read_text().strip() != "1", reason="this kernel does not group tasks by session"
)
LOWERED = """
import os
from pathlib import Path
from node.host.priority import lower_priority
before = Path("/proc/self/autogroup").read_text().strip()
lower_priority()
print(os.nice(0))
print(before)
print(Path("/proc/self/autogroup").read_text().strip())
"""
BUSY = """
import os, sys, time
from node.host.priority import lower_priority
os.sched_setaffinity(0, {int(sys.argv[1])})
if sys.argv[2] == "low":
    lower_priority()
print("ready", flush=True)
sys.stdin.readline()
began_s, end_s = time.process_time(), time.monotonic() + 6
while time.monotonic() < end_s:
    pass
print(time.process_time() - began_s)
"""

APART = """
import os, signal, sys, time
from node.host.priority import run_in_own_session
if (status := run_in_own_session()) is not None:
    sys.exit(status)
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print(os.getpid(), os.getsid(0), flush=True)
time.sleep(60)
"""


def start(code: str, *words: str, own_session: bool = True) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment({}), start_new_session=own_session,
    )  # fmt: skip


@needs_autogroups
@pytest.mark.parametrize("own_session", [True, False])
def test_the_niceness_is_that_of_the_session_only_if_the_process_leads_it(own_session: bool) -> None:
    shared = AUTOGROUP.read_text().strip()  # Empty for processes that descend from init without a session of their own.
    output, _ = start(LOWERED, own_session=own_session).communicate(timeout=30)
    niceness, before, after = output.split("\n")[:3]
    assert int(niceness) == min(19, os.nice(0) + NICENESS)
    if own_session:
        assert before != shared and after == before.replace("nice 0", f"nice {NICENESS}") != before
    else:
        assert before == after == shared


@needs_autogroups
def test_a_process_of_low_priority_leaves_the_core_to_one_of_another_session() -> None:
    core = str(min(os.sched_getaffinity(0)))
    processes = [start(BUSY, core, how) for how in ("low", "normal")]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    low_s, normal_s = (float(process.communicate(timeout=60)[0]) for process in processes)
    assert low_s < normal_s / 4, (low_s, normal_s)


@needs_autogroups
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 7), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_command_runs_in_its_own_session_and_ends_with_the_process_that_was_started(number: int, status: int) -> None:
    process = start(APART, own_session=False)
    assert process.stdout is not None
    pid, session = map(int, process.stdout.readline().split())
    assert pid == session != process.pid
    command = psutil.Process(pid)
    process.send_signal(number)
    assert process.wait(30) == status
    assert psutil.wait_procs([command], 30)[1] == []
    process.communicate()

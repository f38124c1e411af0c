"""No process outlives a killed parent, with the kernel's help and without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from node.host.parent_death import BY_KERNEL, POLL_S, launch_command
from node.host.priority import PARENT, helper_environment

END_S = POLL_S + 10.0
BOTH = pytest.mark.parametrize(
    "by_kernel",
    [pytest.param(True, marks=pytest.mark.skipif(not BY_KERNEL, reason="the kernel's help is Linux's")), False],
    ids=["kernel", "polling"],
)


def start(tmp_path: Path, code: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Run a parent, and return it with the processes whose ids it prints on its first line."""
    file = tmp_path / "parent.py"
    file.write_text(textwrap.dedent(code))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    parent = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    return parent, [psutil.Process(int(word)) for word in parent.stdout.readline().split()]


def kill(parent: subprocess.Popen[str]) -> None:
    parent.kill()
    parent.wait(END_S)
    assert parent.stdout is not None
    parent.stdout.close()


@BOTH
def test_killed_parent_takes_its_child_and_the_childs_group_with_it(tmp_path: Path, by_kernel: bool) -> None:
    """The child leads a session of its own, as a worker does. Only polling ends the grandchild, here as on macOS."""
    child = f"""
        import os, subprocess, sys, time
        from node.host.parent_death import die_with_parent
        die_with_parent(os.getppid(), by_kernel={by_kernel})
        print(os.getpid(), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
        time.sleep(60)
    """
    (tmp_path / "child.py").write_text(textwrap.dedent(child))
    parent, processes = start(
        tmp_path,
        f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, {str(tmp_path / "child.py")!r}], stdout=subprocess.PIPE, text=True,
                                 start_new_session=True)
        print(child.stdout.readline(), flush=True)
        time.sleep(60)
        """,
    )
    kill(parent)
    expected = processes[:1] if by_kernel else processes
    try:
        assert psutil.wait_procs(expected, timeout=END_S)[1] == []
    finally:
        for process in processes:
            if process.is_running():
                process.kill()


@BOTH
def test_killed_parent_takes_a_launched_program_with_it(tmp_path: Path, by_kernel: bool) -> None:
    parent, (launcher,) = start(
        tmp_path,
        f"""
        import subprocess, time
        from node.host.parent_death import launch_command
        print(subprocess.Popen(launch_command(["/bin/sleep", "60"], by_kernel={by_kernel})).pid, flush=True)
        time.sleep(60)
        """,
    )
    started = [launcher, *_wait_for_program(launcher, by_kernel)]
    kill(parent)
    assert psutil.wait_procs(started, timeout=END_S)[1] == []


@BOTH
def test_program_is_not_launched_if_its_parent_has_died_before(tmp_path: Path, by_kernel: bool) -> None:
    begun = tmp_path / "begun"
    command = launch_command(["/bin/sh", "-c", f"touch {begun}"], by_kernel=by_kernel)
    as_orphan = [str(dead_pid()) if word == str(os.getpid()) else word for word in command]
    assert subprocess.run(as_orphan, check=False, timeout=END_S).returncode == 1 and not begun.exists()
    assert subprocess.run(command, check=False, timeout=END_S).returncode == 0 and begun.exists()


def test_helper_does_not_begin_if_its_parent_has_died_before(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    program = f"from node.host.priority import serve_parent\nwith serve_parent(): open({str(begun)!r}, 'w')"
    helper, environment = [sys.executable, "-c", program], helper_environment()
    as_orphan = environment | {PARENT: str(dead_pid())}
    assert subprocess.run(helper, env=as_orphan, check=False, timeout=30).returncode == 1 and not begun.exists()
    assert subprocess.run(helper, env=environment, check=False, timeout=30).returncode == 0 and begun.exists()


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(END_S)
    return process.pid


@BOTH
def test_launched_program_gets_sigterm_and_its_exit_code_is_passed_on(tmp_path: Path, by_kernel: bool) -> None:
    launched = subprocess.Popen(launch_command(["/bin/sleep", "60"], by_kernel=by_kernel))
    launcher = psutil.Process(launched.pid)
    (program,) = _wait_for_program(launcher, by_kernel) or [launcher]
    launched.send_signal(signal.SIGTERM)
    assert launched.wait(END_S) != 0
    assert psutil.wait_procs([program], timeout=END_S)[1] == []
    for code in (0, 7):
        command = launch_command(["/bin/sh", "-c", f"exit {code}"], by_kernel=by_kernel)
        assert subprocess.run(command, check=False, timeout=END_S).returncode == code


def _wait_for_program(launcher: psutil.Process, by_kernel: bool) -> list[psutil.Process]:
    """Wait until the program runs. Return its process unless that is the launcher's."""
    end_s = time.monotonic() + END_S
    while time.monotonic() < end_s:
        if by_kernel and launcher.name() == "sleep":
            return []
        if not by_kernel and (children := [c for c in launcher.children() if c.name() == "sleep"]):
            return children
        time.sleep(0.02)
    raise AssertionError("the program did not start")

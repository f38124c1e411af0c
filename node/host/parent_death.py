"""Ends a process together with its parent, so that no `kill -9` leaves a process of the node behind.

On Linux the kernel does it. Elsewhere the process polls the id of its parent. Imports no torch, so the worker can call
it before slow imports.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
POLL_S = 1.0
BY_KERNEL = sys.platform == "linux"

_LAUNCH = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGKILL:d})
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
sys.exit(1)
"""
"""The kernel sends the signal when the *thread* that forked ends, so a long-lived thread must start the program."""
_LAUNCH_AND_POLL = """
import os, signal, subprocess, sys
parent = int(sys.argv[1])
if os.getppid() != parent:
    sys.exit(1)
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
program = subprocess.Popen(sys.argv[2:])
while True:
    try:
        sys.exit(program.wait(0.2))
    except subprocess.TimeoutExpired:
        if asked:
            asked.clear()
            program.terminate()
        if os.getppid() != parent:
            program.kill()
"""


def die_with_parent(parent: int, *, by_kernel: bool = BY_KERNEL) -> None:
    """Kill this process when its parent dies. `parent` is the parent's process id.

    Without the kernel's help, the processes of this process's group die with it if it leads one, at most POLL_S later.
    """
    if by_kernel:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_poll, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:
        sys.exit(1)


def ignore_stop_signals() -> None:
    """Let only the parent end this process. At a Ctrl-C, or at the end of a session, every process gets a signal, and
    the parent still needs this one to save its work. Call this on the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def launch_command(command: Sequence[str], *, by_kernel: bool = BY_KERNEL) -> list[str]:
    """Return the command with which this process can run `command`, so that it is killed when this process dies.

    It does not start if this process is dead by then. Without the kernel's help, a second process stays as its parent
    and passes SIGTERM on.
    """
    return [sys.executable, "-I", "-S", "-c", _LAUNCH if by_kernel else _LAUNCH_AND_POLL, str(os.getpid()), *command]


def _poll(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

"""Lowers the priority of processes that work beside training.

Linux may share the processor between sessions first (`sched_autogroup_enabled`), so that a niceness counts only within
a session. A process of low priority therefore leads a session of its own, or shares that of the training.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import psutil

from node.host.parent_death import die_with_parent, launch_command

NICENESS = 10
"""If all cores are busy, a process gets a tenth of one. With 19 it would get 1.5 %, and hardly ever end."""
OOM_SCORE = "1000"
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Environment of a process that computes on the CPU, because the GPU's memory belongs to training."""
PARENT = "HELPER_PARENT_PID"
"""Environment variable of a helper: the process id of its parent, which may be dead before the helper looks."""
AUTOGROUP = Path("/proc/self/autogroup")
"""The niceness of this process's session. Only some kernels have it."""
AUTOGROUP_TRIES = 20
AUTOGROUP_WAIT_S = 0.15
"""The kernel takes one change in 0.1 s from all users together."""


def lower_priority() -> None:
    """Let training have processor and disk first, and let the system end this process first if memory runs out.

    The niceness becomes that of the whole session if this process leads one.
    """
    os.nice(NICENESS)
    with suppress(AttributeError, OSError, psutil.Error):  # Only Linux has these.
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    if os.getsid(0) == os.getpid():
        _lower_session()


def helper_environment() -> dict[str, str]:
    """The environment of a process that this one starts, and that calls `serve_parent`."""
    return {**os.environ, **WITHOUT_GPU, PARENT: str(os.getpid())}


@contextmanager
def serve_parent() -> Iterator[TextIO]:
    """Begin a process that works for its parent: at low priority, and not longer than the parent lives.

    Yields the file for answers, line by line, in place of stdout, to which packages print.
    """
    die_with_parent(int(os.environ.get(PARENT) or os.getppid()))
    lower_priority()
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as answers:
        os.dup2(2, 1)
        yield answers


def _lower_session() -> None:
    for _ in range(AUTOGROUP_TRIES):
        try:
            AUTOGROUP.write_text(str(NICENESS))
        except BlockingIOError:
            time.sleep(AUTOGROUP_WAIT_S)
        except OSError:
            return
        else:
            return


def run_in_own_session() -> int | None:
    """Run the command of this process again as the leader of a session of its own, so that its niceness counts.

    Signals that end this process end that one. Call this on the main thread.

    Returns:
        the exit code; None if this process needs no other session.
    """
    if not AUTOGROUP.exists() or os.getsid(0) == os.getpid():
        return None
    process = subprocess.Popen(launch_command([sys.executable, *sys.orig_argv[1:]]), start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: process.send_signal(number))
    status = process.wait()
    return status if status >= 0 else 128 - status

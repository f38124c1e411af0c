"""Lowers the priority of processes that work beside training."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

NICENESS = 19
OOM_SCORE = "1000"


def lower_priority() -> None:
    """Let training have processor and disk first, and let the system end this process first if memory runs out."""
    os.nice(NICENESS)
    with suppress(AttributeError, OSError, psutil.Error):  # Only Linux has these.
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)

"""Lowers the priority of processes that work beside training."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

NICENESS = 19
WORKING_NICENESS = 10
"""For work that has to be done in the end. If all cores are busy, 19 leaves a process 1.5 % of a core."""
OOM_SCORE = "1000"
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Environment of a process that computes on the CPU, because the GPU's memory belongs to training."""


def lower_priority(niceness: int = NICENESS) -> None:
    """Let training have processor and disk first, and let the system end this process first if memory runs out."""
    os.nice(niceness)
    with suppress(AttributeError, OSError, psutil.Error):  # Only Linux has these.
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)

"""The processor cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The number of cores that the process's affinity and the quota of its container, if any, allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, quota_cores(CGROUP / "cpu.max") or cores))


def quota_cores(file: Path) -> int | None:
    """Read a quota of cgroup v2, `QUOTA PERIOD` in microseconds or `max PERIOD`. None without a quota."""
    try:
        quota, period = file.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return None

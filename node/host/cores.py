"""The processor cores that this process may use."""

from __future__ import annotations

import os

from node.host.cgroup import quota_cores


def usable_cores() -> int:
    """The number of cores that the process's affinity and the quota of its container, if any, allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, quota_cores() or cores))

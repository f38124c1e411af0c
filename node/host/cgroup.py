"""The limits that a container or service sets on this process by control groups, of version 2 and of version 1.

The kernel kills a process that exceeds the memory limit, so callers compare their needs with it beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes the largest page-aligned number where there is no limit."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    limit_bytes: int
    used_bytes: int
    """Used by all processes of the group, without the file cache that the kernel can drop at once."""
    file: str
    """Name of the kernel's file that holds the limit, such as `memory.max`."""

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def __str__(self) -> str:
        return f"{self.limit_bytes / 1e9:.3g} GB ({self.file})"


def memory_limit(root: Path = ROOT, own: Path = OWN) -> MemoryLimit | None:
    """Return the limit under which the least memory is free, or None if there is no limit.

    Groups are nested, and each may have a limit. `root` is where control groups are mounted, and `own` is the file that
    names the groups of this process.
    """
    limits = []
    for is_v2, group in _groups("memory", root, own):
        with suppress(OSError, ValueError):
            limits.append(_read_v2(group) if is_v2 else _read_v1(group))
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.free_bytes, default=None)


def quota_cores(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Return the number of cores that the smallest CPU quota allows, rounded up, or None if there is no quota."""
    quotas = []
    for is_v2, group in _groups("cpu", root, own):
        with suppress(OSError, ValueError):  # Version 2 writes `max` where there is no quota.
            if is_v2:
                quota_us, period_us = (int(word) for word in (group / "cpu.max").read_text().split())
            else:
                quota_us, period_us = (_number(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            if quota_us > 0 and period_us > 0:
                quotas.append(math.ceil(quota_us / period_us))
    return min(quotas, default=None)


def _read_v2(group: Path) -> MemoryLimit | None:
    limit = (group / "memory.max").read_text().strip()
    if limit == "max":
        return None
    used_bytes = _number(group / "memory.current") - _statistic(group, "inactive_file")
    return MemoryLimit(int(limit), used_bytes, "memory.max")


def _read_v1(group: Path) -> MemoryLimit | None:
    limit_bytes = _number(group / "memory.limit_in_bytes")
    if limit_bytes >= NO_LIMIT_BYTES:
        return None
    used_bytes = _number(group / "memory.usage_in_bytes") - _statistic(group, "total_inactive_file")
    return MemoryLimit(limit_bytes, used_bytes, "memory.limit_in_bytes")


def _groups(controller: str, root: Path, own: Path) -> Iterator[tuple[bool, Path]]:
    """Yield (whether it is of version 2, folder) for this process's group of a controller and for all groups around it.

    In a container, `own` may name a path of the host that does not exist here; then the mount is the container's group.
    """
    for line in _lines(own) or ["0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        is_v2 = not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        mount = root if is_v2 else root / controllers
        if not is_v2 and not mount.is_dir():
            mount = root / controller
        inner = PurePosixPath(path.lstrip("/"))
        if ".." in inner.parts:  # The group is outside of this process's namespace.
            inner = PurePosixPath()
        yield from ((is_v2, mount / group) for group in (inner, *inner.parents) if (mount / group).is_dir())


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(file: Path) -> int:
    return int(file.read_text())


def _statistic(group: Path, name: str) -> int:
    """Return a figure of the group's `memory.stat`, in bytes; 0 if the kernel does not tell it."""
    words = (line.split() for line in _lines(group / "memory.stat"))
    return next((int(word[1]) for word in words if len(word) == 2 and word[0] == name), 0)

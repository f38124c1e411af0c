"""The main memory that this process may still use, on a bare machine and in a container."""

from __future__ import annotations

import psutil

from node.host.cgroup import MemoryLimit, memory_limit

WORKER_BYTES = 350_000_000
"""Memory of a worker that has imported torch and hivemind, and of libp2p's daemon. Measured: 253 MB and 45 MB."""


def available_memory_bytes() -> float:
    """Bytes of main memory that this process may still use, within the limit of its container if there is one."""
    free_bytes, limit = float(psutil.virtual_memory().available), memory_limit()
    return free_bytes if limit is None else min(free_bytes, float(limit.free_bytes))


def own_memory_bytes() -> int:
    """Bytes of main memory that this process uses now."""
    return int(psutil.Process().memory_info().rss)


def memory_size_bytes() -> int:
    """Bytes of main memory of this machine, or of its container if that has less."""
    size_bytes, limit = int(psutil.virtual_memory().total), memory_limit()
    return size_bytes if limit is None else min(size_bytes, limit.limit_bytes)


def memory_remedy() -> str:
    """What helps if the memory does not suffice: to raise the limit if it is what lacks, else to end other programs."""
    limit = memory_limit()
    if limit is None or limit.free_bytes > psutil.virtual_memory().available:
        return "end what else uses memory, or join a run with a smaller model"
    return f"raise the memory limit of its container or service, which is {limit}, or join a run with a smaller model"


def worker_lack(limit: MemoryLimit | None) -> str:
    """Return one sentence with the figures if a worker cannot even start within `limit`, else an empty string.

    Without a limit a worker may start: a machine that is short of memory can swap.
    """
    if limit is None or limit.free_bytes >= WORKER_BYTES:
        return ""
    return (
        f"A node needs at least {WORKER_BYTES / 1e9:.3g} GB of memory besides this process, and "
        f"{limit.free_bytes / 1e9:.3g} GB are free: raise the memory limit of its container or service, which is "
        f"{limit}."
    )

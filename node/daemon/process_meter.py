"""Measures memory and processor time of all processes of the node, by kind of process.

`usage` is what `/metrics` shows. `sample` reads /proc and belongs on a thread; `watch` calls it there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil

from node.api.node_interface import PROCESS_KINDS, ProcessUsage

INTERVAL_S = 10.0
P2PD = "p2pd"


class ProcessMeter:
    """Sums the processes of each kind. The processor time of processes that have ended stays in the sums."""

    def __init__(self, worker_pid: Callable[[], int | None]) -> None:
        """`worker_pid` returns the id of the running worker, or None."""
        self.usage = ProcessUsage()
        """The last measurement."""
        self._worker_pid = worker_pid
        self._own = psutil.Process()
        self._cpu_s: dict[psutil.Process, float] = {}
        """Processor seconds of each process at the last sample, by process id and start."""

    async def watch(self) -> None:
        """Measure every INTERVAL_S, forever."""
        while True:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(INTERVAL_S)

    def sample(self) -> None:
        """Measure all processes. A process that ends meanwhile is left out."""
        worker_pid, memory = self._worker_pid(), dict.fromkeys(PROCESS_KINDS, 0)
        cpu_s, seen = dict(self.usage.cpu_seconds), {}
        children = self._children()
        for process in (self._own, *(children or ())):
            before_s = self._cpu_s.get(process, 0.0)
            try:
                with process.oneshot():
                    kind = self._kind(process, worker_pid)
                    times, rss = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                seen[process] = before_s  # It may be readable again later.
                continue
            memory[kind] += rss
            seen[process] = times.user + times.system
            cpu_s[kind] += max(0.0, seen[process] - before_s)
        # Of processes that could not be listed now, the time until here must not count again.
        self._cpu_s = seen if children is not None else self._cpu_s | seen
        self.usage = ProcessUsage(memory, cpu_s)

    def _children(self) -> list[psutil.Process] | None:
        """All processes below this one; None if the system does not list them, as in some sandboxes."""
        try:
            return list(self._own.children(recursive=True))
        except (psutil.Error, OSError):
            return None

    def _kind(self, process: psutil.Process, worker_pid: int | None) -> str:
        if process.pid == self._own.pid:
            return "supervisor"
        if process.pid == worker_pid:
            return "worker"
        if process.name() == P2PD:
            return P2PD
        is_of_worker = worker_pid is not None and any(parent.pid == worker_pid for parent in process.parents())
        return "rank" if is_of_worker else "other"

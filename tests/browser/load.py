"""Measures the processor time of a node's processes and of the browser's processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

from tests.swarm.harness import Node

LOOK_S = 0.2
WINDOW_S = 1.0


class Meter:
    """Counts the processor seconds of some processes, including processes that start or end while it counts."""

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        self._processes = processes
        self._used_s: dict[tuple[int, float], float] = {}
        self._before_s = 0.0
        self._before_s = self.read_s()

    def read_s(self) -> float:
        """The processor seconds that the processes have used since this meter was created."""
        for process in self._processes():
            with suppress(psutil.Error):
                self._used_s[process.pid, process.create_time()] = sum(process.cpu_times()[:2])
        return sum(self._used_s.values()) - self._before_s


def node_meter(node: Node) -> Meter:
    """Return a meter of the node's supervisor, worker and p2pd and all their child processes."""
    return Meter(node.processes)


def browser_meter() -> Meter:
    """Return a meter of all Chromium processes that this process has started."""

    def processes() -> Iterable[psutil.Process]:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if "chrom" in process.name():
                    yield process

    return Meter(processes)


def busy_ratio(meter: Meter, window_s: float = WINDOW_S) -> float:
    """Measure for `window_s` seconds. Returns the share of one core that the processes used."""
    before_s, began_s = meter.read_s(), time.monotonic()
    time.sleep(window_s)
    return (meter.read_s() - before_s) / (time.monotonic() - began_s)


def quiet_after(meter: Meter, ratio: float, *, began_s: float, quiet_s: float, limit_s: float) -> tuple[float, str]:
    """Measure windows of one second until none has used `ratio` of a core for `quiet_s`. Returns the seconds from
    `began_s` to the start of the last window that did, and a text with all shares. Gives up after `limit_s`."""
    reads: deque[tuple[float, float]] = deque([(time.monotonic(), meter.read_s())])
    loud_at_s = loud_until_s = began_s
    told: list[tuple[float, float]] = []
    while (now_s := time.monotonic()) - loud_until_s < quiet_s and loud_at_s - began_s <= limit_s:
        time.sleep(LOOK_S)
        reads.append((time.monotonic(), meter.read_s()))
        while reads[1][0] < reads[-1][0] - WINDOW_S:
            reads.popleft()
        (first_s, before_s), (last_s, used_s) = reads[0], reads[-1]
        share = (used_s - before_s) / max(WINDOW_S, last_s - first_s)
        if share >= ratio:
            loud_at_s, loud_until_s = first_s, last_s
        if not told or now_s - told[-1][0] >= WINDOW_S:
            told.append((now_s, share))
    return loud_at_s - began_s, " ".join(f"{at_s - began_s:.0f}s:{100 * share:.0f}%" for at_s, share in told)

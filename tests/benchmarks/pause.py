"""How soon a pause gives the machine back: from the order until the node's processes leave the processor alone.

    python -m tests.benchmarks.pause [--times 3]

One real node trains alone, with libp2p and all. `POST /actions/pause`, then the processor time of the supervisor and of
everything that it started, in windows of half a second, those processes included that come and go in between. The
machine is free from the first window on after which none has more than a tenth of a core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import psutil

from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.small import small_run
from tests.swarm.harness import START_S, Node, Swarm

FREE_S = 5.0
BUSY_CORE = 0.1
WINDOW_S = 0.5
LOOK_S = 0.05
WATCHED_S = 15.0
"""After the order."""
RUN = small_run("pause", round={"policy": "steps", "inner_steps": 50, "min_peers": 1}, evaluation={"batches": 0})


class Meter:
    """Processor seconds of a process and all below it, also of those that have ended since."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._seconds: dict[int, float] = {}

    def read(self) -> float:
        """Seconds so far; of a process that ended, those at the last look."""
        for one in (self._root, *self._root.children(recursive=True)):
            with suppress(psutil.Error):
                self._seconds[one.pid] = sum(one.cpu_times()[:2])
        return sum(self._seconds.values())


def windows(meter: Meter, seconds: float, since_s: float) -> Iterator[tuple[float, float]]:
    """(end of the window in seconds after `since_s`, cores used in it), for so many seconds."""
    used, at_s = meter.read(), time.monotonic()
    while at_s < since_s + seconds:
        end_s = at_s + WINDOW_S
        while time.monotonic() < end_s:
            time.sleep(LOOK_S)
            meter.read()
        now_used, now_s = meter.read(), time.monotonic()
        yield now_s - since_s, (now_used - used) / (now_s - at_s)
        used, at_s = now_used, now_s


def free_after_s(seen: list[tuple[float, float]]) -> float:
    """The end of the last busy window; 0 if there is none."""
    return max((end_s for end_s, cores in seen if cores > BUSY_CORE), default=0.0)


@dataclass(frozen=True, slots=True)
class Freed:
    """Seconds from the order."""

    memory_s: float
    """The process that held the model, and a device's memory, has ended."""
    processor_s: float
    seen: list[tuple[float, float]]


def pause(node: Node) -> Freed:
    """Pause a node that trains, and watch it."""
    worker, meter = node.find("worker"), Meter(node.find("supervisor"))
    began_s, gone_s = time.monotonic(), []
    worker_ends = Thread(target=lambda: gone_s.append((worker.wait(WATCHED_S), time.monotonic() - began_s)[1]))
    assert node.act("pause").status_code == 202
    worker_ends.start()
    seen = list(windows(meter, WATCHED_S, began_s))
    worker_ends.join(WATCHED_S)
    return Freed(gone_s[0], free_after_s(seen), seen)


def measure(folder: Path, times: int) -> list[Freed]:
    found = []
    with Swarm(folder, RUN) as swarm:
        node = swarm.found()
        for _ in range(times):
            node.until_training()
            found.append(pause(node))
            assert node.status()["phase"] == "paused"
            assert node.act("resume").status_code == 202
            node.until(lambda s: s["phase"] == "training", START_S)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        found = measure(Path(name) / "swarm", options.times)
    notes = [f"pause {n}: " + " ".join(f"{cores:.2f}@{at:.1f}s" for at, cores in f.seen) for n, f in enumerate(found)]
    gone, idle = [f.memory_s for f in found], [f.processor_s for f in found]
    figures = [
        Figure("pause: the model's process gone, longest", "s", max(gone), FREE_S, "s promised", high=1.0),
        Figure("  the processor idle, median", "s", statistics.median(idle), FREE_S, "s promised", high=1.0),
        Figure("  the processor idle, longest", "s", max(idle), FREE_S, "s promised"),
    ]
    return Result("pause", figures, notes).conclude()


if __name__ == "__main__":
    sys.exit(main())

"""Measures how soon a pause frees the machine.

    python -m tests.benchmarks.pause [--times 3]

One real node trains alone, including libp2p. After `POST /actions/pause`, the processor time of the supervisor and of
all processes that it has started is read once a second, including short-lived ones. The machine counts as free from the
first second after which they use no more than a tenth of a core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.small import small_run
from tests.browser.load import node_meter, quiet_after
from tests.swarm.harness import START_S, Node, Swarm

FREE_S = 5.0
BUSY_CORE = 0.1
QUIET_S = 10.0
WATCHED_S = 30.0
"""Longest time to watch the processes after the order to pause."""
RUN = small_run("pause", round={"policy": "steps", "inner_steps": 50, "min_peers": 1}, evaluation={"batches": 0})


@dataclass(frozen=True, slots=True)
class Freed:
    """Seconds from the order to pause to each event."""

    memory_s: float
    """Seconds until the process that held the model and the memory of a device has ended."""
    processor_s: float
    told: str
    """The share of a core that was used, second by second, as text."""


def pause(node: Node) -> Freed:
    """Pause a training node and watch its processes."""
    worker, meter = node.find("worker"), node_meter(node)
    began_s, gone_s = time.monotonic(), []
    worker_ends = Thread(target=lambda: gone_s.append((worker.wait(WATCHED_S), time.monotonic() - began_s)[1]))
    assert node.act("pause").status_code == 202
    worker_ends.start()
    free_s, told = quiet_after(meter, BUSY_CORE, began_s=began_s, quiet_s=QUIET_S, limit_s=WATCHED_S)
    worker_ends.join(WATCHED_S)
    return Freed(gone_s[0], free_s, told)


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
    notes = [f"pause {number}: {one.told}" for number, one in enumerate(found)]
    gone, idle = [f.memory_s for f in found], [f.processor_s for f in found]
    figures = [
        Figure("pause: the model's process gone, longest", "s", max(gone), FREE_S, "s promised", high=1.0),
        Figure("  the processor idle, median", "s", statistics.median(idle), FREE_S, "s promised", high=1.0),
        Figure("  the processor idle, longest", "s", max(idle), FREE_S, "s promised"),
    ]
    return Result("pause", figures, notes).conclude()


if __name__ == "__main__":
    sys.exit(main())

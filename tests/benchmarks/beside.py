"""What `serve` and the metric sinks cost a node that trains, while nobody asks the served model.

    python -m tests.benchmarks.beside [--seconds 60] [--slice 10]

One node trains, with the sink `jsonl` and, if it is installed, `tensorboard`. `diloco-node serve` runs on its data
folder. In turns, `serve` runs and is suspended (SIGSTOP). The figures are the tokens a second in both cases, and the
processor time of `serve` and the sinks. A round takes about a second, so the sinks write much more often than in a real
run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil

from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.load import RUN, Seen, Server, Slice, moment
from tests.swarm.harness import START_S, Node, Swarm, environment, wait_for

SERVE_RATIO, SINK_RATIO = 0.03, 0.005
"""What is promised: the loss of tokens/s by `serve`, and the sinks' time as a share of the time of the steps."""


@contextmanager
def serve(node: Node) -> Iterator[list[psutil.Process]]:
    """Run `diloco-node serve` on the node's data folder. Yields its processes."""
    command = [sys.executable, "-m", "node.cli", "serve", "--data-dir", str(node.folder), "--port", "0"]
    processes: list[psutil.Process] = []
    with subprocess.Popen(command, env=environment({}), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline(), "serve has ended"
            top = psutil.Process(process.pid)
            processes = [top, *top.children(recursive=True)]
            yield processes
        finally:
            for one in processes:
                one.resume()
            process.terminate()
            process.wait(START_S)


def sinks_of(node: Node) -> list[psutil.Process]:
    children = node.find("supervisor").children(recursive=True)
    return [child for child in children if "node.sinks" in child.cmdline()]


def processor_s(processes: list[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes)


def promise(name: str, ratio: float, promised_ratio: float) -> Figure:
    return Figure(name, "%", 100 * ratio, 100 * promised_ratio, "% promised", high=1.0)


async def measure_node(
    node: Node, parts: tuple[list[psutil.Process], list[psutil.Process]], pairs: int, slice_s: float
) -> Result:
    """Measure slices with `serve` suspended and running in turns. `parts`: its processes and those of the sinks."""
    server, worker, seen = Server(node), node.find("worker"), Seen()
    used_s, past_s = [0.0, 0.0], 0.0
    for number in range(2 * pairs + 1):
        for one in parts[0]:
            one.resume() if number % 2 else one.suspend()
        before, began_s = await moment(server, worker), time.monotonic()
        used_before = [processor_s(part) for part in parts]
        await asyncio.sleep(slice_s)
        after = await moment(server, worker)
        rate = (after.tokens - before.tokens) / (after.seconds - before.seconds)
        seen.slices.append(Slice(with_load=number % 2 == 1, tokens_per_s=rate, waited_ratio=0.0))
        if number % 2:
            past_s += time.monotonic() - began_s
            used = [processor_s(part) - first for part, first in zip(parts, used_before, strict=True)]
            used_s = [old + new for old, new in zip(used_s, used, strict=True)]
    running, suspended = ([s.tokens_per_s for s in seen.slices if s.with_load is w] for w in (True, False))
    serve_ratio, sink_ratio = (used / past_s for used in used_s)
    return Result(
        "beside",
        [
            Figure(
                "tokens/s beside serve", "tok/s", statistics.median(running), statistics.median(suspended),
                "without", low=1 - SERVE_RATIO, ratio_measured=statistics.fmean(seen.kept_ratios),
            ),
            promise("  serve, unasked: share of a core", serve_ratio, SERVE_RATIO),
            promise("  sinks: time / time of the steps", sink_ratio, SINK_RATIO),
        ],
    )  # fmt: skip


def measure(folder: Path, pairs: int, slice_s: float) -> Result:
    names = ["jsonl", *(["tensorboard"] if find_spec("tensorboard") else [])]
    with Swarm(folder, RUN) as swarm:
        node = swarm.node("founder")
        node.program = "node.cli"  # A supervisor that is forked can start workers only.
        node.start(f"--metrics.sinks={','.join(names)}", "--checkpoint.every_s=10")
        node.until_round(2)
        wait_for(lambda: len(sinks_of(node)) == len(names), START_S, "a sink has not started")
        with serve(node) as serving:
            return asyncio.run(measure_node(node, (serving, sinks_of(node)), pairs, slice_s))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="with the processes, all slices together")
    parser.add_argument("--slice", type=float, default=10.0, help="seconds of each slice")
    options = parser.parse_args()
    pairs = max(1, round(options.seconds / options.slice))
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        return measure(Path(name) / "swarm", pairs, options.slice).conclude()


if __name__ == "__main__":
    sys.exit(main())

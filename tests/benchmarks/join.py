"""Measures the download speed of a node that joins three training nodes over shaped lines, and what the three lose.

Each node has its own network namespace with a line shaped by `tc` (`tests.homes`, which needs root). The download is
compared with the lower of the joiner's downlink and the sum of the servers' uplinks. Its speed is read from the
joiner's log, from the first request for a leaf to the last answer. Utilisation is the share of `compute` in all
activities of the three nodes' /metrics during the download, compared with an equal time before it. No round ends during
the download. All nodes share this machine's cores, so the joiner's start, hashing and loading slow the others' steps.
This lowers their tokens/s, but not their utilisation.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.errors import MachineError
from tests.benchmarks.figures import Figure, Result
from tests.homes.home import Home
from tests.homes.world import AttachedHome, World, why_not
from tests.swarm.harness import Node, Swarm

DOWN_MBIT_S = 50.0
UP_MBIT_S = 30.0
WIDE_MBIT_S = 100.0
SPEED_RATIO = 0.8
BUSY_RATIO = 0.95
LOOK_S = 0.2
START_S = 180.0
ROUND_S = 900.0
CALM_S = 5.0
DONE = re.compile(r"Downloaded the state after round (-?\d+): ([\d.]+) MB in ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of the model and the length of a round."""

    hidden: int
    layers: int
    inner_steps: int

    def run(self) -> dict[str, Any]:
        heads = max(2, self.hidden // 64)
        return {
            "name": "join",
            "total_tokens": 10**9,
            "model": {
                "hidden_size": self.hidden,
                "intermediate_size": 8 * self.hidden // 3 // 64 * 64,
                "num_hidden_layers": self.layers,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "max_position_embeddings": 64,
            },
            "inner": {"batch_size": 1, "sequence_length": 32},
            "round": {"policy": "steps", "inner_steps": self.inner_steps, "min_peers": 3},
            "evaluation": {"batches": 0},
        }


@dataclass(frozen=True, slots=True)
class Counted:
    """The counters of one node at one moment."""

    compute_s: float
    all_s: float
    tokens: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """The three nodes' work between two moments."""

    busy: dict[str, float]
    tokens_per_s: float
    seconds: float


def count(node: Node) -> Counted:
    seconds, tokens = node.activity_s(), node.metrics()["tokens_processed_total"]
    return Counted(seconds["compute"], sum(seconds.values()), tokens, time.monotonic())


def window(nodes: Sequence[Node], before: Sequence[Counted], after: Sequence[Counted]) -> Window:
    pairs = list(zip(before, after, strict=True))
    busy = {
        node.name: (new.compute_s - old.compute_s) / max(1e-6, new.all_s - old.all_s)
        for node, (old, new) in zip(nodes, pairs, strict=True)
    }
    rate = sum((new.tokens - old.tokens) / (new.at_s - old.at_s) for old, new in pairs)
    return Window(busy, rate, after[0].at_s - before[0].at_s)


def start_three(swarm: Swarm, hosts: Sequence[AttachedHome]) -> list[Node]:
    """Start a founder and two more nodes. Returns when their first round is saved."""
    flags = ("--checkpoint.every_s=1",)
    founder = swarm.node("founder").live_in(hosts[0]).start(*flags)
    invite = founder.invite()
    nodes = [founder]
    for name, host in zip(("second", "third"), hosts[1:], strict=True):
        node = swarm.node(name, join=invite).live_in(host)
        nodes.append(node.start(*flags))
    for node in nodes:
        node.until_training(START_S)
    for node in nodes:
        node.until(lambda s: s["run"]["round"] >= 0 and s["training"]["inner_step"] > 0, ROUND_S)
    return nodes


def watch_download(joiner: Node, nodes: Sequence[Node]) -> tuple[list[Counted], list[Counted]]:
    """Read the counters of the three nodes when the download begins and when it ends."""
    end_s = time.monotonic() + ROUND_S
    while "Downloading the state after round" not in joiner.said():
        _in_time(end_s, joiner)
    before = [count(node) for node in nodes]
    while not DONE.search(joiner.said()):
        _in_time(end_s, joiner)
    return before, [count(node) for node in nodes]


def _in_time(end_s: float, joiner: Node) -> None:
    if time.monotonic() > end_s:
        raise TimeoutError(f"the download did not end\n{joiner.said()[-2000:]}")
    time.sleep(LOOK_S)


def measure(sizes: Sizes) -> Result:
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as name,
        World() as network,
        Swarm(Path(name), sizes.run()) as swarm,
    ):
        hosts = [
            network.attach(Home("public", lines=(UP_MBIT_S, down_mbit_s)))
            for down_mbit_s in (*[WIDE_MBIT_S] * 3, DOWN_MBIT_S)
        ]
        nodes = start_three(swarm, hosts[:3])
        time.sleep(CALM_S)
        round_before = nodes[0].status()["run"]["round"]
        began = [count(node) for node in nodes]
        joiner = swarm.node("joiner", join=nodes[0].invite()).live_in(hosts[3])
        time.sleep(4 * CALM_S)
        calm = window(nodes, began, [count(node) for node in nodes])
        joiner.start()
        busy = window(nodes, *watch_download(joiner, nodes))
        round_after = nodes[0].status()["run"]["round"]
        joiner.until_training(START_S)
        same = joiner.status()["run"]["round"] >= round_before
        found = DONE.search(joiner.said())
        assert found is not None
        return judge(found, calm, busy, quiet=round_before == round_after and same)


def judge(found: re.Match[str], calm: Window, busy: Window, *, quiet: bool) -> Result:
    megabytes, seconds = float(found[2]), float(found[3])
    limit = min(DOWN_MBIT_S, 3 * UP_MBIT_S) / 8
    least = min(busy.busy, key=lambda name: busy.busy[name])
    figures = [
        Figure("join: download", "MB/s", megabytes / seconds, limit, "the line's limit", low=SPEED_RATIO),
        Figure("  the others' utilisation, least", "", busy.busy[least], BUSY_RATIO, "promised", low=1.0),
        Figure("  against before the download", "", busy.busy[least], calm.busy[least], "before"),
        Figure("  the others' pace", "tokens/s", busy.tokens_per_s, calm.tokens_per_s, "before"),
    ]
    lines = f"joiner {DOWN_MBIT_S:g} Mbit/s down, the three {UP_MBIT_S:g} Mbit/s up each"
    notes = [
        f"{megabytes:.1f} MB in {seconds:.1f} s; {lines}.",
        f"Shares of compute: {_shares(calm)} in {calm.seconds:.0f} s before,",
        f"{_shares(busy)} in {busy.seconds:.0f} s of download.",
        "No round ended meanwhile." if quiet else "A round ended meanwhile: the shares hold its sync, too.",
    ]
    return Result("join", figures, notes, {"before": asdict(calm), "download": asdict(busy), "quiet": quiet})


def _shares(one: Window) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in one.busy.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--inner-steps", type=int, default=1000, help="a round must outlast calm, start and download")
    options = parser.parse_args()
    if reason := why_not():
        print(reason)
        return MachineError.exit_code
    result = measure(Sizes(options.hidden, options.layers, options.inner_steps))
    return result.conclude()


if __name__ == "__main__":
    raise SystemExit(main())

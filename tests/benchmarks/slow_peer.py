"""Compares round policies in a swarm of two nodes, one of them three times slower: how busy each is, and the loss.

Each seed has three arms with the same parameters and order of data: both nodes under `time`, both under `steps`, and
the fast node alone. An injected fault (`inner@*=slow:3`) makes each inner step of the slow node three times as long.
The added time counts as compute, as on a slow device. A node's busy share is the share of `compute` in all activities
of `/metrics` over whole rounds, from the commit of round 0 (before it the length of a round is unknown) to the first
commit after the window. The loss is that of the anchor on held-out text at equal times after the first step of all
nodes, interpolated between the two nearest rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.curves import Curve, interval_95
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.founding import found, invite_to, lend_identity, listen_at, run_config
from tests.benchmarks.small import small_run
from tests.free_ports import free_port
from tests.swarm.harness import Node, Swarm

SLOWER = 3
BUSY_RATIO = 0.9
LOOK_S = 0.25
PATIENCE_S = 120.0
"""Longest time after the window until the round that it cuts has ended."""
ARMS = ("time", "steps", "fast alone")

RUN = small_run("slow-peer", outer={"lr": 0.7, "momentum": 0.6}, evaluation={"batches": 8})


@dataclass(frozen=True, slots=True)
class Arm:
    """The results of one swarm."""

    seed: int
    name: str
    busy: Mapping[str, float]
    """For each node, the share of compute in its time."""
    pace_ratio: float
    """Seconds per inner step of the slow node, divided by those of the fast one; 1 for an arm without a slow node."""
    rounds: int
    loss: float
    tokens: int
    """Tokens that the swarm had trained on at the last round in the window."""
    curve: Curve


def manifest_of(arm: str, inner_steps: int) -> dict[str, Any]:
    policy, min_peers = ("steps" if arm == "steps" else "time"), (1 if arm == "fast alone" else 2)
    return RUN | {"round": {"policy": policy, "inner_steps": inner_steps, "min_peers": min_peers}}


def start(swarm: Swarm, keys: Path, arm: str, seed: int, inner_steps: int) -> list[Node]:
    """Start the nodes of the arm, the fast one first."""
    run, port = run_config(manifest_of(arm, inner_steps)), free_port()
    names = ["fast"] if arm == "fast alone" else ["fast", "slow"]
    ids, invite, nodes = {}, "", []
    for name in names:
        ids[name] = lend_identity(keys, swarm.folder / name, name)
        manifest = found(swarm.folder / name, run, seed)
        invite = invite_to(manifest, port, ids["fast"])
    for name in names:
        node = swarm.node(name, join=invite if name == "slow" else None)
        node.preset = None
        flags = [f"--swarm.listen={listen_at(port)}"] if name == "fast" else []
        faults = {"DILOCO_FAULTS": f"inner@*=slow:{SLOWER}"} if name == "slow" else {}
        nodes.append(node.start(*flags, env=faults))
    return nodes


def activity_s(node: Node) -> tuple[float, float]:
    """The node's total seconds of compute, and of all activities."""
    seconds = node.activity_s()
    return seconds["compute"], sum(seconds.values())


def step_s(node: Node) -> float:
    """The node's mean seconds per inner step so far."""
    metrics = node.metrics()
    return metrics["inner_step_duration_seconds_sum"] / metrics["inner_step_duration_seconds_count"]


def measure_arm(folder: Path, keys: Path, arm: str, seed: int, inner_steps: int, window_s: float) -> Arm:
    with Swarm(folder) as swarm:
        nodes = start(swarm, keys, arm, seed, inner_steps)
        for node in nodes:
            node.until_training()
        # The window begins when all nodes have done a step. Before that, one may train while the other starts.
        began_s, before = time.monotonic(), list[tuple[float, float]]()
        curve = Curve()
        while len(curve.points) < 2 or curve.points[-1].at_s < window_s:
            now_s = time.monotonic() - began_s
            if now_s > window_s + PATIENCE_S:
                raise TimeoutError(
                    f"no round ended within {PATIENCE_S:.0f} s after the window\n{nodes[0].said()[-2000:]}"
                )
            for node in nodes:
                curve.see(node.status(), now_s)
            if curve.points and not before:
                before = [activity_s(node) for node in nodes]
            time.sleep(LOOK_S)
        busy = {node.name: share(old, activity_s(node)) for node, old in zip(nodes, before, strict=True)}
        inside = [point for point in curve.points if point.at_s <= window_s]
        paces = [step_s(node) for node in nodes]
    return Arm(
        seed=seed,
        name=arm,
        busy=busy,
        pace_ratio=paces[-1] / paces[0],
        rounds=len(inside),
        loss=curve.loss_at_s(window_s),
        tokens=inside[-1].tokens if inside else 0,
        curve=curve,
    )


def share(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / (after[1] - before[1])


def describe(arms: Sequence[Arm]) -> list[str]:
    head = "| seed | arm | rounds | swarm tokens | loss | fast busy | slow busy | slow / fast, s a step |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for arm in arms:
        slow = f"{arm.busy['slow']:.1%} | {arm.pace_ratio:.2f}" if "slow" in arm.busy else "- | -"
        fast = f"{arm.busy['fast']:.1%}"
        lines.append(f"| {arm.seed} | {arm.name} | {arm.rounds} | {arm.tokens:,} | {arm.loss:.4f} | {fast} | {slow} |")
    return lines


def compare(arms: Sequence[Arm]) -> list[str]:
    """Compare the arm `time` with the other arms, paired by seed. Returns lines of text."""
    loss = {(arm.seed, arm.name): arm.loss for arm in arms}
    seeds = sorted({arm.seed for arm in arms})
    lines = [f"| loss of `time` less that of | mean of {len(seeds)} seeds | 95 % interval |", "|---|---|---|"]
    for other in ARMS[1:]:
        mean, half = interval_95([loss[seed, "time"] - loss[seed, other] for seed in seeds])
        lines.append(f"| {other} | {mean:+.4f} | {mean - half:+.4f} to {mean + half:+.4f} |")
    return lines


def figures(arms: Sequence[Arm]) -> list[Figure]:
    made = []
    for name in ("fast", "slow"):
        worst = min(arm.busy[name] for arm in arms if arm.name == "time")
        steps = statistics.fmean(arm.busy[name] for arm in arms if arm.name == "steps")
        title = f"slow peer: the {name} one's busy share under time, least of the seeds"
        made.append(Figure(title, "", worst, BUSY_RATIO, "promised", low=1.0))
        made.append(Figure("  against steps, mean", "", worst, steps, "under steps"))
    return made


def measure(seeds: int, window_s: float, inner_steps: int) -> Result:
    arms = []
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        base = Path(name)
        for seed in range(seeds):
            for place, arm in enumerate(ARMS):
                folder = base / f"{seed}-{place}"
                arms.append(measure_arm(folder, base / f"keys-{seed}", arm, seed, inner_steps, window_s))
                print(describe(arms[-1:])[-1], flush=True)
    notes = [f"Losses after {window_s:.0f} s of training, nats per byte.", *describe(arms), "", *compare(arms)]
    return Result("slow_peer", figures(arms), notes, {"arms": [asdict(arm) for arm in arms]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=90.0, help="measured, of each of the three arms")
    parser.add_argument("--inner-steps", type=int, default=250)
    options = parser.parse_args()
    result = measure(options.seeds, options.seconds, options.inner_steps)
    return result.conclude()


if __name__ == "__main__":
    raise SystemExit(main())

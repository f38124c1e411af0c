"""A member on a slow line, and members of different speed: how much of their work counts, and what it costs the others.

    python -m tests.benchmarks.slow_line [--rounds 30] [--beside 10] [--mbit 2]

Real nodes in network namespaces, `blocking` fp16, 1.8 MB a contribution, rounds of 22 s by the clock; a sleep stands
for each inner step. Three nodes without limits, first by themselves, then beside one whose line carries so many Mbit/s
each way: in how many rounds that one is included, which share of its tokens is in the records, and how busy the others
are with and without it. Then four nodes with speeds 1, 1, 1/4 and 1/16: the share of all tokens that is in the records.
Needs root.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.processes import end_all_on_sigterm
from tests.benchmarks.sync import START_S, settle, wait_for_round
from tests.homes.home import Home
from tests.homes.world import World, why_not
from tests.swarm.harness import Node, Swarm

ROUND_S = 22.0
STEP_S = 0.25
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
"""0.92 million parameters."""
RUN: dict[str, Any] = {
    "name": "slow-line",
    "total_tokens": 10**12,
    "model": MODEL,
    "inner": {"batch_size": 1, "sequence_length": 32},
    "round": {"policy": "time", "inner_steps": round(ROUND_S / STEP_S), "min_peers": 2},
    "sync": {"mode": "blocking", "codec": "fp16"},
    "evaluation": {"batches": 0},
}
LEARNT = 5
"""Rounds before those that are judged: until the members have measured their uplinks, and told."""
SPEEDS = (1.0, 1.0, 1 / 4, 1 / 16)
PATIENCE = 3.0


@dataclass(frozen=True, slots=True)
class Given:
    """One node's totals at one moment."""

    name: str
    compute_s: float
    all_s: float
    tokens: int
    merged: int
    discarded: int
    forwarded_bytes: int


@dataclass(frozen=True, slots=True)
class Arm:
    """What one swarm came to, over its judged rounds."""

    name: str
    rounds: int
    in_rounds: dict[str, int]
    """Of each node, in how many rounds its contribution is."""
    before: tuple[Given, ...]
    after: tuple[Given, ...]
    transfer_s: float
    """Median seconds from the closed group to the commit, as the founder saw it."""

    def busy(self, names: Sequence[str]) -> float:
        """Mean share of the time in which these nodes computed."""
        pairs = [pair for pair in zip(self.before, self.after, strict=True) if pair[0].name in names]
        return statistics.fmean((new.compute_s - old.compute_s) / (new.all_s - old.all_s) for old, new in pairs)

    def merged_ratio(self, names: Sequence[str]) -> float:
        """Share of the tokens that these nodes have done which is in the records."""
        pairs = [pair for pair in zip(self.before, self.after, strict=True) if pair[0].name in names]
        done = sum(new.tokens - old.tokens for old, new in pairs)
        return sum(new.merged - old.merged for old, new in pairs) / done


def given(node: Node) -> Given:
    text = node.http.get("/metrics").text
    seconds = dict(re.findall(r'^diloco_activity_seconds_total\{activity="(\w+)"\} (\S+)$', text, re.MULTILINE))
    told = node.status()["contribution"]
    return Given(
        name=node.name,
        compute_s=float(seconds["compute"]),
        all_s=sum(map(float, seconds.values())),
        tokens=told["tokens_total"],
        merged=told["tokens_merged"],
        discarded=told["tokens_discarded"],
        forwarded_bytes=told["bytes_forwarded"],
    )


def play(name: str, steps_s: dict[str, float], rounds: int, slow_mbit_s: float = 0.0) -> Arm:
    """Nodes by name, each with the seconds of its inner steps; the last one's line is slow if that is above 0."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder, World() as network:
        lines = [None] * (len(steps_s) - 1) + [(slow_mbit_s, slow_mbit_s) if slow_mbit_s else None]
        hosts = [network.attach(Home("public", lines=line)) for line in lines]
        with Swarm(Path(folder), RUN) as swarm:
            invite: str | None = None
            for (node_name, step_s), host in zip(steps_s.items(), hosts, strict=True):
                node = settle(swarm.node(node_name, join=invite), host)
                if invite is not None:
                    node.preset = None
                node.start(env={"DILOCO_FAULTS": f"inner@*=rest:{step_s}"})
                if invite is None:
                    node.until_training(START_S)
                    invite = node.invite()
            for node in swarm.nodes:
                node.until_training(START_S)
            return _judge(name, swarm.nodes, rounds)


def _judge(name: str, nodes: Sequence[Node], rounds: int) -> Arm:
    founder = nodes[0]
    first = max(node.status()["run"]["round"] for node in nodes) + LEARNT
    wait_for_round(nodes, first, LEARNT * PATIENCE * ROUND_S)
    before = tuple(given(node) for node in nodes)
    wait_for_round(nodes, first + rounds, rounds * PATIENCE * ROUND_S)
    after = tuple(given(node) for node in nodes)
    records = [r for r in founder.rounds() if first < r["round"] <= first + rounds and r["outcome"] != "failed"]
    included = [member["name"] for r in records for member in r["members"] if member["included"]]
    return Arm(
        name=name,
        rounds=len(records),
        in_rounds={node.name: included.count(node.name) for node in nodes},
        before=before,
        after=after,
        transfer_s=statistics.median(r["seconds"]["reduce"] + r["seconds"]["commit"] for r in records),
    )


def describe(arm: Arm) -> str:
    names = [one.name for one in arm.before]
    said = ", ".join(
        f"{n} in {arm.in_rounds[n]}, busy {arm.busy([n]):.1%}, merged {arm.merged_ratio([n]):.1%}" for n in names
    )
    return f"{arm.name}, {arm.rounds} rounds, transfer {arm.transfer_s:.2f} s: {said}"


def measure(rounds: int, beside: int, mbit_s: float) -> Result:
    fast = {"founder": STEP_S, "second": STEP_S, "third": STEP_S}
    alone = play("without it", fast, beside)
    print(describe(alone), flush=True)
    slow = play(f"beside one at {mbit_s:g} Mbit/s", {**fast, "slow": STEP_S}, rounds, mbit_s)
    print(describe(slow), flush=True)
    speeds = {f"node{place}": STEP_S / speed for place, speed in enumerate(SPEEDS)}
    mixed = play("speeds 1, 1, 1/4, 1/16", speeds, beside)
    print(describe(mixed), flush=True)
    figures = [
        Figure("slow line: rounds that it is in", "", slow.in_rounds["slow"] / slow.rounds, 0.5, "at least", low=1.0),
        Figure("slow line: share of its tokens in the records", "", slow.merged_ratio(["slow"]), 0.9, "", low=1.0),
        Figure(
            "slow line: busy, the others", "", slow.busy(list(fast)), alone.busy(list(fast)), "without it", low=0.95
        ),
        Figure("speeds: share of all tokens in the records", "", mixed.merged_ratio(list(speeds)), 0.9, "", low=1.0),
    ]
    arms = (alone, slow, mixed)
    return Result("slow_line", figures, [describe(arm) for arm in arms], {"arms": [asdict(arm) for arm in arms]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="judged, beside the slow line")
    parser.add_argument("--beside", type=int, default=10, help="judged, of the other swarms")
    parser.add_argument("--mbit", type=float, default=2.0, help="Mbit/s each way")
    options = parser.parse_args()
    end_all_on_sigterm()
    if reason := why_not():
        print(reason)
        return 1
    return measure(options.rounds, options.beside, options.mbit).conclude()


if __name__ == "__main__":
    raise SystemExit(main())

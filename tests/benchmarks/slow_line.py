"""Measures how much of the work of slow members counts, and how much it slows the others.

    python -m tests.benchmarks.slow_line [--parts line,speeds,big] [--rounds 30] [--beside 10] [--mbit 2]

Real nodes run in network namespaces with mode `blocking`, fp16, 1.8 MB per contribution and rounds of 22 s. Inner steps
sleep. It needs root.

- `line`: three nodes without limits, first alone, then with a fourth one on a slow line. Measures how many rounds
  include the fourth node, which share of its tokens counts, and how busy the others are with and without it.
- `speeds`: four nodes with speeds 1, 1, 1/4 and 1/16. Measures which share of all tokens counts.
- `big`: two nodes that train 85 million parameters, 170 MB per contribution, while other processes use half of the
  machine. Measures how many rounds include each node.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.errors import MachineError
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.processes import end_all_on_sigterm
from tests.benchmarks.sync import START_S, wait_for_round
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
"""A model of 0.92 million parameters."""
RUN: dict[str, Any] = {
    "name": "slow-line",
    "total_tokens": 10**12,
    "model": MODEL,
    "inner": {"batch_size": 1, "sequence_length": 32},
    "round": {"policy": "time", "min_peers": 2},
    "sync": {"mode": "blocking", "codec": "fp16"},
    "evaluation": {"batches": 0},
}


def run_of(round_s: float) -> dict[str, Any]:
    return RUN | {"round": RUN["round"] | {"inner_steps": round(round_s / STEP_S)}}


BIG_RUN = RUN | {
    "name": "big",
    "model": MODEL
    | {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    "round": {"policy": "time", "inner_steps": 20, "min_peers": 2},
}
"""A run with a model of 85 million parameters, whose inner steps are computed instead of slept."""
BIG_NODES = ("founder", "second")
BIG_ROUND_S = 180.0
LEARNT = 5
"""Number of rounds that are not judged, in which members measure and announce their uplinks."""
SPEEDS = (1.0, 1.0, 1 / 4, 1 / 16)
PATIENCE = 3.0
STOP_S = 90.0
"""Timeout for the end of a node, which saves a checkpoint of 85 million parameters on a busy machine."""
PARTS = ("line", "speeds", "big")


@dataclass(frozen=True, slots=True)
class Given:
    """The totals of one node at one moment."""

    name: str
    compute_s: float
    all_s: float
    tokens: int
    merged: int
    discarded: int
    forwarded_bytes: int


@dataclass(frozen=True, slots=True)
class Arm:
    """The results of one swarm over its judged rounds."""

    name: str
    rounds: int
    in_rounds: dict[str, int]
    """For each node, the number of rounds that include its contribution."""
    before: tuple[Given, ...]
    after: tuple[Given, ...]
    transfer_s: float
    """Median seconds from the closed group to the commit, in the founder's records."""

    def busy(self, names: Sequence[str]) -> float:
        """The mean share of the time in which these nodes computed."""
        pairs = [pair for pair in zip(self.before, self.after, strict=True) if pair[0].name in names]
        return statistics.fmean((new.compute_s - old.compute_s) / (new.all_s - old.all_s) for old, new in pairs)

    def merged_ratio(self, names: Sequence[str]) -> float:
        """The share of these nodes' tokens that rounds included."""
        pairs = [pair for pair in zip(self.before, self.after, strict=True) if pair[0].name in names]
        done = sum(new.tokens - old.tokens for old, new in pairs)
        return sum(new.merged - old.merged for old, new in pairs) / done


def given(node: Node) -> Given:
    seconds, told = node.activity_s(), node.status()["contribution"]
    return Given(
        name=node.name,
        compute_s=seconds["compute"],
        all_s=sum(seconds.values()),
        tokens=told["tokens_total"],
        merged=told["tokens_merged"],
        discarded=told["tokens_discarded"],
        forwarded_bytes=told["bytes_forwarded"],
    )


def play(
    name: str,
    steps_s: Mapping[str, float],
    rounds: int,
    slow_mbit_s: float = 0.0,
    *,
    run: Mapping[str, Any] = RUN,
    round_s: float,
) -> Arm:
    """Run nodes, given by name with the seconds that an inner step sleeps. 0 means that inner steps are computed.

    The last node's line is slow if `slow_mbit_s` is above 0. `round_s` is the expected length of a round. A round that
    takes more than PATIENCE times as long is a failure.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder, World() as network:
        lines = [None] * (len(steps_s) - 1) + [(slow_mbit_s, slow_mbit_s) if slow_mbit_s else None]
        hosts = [network.attach(Home("public", lines=line)) for line in lines]
        with Swarm(Path(folder), run, STOP_S) as swarm:
            invite: str | None = None
            for (node_name, step_s), host in zip(steps_s.items(), hosts, strict=True):
                node = swarm.node(node_name, join=invite).live_in(host)
                node.start(env={"DILOCO_FAULTS": f"inner@*=rest:{step_s}"} if step_s else {})
                if invite is None:
                    node.until_training(START_S)
                    invite = node.invite()
            for node in swarm.nodes:
                node.until_training(START_S)
            return _judge(name, swarm.nodes, rounds, round_s)


@contextmanager
def busy_machine(processes: int) -> Iterator[None]:
    """Keep this number of processes computing."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def _judge(name: str, nodes: Sequence[Node], rounds: int, round_s: float) -> Arm:
    founder = nodes[0]
    first = max(node.status()["run"]["round"] for node in nodes) + LEARNT
    wait_for_round(nodes, first, START_S + LEARNT * PATIENCE * round_s)
    before = tuple(given(node) for node in nodes)
    wait_for_round(nodes, first + rounds, START_S + rounds * PATIENCE * round_s)
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


def play_line(rounds: int, beside: int, mbit_s: float, round_s: float) -> tuple[list[Arm], list[Figure]]:
    fast = {"founder": STEP_S, "second": STEP_S, "third": STEP_S}
    alone = play("without it", fast, beside, run=run_of(round_s), round_s=round_s)
    print(describe(alone), flush=True)
    with_slow = {**fast, "slow": STEP_S}
    slow = play(f"beside one at {mbit_s:g} Mbit/s", with_slow, rounds, mbit_s, run=run_of(round_s), round_s=round_s)
    print(describe(slow), flush=True)
    return [alone, slow], [
        Figure("slow line: rounds that it is in", "", slow.in_rounds["slow"] / slow.rounds, 0.5, "at least", low=1.0),
        Figure("slow line: share of its tokens in the records", "", slow.merged_ratio(["slow"]), 0.9, "", low=1.0),
        Figure(
            "slow line: busy, the others", "", slow.busy(list(fast)), alone.busy(list(fast)), "without it", low=0.95
        ),
    ]


def play_speeds(rounds: int, round_s: float) -> tuple[list[Arm], list[Figure]]:
    speeds = {f"node{place}": STEP_S / speed for place, speed in enumerate(SPEEDS)}
    mixed = play("speeds 1, 1, 1/4, 1/16", speeds, rounds, run=run_of(round_s), round_s=round_s)
    print(describe(mixed), flush=True)
    merged = mixed.merged_ratio(list(speeds))
    return [mixed], [Figure("speeds: share of all tokens in the records", "", merged, 0.9, "", low=1.0)]


def play_big(rounds: int) -> tuple[list[Arm], list[Figure]]:
    with busy_machine(2):
        big = play("85M on a busy machine", dict.fromkeys(BIG_NODES, 0.0), rounds, run=BIG_RUN, round_s=BIG_ROUND_S)
    print(describe(big), flush=True)
    least = min(big.in_rounds.values()) / big.rounds
    return [big], [Figure("85M on a busy machine: rounds that both are in", "", least, 1 / 3, "at least", low=1.0)]


def measure(parts: Sequence[str], rounds: int, beside: int, mbit_s: float, round_s: float) -> Result:
    play_part = {
        "line": lambda: play_line(rounds, beside, mbit_s, round_s),
        "speeds": lambda: play_speeds(beside, round_s),
        "big": lambda: play_big(beside),
    }
    done = [play_part[part]() for part in parts]
    arms = [arm for played, _ in done for arm in played]
    figures = [figure for _, told in done for figure in told]
    return Result("slow_line", figures, [describe(arm) for arm in arms], {"arms": [asdict(arm) for arm in arms]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=30, help="judged rounds with the slow line")
    parser.add_argument("--beside", type=int, default=10, help="judged rounds of the other swarms")
    parser.add_argument("--mbit", type=float, default=2.0, help="Mbit/s each way")
    parser.add_argument("--round-s", type=float, default=ROUND_S, help="length of a round, except with 85M parameters")
    options = parser.parse_args()
    end_all_on_sigterm()
    if reason := why_not():
        print(reason)
        return MachineError.exit_code
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return measure(parts, options.rounds, options.beside, options.mbit, options.round_s).conclude()


if __name__ == "__main__":
    raise SystemExit(main())

"""Measures how soon nodes with `sync.auto` are busy again after their lines become slow, and whether they agree.

    python -m tests.benchmarks.link_drop [--high 100] [--low 10] [--phase 150] [--nodes 4]

Four nodes run in network namespaces with mode `overlapped`, int8, 15M parameters and H of 10 s (inner steps sleep, see
`sync`). At the lower rate a round's bytes do not fit into that time. All lines have the high rate, then the low rate,
then the high rate again. Utilisation is each node's own figure for its last complete round. The table also shows the
formula's figure for rounds of fixed length. It needs root.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.diloco.forecast import transfer_seconds, utilization
from node.errors import MachineError
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.processes import end_all_on_sigterm
from tests.benchmarks.sync import PARAMETERS, START_S, STEP_S, Cell, found_swarm, run_of
from tests.homes.world import AttachedHome, World, why_not
from tests.swarm.harness import Node, Swarm

INNER_S = 10.0
STEPS = round(INNER_S / STEP_S)
POLL_S = 1.0
WANTED = 0.95
WITHIN_ROUNDS = 3
PHASES = ("high", "low", "high again")


@dataclass(frozen=True, slots=True)
class Seen:
    """A node's figures for one round."""

    node: int
    phase: int
    at_s: float
    """Seconds since the measurement began."""
    round: int
    utilization: float
    """The utilisation in this round."""
    inner_steps: int
    """H of the next round."""
    digest: str


def cell(nodes: int, mbit_s: float) -> Cell:
    return Cell(mbit_s, nodes, "overlapped", "int8")


def run_config(nodes: int) -> dict[str, Any]:
    run = run_of(cell(nodes, 0))
    run["round"] |= {"inner_steps": STEPS}
    run["sync"] |= {"auto": True}
    return run


def limit(hosts: Sequence[AttachedHome], mbit_s: float) -> None:
    for host in hosts:
        host.limit((mbit_s, mbit_s))


def watch(nodes: Sequence[Node], phase: int, seconds: float, began_s: float, seen: dict[tuple[int, int], Seen]) -> None:
    """Record the figures of each round of each node."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for number, node in enumerate(nodes):
            status = node.status()
            run, ratio = status["run"], status["compute_utilization_ratio"]
            if ratio is not None and (number, run["round"]) not in seen:
                one = Seen(
                    number,
                    phase,
                    time.monotonic() - began_s,
                    run["round"],
                    ratio,
                    status["training"]["inner_steps"],
                    run["state_digest"],
                )
                seen[number, run["round"]] = one
        time.sleep(POLL_S)


def play(count: int, rates: Sequence[float], seconds: float) -> list[Seen]:
    seen: dict[tuple[int, int], Seen] = {}
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as name,
        World() as network,
        Swarm(Path(name), run_config(count)) as swarm,
    ):
        nodes, hosts = found_swarm(swarm, network, count)
        limit(hosts, rates[0])
        first = max(node.status()["run"]["round"] for node in nodes) + 3
        for node in nodes:
            node.until_round(first, START_S)
        began_s = time.monotonic()
        for phase, rate in enumerate(rates):
            limit(hosts, rate)
            watch(nodes, phase, seconds, began_s, seen)
    return sorted(seen.values(), key=lambda one: (one.round, one.node))


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round over all nodes."""

    round: int
    phase: int
    at_s: float
    utilization: float
    least: float
    inner_steps: int
    agree: bool
    """Whether all nodes that reported the round have the same H and the same digest."""


def rounds_of(seen: Sequence[Seen]) -> list[Round]:
    by_round: defaultdict[int, list[Seen]] = defaultdict(list)
    for one in seen:
        by_round[one.round].append(one)
    return [
        Round(
            number,
            max(one.phase for one in told),
            min(one.at_s for one in told),
            statistics.fmean(one.utilization for one in told),
            min(one.utilization for one in told),
            told[0].inner_steps,
            len({(one.inner_steps, one.digest) for one in told}) == 1,
        )
        for number, told in sorted(by_round.items())
    ]


def rounds_to_recover(rounds: Sequence[Round], phase: int) -> int:
    """The number of the first round in this phase whose utilisation is back at WANTED, counted from the first below it.

    The result is 0 if no round is below WANTED, and greater than the number of rounds if the utilisation stays below.
    """
    ratios = [one.utilization for one in rounds if one.phase == phase]
    dip = next((number for number, ratio in enumerate(ratios) if ratio < WANTED), None)
    if dip is None:
        return 0
    return next((n for n, ratio in enumerate(ratios[dip:], 1) if ratio >= WANTED), len(ratios) + 1)


def measure(count: int, high: float, low: float, seconds: float) -> Result:
    rounds = rounds_of(play(count, (high, low, high), seconds))
    transfer_s = transfer_seconds(cell(count, low).payload_bytes, low)
    blocked = utilization(INNER_S, transfer_s, overlapped=True)
    notes = [f"{count} nodes, {PARAMETERS / 1e6:.0f}M parameters, int8, {high:g} to {low:g} to {high:g} Mbit/s:"]
    for phase, own in itertools.groupby(rounds, lambda one: one.phase):
        told = ", ".join(f"{one.utilization:.0%} (H {one.inner_steps})" for one in own)
        notes.append(f"  {PHASES[phase]}: {told}")
    settled = [one.utilization for one in rounds if one.phase == 1][WITHIN_ROUNDS:]
    busy = statistics.fmean(settled) if settled else math.nan
    figures = [
        Figure(
            f"rounds until {WANTED:.0%} after the line {verb}",
            "rounds",
            rounds_to_recover(rounds, phase),
            WITHIN_ROUNDS,
            "at most",
            high=1.0,
        )
        for phase, verb in ((1, "drops"), (2, "comes back"))
    ]
    figures += [
        Figure(
            "busy on the slow line, settled",
            "",
            busy,
            blocked,
            "with fixed H",
            low=1.0,
        ),
        Figure(
            "rounds with one decision and one digest",
            "rounds",
            sum(one.agree for one in rounds),
            len(rounds),
            "rounds",
            low=1.0,
        ),
    ]
    return Result(
        "link_drop", figures, notes, {"rounds": [asdict(one) for one in rounds], "fixed": blocked, "phase_s": seconds}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--high", type=float, default=100.0, help="Mbit/s")
    parser.add_argument("--low", type=float, default=10.0, help="Mbit/s")
    parser.add_argument("--phase", type=float, default=150.0, help="seconds for which each rate holds")
    parser.add_argument("--nodes", type=int, default=4)
    options = parser.parse_args()
    end_all_on_sigterm()
    if reason := why_not():
        print(reason)
        return MachineError.exit_code
    return measure(options.nodes, options.high, options.low, options.phase).conclude()


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m tests.simulation --seeds 1000 --jobs 2` simulates seeds. `--seed 57` shows one with its messages."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import count, islice

from tests.simulation.chart import chart
from tests.simulation.run import Report, quiet, report_of, simulate, start_process
from tests.simulation.scenario import draw
from tests.simulation.shrink import shrink

SHOWN = 10
"""Failed seeds that are printed."""
SUMMED_EVERY = 1000
"""Seeds between two prints of the sums."""


@dataclass
class Totals:
    """Sums over all seeds."""

    seeds: int = 0
    next_seed: int = 0
    """The seed after the last one. Seeds with too few nodes are skipped, so it is not the first one plus `seeds`."""
    nodes: Counter[int] = field(default_factory=Counter)
    """How many seeds have this number of nodes."""
    events: int = 0
    messages: int = 0
    rounds: int = 0
    forks: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[Report] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """The digest of the messages of each seed."""

    @property
    def digest(self) -> str:
        """The digest of all messages of all seeds. It is the same each time, in any process."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()[:32]

    def add(self, report: Report) -> None:
        self.seeds += 1
        self.next_seed = report.seed + 1
        self.nodes[report.nodes] += 1
        self.events += report.events
        self.messages += report.messages
        self.rounds += report.rounds
        self.forks += report.forks
        self.virtual_s += report.virtual_s
        self.cpu_s += report.cpu_s
        self.faults += report.faults
        self.digests.append(report.digest)
        if report.violations:
            self.failed.append(report)


def run_seed(seed: int) -> Report:
    return report_of(draw(seed))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="replay one seed and print its messages")
    parser.add_argument("--least-nodes", type=int, default=2, help="skip seeds with fewer nodes")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    quiet()
    if options.seed is not None:
        return replay(options.seed)
    began_s, totals = time.perf_counter(), Totals()
    drawn = (seed for seed in count(options.first) if draw(seed).nodes >= options.least_nodes)
    seeds = islice(drawn, options.seeds)
    with ProcessPoolExecutor(options.jobs, initializer=start_process) as pool:
        for report in pool.map(run_seed, seeds, chunksize=8):
            totals.add(report)
            if report.violations and len(totals.failed) <= SHOWN:
                print(f"seed {report.seed}: {report.violations[0]}", flush=True)
            if totals.seeds % SUMMED_EVERY == 0 or totals.seeds == options.seeds:
                show(totals, time.perf_counter() - began_s)
    return 1 if totals.failed else 0


def show(totals: Totals, took_s: float) -> None:
    cpu_hours = totals.cpu_s / 3600
    kinds = ", ".join(f"{count} {kind}" for kind, count in totals.faults.most_common())
    large = totals.seeds - totals.nodes[2]
    print(
        f"{totals.seeds} seeds ({large} of 3 to 9 nodes), {totals.events} events, {totals.messages} messages, "
        f"{totals.virtual_s / 3600:.1f} virtual hours, {totals.rounds} rounds, {totals.forks} allowed forks"
    )
    print(f"{totals.faults.total()} faults ({kinds}), {totals.faults.total() / cpu_hours:.0f} an hour of CPU")
    print(f"{took_s:.1f} s, {totals.cpu_s:.1f} s of CPU; {len(totals.failed)} failed; next seed {totals.next_seed}")
    print(f"digest of all messages: {totals.digest}")
    sys.stdout.flush()


def replay(seed: int) -> int:
    scenario = draw(seed)
    report, _ = simulate(scenario)
    if report.violations:
        scenario = shrink(scenario)
    report, world = simulate(scenario, keep_trace=True)
    print(chart(world))
    print(scenario.describe())
    print("\n".join(report.violations) or "no violation")
    print(f"digest of all messages: {report.digest}")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks that a live member within the bounds of PROTOCOL.md, Participation, is in at least every second round.

`python -m tests.simulation.participation --seeds 1000` simulates members of all speeds and lines, without faults.
`--seed 57` shows one seed with its messages.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from tests.simulation.chart import chart
from tests.simulation.network import Line
from tests.simulation.run import Report, World, quiet, simulate, start_process
from tests.simulation.scenario import Scenario

WARM_UP_ROUNDS, ROUNDS = 2, 10
"""The first rounds are not checked, because no member has measured its uplink yet."""
LEAST_MERGED_RATIO = 0.9
SLOWEST_RATIO = 16.0
"""The fastest member is up to this many times as fast as the slowest."""
SLOWEST_MBIT_S, FASTEST_MBIT_S = 2.0, 1000.0
BYTES_PER_MBIT = 125_000.0
CHUNKS, CHUNK_BYTES = 16, 64 * 1024
GOSSIP_S = 2.0
"""Slower than in production, because heartbeats take most of the simulation's time."""
CONTRIBUTION_BYTES = CHUNKS * CHUNK_BYTES
LATENCIES_S = tuple(itertools.product((0.001, 0.01, 0.05, 0.1), (0.0, 0.01, 0.05, 0.3)))
"""Pairs of latency and jitter. A message takes the latencies and at most the jitters of both lines."""
MESSAGES = 8
"""The messages between two members that follow one another from a commit to the next join: the news of the commit, two
each for the certificates, the mean and the upload, and the join."""
NEEDED_RATIO = 1.0
"""The bound: upload, download, one inner step and MESSAGES of a member take at most this share of T_r."""
LONGEST_RATIO = 8.0
"""A round that takes longer than this many T_r counts as a stop."""
SHOWN, SUMMED_EVERY = 10, 500
"""The number of failed seeds that are printed, and the number of seeds after which the sums are printed."""


@dataclass(frozen=True, slots=True)
class Participation:
    """The result of one seed."""

    seed: int
    rounds: int
    virtual_s: float
    merged_ratio: float
    worst: str
    """A description of the member that is in the fewest rounds."""
    worst_ratio: float
    violations: tuple[str, ...]


def draw(seed: int) -> Scenario:
    """Draw members within the bounds. Every mix of speeds and lines has the same chance."""
    rng = random.Random(f"participation {seed}")
    nodes = rng.randint(3, 9)
    slowness = [SLOWEST_RATIO ** rng.choice((0.0, 1.0, rng.random(), rng.random())) for _ in range(nodes)]
    round_s, inner_steps = rng.choice((5.0, 10.0, 20.0)), rng.choice((20, 50, 100))
    typical_step_s = round_s / inner_steps
    step_s = tuple(typical_step_s * slow / statistics.median_low(slowness) for slow in slowness)
    rest_s = [NEEDED_RATIO * round_s - step for step in step_s]
    # All messages of a member with the best line leave half of its time for the transfers.
    far_s = rng.choice([s for s in map(sum, LATENCIES_S) if MESSAGES * (sum(LATENCIES_S[0]) + s) <= min(rest_s) / 2])
    return Scenario(
        seed=seed,
        step_s=step_s,
        lines=tuple(_line(rng, most_s, far_s) for most_s in rest_s),
        faults=(),
        length_s=LONGEST_RATIO * round_s * ROUNDS,
        min_peers=rng.choice((1, 2, 3)),
        quorum_ratio=rng.choice((0.5, 0.75)),
        policy="time",
        disk_s=rng.choice((0.001, 0.02)),
        join_at_s=tuple(0.5 * rng.random() for _ in range(nodes)),
        inner_steps=inner_steps,
        chunks=CHUNKS,
        chunk_bytes=CHUNK_BYTES,
        gossip_s=GOSSIP_S,
        founders=nodes,
        first_round_s=inner_steps * min(step_s),
    )


def transfer_s(line: Line) -> float:
    """Seconds to upload a contribution, and to download a mean."""
    return CONTRIBUTION_BYTES / line.up_bytes_s + CONTRIBUTION_BYTES / line.down_bytes_s


def _line(rng: random.Random, most_s: float, far_s: float) -> Line:
    """A line that transfers a contribution, a mean and MESSAGES within `most_s`. No latency is longer than `far_s`."""
    pairs = [pair for pair in LATENCIES_S if sum(pair) <= far_s]
    while True:
        up_bytes_s, down_bytes_s = sorted(BYTES_PER_MBIT * _mbit_s(rng) for _ in range(2))
        latency_s, jitter_s = rng.choice(pairs)
        line = Line(latency_s, jitter_s, up_bytes_s=up_bytes_s, down_bytes_s=down_bytes_s)
        if transfer_s(line) + MESSAGES * (latency_s + jitter_s + far_s) <= most_s:
            return line


def _mbit_s(rng: random.Random) -> float:
    """Draw a rate. All decades have the same chance, and the lowest rate is frequent."""
    place = rng.choice((0.0, rng.random(), rng.random()))
    return SLOWEST_MBIT_S * math.exp(place * math.log(FASTEST_MBIT_S / SLOWEST_MBIT_S))


def misses(records: Sequence[Collection[str]], peer: str) -> list[int]:
    """Rounds, counted from the first record, in which a member is missing for the second time in a row."""
    return [i + 1 for i, pair in enumerate(pairwise(records)) if not any(peer in members for members in pair)]


async def run_rounds(world: World, rounds: int = ROUNDS) -> None:
    """Run until one node has this number of rounds, or until the end of the scenario."""
    for node, at_s in zip(world.nodes, world.scenario.join_at_s, strict=True):
        world.loop.call_later(at_s, node.start)
    await asyncio.sleep(1.0)
    while world.loop.time() < world.scenario.length_s:
        if max(node.chain.tip.round for node in world.nodes) >= rounds - 1:
            return
        await asyncio.sleep(0.5)


def check(report: Report, world: World) -> Participation:
    """Judge a run that has ended."""
    tip = max((node.chain.tip for node in world.nodes), key=lambda tip: tip.round)
    records = [link.members for link in tip.links]
    checked = records[WARM_UP_ROUNDS:]
    violations = list(report.violations)
    if len(records) < ROUNDS:
        violations.append(f"only {len(records)} rounds in {report.virtual_s:.0f} s")
    ratios = {}
    for node in world.nodes:
        ratios[node.number] = statistics.fmean(node.peer_id in members for members in checked) if checked else 0.0
        missed = [WARM_UP_ROUNDS + round_ for round_ in misses(checked, node.peer_id)]
        if missed:
            violations.append(f"n{node.number} is in neither of two rounds in a row, at rounds {missed}")
    trained, merged = (sum(getattr(node, name) for node in world.nodes) for name in ("trained_tokens", "merged_tokens"))
    merged_ratio = merged / trained if trained else 0.0
    if merged_ratio < LEAST_MERGED_RATIO:
        violations.append(f"{merged_ratio:.1%} of the trained tokens are merged")
    worst = min(ratios, key=lambda number: ratios[number])
    scenario, line = world.scenario, world.scenario.lines[worst]
    slow = scenario.step_s[worst] / min(scenario.step_s)
    up, down = line.up_bytes_s / BYTES_PER_MBIT, line.down_bytes_s / BYTES_PER_MBIT
    text = f"n{worst} of {scenario.nodes}, speed 1/{slow:.1f}, {up:.1f} up and {down:.1f} Mbit/s down"
    return Participation(
        scenario.seed, len(records), report.virtual_s, merged_ratio, text, ratios[worst], tuple(violations)
    )


def run_seed(seed: int) -> Participation:
    return judge(draw(seed))


def judge(scenario: Scenario) -> Participation:
    """Run a scenario and check it."""
    result = check(*simulate(scenario, run=run_rounds))
    gc.collect()  # Reference cycles hold hundreds of MiB of chunks.
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.participation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="replay one seed and print its messages")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    quiet()
    if options.seed is not None:
        return replay(options.seed)
    began_s, done, failed = time.perf_counter(), [], 0
    with ProcessPoolExecutor(options.jobs, initializer=start_process) as pool:
        for result in pool.map(run_seed, range(options.first, options.first + options.seeds), chunksize=8):
            done.append(result)
            failed += bool(result.violations)
            if result.violations and failed <= SHOWN:
                print(f"seed {result.seed}: {result.violations[0]}", flush=True)
            if len(done) % SUMMED_EVERY == 0 or len(done) == options.seeds:
                show(done)
                print(f"{time.perf_counter() - began_s:.1f} s; {failed} failed", flush=True)
    return 1 if failed else 0


def show(done: Sequence[Participation]) -> None:
    hours, merged = sum(one.virtual_s for one in done) / 3600, [one.merged_ratio for one in done]
    worst = min(done, key=lambda one: one.worst_ratio)
    print(f"{len(done)} seeds, {sum(one.rounds for one in done)} rounds, {hours:.1f} virtual hours")
    print(f"trained tokens that are merged: median {statistics.median(merged):.1%}, minimum {min(merged):.1%}")
    print(f"worst member: in {worst.worst_ratio:.0%} of the rounds (seed {worst.seed}, {worst.worst})")


def replay(seed: int) -> int:
    scenario = draw(seed)
    report, world = simulate(scenario, keep_trace=True, run=run_rounds)
    result = check(report, world)
    print(chart(world))
    print(scenario.describe())
    tip = max((node.chain.tip for node in world.nodes), key=lambda tip: tip.round)
    for number, link in enumerate(tip.links):
        print(f"round {number}: {' '.join(f'n{node.number}' for node in world.nodes if node.peer_id in link.members)}")
    print(f"{result.merged_ratio:.1%} merged; worst member: {result.worst}")
    print("\n".join(result.violations) or "no violation")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures how many members each round includes in a swarm of eight homes with typical internet access.

    python -m tests.benchmarks.homes [--scenarios all,founder_gone,address_changed] [--rounds 20]

The homes are two containers with published ports, a forwarded port, two cone NATs, two symmetric NATs and an IPv6-only
home; all but the last are dual-stack. Their lines have 2/2 to 1000/1000 Mbit/s. All nodes join with the founder's first
invite. The founder is a container with a published port that announces its outer address. Inner steps are simulated by
sleeping, so that eight nodes fit on two cores. After two rounds for joining, each round is judged: whether it was
committed, how many members it includes, and whether all nodes have the same digest.

Scenarios: `all` changes nothing. `founder_gone` kills the founder by SIGKILL after the fifth judged round.
`address_changed` gives the home with the forwarded port another outer address after the tenth judged round.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from node.errors import MachineError
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.processes import end_all_on_sigterm
from tests.homes.home import Home
from tests.homes.nodes import START_S, Pace, found, included, join
from tests.homes.world import World, why_not, world
from tests.swarm.harness import Node, Swarm

HOMES = (
    Home("published", lines=(100, 100), ipv6=True, inbound_ipv6=True),
    Home("published", lines=(1000, 1000), ipv6=True, inbound_ipv6=True),
    Home("forwarded", lines=(10, 50)),
    Home("cone", lines=(20, 20)),
    Home("cone", lines=(100, 20)),
    Home("symmetric", lines=(100, 20)),
    Home("symmetric", lines=(2, 2)),
    Home("ipv6_only", lines=(20, 20)),
)
FORWARDED = 2
GETTING_IN = 2
"""Number of rounds that are not judged after the last home has started to train."""
FOUNDER_GONE_AFTER = 5
ADDRESS_CHANGED_AFTER = 10
"""Number of judged rounds before the address changes."""
SCENARIOS = ("all", "founder_gone", "address_changed")
LOOK_S = 1.0
ROUND_LIMIT_S = 180.0
"""Longest time to wait for one round."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one scenario."""

    scenario: str
    first_round: int
    included: dict[int, list[str]]
    """For each round, the homes whose contributions were included."""
    expected: dict[int, int]
    """For each round, the number of homes that were present."""
    digests: dict[int, int]
    """For each round, the number of different digests that the nodes report."""

    @property
    def complete(self) -> int:
        """The number of rounds that included all present homes."""
        return sum(len(homes) == self.expected[number] for number, homes in self.included.items())

    def lines(self) -> list[str]:
        head = f"{self.scenario}: {self.complete} of {len(self.included)} rounds with all homes"
        missing = [
            f"  round {number}: {len(homes)} of {self.expected[number]} homes, {self.digests[number]} digest(s): "
            f"{', '.join(homes)}"
            for number, homes in self.included.items()
            if len(homes) < self.expected[number] or self.digests[number] != 1
        ]
        return [head, *missing]


def run(scenario: str, folder: Path, rounds: int, pace: Pace, count: int) -> Found:
    """Run a scenario. Raises AssertionError if a home does not join or no round is committed in time."""
    with world(HOMES[:count]) as homes, Swarm(folder) as swarm:
        nodes = start(swarm, homes, pace)
        names = {node.peer_id(): home.name for node, home in zip(nodes, homes, strict=True)}
        witness = nodes[1]
        first = witness.status()["run"]["round"] + 1 + GETTING_IN
        for number in range(first, first + rounds):
            _until_round(witness, number)
            if scenario == "founder_gone" and number == first + FOUNDER_GONE_AFTER - 1:
                nodes[0].end_by_force()
            if scenario == "address_changed" and number == first + ADDRESS_CHANGED_AFTER - 1:
                homes[FORWARDED].change_address()
            print(f"{time.strftime('%H:%M:%S')} {scenario}: round {number} is committed", flush=True)
        alive = nodes[1:] if scenario == "founder_gone" else nodes
        for node in alive:
            _until_round(node, first + rounds - 1)
        return _found(scenario, first, rounds, alive, names)


def start(swarm: Swarm, homes: World, pace: Pace) -> list[Node]:
    """Start the founder, then all other nodes at the same time with only the founder's first invite."""
    founder = found(swarm, homes[0], pace=pace)
    invite = founder.invite()
    nodes = [founder, *(join(swarm, home, invite, pace=pace) for home in homes[1:])]
    for node in nodes:
        node.until_training(START_S)
    return nodes


def _until_round(node: Node, number: int) -> None:
    deadline_s = time.monotonic() + ROUND_LIMIT_S
    while True:
        with suppress(httpx.HTTPError):  # Requests may fail on a busy machine. The deadline decides.
            if node.status()["run"]["round"] >= number:
                return
        assert time.monotonic() < deadline_s, f"round {number} did not commit within {ROUND_LIMIT_S:.0f} s"
        time.sleep(LOOK_S)


def _found(scenario: str, first: int, rounds: int, alive: Sequence[Node], names: dict[str, str]) -> Found:
    numbers = range(first, first + rounds)
    records = alive[0].rounds()
    by_home = {name: included(records, peer) for peer, name in names.items()}
    digests = [node.digests() for node in alive]
    gone_from = first + FOUNDER_GONE_AFTER if scenario == "founder_gone" else first + rounds
    return Found(
        scenario=scenario,
        first_round=first,
        included={n: [name for name, took_part in by_home.items() if took_part.get(n)] for n in numbers},
        expected={n: len(names) - (n >= gone_from) for n in numbers},
        digests={n: len({one[n] for one in digests if n in one}) for n in numbers},
    )


def figures(found_ones: Sequence[Found]) -> list[Figure]:
    made = []
    for one in found_ones:
        title = f"homes, {one.scenario}: rounds with all homes included"
        made.append(Figure(title, "rounds", one.complete, len(one.included), "rounds", low=1.0))
        equal = sum(count == 1 for count in one.digests.values())
        made.append(Figure("  rounds with equal digests", "rounds", equal, len(one.digests), "rounds", low=1.0))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=20, help="that count, after two of getting in")
    parser.add_argument("--step-s", type=float, default=0.22, help="seconds that stand for an inner step")
    parser.add_argument("--inner-steps", type=int, default=100)
    parser.add_argument("--homes", type=int, default=len(HOMES), help="only the first ones of the eight")
    parser.add_argument("--folder", type=Path, help="keep data folders and logs here")
    options = parser.parse_args()
    end_all_on_sigterm()
    if reason := why_not():
        print(reason)
        return MachineError.exit_code
    chosen = options.scenarios.split(",")
    if unknown := set(chosen) - set(SCENARIOS):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    pace = Pace(step_s=options.step_s, inner_steps=options.inner_steps)
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as temporary:
        base = options.folder or Path(temporary)
        done = [run(scenario, base / scenario, options.rounds, pace, options.homes) for scenario in chosen]
    notes = [line for one in done for line in one.lines()]
    return Result("homes", figures(done), notes, {"scenarios": [asdict(one) for one in done]}).conclude()


if __name__ == "__main__":
    raise SystemExit(main())

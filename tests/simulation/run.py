"""One simulated night of a swarm, from a seed."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from node.diloco.codec import make_codec
from node.diloco.outer import genesis
from node.swarm.allreduce.reducer import ChunkLayout
from node.swarm.chain.chain import OuterRule, make_tip
from node.swarm.consensus.commit import Committed
from node.swarm.consensus.context import Rules
from node.swarm.consensus.group_closing import ClosingRule
from node.swarm.membership.timings import MemberTimings
from tests.simulation.keys import simulated_identity, simulated_keys
from tests.simulation.network import Line, Network
from tests.simulation.node import Habits, SimulatedNode
from tests.simulation.virtual_loop import VirtualLoop

PARAMETERS, CHUNKS = 16, 4
TIMINGS = MemberTimings(gossip_s=1.0, look_ahead_s=1.0)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to a node at a time."""

    at_s: float
    kind: str
    node: int
    other: int = -1
    seconds: float = 0.0


@dataclass(frozen=True)
class Scenario:
    seed: int
    step_s: tuple[float, ...]
    lines: tuple[Line, ...]
    events: tuple[Event, ...]
    length_s: float
    min_peers: int
    disk_s: float


@dataclass
class Report:
    seed: int
    violations: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    events: int = 0
    messages: int = 0
    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    digest: str = ""


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    count = rng.randint(3, 9)
    length_s = 40.0
    step_s = tuple(rng.choice((0.1, 0.2, 0.3)) for _ in range(count))
    lines = tuple(Line(latency_s=rng.choice((0.001, 0.02, 0.08)), jitter_s=rng.choice((0.0, 0.02, 0.2))) for _ in range(count))
    events = []
    for _ in range(rng.choice((0, 1, 2, 4))):
        node, at_s = rng.randrange(count), rng.uniform(2.0, length_s - 15)
        if rng.random() < 0.5:
            events.append(Event(at_s, "crash", node, seconds=rng.choice((0.1, 2.0, 12.0, 1000.0))))
        else:
            events.append(Event(at_s, "stall", node, seconds=rng.choice((1.0, 4.0, 12.0))))
    return Scenario(seed, step_s, lines, tuple(sorted(events, key=lambda e: e.at_s)), length_s, rng.choice((1, 2)), 0.005)


class World:
    def __init__(self, scenario: Scenario, folder: Path, *, keep_trace: bool = False) -> None:
        self.scenario, self.report = scenario, Report(scenario.seed)
        rng = random.Random(f"disk {scenario.seed}")
        self.loop = VirtualLoop(lambda: scenario.disk_s * rng.random())
        self.network = Network(self.loop, scenario.seed, keep_trace=keep_trace)
        codec = make_codec("fp16") if False else make_codec("fp32")
        size = PARAMETERS // CHUNKS
        layout = ChunkLayout(codec, [(i * size, (i + 1) * size) for i in range(CHUNKS)], ((0, PARAMETERS),))
        rules = Rules(
            run="ab" * 32,
            layouts=(layout,),
            closing=ClosingRule("time", scenario.min_peers, 0.5),
            outer=OuterRule(lr=0.7, momentum=0.9, inner_steps=10),
            max_tokens=10**6,
        )
        tip = make_tip(genesis(torch.linspace(-1, 1, PARAMETERS)), rules.run, None, rules.outer, {}, 0.0)
        self.nodes = []
        for number, (step_s, line) in enumerate(zip(scenario.step_s, scenario.lines, strict=True)):
            identity = simulated_identity(number)
            self.network.lines[identity.peer_id] = line
            self.network.names[identity.peer_id] = f"n{number}"
            node = SimulatedNode(
                self.network, identity, number, rules, tip, folder / f"n{number}", Habits(step_s), TIMINGS,
                self._on_adopted, scenario.seed,
            )  # fmt: skip
            self.nodes.append(node)
        for node in self.nodes:
            node.peers = [other.peer_id for other in self.nodes if other is not node]
        self.heads: defaultdict[int, dict[str, list[int]]] = defaultdict(dict)
        self.digests: dict[str, str] = {}

    def _on_adopted(self, node: SimulatedNode, committed: Committed) -> None:
        tip = committed.tip
        adopters = self.heads[tip.round].setdefault(tip.head, [])
        adopters.append(node.number)
        if len(self.heads[tip.round]) > 1:
            self.report.violations.append(f"{self.loop.time():.2f} fork of round {tip.round}: {self.heads[tip.round]}")
        if self.digests.setdefault(tip.head, tip.digest) != tip.digest:
            self.report.violations.append(f"digest of round {tip.round} differs")

    async def run(self) -> None:
        loop = self.loop
        for node in self.nodes:
            loop.call_later(0.01 * node.number, node.start)
        for event in self.scenario.events:
            await asyncio.sleep(max(0.0, event.at_s - loop.time()))
            node = self.nodes[event.node]
            self.report.faults[event.kind] += 1
            if event.kind == "crash" and node.is_alive:
                node.crash()
                if event.seconds < 999:
                    loop.call_later(event.seconds, node.start)
            elif event.kind == "stall" and node.is_alive:
                node.stall(event.seconds)
        await asyncio.sleep(max(0.0, self.scenario.length_s - loop.time()))


def simulate(scenario: Scenario, *, keep_trace: bool = False) -> tuple[Report, World]:
    folder = Path(tempfile.mkdtemp(prefix="sim-", dir="/dev/shm"))
    torch.set_num_threads(1)
    try:
        with simulated_keys():
            world = World(scenario, folder, keep_trace=keep_trace)
            asyncio.set_event_loop(world.loop)
            world.loop.run_until_complete(world.run())
            report = world.report
            report.virtual_s, report.events, report.messages = world.loop.time(), world.loop.events, world.network.messages
            report.rounds, report.digest = len(world.heads), world.network.digest
            world.loop.close()
    finally:
        asyncio.set_event_loop(None)
        shutil.rmtree(folder)
    return report, world

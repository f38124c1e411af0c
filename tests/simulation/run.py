"""Runs a scenario on virtual time, and checks the invariants of PROTOCOL.md at every commit and at the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from node.config.manifest import OuterConfig, RoundConfig, RunConfig, SyncConfig
from node.diloco.outer import OuterOptimizer, genesis
from node.swarm.allreduce.reducer import ChunkLayout
from node.swarm.chain.chain import OuterRule, make_tip
from node.swarm.consensus.commit import Committed
from node.swarm.consensus.context import AmendedRules, Rules
from node.swarm.consensus.group_closing import ClosingRule
from node.swarm.governance.charter import Charter
from node.swarm.membership.timings import MemberTimings
from tests.simulation.invariants import Invariants
from tests.simulation.keys import simulated_identity, simulated_keys
from tests.simulation.network import NOBODYS, Life, Network, Sent
from tests.simulation.node import Habits, SimulatedNode
from tests.simulation.padded_codec import PaddedFp32
from tests.simulation.scenario import FOREVER_S, QUIET_S, Fault, Scenario
from tests.simulation.virtual_loop import PROCESS, Deadlock, TooManyEvents, VirtualLoop

CHUNK_ELEMENTS = 4
MEMORY = Path("/dev/shm")
"""Simulated disks are folders in this folder, which is in memory."""


@dataclass
class Report:
    """The result of one run."""

    seed: int
    nodes: int = 0
    violations: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of the run itself."""
    events: int = 0
    messages: int = 0
    rounds: int = 0
    forks: int = 0
    """Rounds with two outcomes that the invariants allow, because nodes could not reach each other."""
    faults: Counter[str] = field(default_factory=Counter)
    digest: str = ""
    """The digest of all messages with their times. The same seed always gives the same digest."""


def settings_of(scenario: Scenario) -> RunConfig:
    """The settings of the simulated run."""
    founder = (simulated_identity(0).peer_id,) if scenario.is_steered else ()
    return RunConfig(
        governance="founder" if founder else "fixed",
        governance_keys=founder,
        outer=OuterConfig(lr=0.7),
        round=RoundConfig(
            policy=scenario.policy,
            inner_steps=scenario.inner_steps,
            min_peers=scenario.min_peers,
            quorum_ratio=scenario.quorum_ratio,
        ),
    )


def rules_of(scenario: Scenario, run: RunConfig) -> Rules:
    """The rules of settings. An amended codec makes chunks twice as large, so it changes their number."""
    parameters = scenario.chunks * CHUNK_ELEMENTS
    size = CHUNK_ELEMENTS * (1 if run.sync.codec == SyncConfig().codec else 2)
    bounds = [(start, min(start + size, parameters)) for start in range(0, parameters, size)]
    return Rules(
        run="ab" * 32,
        layouts=(ChunkLayout(PaddedFp32(scenario.chunk_bytes), bounds, ((0, parameters),)),),
        closing=ClosingRule(run.round.policy, run.round.min_peers, run.round.quorum_ratio),
        outer=OuterRule(lr=run.outer.lr, optimizer=OuterOptimizer(), inner_steps=run.round.inner_steps),
        max_tokens=10**6,
    )


class World:
    """All nodes of one run."""

    def __init__(self, scenario: Scenario, folder: Path, *, keep_trace: bool = False) -> None:
        self.scenario, self.report = scenario, Report(scenario.seed, scenario.nodes)
        rng = random.Random(f"disk {scenario.seed}")
        self.loop = VirtualLoop(lambda: scenario.disk_s * rng.random())
        self.network = Network(self.loop, scenario.seed, keep_trace=keep_trace)
        parameters = scenario.chunks * CHUNK_ELEMENTS
        settings = settings_of(scenario)
        self.rules = rules_of(scenario, settings)
        if scenario.is_steered:
            charter = Charter(self.rules.run, settings)
            self.rules = replace(self.rules, amended=AmendedRules(charter, partial(rules_of, scenario)))
        start = genesis(torch.linspace(-1, 1, parameters))
        tip = make_tip(start, self.rules.run, None, self.rules.outer, {}, 0.0)
        self.nodes: list[SimulatedNode] = []
        self._armed: list[Fault] = []
        joiners = range(1, scenario.nodes - bool(scenario.hostile)) if scenario.joiners_download else ()
        for number, (step_s, line) in enumerate(zip(scenario.step_s, scenario.lines, strict=True)):
            identity = simulated_identity(number, partial(self._on_signed, number))
            self.network.lines[identity.peer_id], self.network.names[identity.peer_id] = line, f"n{number}"
            node = SimulatedNode(
                network=self.network,
                identity=identity,
                number=number,
                rules=self.rules,
                genesis=tip,
                folder=folder / f"n{number}",
                habits=Habits(
                    step_s,
                    first_round_s=scenario.first_round_s,
                    founders=scenario.founders,
                    joins_by_download=number in joiners and scenario.join_at_s[number] > 0,
                ),
                timings=MemberTimings(scenario.gossip_s, dead_s=8 * scenario.gossip_s, settle_s=5 * scenario.gossip_s),
                on_adopted=self._on_adopted,
                seed=scenario.seed,
            )
            self.nodes.append(node)
        for node in self.nodes:
            node.peers = [other.peer_id for other in self.nodes if other is not node]
        self._numbers = {node.peer_id: node.number for node in self.nodes}
        self.invariants = Invariants(self.nodes, self.loop.time, self.report.violations)
        self.network.on_request = self.invariants.requested
        for node in self.nodes:
            node.on_replayed, node.on_downloaded = self.invariants.replayed, self.invariants.downloaded
            node.contributed, node.on_failed = self.invariants.contributed, self.invariants.failed
        self.nodes[-1].hostility = scenario.hostile

    def _on_adopted(self, node: SimulatedNode, committed: Committed) -> None:
        self.invariants.adopted(node, committed)
        self._strike(node.peer_id, self._other(node.number), "adopts")

    def _on_signed(self, number: int, data: bytes) -> None:
        self.invariants.signed(self.nodes[number], data)
        if data.startswith(b"diloco accept\0") and not self.nodes[number].hostility:
            self._strike(self.nodes[number].peer_id, self._other(number), "votes")

    def _other(self, number: int) -> str:
        """The next node. A fault at a vote or an adoption may hit it instead of the voter or adopter."""
        return self.nodes[(number + 1) % len(self.nodes)].peer_id

    async def run(self) -> None:
        """Start the nodes, cause the faults, and judge the end."""
        for node, at_s in zip(self.nodes, self.scenario.join_at_s, strict=True):
            self.loop.call_later(at_s, self._start, node)
        for fault in self.scenario.faults:
            self.loop.call_at(fault.at_s, self._arm if fault.verb else self._cause, fault)
        self.network.watch = self._strike
        await asyncio.sleep(self.scenario.length_s - QUIET_S)
        self._armed.clear()
        while self.loop.time() < self.scenario.length_s and not self.invariants.is_whole():  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(1.0)
        self.invariants.ended(self.scenario)

    def _arm(self, fault: Fault) -> None:
        self._armed.append(fault)

    def _strike(self, sender: str, receiver: str, text: str) -> float:
        """Cause the faults that wait for this message. Returns the seconds by which it is late."""
        late_s = 0.0
        for fault in [fault for fault in self._armed if fault.verb == text]:
            self._armed.remove(fault)
            if fault.kind == "delay":
                late_s += fault.seconds
                self.report.faults["delay"] += 1
                continue
            numbers = [self._numbers[sender], self._numbers[receiver]]
            node, other = numbers if fault.node == 0 else reversed(numbers)
            struck = replace(
                fault, at_s=self.loop.time(), node=node, other=other if fault.kind == "cut" else -1, verb=""
            )
            # The fault happens after this message has been sent.
            self.loop.call_soon(self._cause, struck, context=NOBODYS)
        return late_s

    def _start(self, node: SimulatedNode) -> None:
        if not node.is_alive:
            node.start()

    def _cause(self, fault: Fault) -> None:
        node = self.nodes[fault.node]
        if fault.kind == "blackout":
            for place, one in enumerate(self.nodes):
                if one.is_alive:
                    one.crash(loses_power=True)
                    down_s = fault.seconds if one is node else min(fault.seconds, 3.0) * (1 + place % 3) / 3
                    self.loop.call_later(down_s, self._start, one)
        elif fault.kind in ("cut", "split"):
            for sender, receiver in self._pairs(fault):
                self.network.cut(sender, receiver, fault.dial_s)
                self.loop.call_later(fault.seconds, self.network.heal, sender, receiver)
        elif not node.is_alive:
            return
        elif fault.kind in ("crash", "power"):
            node.crash(loses_power=fault.kind == "power")
            if fault.seconds < FOREVER_S:
                self.loop.call_later(fault.seconds, self._start, node)
        elif fault.kind == "stall":
            node.stall(fault.seconds)
        elif fault.kind == "clock":
            node.clock_ahead_ms -= round(1000 * 60 * fault.seconds)
        self.report.faults[fault.kind] += 1
        self.invariants.happened(fault)

    def _pairs(self, fault: Fault) -> list[tuple[str, str]]:
        """The pairs of sender and receiver between which a cut or a split drops messages."""
        if fault.kind == "cut":
            return [(self.nodes[fault.node].peer_id, self.nodes[fault.other].peer_id)]
        side = {self.nodes[number].peer_id for number in fault.side or (fault.node,)}
        rest = {node.peer_id for node in self.nodes} - side
        return [pair for one in sorted(side) for other in sorted(rest) for pair in ((one, other), (other, one))]


def simulate(
    scenario: Scenario, *, keep_trace: bool = False, run: Callable[[World], Awaitable[None]] = World.run
) -> tuple[Report, World]:
    """Run a scenario. Returns the report, and the world, which holds the trace."""
    torch.set_num_threads(1)
    began_s = time.process_time()
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=MEMORY if MEMORY.is_dir() else None))
    collects = gc.isenabled()
    gc.disable()  # A collection would run at a moment that depends on the process.
    try:
        with simulated_keys():
            world = World(scenario, folder, keep_trace=keep_trace)
            asyncio.set_event_loop(world.loop)
            handler = TraceHandler(world.network)
            if keep_trace:
                logging.disable(logging.NOTSET)
                logging.getLogger("node").addHandler(handler)
                logging.getLogger("node").setLevel(logging.INFO)
            try:
                world.loop.run_until_complete(run(world))
            except (Deadlock, TooManyEvents) as exc:
                world.report.violations.append(str(exc))
            logging.getLogger("node").removeHandler(handler)
            report = world.report
            report.virtual_s, report.events, report.messages = (
                world.loop.time(),
                world.loop.events,
                world.network.messages,
            )
            report.rounds, report.forks = world.invariants.rounds, world.invariants.forks
            report.digest = world.network.digest
            world.loop.close()
    finally:
        asyncio.set_event_loop(None)
        shutil.rmtree(folder)
        if collects:
            gc.enable()
            gc.collect(0)
    report.cpu_s = time.process_time() - began_s
    return report, world


def report_of(scenario: Scenario) -> Report:
    """Run a scenario, and free the memory of its world at once. A process that simulates many seeds needs this."""
    report = simulate(scenario)[0]
    gc.collect(1)  # The world was still in use when `simulate` collected.
    return report


class TraceHandler(logging.Handler):
    """Adds what a node logs to the trace."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network

    def emit(self, record: logging.LogRecord) -> None:
        life = PROCESS.get()
        if isinstance(life, Life) and self._network.trace is not None:
            text = f"{record.levelname.lower()}: {record.getMessage()}"
            self._network.trace.append(Sent(self._network.loop.time(), life.peer_id, life.peer_id, text))


def quiet() -> None:
    """Silence the logs of the nodes."""
    logging.disable(logging.CRITICAL)


def start_process() -> None:
    """Prepare a process that simulates many seeds: collections skip what the imports made, and are rare."""
    quiet()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)

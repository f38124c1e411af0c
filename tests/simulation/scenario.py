"""A scenario describes one simulated run: nodes, lines and faults that are drawn from a seed. Faults can be removed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.simulation.network import DIAL_S, Line

HOSTILE = (
    "FlippedBits",
    "FalseChunks",
    "OnlyMyself",
    "FalseSquares",
    "HugeMean",
    "Silence",
    "FalseNorm",
    "FalseClaim",
    "FarAhead",
    "TwoProposals",
    "OtherSigner",
    "Excluder",
    "LonePlan",
    "NextIsMine",
)
PROPOSERS = ("TwoProposals", "LonePlan")
"""Hostile members that propose another outcome than the one that members have accepted."""
BOUND_S = 5.0
"""The failure detector's bound: a node that is away for less never counts as dead (`MemberTimings.dead_s` is 8 s, and a
record needs a few seconds to reach all)."""
QUIET_S = 120.0
"""At the end of each run nothing fails for this long, and the swarm must be whole again."""
FOREVER_S = 10_000.0
VERBS = (
    "attend",
    "attend ok",
    "contribute",
    "collect",
    "collect ok",
    "average",
    "average ok",
    "fetch",
    "fetch ok",
    "chain ok",
)
"""Messages at which faults happen. The names with `ok` are replies."""
END_VERBS = ("attend", "attend ok", "votes", "fetch ok", "adopts")
"""Messages at the end of a round, and the moments at which a node votes or adopts."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a node at a virtual time."""

    at_s: float
    kind: str
    """`delay` (of one message), `crash`, `power` (a crash that also loses the node's messages under way), `blackout`
    (all nodes lose power, and the others start before this one), `stall`, `cut` (one way, from node to other), `split`
    (nobody on this side reaches anyone on the other), or `clock` (the clock is set back at the node's next start)."""
    node: int
    seconds: float
    other: int = -1
    side: tuple[int, ...] = ()
    """Nodes on one side of a split. Empty means `node` alone."""
    dial_s: float = DIAL_S
    """After this time, a call over a cut or split path fails."""
    verb: str = ""
    """If set, the fault happens at the first message of this verb after `at_s`; with `votes` and `adopts`, when an
    honest node does so. It hits the sender (`node` 0), the receiver (1), or in a cut the path between them. A split
    separates the hit node from all others."""

    def __str__(self) -> str:
        seconds = "for good" if self.seconds >= FOREVER_S else f"for {self.seconds:.2f} s"
        if self.verb:
            whom = "receiver" if self.node else "sender"
            return f"after {self.at_s:.2f} s, at the first {self.verb!r}: {self.kind} its {whom} {seconds}"
        towards = f" to n{self.other}" if self.other >= 0 else "".join(f" n{node}" for node in self.side[1:])
        return f"{self.at_s:6.2f} s: {self.kind} n{self.node}{towards} {seconds}"


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    step_s: tuple[float, ...]
    """Seconds per inner step of each node."""
    lines: tuple[Line, ...]
    faults: tuple[Fault, ...]
    length_s: float
    min_peers: int
    quorum_ratio: float
    policy: str
    disk_s: float
    """The longest delay of the disk."""
    join_at_s: tuple[float, ...]
    hostile: str = ""
    """The attack of the last node. Empty means that it is honest."""
    inner_steps: int = 10
    chunks: int = 4
    chunk_bytes: int = 0
    """The encoded size of a chunk. 0 means as small as possible."""
    first_round_s: float | None = None
    """As in `Habits`."""
    founders: int = 1
    """As in `Habits`."""
    joiners_download: bool = False
    """Whether nodes that join later have no state at first, as in `Habits.joins_by_download`."""
    is_steered: bool = False
    """Whether the run has amendments, by the key of node 0."""
    gossip_s: float = 1.0
    """Time between two heartbeats. A peer is dead after eight of them."""

    @property
    def nodes(self) -> int:
        return len(self.step_s)

    def without_fault(self, place: int) -> Scenario:
        return replace(self, faults=self.faults[:place] + self.faults[place + 1 :])

    def describe(self) -> str:
        speeds = ", ".join(f"n{i} {1 / step_s:.1f} steps/s" for i, step_s in enumerate(self.step_s))
        lines = ", ".join(
            f"n{i} {1000 * line.latency_s:.0f}+{1000 * line.jitter_s:.0f} ms" for i, line in enumerate(self.lines)
        )
        head = f"seed {self.seed}: {self.nodes} nodes, min_peers {self.min_peers}, {self.policy}, {self.length_s:.0f} s"
        hostile = (f"n{self.nodes - 1} is hostile: {self.hostile}",) if self.hostile else ()
        return "\n".join((head, speeds, lines, *hostile, *map(str, self.faults)))


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    nodes = rng.choice((2, 3, 3, 4, 5, 6, 7, 9))
    stormy_s = rng.choice((10.0, 20.0, 40.0))
    break_ratio = rng.choice((0.0, 0.0, 0.0, 0.002))
    lines = tuple(_line(rng, break_ratio) for _ in range(nodes))
    step_s = tuple(rng.choice((0.1, 0.2, 0.4)) for _ in range(nodes))
    # Few faults happen within one round, unless all happen within a few seconds.
    from_s = rng.uniform(1.0, stormy_s)
    window_s = rng.choice(((1.0, stormy_s), (from_s, min(stormy_s, from_s + 8.0))))
    verbs = rng.choice((VERBS, END_VERBS, (rng.choice(END_VERBS),)))
    faults = [_fault(rng, nodes, window_s, verbs) for _ in range(rng.choice((0, 1, 2, 3, 4, 6, 8, 12)))]
    late_ratio = rng.choice((0.25, 0.25, 1.0))
    joins = (0.0, *(0.5 + (rng.random() < late_ratio) * rng.uniform(0, stormy_s) for _ in range(nodes - 1)))
    scenario = Scenario(
        seed=seed,
        step_s=step_s,
        lines=lines,
        faults=(),
        length_s=stormy_s + QUIET_S,
        min_peers=rng.choice((1, 1, 2, 3)),
        quorum_ratio=rng.choice((0.5, 0.75)),
        policy=rng.choice(("time", "time", "steps")),
        disk_s=rng.choice((0.001, 0.02, 0.5)),
        join_at_s=joins,
        hostile=rng.choice(HOSTILE) if rng.random() < 0.4 else "",
    )
    if not scenario.hostile and rng.random() < 0.05:
        scenario = replace(scenario, hostile="ForgedCommit")
    if not scenario.hostile and random.Random(f"heavy fork {seed}").random() < 0.04:
        scenario = replace(scenario, hostile="HeavyFork")
    if not scenario.hostile and random.Random(f"false state {seed}").random() < 0.04:
        scenario = replace(scenario, hostile="FalseState")
    for kind, text in (("FarAttempt", "far attempt"), ("OldAges", "old ages")):
        if not scenario.hostile and scenario.nodes > 4 and random.Random(f"{text} {seed}").random() < 0.06:
            scenario = replace(scenario, hostile=kind)
    # A joiner was away, so it may believe a forged certificate.
    if scenario.hostile != "ForgedCommit" and random.Random(f"joins {seed}").random() < 0.1:
        scenario = replace(scenario, joiners_download=True)
    # Half of the crashes lose power.
    chance = random.Random(f"lost commit {seed}")
    if scenario.hostile in PROPOSERS and chance.random() < 0.5:
        # The first to commit loses power with its certificates, and the hostile member may lead the next attempt.
        at_s, seconds = chance.uniform(0.0, stormy_s), chance.uniform(0.1, 15.0)
        faults.append(Fault(at_s, "power", 0, seconds, verb="adopts"))
    faults = [replace(f, kind="power") if f.kind == "crash" and rng.random() < 0.5 else f for f in faults]
    fitting = [fault for fault in faults if _fits(fault, scenario.hostile)]
    return replace(scenario, faults=tuple(sorted(fitting, key=lambda fault: fault.at_s)))


def _fits(fault: Fault, hostile: str) -> bool:
    if hostile == "ForgedCommit":  # A node that was away may believe the forged certificate.
        return fault.kind == "delay"
    # A hostile node that is alone for so long may commit a round that nobody else can fetch.
    return not hostile or fault.kind not in ("split", "blackout") or fault.seconds < BOUND_S


def _line(rng: random.Random, break_ratio: float) -> Line:
    jitter_s = rng.choice((0.0, 0.01, 0.05, 0.3))
    return Line(latency_s=rng.choice((0.001, 0.01, 0.05, 0.1)), jitter_s=jitter_s, break_ratio=break_ratio)


def _fault(rng: random.Random, nodes: int, window_s: tuple[float, float], verbs: Sequence[str]) -> Fault:
    kind = rng.choice(
        ("crash", "crash", "crash", "stall", "cut", "split", "split", "blackout", "delay", "delay", "clock")
    )
    at_s, short = rng.uniform(*window_s), rng.uniform(0.1, 0.8 * BOUND_S)
    seconds = rng.choice((short, short, rng.uniform(BOUND_S, 15.0)))
    dial_s = rng.choice((0.05, DIAL_S))
    if kind == "delay" or (kind != "clock" and rng.random() < 0.6):
        return Fault(at_s, kind, rng.randint(0, 1), seconds, dial_s=dial_s, verb=rng.choice(verbs))
    if kind == "crash" and rng.random() < 0.2:
        seconds = FOREVER_S
    node, other = rng.sample(range(nodes), 2)
    side = tuple(rng.sample(range(nodes), rng.randint(1, nodes - 1))) if kind == "split" else ()
    return Fault(at_s, kind, side[0] if side else node, seconds, other if kind == "cut" else -1, side, dial_s)

"""What was seen of a storm, as plain values that go into a JSON file and come back. Knows no node and no judgement.

Moments are seconds of the monotonic clock of the process that watched.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MEMBER_PHASES = frozenset({"training", "syncing", "draining"})


@dataclass(frozen=True, slots=True)
class Look:
    """One answer of `/api/v1/status`."""

    at_s: float
    phase: str
    round: int
    head: str
    digest: str


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed round in a node's list of rounds, and when it was first seen there."""

    at_s: float
    round: int
    head: str
    digest: str
    outcome: str
    included: bool
    """Whether this node's own contribution is in."""


@dataclass(slots=True)
class Hurt:
    """One fault. `over_s`: when its cause was gone (the process continued, or started again); None: for good."""

    node: str
    kind: str
    at_s: float
    over_s: float | None
    after_round: int = -1
    """The node is itself again only in a round after this one (damage that shows later)."""


@dataclass(slots=True)
class Life:
    """Memory and open handles of one process, from its start to its end."""

    node: str
    what: str
    pid: int
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """(at_s, resident bytes, open handles)."""


@dataclass(slots=True)
class NodeSeen:
    name: str
    peer_id: str = ""
    looks: list[Look] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    rounds_joined: int = 0
    """Contributions that arrived, over all starts."""
    rounds_attempted: int = 0
    """Contributions made, over all starts."""
    failures: dict[str, int] = field(default_factory=dict)
    """Failed attempts by reason, over all starts."""
    mismatches: int = 0
    """Times that the node found itself off the chain and fetched the state again."""
    restarts: int = 0


@dataclass(slots=True)
class Observed:
    settings: dict[str, Any]
    nodes: dict[str, NodeSeen] = field(default_factory=dict)
    hurts: list[Hurt] = field(default_factory=list)
    """Joins too: a node that starts is hurt until it takes part."""
    lives: list[Life] = field(default_factory=list)
    oddities: list[str] = field(default_factory=list)
    """What should not happen: nodes that ended or failed unasked, processes left behind."""
    began_s: float = 0.0
    """The first fault was due."""
    calm_s: float = 0.0
    """The last fault was over."""
    ended_s: float = 0.0
    at_end: dict[str, Look] = field(default_factory=dict)
    """Of the nodes that were alive at the end: where each stood."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def load(path: Path) -> Observed:
    raw = json.loads(path.read_text(encoding="utf-8"))
    nodes = {name: _node(one) for name, one in raw.pop("nodes").items()}
    hurts = [Hurt(**one) for one in raw.pop("hurts")]
    lives = [
        Life(**{**one, "samples": [(at_s, size, handles) for at_s, size, handles in one["samples"]]})
        for one in raw.pop("lives")
    ]
    at_end = {name: Look(**one) for name, one in raw.pop("at_end").items()}
    return Observed(nodes=nodes, hurts=hurts, lives=lives, at_end=at_end, **raw)


def _node(raw: dict[str, Any]) -> NodeSeen:
    looks = [Look(**one) for one in raw.pop("looks")]
    commits = [Commit(**one) for one in raw.pop("commits")]
    return NodeSeen(looks=looks, commits=commits, **raw)

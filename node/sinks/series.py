"""What the supervisor sends to the process of a sink. Imports nothing heavy, because each of these processes does."""

from __future__ import annotations

from dataclasses import dataclass

NOT_INSTALLED = 3
"""Exit code of a sink whose package is not installed."""


@dataclass(frozen=True, slots=True)
class Point:
    """All curves at one round."""

    round: int
    tokens: int
    """Tokens of the whole swarm after the round: the x axis. The same on all nodes."""
    at_s: float
    """When this node committed the round, Unix time."""
    values: dict[str, float]
    """Value by the name of its curve: `run/..` is the same on all nodes, and `node/..` is this node's own. A curve
    without a value at this round is missing."""


@dataclass(frozen=True, slots=True)
class SinkTarget:
    """Where a sink writes."""

    folder: str
    """A folder of this run, which exists."""
    run: str
    """The run's name from the manifest."""
    run_id: str
    """The first characters of the manifest's hash."""
    node: str
    """This node's name, or a short form of its peer id."""
    node_id: str
    """The last characters of this node's peer id."""

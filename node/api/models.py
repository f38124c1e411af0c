"""The bodies of the API's answers that are not in `node.status`. Lists come in an object. Knows only words."""

from __future__ import annotations

from typing import Any, Literal

from node.api.seam import LogLine
from node.status import PeerRow, Phase, RoundRecord, Value


class Health(Value):
    ok: bool
    phase: Phase
    code: str


class Swarm(Value):
    peers: tuple[PeerRow, ...]


class Rounds(Value):
    rounds: tuple[RoundRecord, ...]
    """Newest first."""


class History(Value):
    step_s: float
    """Seconds from one moment of `at_s` to the next."""
    at_s: tuple[float, ...]
    """Unix time at which each step begins; the axis of all series."""
    series: dict[str, tuple[float | None, ...]]
    """One value a step, null where nothing is known: the node was off, or the machine asleep."""


class Contribution(Value):
    """What one peer has given, in the rounds that this node knows of."""

    peer_id: str
    short_id: str
    name: str
    rounds: int
    tokens: int
    last_round: int
    this_node: bool


class Contributions(Value):
    contributions: tuple[Contribution, ...]
    """Most tokens first."""


class Logs(Value):
    records: tuple[LogLine, ...]
    """Oldest first."""
    last_id: int
    """Ask with `after=last_id` for what comes next."""


class Version(Value):
    version: str
    revision: str
    python: str
    torch: str
    hivemind: str


class ResolvedConfig(Value):
    config: dict[str, Any]
    """Every key as it holds now; secrets are hidden."""
    origins: dict[str, str]
    """Where each key came from, `default` included, under its dotted name."""
    changeable: dict[str, Literal["now", "restart"]]
    """What `PATCH` takes: some keys hold at once, others from the worker's next start (pause and resume do that)."""
    pending_restart: tuple[str, ...]
    """Keys that have changed since the worker's start, and wait for its next one."""


class Accepted(Value):
    phase: Phase
    """The phase that the action leads to."""


class SessionOpened(Value):
    cookie: str
    """Name of the cookie that was set."""

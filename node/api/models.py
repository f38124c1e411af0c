"""Response bodies of the API that are not in `node.status`. A list is always inside an object."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from node.api.node_interface import LogLine
from node.config.amendments import MOST_BYTES, SignedAmendment
from node.status import DepartedPeer, JournalEntry, PeerRow, Phase, RoundRecord, Value


class Health(Value):
    ok: bool
    phase: Phase
    code: str


class Swarm(Value):
    peers: tuple[PeerRow, ...]
    departed: tuple[DepartedPeer, ...] = ()
    """The peers that left or fell silent within the last hour, newest first."""


class JournalEntries(Value):
    entries: tuple[JournalEntry, ...]
    """Newest first, since the node started."""


class Rounds(Value):
    rounds: tuple[RoundRecord, ...]
    """Newest first."""


class History(Value):
    step_s: float
    """Seconds from one moment of `at_s` to the next."""
    at_s: tuple[float, ...]
    """Unix time at which each step begins; the axis of all series."""
    series: dict[str, tuple[float | None, ...]]
    """One value per step; null while the node was off or the machine asleep."""


class Contribution(Value):
    """What one member has contributed, as the table of credit has it."""

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
    """Pass it as `after` to get the records that follow."""


class Version(Value):
    version: str
    revision: str
    python: str
    torch: str
    hivemind: str


class ResolvedConfig(Value):
    config: dict[str, Any]
    """The current value of every key; secrets are hidden."""
    origins: dict[str, str]
    """Source of the value of each dotted key, such as `default`."""
    changeable: dict[str, Literal["now", "restart"]]
    """The keys that `PATCH` accepts. A `now` key applies at once, a `restart` key from the worker's next start
    (pause and resume)."""
    cores: int
    """Processor cores that this node may use."""
    timezone: str
    """The time zone of `schedule.active`, such as `Europe/Berlin`; `machine` if the machine's has no name."""
    pending_restart: tuple[str, ...]
    """Keys that changed after the worker started and apply from its next start."""


class Accepted(Value):
    phase: Phase
    """The phase that the action leads to."""


class SubmittedAmendment(SignedAmendment):
    """An amendment of the run, as `diloco-node steer` writes it."""

    text: str = Field(min_length=1, max_length=MOST_BYTES)
    """The canonical text that is signed."""


class AmendmentAccepted(Value):
    digest: str
    """SHA-256 of the text. `GET /api/v1/amendments` has it as soon as the amendment is pending or refused."""


class SessionOpened(Value):
    cookie: str
    """Name of the cookie that was set."""

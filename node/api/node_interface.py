"""What the API needs of a node: protocols that the daemon implements, and the values that cross them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from node.config.amendments import SignedAmendment
from node.config.schema import Config
from node.errors import NodeError, UsageError
from node.status import DepartedPeer, GovernanceInfo, JournalEntry, Moment, PeerRow, Phase, RoundRecord, Status, Value

ActionName = Literal["pause", "resume", "drain", "leave"]
Level = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
PAUSE_MAX_S = 366 * 86400.0
SERIES = (
    "training_loss", "evaluation_loss", "tokens_per_second", "swarm_tokens_per_second", "swarm_peers",
    "utilization_ratio", "forecast_utilization_ratio",
    "activity_compute", "activity_sync_wait", "activity_data", "activity_evaluate", "activity_checkpoint",
    "activity_paused", "activity_idle",
    "sync_rendezvous", "sync_reduce", "sync_commit", "sync_apply", "sync_blocked",
    "sent_bytes_per_second", "received_bytes_per_second",
)  # fmt: skip
"""Names of the time series in the history."""


def level_name(levelno: int) -> Level:
    """Map a level of the standard library to ours; critical counts as error."""
    if levelno >= logging.ERROR:
        return "error"
    if levelno >= logging.WARNING:
        return "warning"
    return "info" if levelno >= logging.INFO else "debug"


class LogLine(Value):
    """One log record of the supervisor or the worker."""

    id: int
    """Number of the record since the node started. The API's parameter `after` takes it."""
    at: str
    level: Level
    logger: str
    message: str
    phase: str = ""
    """Phase of the node when the record was logged."""
    round: int | None = None


class PauseOrder(Value):
    """How long to pause. At most one field is set; without any, the pause lasts until `resume`."""

    for_s: float | None = Field(None, gt=0, le=PAUSE_MAX_S)
    """Seconds from now."""
    until: Moment | None = None
    """A moment with time zone (RFC 3339), at most PAUSE_MAX_S ahead."""
    after_round: int | None = Field(None, ge=0)
    """Pause when this round has ended, until `resume`."""

    @model_validator(mode="after")
    def _one_at_most(self) -> PauseOrder:
        if sum(value is not None for value in (self.for_s, self.until, self.after_round)) > 1:
            raise ValueError("give only one of for_s, until and after_round")
        return self


@dataclass(frozen=True, slots=True)
class View:
    """A node at one moment."""

    status: Status
    swarm: tuple[PeerRow, ...]
    rounds: Sequence[RoundRecord]
    """Newest first."""
    logs: Sequence[LogLine]
    """Oldest first."""
    log_counts: Mapping[str, int]
    """Records since the start, by level."""
    alive: bool
    """Whether the worker's last heartbeat is recent. True without a worker."""
    journal: Sequence[JournalEntry] = ()
    """Newest first."""
    departed: Sequence[DepartedPeer] = ()
    """Newest first."""
    governance: GovernanceInfo = field(default_factory=GovernanceInfo)


@dataclass(frozen=True, slots=True)
class Space:
    """Disk space of the data folder, bytes."""

    used_bytes: Mapping[str, int]
    """By kind of file."""
    free_bytes: int = 0
    """Bytes of the disk that this user can still write."""
    size_bytes: int = 0


PROCESS_KINDS = ("supervisor", "worker", "rank", "p2pd", "other")
"""Kinds of the node's processes. `rank` is a rank other than the worker, `other` such as a sink of the curves."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What the node's processes use, by kind of process."""

    memory_bytes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(PROCESS_KINDS, 0))
    """Resident memory. Processes share some of it, such as libraries."""
    cpu_seconds: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PROCESS_KINDS, 0.0))
    """Processor time since this supervisor started, with that of processes that have ended."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over one time axis with even steps."""

    step_s: float
    at_s: Sequence[float]
    """Unix time at which each step begins."""
    columns: Mapping[str, Sequence[float | None]]
    """Values by name, which is one of SERIES. None means unknown."""


class RecentWork(Value):
    """What this node did from a moment until now."""

    seen_s: float
    """Seconds in which the node ran."""
    rounds: int
    """Rounds that ended with a result while this node was a member, whether they included its work or not."""
    computed_s: float
    tokens: int
    """Tokens that this node trained on."""
    tokens_merged: int
    """Tokens of this node that committed rounds include."""


@dataclass(frozen=True, slots=True)
class Configured:
    """The current configuration."""

    config: Config
    origins: Mapping[str, str]
    """Source of the value of each dotted key."""
    changeable: Mapping[str, Literal["now", "restart"]]
    pending_restart: tuple[str, ...] = ()


class HistoryUnavailable(NodeError):
    """The history cannot be read at the moment; the message says why."""

    code = "history_away"


class NotAllowed(UsageError):
    """The node's phase does not allow the action. The message says why and what to do instead."""

    code = "not_allowed"


class GeneratorBusy(NodeError):
    """Another text is being continued; the message says what to do."""

    code = "busy"


class GeneratorFailed(NodeError):
    """The text was not continued; the message says why."""

    code = "no_text"


class TextRequest(Value):
    """A text that the model continues."""

    prompt: str = Field(min_length=1, max_length=2000)
    tokens: int = Field(64, ge=1, le=256)
    """Most tokens to add."""
    temperature: float = Field(0.8, ge=0, le=10)
    """0 means always the likeliest token."""


class GeneratedText(Value):
    text: str
    """How the model continues the prompt. It is untrusted output of the model."""
    round: int
    """The round after which the model was saved."""


class ContinuesText(Protocol):
    """Samples from the newest checkpoint."""

    async def generate(self, request: TextRequest) -> GeneratedText:
        """Raises GeneratorBusy or GeneratorFailed."""
        ...


class Node(Protocol):
    """State of the node and actions on it."""

    def view(self) -> View:
        """Return the present state. Never waits."""
        ...

    def subscribe(self) -> AbstractContextManager[asyncio.Queue[Status | None]]:
        """Return a queue of statuses, beginning with the present one. It holds only the newest; None is the end."""
        ...

    @property
    def is_ending(self) -> bool:
        """Whether the process is about to end, and open requests must."""
        ...

    async def keep_counters(self) -> None:
        """Store the totals, so that no counter on `/metrics` falls if the node is killed now. Takes half a second at
        most."""
        ...

    def act(self, action: ActionName, order: PauseOrder) -> Phase:
        """Begin an action and return the phase it leads to. Idempotent. Raises NotAllowed."""
        ...

    def submit(self, amendment: SignedAmendment) -> None:
        """Submit an amendment of the run. `View.governance` says what became of it. Raises NotAllowed."""
        ...


class HistoryReader(Protocol):
    """The history, kept over restarts. Calls raise HistoryUnavailable if it cannot be read within seconds."""

    async def chart(self, names: Collection[str], since_s: float | None, points: int) -> Chart:
        """Return at most `points` steps from `since_s` (Unix time; None means an hour ago) until now."""
        ...

    async def work(self, since_s: float) -> RecentWork:
        """Return what this node did from `since_s` (Unix time) until now."""
        ...


class Settings(Protocol):
    """The part of the configuration that can change while the node runs."""

    def configured(self) -> Configured: ...

    def change(self, patch: Mapping[str, Any]) -> Configured:
        """Apply nested tables of new values, all of them or none. Raises overrides.OverrideError."""
        ...

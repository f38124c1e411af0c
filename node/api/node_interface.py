"""What the API needs of a node: protocols that the daemon implements, and the values that cross them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from node.config.schema import Config
from node.errors import NodeError, UsageError
from node.status import Moment, PeerRow, Phase, RoundRecord, Status, Value

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
    """Increases by one per record since the node started; `after=` takes it."""
    at: str
    level: Level
    logger: str
    message: str
    phase: str = ""
    """Phase of the node when the record was logged."""
    round: int | None = None


class PauseOrder(Value):
    """How long to pause; at most one of the three fields. Empty: until `resume`."""

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
    """The worker's heartbeat is recent, or no worker is meant to run."""


@dataclass(frozen=True, slots=True)
class Space:
    """Disk space of the data folder, bytes."""

    used_bytes: Mapping[str, int]
    """By kind of file."""
    free_bytes: int = 0
    """Available to this user on the disk."""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over one time axis with even steps."""

    step_s: float
    at_s: Sequence[float]
    """Unix time at which each step begins."""
    columns: Mapping[str, Sequence[float | None]]
    """By names of SERIES; None where nothing is known."""


@dataclass(frozen=True, slots=True)
class PeerContribution:
    """What one peer contributed to the rounds that this node knows."""

    peer_id: str
    name: str
    rounds: int
    tokens: int
    last_round: int


@dataclass(frozen=True, slots=True)
class Configured:
    """The current configuration."""

    config: Config
    origins: Mapping[str, str]
    """Dotted key to the source of its value."""
    changeable: Mapping[str, Literal["now", "restart"]]
    pending_restart: tuple[str, ...] = ()


class HistoryUnavailable(NodeError):
    """The history cannot be read at the moment; the message says why."""

    code = "history_away"


class NotAllowed(UsageError):
    """The action does not fit the node's phase; the message says why, and what would."""

    code = "not_allowed"


class Node(Protocol):
    """State of the node and actions on it."""

    def view(self) -> View:
        """The present state. Never waits."""
        ...

    def subscribe(self) -> AbstractContextManager[asyncio.Queue[Status | None]]:
        """A queue of the newest status, starting with the present one. A slow reader misses some; None ends it."""
        ...

    def act(self, action: ActionName, order: PauseOrder) -> Phase:
        """Begin an action and return the phase it leads to. Idempotent. Raises NotAllowed."""
        ...


class HistoryReader(Protocol):
    """The record kept over restarts. Raises HistoryUnavailable where it cannot be read within seconds."""

    async def chart(self, names: Collection[str], since_s: float | None, points: int) -> Chart:
        """At most `points` steps from `since_s` (Unix time; None: an hour ago) until now."""
        ...

    async def shares(self, limit: int) -> Sequence[PeerContribution]:
        """The peers with the most tokens, most first."""
        ...


class Settings(Protocol):
    """The part of the configuration that can change while the node runs."""

    def configured(self) -> Configured: ...

    def change(self, patch: Mapping[str, Any]) -> Configured:
        """Apply a nested part of the configuration, all of it or nothing. Raises overrides.OverrideError."""
        ...

"""What the API needs of a node, and nothing else. The supervisor offers it; tests offer a small one of their own.

Knows the words of `node.status`; knows no HTTP and no process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from node.config import Config
from node.errors import NodeError, UsageError
from node.status import Moment, PeerRow, Phase, RoundRecord, Status, Value

ActionName = Literal["pause", "resume", "drain", "leave"]
Level = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")


def level_name(levelno: int) -> Level:
    """The word for a level of the standard library; whatever is above error is an error."""
    if levelno >= logging.ERROR:
        return "error"
    if levelno >= logging.WARNING:
        return "warning"
    return "info" if levelno >= logging.INFO else "debug"


class LogLine(Value):
    """One log record of supervisor or worker."""

    id: int
    """Grows by one a record since the node started; `after=` takes it."""
    at: str
    level: Level
    logger: str
    message: str
    phase: str = ""
    """Of the node, when it was said."""
    round: int | None = None


PAUSE_MAX_S = 366 * 86400.0


class PauseOrder(Value):
    """How long to pause; empty: until `resume`. At most one of the three."""

    for_s: float | None = Field(None, gt=0, le=PAUSE_MAX_S)
    """Seconds from now."""
    until: Moment | None = None
    """A moment with time zone (RFC 3339), at most as far ahead as `for_s` may be."""
    after_round: int | None = Field(None, ge=0)
    """Train on until this round is over, then pause until `resume`."""

    @model_validator(mode="after")
    def _one_at_most(self) -> PauseOrder:
        if sum(value is not None for value in (self.for_s, self.until, self.after_round)) > 1:
            raise ValueError("give only one of for_s, until and after_round")
        return self


@dataclass(frozen=True, slots=True)
class View:
    """What a node is at one moment."""

    status: Status
    swarm: tuple[PeerRow, ...]
    rounds: Sequence[RoundRecord]
    """Newest first."""
    logs: Sequence[LogLine]
    """Oldest first."""
    log_counts: Mapping[str, int]
    """Records since the start, by level."""
    alive: bool
    """The worker's heartbeat is recent, or no worker is meant to run right now."""


@dataclass(frozen=True, slots=True)
class Space:
    """Of the data folder and its disk, bytes."""

    used_bytes: Mapping[str, int]
    """By kind of file."""
    free_bytes: int = 0
    """What this user may still fill."""
    size_bytes: int = 0


SERIES = (
    "training_loss", "evaluation_loss", "tokens_per_second", "swarm_tokens_per_second", "swarm_peers",
    "utilization_ratio", "forecast_utilization_ratio",
    "activity_compute", "activity_sync_wait", "activity_data", "activity_evaluate", "activity_checkpoint",
    "activity_paused", "activity_idle",
    "sync_rendezvous", "sync_reduce", "sync_commit", "sync_apply", "sync_blocked",
    "sent_bytes_per_second", "received_bytes_per_second",
)  # fmt: skip
"""What the history can be asked for."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Columns over one time axis, in even steps."""

    step_s: float
    at_s: Sequence[float]
    """Unix time at which each step begins."""
    columns: Mapping[str, Sequence[float | None]]
    """By names of SERIES; None where nothing is known."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one peer has given to the rounds that this node knows of."""

    peer_id: str
    name: str
    rounds: int
    tokens: int
    last_round: int


class HistoryAway(NodeError):
    """The history cannot be asked just now; the message says why."""

    code = "history_away"


@dataclass(frozen=True, slots=True)
class Configured:
    """The configuration that holds."""

    config: Config
    origins: Mapping[str, str]
    """Dotted key to where it came from."""
    changeable: Mapping[str, Literal["now", "restart"]]
    pending_restart: tuple[str, ...] = ()


class NotAllowed(UsageError):
    """The action does not fit the node's present phase. The message says why and what would."""

    code = "not_allowed"


class Node(Protocol):
    """The node behind the API."""

    def view(self) -> View:
        """The present moment; cheap, and never waits."""
        ...

    def subscribe(self) -> AbstractContextManager[asyncio.Queue[Status | None]]:
        """A queue of the newest status: a slow reader misses some. It starts with the present one; None ends it."""
        ...

    def act(self, action: ActionName, order: PauseOrder) -> Phase:
        """Begin an action and return the phase it leads to. Idempotent. Raises NotAllowed."""
        ...


class Past(Protocol):
    """What is known of earlier, over restarts. Raises HistoryAway where that cannot be had within seconds."""

    async def chart(self, names: Collection[str], since_s: float | None, points: int) -> Chart:
        """At most so many steps from `since_s` (Unix time; None: the last hour) until now."""
        ...

    async def shares(self, limit: int) -> Sequence[Share]:
        """Of the peers that have given most, those first."""


class Settings(Protocol):
    """What of the node can be set while it runs."""

    def configured(self) -> Configured: ...

    def change(self, patch: Mapping[str, Any]) -> Configured:
        """Take over a nested part of the configuration, all of it or nothing. Raises choices.ChoiceError."""
        ...

"""The messages between supervisor and worker: one JSON object per line over a socketpair.

The supervisor sends `Start` once, then `Adjust`, `Submit` and `Stop`. The worker sends the other messages and finally
`Ended`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from pydantic_core import PydanticSerializationError

from node.config.amendments import SignedAmendment
from node.status import GovernanceInfo, Notice, Report, RoundRecord, SavedCounters, Value

MAX_LINE_BYTES = 4 * 2**20
"""Upper bound of a line. A report of 1,000 peers is about 400 kB."""


class FoundFrom(Value):
    """The publication from which a node founds a run."""

    address: str
    """As `parse_publish_address` takes it, perhaps with a revision."""
    own_keys: tuple[str, ...] = ()
    """The keys of `[run]` that the owner has set. All others are those of the publication."""


class Start(Value):
    type: Literal["start"] = "start"
    mode: Literal["train", "relay", "pause"]
    """`relay` relays traffic and has no model. `pause` does the same for a training node while it is paused."""
    config: dict[str, Any]
    """`node.config.schema.Config.model_dump(mode="json")`."""
    join: str | None = None
    """An invite, or `ANY_RUN` for a run of the directory. With None, the worker founds a run or continues that of the
    data folder."""
    found_from: FoundFrom | None = None
    """None founds a run from `[run]` of the configuration."""
    may_move_port: bool = False
    """Whether the port in `swarm.listen` is only a default, which the next free port may replace."""
    held_addresses: tuple[str, ...] = ()
    """Listen addresses from the `ListenReport` of an earlier worker, which the supervisor keeps from other nodes."""
    counters: SavedCounters | None = None
    """Totals of earlier workers; None if they are unknown."""
    version: str = ""
    """The supervisor's version. A worker of another one cannot be sure to understand it."""


class Stop(Value):
    """Orders the worker to save, leave the swarm, and exit with code 0.

    `leave` and `pause` apply at once, even in the middle of a round. With `drain`, the worker finishes its round first.
    """

    type: Literal["stop"] = "stop"
    how: Literal["leave", "pause", "drain"]


class Adjust(Value):
    """New settings. The worker applies those that can change while it runs: name, log level and limits."""

    type: Literal["adjust"] = "adjust"
    config: dict[str, Any]
    """As in `Start`."""


class Submit(Value):
    """An amendment of the run that the owner submits."""

    type: Literal["submit"] = "submit"
    amendment: SignedAmendment


class Beat(Value):
    """Heartbeat that the worker's main thread sends about once a second while it trains, waits or downloads."""

    type: Literal["beat"] = "beat"


class Unsaved(Value):
    """Sent once a second after a `Stop`, while the worker still finishes an operation or writes a checkpoint.

    This is not a heartbeat: another thread sends it, because the main thread may be in one long operation.
    """

    type: Literal["unsaved"] = "unsaved"


class StatusReport(Value):
    type: Literal["report"] = "report"
    report: Report
    last_round: int = -1
    """Newest round in the report's counters."""


class RoundReport(Value):
    type: Literal["round"] = "round"
    record: RoundRecord


class DurationReport(Value):
    """Durations since the previous such message. The keys are `inner_step`, `sync.STAGE` and `blocked.STAGE`."""

    type: Literal["observed"] = "observed"
    seconds: dict[str, list[float]]


class NoticeReport(Value):
    """Sets a notice until the worker withdraws it or ends."""

    type: Literal["notice"] = "notice"
    code: str
    notice: Notice | None
    """None withdraws the notice with this code."""


class ListenReport(Value):
    """The multiaddresses, without peer id, on which the worker listens."""

    type: Literal["listen"] = "listen"
    addresses: tuple[str, ...]


class GovernanceReport(Value):
    """The amendments of the run. Sent when they change."""

    type: Literal["governance"] = "governance"
    governance: GovernanceInfo


class LogReport(Value):
    type: Literal["log"] = "log"
    level: str
    logger: str
    message: str
    at: str
    """UTC, RFC 3339."""
    round: int | None = None


class Ended(Value):
    """The worker's last message. `exit_code` is 0 after a `Stop` or `run_complete`, otherwise as in `node.errors`."""

    type: Literal["ended"] = "ended"
    exit_code: int
    code: str
    reason: str


WorkerMessage = (
    Beat
    | Unsaved
    | StatusReport
    | RoundReport
    | DurationReport
    | NoticeReport
    | ListenReport
    | GovernanceReport
    | LogReport
    | Ended
)
SupervisorMessage = Start | Adjust | Submit | Stop

WORKER_MESSAGE: TypeAdapter[WorkerMessage] = TypeAdapter(Annotated[WorkerMessage, Field(discriminator="type")])
SUPERVISOR_MESSAGE: TypeAdapter[SupervisorMessage] = TypeAdapter(
    Annotated[SupervisorMessage, Field(discriminator="type")]
)


def encode(message: WorkerMessage | SupervisorMessage) -> bytes:
    """Return the message as one line of JSON, newline included."""
    try:
        text = message.model_dump_json()
    except PydanticSerializationError:  # A text quotes a file name that is not UTF-8.
        text = json.dumps(message.model_dump(mode="json"), ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"

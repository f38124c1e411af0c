"""The words between supervisor and worker: one JSON object a line over a socketpair. Knows no process and no torch.

Down (supervisor to worker): `Start` once, then `Adjust` and `Stop`. Up (worker to supervisor): `Beat`, `Unsaved`,
`Report` inside `Told`, `RoundTold`, `Observed`, `Noticed`, `LogTold`, and at the end `Ended`. A line that does not
parse is a bug of ours and raises.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from node.status import Notice, Report, RoundRecord, Value

TOTALS_FILE = "totals.json"
"""In the data folder: what the worker has counted, of which the supervisor reads `counters` at its start."""
MAX_LINE_BYTES = 4 * 2**20
"""Longest line on the socketpair. A report of 1,000 peers is about 400 kB."""


class Start(Value):
    """What the worker is to be. `mode`: train; relay (no training, no model); pause (relay of a training node)."""

    type: Literal["start"] = "start"
    mode: Literal["train", "relay", "pause"]
    config: dict[str, Any]
    """`node.config.Config.model_dump(mode="json")`."""
    join: str | None = None
    """An invite; None founds a run, or goes on with the run of the data folder."""
    may_move_port: bool = False
    """Nobody chose the port in `swarm.listen`: where it is taken, the next free one is used."""


class Stop(Value):
    """Save what must last, say goodbye to the swarm, end with exit code 0.

    leave, pause: at once, also in the middle of a round. drain: take part in the current round first.
    """

    type: Literal["stop"] = "stop"
    how: Literal["leave", "pause", "drain"]


class Adjust(Value):
    """Settings have changed. The worker makes those its own that hold at once: its name, log level and limits."""

    type: Literal["adjust"] = "adjust"
    config: dict[str, Any]
    """As in `Start`."""


class Beat(Value):
    """The worker's main thread is alive. At least once a second while it trains, waits, or downloads."""

    type: Literal["beat"] = "beat"


class Unsaved(Value):
    """The worker was asked to stop, and its work is not on the disk yet: it finishes an operation, or writes.

    Once a second, from a thread of its own, as the main thread may be in one long operation. Not a heartbeat.
    """

    type: Literal["unsaved"] = "unsaved"


class Told(Value):
    type: Literal["report"] = "report"
    report: Report


class RoundTold(Value):
    type: Literal["round"] = "round"
    record: RoundRecord


class Observed(Value):
    """Seconds since the last one, for the histograms. Keys: `inner_step`, `sync.STAGE`, `blocked.STAGE`"""

    type: Literal["observed"] = "observed"
    seconds: dict[str, list[float]]


class Noticed(Value):
    """Something that the owner should know, for as long as it holds or this worker lives."""

    type: Literal["notice"] = "notice"
    code: str
    notice: Notice | None
    """None: it is over."""


class LogTold(Value):
    type: Literal["log"] = "log"
    level: str
    logger: str
    message: str
    at: str
    """UTC, RFC 3339."""
    round: int | None = None


class Ended(Value):
    """The worker's last words: why it ends. `exit_code` 0 as asked (or `run_complete`); else as in errors.py."""

    type: Literal["ended"] = "ended"
    exit_code: int
    code: str
    reason: str


Up = Beat | Unsaved | Told | RoundTold | Observed | Noticed | LogTold | Ended
Down = Start | Adjust | Stop

_UP: TypeAdapter[Up] = TypeAdapter(Annotated[Up, Field(discriminator="type")])
_DOWN: TypeAdapter[Down] = TypeAdapter(Annotated[Down, Field(discriminator="type")])


def encode(message: Up | Down) -> bytes:
    """One line, newline included."""
    return message.model_dump_json().encode() + b"\n"


def decode_up(line: bytes) -> Up:
    return _UP.validate_json(line)


def decode_down(line: bytes) -> Down:
    return _DOWN.validate_json(line)

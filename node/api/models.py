"""The bodies of the API's answers that are not in `node.status`. Lists come in an object. Knows only words."""

from __future__ import annotations

from typing import Any

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
    """Where each key that is not a default came from, under its dotted name."""


class Accepted(Value):
    phase: Phase
    """The phase that the action leads to."""


class SessionOpened(Value):
    cookie: str
    """Name of the cookie that was set."""

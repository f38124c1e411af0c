"""Logging, set up once per process: for people or as JSON lines. Knows no node, no network, no torch.

Our own loggers (`node.*`) follow the configured level; those of libraries speak from WARNING on. On a terminal with a
live line, records go through that line's console, so the two never overwrite each other.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal, TextIO

from rich.console import Console
from rich.text import Text

CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""C0 and C1 but for tab and line feed, separators of lines, what turns the direction of writing, halves of characters.
As they stand in a regular expression's set."""
_CONTROL = re.compile(f"[{CONTROLS}]")
STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}


def configure(level: str, format: Literal["console", "json"], *, to: TextIO | Console) -> None:
    """Send records of this process to `to`. Called again, it replaces what it set up before, and nothing else."""
    handler: logging.Handler = ConsoleHandler(to) if isinstance(to, Console) else logging.StreamHandler(to)
    handler.setFormatter(make_formatter(format))
    handler.set_name("node.logs")
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == "node.logs"]:
        root.removeHandler(old)
    root.addHandler(handler)
    set_level(level)


def set_level(level: str) -> None:
    """Change the level while running."""
    wanted = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("node").setLevel(wanted)
    logging.getLogger().setLevel(max(wanted, logging.WARNING))


class Stamp(logging.Filter):
    """Gives records the phase, and those without a round the last one, as they are when it is said."""

    def __init__(self, now: Callable[[], tuple[str, int | None]]) -> None:
        super().__init__()
        self._now = now

    def filter(self, record: logging.LogRecord) -> bool:
        phase, round_ = self._now()
        record.phase = getattr(record, "phase", phase)
        own = getattr(record, "round", None)
        record.round = round_ if own is None else own
        return True


def make_formatter(format: Literal["console", "json"], *, date: bool = False) -> logging.Formatter:
    """`date`: whether lines for people say the day, too."""
    return JsonFormatter() if format == "json" else LineFormatter(date=date)


class LineFormatter(logging.Formatter):
    """`12:34:56 INFO node.worker.loop: message`, local time. Phase and round, if any, stand before the message.

    Whoever's words are in it, no record looks like two: further lines are indented, and other control characters, which
    drive terminals, are spelled out.
    """

    def __init__(self, *, date: bool = False) -> None:
        day = "%Y-%m-%d " if date else ""
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt=f"{day}%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        phase, number = getattr(record, "phase", ""), getattr(record, "round", None)
        where = [part for part in (phase, f"round {number}" if number is not None else "") if part]
        said = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.message).replace("\n", "\n    ")
        message = f"[{', '.join(where)}] {said}" if where else said
        return self._fmt % (record.__dict__ | {"message": message}) if self._fmt else message


class JsonFormatter(logging.Formatter):
    """One object a line: `at` (UTC, RFC 3339), `level`, `logger`, `message`; `phase`, `round`, `exception` if any."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {
            "at": at,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        number = getattr(record, "round", None)
        if number is not None:
            line["round"] = number
        if phase := getattr(record, "phase", ""):
            line["phase"] = phase
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class ConsoleHandler(logging.Handler):
    """Writes above the live line of a rich console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = Text(self.format(record), style=STYLES.get(record.levelname, ""))
            self._console.print(text, soft_wrap=True)
        except Exception:  # noqa: BLE001 - logging's own policy: a record that cannot be written never stops the program
            self.handleError(record)

"""Logging, set up once per process: for people or as JSON lines. Knows no node, no network, no torch.

Our own loggers (`node.*`) follow the configured level; those of libraries speak from WARNING on. On a terminal with a
live line, records go through that line's console, so the two never overwrite each other.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal, TextIO

from rich.console import Console
from rich.text import Text

STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}


def configure(level: str, format: Literal["console", "json"], *, to: TextIO | Console) -> None:
    """Send records of this process to `to`. Called again, it replaces what it set up before, and nothing else."""
    handler: logging.Handler = ConsoleHandler(to) if isinstance(to, Console) else logging.StreamHandler(to)
    handler.setFormatter(JsonFormatter() if format == "json" else LineFormatter())
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


class LineFormatter(logging.Formatter):
    """`12:34:56 INFO node.worker.loop: message`, local time. A record's round stands before the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        number = getattr(record, "round", None)
        if number is not None:
            record.message = f"[round {number}] {record.message}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One object a line: `at` (UTC, RFC 3339), `level`, `logger`, `message`; `round`, `exception` if any."""

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

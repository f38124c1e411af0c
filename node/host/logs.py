"""Logging of one process, as text for people or as JSON lines. `configure` is called when the process starts.

Loggers of `node.*` use the configured level; those of libraries log from WARNING on.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.text import Text

from node.host.printable import CONTROLS
from node.status import rfc3339

_CONTROL = re.compile(f"[{CONTROLS}]")
HANDLER_NAME = "node.host.logs"
STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}


def configure(level: str, format: Literal["console", "json"], *, to: TextIO | Console) -> None:
    """Send the log records of this process to `to`. A second call replaces the first one."""
    handler: logging.Handler = ConsoleHandler(to) if isinstance(to, Console) else logging.StreamHandler(to)
    handler.setFormatter(make_formatter(format))
    handler.set_name(HANDLER_NAME)
    root = logging.getLogger()
    for previous in [h for h in root.handlers if h.get_name() == HANDLER_NAME]:
        root.removeHandler(previous)
    root.addHandler(handler)
    set_level(level)


def set_level(level: str) -> None:
    """Change the level of a running process."""
    levelno = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("node").setLevel(levelno)
    logging.getLogger().setLevel(max(levelno, logging.WARNING))


class Stamp(logging.Filter):
    """Adds the node's phase and round to records that have none. `now` returns the present phase and round."""

    def __init__(self, now: Callable[[], tuple[str, int | None]]) -> None:
        super().__init__()
        self._now = now

    def filter(self, record: logging.LogRecord) -> bool:
        phase, round_ = self._now()
        record.phase = getattr(record, "phase", phase)
        own = getattr(record, "round", None)
        record.round = round_ if own is None else own
        return True


def escaped(text: str) -> str:
    """Replace characters that control a terminal by their escapes, such as `\\x1b`. Tabs and line feeds stay."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def make_formatter(format: Literal["console", "json"], *, date: bool = False) -> logging.Formatter:
    """Return a formatter. `date` says whether text lines contain the date."""
    return JsonFormatter() if format == "json" else LineFormatter(date=date)


class LineFormatter(logging.Formatter):
    """`12:34:56 INFO    node.worker.loop: [training, round 4] message`, in local time.

    A message cannot look like a second record or control the terminal: further lines are indented, and control
    characters are escaped.
    """

    def __init__(self, *, date: bool = False) -> None:
        day = "%Y-%m-%d " if date else ""
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt=f"{day}%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        phase, number = getattr(record, "phase", ""), getattr(record, "round", None)
        context = [part for part in (phase, f"round {number}" if number is not None else "") if part]
        message = escaped(record.message).replace("\n", "\n    ")
        if context:
            message = f"[{', '.join(context)}] {message}"
        return self._fmt % (record.__dict__ | {"message": message}) if self._fmt else message

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """The traceback, whose lines may contain a stranger's text as well."""
        return "    " + escaped(super().formatException(ei)).replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """One object per line: `at` (UTC, RFC 3339), `level`, `logger`, `message`; `phase`, `round`, `exception` if any."""

    def format(self, record: logging.LogRecord) -> str:
        at = rfc3339(datetime.fromtimestamp(record.created, UTC), "milliseconds")
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
    """Writes records above the live line of a rich console, so that neither overwrites the other."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = Text(self.format(record), style=STYLES.get(record.levelname, ""))
            self._console.print(text, soft_wrap=True)
        except Exception:  # noqa: BLE001 - logging's policy: a record that cannot be written never stops the program
            self.handleError(record)

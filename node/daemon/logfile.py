"""The log in the data folder: rotated, bounded, written by a thread of its own, so that no disk holds up whoever logs.

Knows files and records; knows no node.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal

from node.logs import make_formatter

logger = logging.getLogger(__name__)

FOLDER = "logs"
FILE = "node.log"
LOG_BYTES_MAX = 20_000_000
"""Of all files together."""
FILES = 4
LINES_WAITING_MAX = 2000
CLOSE_S = 0.8


class LogFile(logging.Handler):
    """Every record to `FOLDER/FILE`, the older ones to FILE.1 and so on. `close` ends its thread.

    Where the disk does not take them, or too slowly, lines are left out; the first time with one warning.
    """

    def __init__(self, folder: Path, format: Literal["console", "json"]) -> None:
        super().__init__()
        self.set_name("node.logfile")
        self.setFormatter(make_formatter(format, date=True))
        self._folder = folder
        self._lines: queue.Queue[str | None] = queue.Queue(LINES_WAITING_MAX)
        self._is_failing = False
        self._thread = threading.Thread(target=self._work, name="logfile", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except (TypeError, ValueError):
            self.handleError(record)
            return
        with suppress(queue.Full):  # A disk that hangs: the node goes on.
            self._lines.put_nowait(line)

    def close(self) -> None:
        with suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        super().close()

    def _work(self) -> None:
        file: _Rotating | None = None
        while (line := self._lines.get()) is not None:
            try:
                file = file or _Rotating(self._folder)
                file.write(line)
                self._is_failing = False
            except OSError as exc:
                if not self._is_failing:
                    self._is_failing = True
                    logger.warning("The log file pauses (%s): free some space, or see to its disk.", exc.strerror)
        if file is not None:
            file.close()


class _Rotating(logging.handlers.RotatingFileHandler):
    """The standard one, with errors that reach the caller."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        each = LOG_BYTES_MAX // FILES
        super().__init__(folder / FILE, maxBytes=each, backupCount=FILES - 1, encoding="utf-8", errors="replace")

    def write(self, line: str) -> None:
        self.emit(logging.makeLogRecord({"msg": line}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        raise  # noqa: PLE0704 - called from within its `except`

"""Log handlers of the supervisor: every record goes to the node's state and to a rotated file in the data directory."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Literal

from node.daemon.node_state import NodeState
from node.host.logs import Stamp, make_formatter
from node.worker_protocol import LogReport

logger = logging.getLogger(__name__)

FOLDER = "logs"
FILE = "node.log"
LOG_BYTES_MAX = 20_000_000
"""Largest size of all log files together."""
FILES = 4
RECORDS_WAITING_MAX = 2000
CLOSE_S = 0.8


@contextmanager
def handle_logs(state: NodeState, folder: Path, format: Literal["console", "json"]) -> Iterator[None]:
    """Inside the block, records carry phase and round, and are passed to `state` and to a file in `folder`."""
    root = logging.getLogger()
    added: list[logging.Handler] = [NodeStateHandler(state), LogFile(folder, format)]
    stamp = Stamp(state.phase_and_round)
    for handler in added:
        root.addHandler(handler)
    stamped = list(root.handlers)
    for handler in stamped:
        handler.addFilter(stamp)
    try:
        yield
    finally:
        for handler in stamped:
            handler.removeFilter(stamp)
        for handler in added:
            root.removeHandler(handler)
            handler.close()


def log_worker_record(report: LogReport) -> None:
    """Log a worker's record in this process, with the time and round that the worker gave it."""
    level = logging.getLevelNamesMapping().get(report.level.upper(), logging.INFO)
    source = logging.getLogger(report.logger)
    if not source.isEnabledFor(level):
        return
    extra = {"round": report.round}
    record = source.makeRecord(report.logger, level, "(worker)", 0, "%s", (report.message,), None, extra=extra)
    try:
        record.created = datetime.fromisoformat(report.at).timestamp()
    except ValueError:
        logger.debug("The worker's log record has an invalid time: %r", report.at)
    source.handle(record)


class NodeStateHandler(logging.Handler):
    def __init__(self, state: NodeState) -> None:
        super().__init__()
        self._state = state

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._state.add_log(record)
        except (TypeError, ValueError):
            self.handleError(record)  # The arguments of a log call do not fit its message.


class LogFile(logging.handlers.QueueHandler):
    """Writes to `FOLDER/FILE` on its own thread, so that no caller waits for the disk. `close` ends the thread.

    Records are dropped while the disk fails or is too slow. A failing disk is logged once, and a slow one afterwards.
    """

    def __init__(self, folder: Path, format: Literal["console", "json"]) -> None:
        records: queue.Queue[logging.LogRecord | None] = queue.Queue(RECORDS_WAITING_MAX)
        super().__init__(records)
        self.setFormatter(make_formatter(format, date=True))
        self._listener = _FileListener(records, _RotatingFile(folder))
        self._listener.start()
        self._dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            return
        dropped, self._dropped = self._dropped, 0
        if dropped:
            logger.warning("The log file lacks %d records here, because the disk was too slow.", dropped)

    def close(self) -> None:
        """Write the waiting records, but do not wait for a disk that hangs."""
        stopping = threading.Thread(target=self._listener.stop, name="logfile-stop", daemon=True)
        stopping.start()
        stopping.join(CLOSE_S)
        super().close()


class _FileListener(logging.handlers.QueueListener):
    """Writes queued records to one file. Warns once when the disk fails."""

    def __init__(self, records: queue.Queue[logging.LogRecord | None], file: _RotatingFile) -> None:
        super().__init__(records)
        self._records, self._file = records, file
        self._has_failed = False

    def handle(self, record: logging.LogRecord) -> None:
        """Write a record without the handler's lock: `logging.shutdown` would wait for that lock if the disk hangs."""
        try:
            self._file.emit(record)
            self._has_failed = False
        except OSError as exc:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "Writing to the log file is paused (%s). Free some space, or check the disk.", exc.strerror
                )

    def enqueue_sentinel(self) -> None:
        """Queue the end marker when there is room. The library's method would raise `queue.Full`."""
        self._records.put(None)

    def stop(self) -> None:
        super().stop()
        self._file.close()


class _RotatingFile(logging.handlers.RotatingFileHandler):
    """Opens its file when the first record arrives. Errors reach the caller of `emit`."""

    def __init__(self, folder: Path) -> None:
        each_bytes = LOG_BYTES_MAX // FILES
        super().__init__(
            folder / FILE, maxBytes=each_bytes, backupCount=FILES - 1, encoding="utf-8", errors="replace", delay=True
        )

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        raise  # noqa: PLE0704 - called within an `except`

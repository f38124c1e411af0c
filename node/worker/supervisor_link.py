"""The worker's end of the connection to the supervisor. A thread reads orders; any thread may send.

If the supervisor is gone, the worker acts as on an order to leave.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from node import __version__
from node.config.amendments import SignedAmendment
from node.errors import RestartError
from node.status import rfc3339
from node.worker_protocol import (
    SUPERVISOR_MESSAGE,
    Adjust,
    Beat,
    LogReport,
    Start,
    Stop,
    Submit,
    Unsaved,
    WorkerMessage,
    encode,
)

BEAT_S = 1.0
MOST_SUBMITTED = 64
"""Limit on the submitted amendments that wait for the main thread."""


class StopAsked(Exception):
    """The supervisor asked the worker to end. Not an error."""


def _check_version(line: bytes) -> None:
    """Raise RestartError if a message is of another version of this program. One without a version passes."""
    try:
        version = json.loads(line).get("version", "")
    except (ValueError, AttributeError):
        return
    if version not in ("", __version__):
        raise RestartError(
            f"diloco-node was updated from {version} to {__version__} while this node ran: start it again.",
            code="updated",
        )


class SupervisorLink:
    """Receives orders and sends messages."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._file = sock.makefile("rb")
        self._send_lock = threading.Lock()
        self._beat_at_s = 0.0
        self.stop: Stop | None = None
        """The newest order to stop; None before the first one."""
        self._adjusts: deque[Adjust] = deque(maxlen=1)
        self._submitted: deque[SignedAmendment] = deque(maxlen=MOST_SUBMITTED)

    def wait_start(self, timeout_s: float) -> Start:
        """Wait for the order to start.

        Raises TimeoutError if it does not come first and in time, and RestartError if the supervisor is of another
        version, whose messages and settings may be others.
        """
        self._socket.settimeout(timeout_s)
        line = self._file.readline()
        self._socket.settimeout(None)
        _check_version(line)
        message = SUPERVISOR_MESSAGE.validate_json(line) if line.endswith(b"\n") else None
        if not isinstance(message, Start):
            raise TimeoutError("no order to start")
        threading.Thread(target=self._receive, name="link", daemon=True).start()
        return message

    def _receive(self) -> None:
        while (line := self._file.readline()).endswith(b"\n"):
            message = SUPERVISOR_MESSAGE.validate_json(line)
            if isinstance(message, Stop):
                self.stop = message
            elif isinstance(message, Adjust):
                self._adjusts.append(message)
            elif isinstance(message, Submit):
                self._submitted.append(message.amendment)
        self.stop = self.stop or Stop(how="leave")

    def take_adjust(self) -> Adjust | None:
        """The newest settings if they changed since the last call."""
        return self._adjusts.popleft() if self._adjusts else None

    def take_submitted(self) -> SignedAmendment | None:
        """The next amendment that the owner has submitted; None if there is none."""
        return self._submitted.popleft() if self._submitted else None

    def send(self, message: WorkerMessage) -> None:
        """Send a message. Callable from any thread. Sets `stop` if the supervisor is gone."""
        with self._send_lock:
            try:
                self._socket.sendall(encode(message))
            except OSError:
                self.stop = self.stop or Stop(how="leave")

    def beat(self) -> None:
        """Send the main thread's heartbeat, at most every BEAT_S."""
        now_s = time.monotonic()
        if now_s - self._beat_at_s >= BEAT_S:
            self._beat_at_s = now_s
            self.send(Beat())

    @contextmanager
    def unsaved(self) -> Iterator[None]:
        """Mark a block with work that a stop must save. After an order to stop, it sends `Unsaved` until its end."""
        saved = threading.Event()

        def report_unsaved() -> None:
            while not saved.wait(BEAT_S):
                if self.stop is not None:
                    self.send(Unsaved())

        thread = threading.Thread(target=report_unsaved, name="unsaved", daemon=True)
        thread.start()
        try:
            yield
        finally:
            saved.set()
            thread.join()


class SupervisorLogHandler(logging.Handler):
    """Sends log records to the supervisor, which writes them."""

    def __init__(self, link: SupervisorLink) -> None:
        super().__init__()
        self._link = link
        self.round_now: Callable[[], int | None] = lambda: None
        """Returns the round for log records that do not name one."""

    def emit(self, record: logging.LogRecord) -> None:
        self._link.send(
            LogReport(
                level=record.levelname.lower(),
                logger=record.name,
                message=self.format(record),
                at=rfc3339(datetime.fromtimestamp(record.created, UTC), "milliseconds"),
                round=getattr(record, "round", self.round_now()),
            )
        )

"""The worker's end of the link. Knows sockets and threads; knows nothing of training.

A thread reads orders; everybody may send. When the supervisor is gone the worker is asked to leave.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from node.link import Adjust, Beat, Down, LogTold, Start, Stop, Unsaved, Up, decode_down, encode

BEAT_S = 1.0


class StopAsked(Exception):
    """The supervisor wants the worker to end; not an error."""


class Channel:
    """Orders in, words out."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._file = sock.makefile("rb")
        self._lock = threading.Lock()
        self._beat_at_s = 0.0
        self.stop: Stop | None = None
        """The last order to stop; None while there is none."""
        self._adjusts: deque[Adjust] = deque(maxlen=1)

    def wait_start(self, timeout_s: float) -> Start:
        """The first order. Raises TimeoutError."""
        self._socket.settimeout(timeout_s)
        message = self._read()
        self._socket.settimeout(None)
        if not isinstance(message, Start):
            raise TimeoutError("no order to start")
        threading.Thread(target=self._listen, name="link", daemon=True).start()
        return message

    def _read(self) -> Down | None:
        line = self._file.readline()
        return decode_down(line) if line.endswith(b"\n") else None

    def _listen(self) -> None:
        while (message := self._read()) is not None:
            if isinstance(message, Stop):
                self.stop = message
            elif isinstance(message, Adjust):
                self._adjusts.append(message)
        self.stop = self.stop or Stop(how="leave")

    def take_adjust(self) -> Adjust | None:
        """The newest settings, if they have changed since the last call."""
        try:
            return self._adjusts.popleft()
        except IndexError:
            return None

    def send(self, message: Up) -> None:
        """Whole lines only, from any thread. A supervisor that is gone is no error here: `stop` tells it."""
        with self._lock:
            try:
                self._socket.sendall(encode(message))
            except OSError:
                self.stop = self.stop or Stop(how="leave")

    def beat(self) -> None:
        """Say that the main thread lives, at most every BEAT_S."""
        now_s = time.monotonic()
        if now_s - self._beat_at_s >= BEAT_S:
            self._beat_at_s = now_s
            self.send(Beat())

    @contextmanager
    def unsaved(self) -> Iterator[None]:
        """Within the block this process has work that a stop must save; the supervisor is told so from the stop on."""
        saved = threading.Event()

        def tell() -> None:
            while not saved.wait(BEAT_S):
                if self.stop is not None:
                    self.send(Unsaved())

        thread = threading.Thread(target=tell, name="unsaved", daemon=True)
        thread.start()
        try:
            yield
        finally:
            saved.set()
            thread.join()


def rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class ChannelHandler(logging.Handler):
    """Log records go to the supervisor, which writes them; each with the round that it names, or was written in."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self.round_now: Callable[[], int | None] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send(
            LogTold(
                level=record.levelname.lower(),
                logger=record.name,
                message=self.format(record),
                at=rfc3339(record.created),
                round=getattr(record, "round", self.round_now()),
            )
        )

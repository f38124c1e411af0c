"""One worker process, from its start to its end. Knows processes, pipes and the link; knows no policy and no phase.

The worker leads a session and process group of its own, so that whatever it started (hivemind's DHT process, `p2pd`)
can be ended with it. When it dies the group is killed, also after a clean end: nothing of it may outlive it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ValidationError

from node.link import MAX_LINE_BYTES, Down, Ended, Start, Stop, Up, decode_up, encode

logger = logging.getLogger(__name__)
output_logger = logging.getLogger("node.worker.output")

OUTPUT_LINES_KEPT = 50
READ_BYTES = 65536
LINE_LENGTH_MAX = 2000
WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}
"""Read when torch is loaded. Threads that spin at barriers take the machine from its owner, and from each other: two
trainers of 2 threads on 2 cores made 570 tokens/s each while spinning, 9,500 while sleeping; a lone one the same.
Large tensors in huge pages: a copy of all parameters takes half the time, as most of it were page faults."""
DRAIN_S = 1.0
"""How long the dead worker's last words may take; they lie in the kernel's buffers already."""


@dataclass(frozen=True, slots=True)
class Fate:
    """How a worker ended."""

    ended: Ended | None
    """Its last words; None: it crashed."""
    exit_status: int
    """As subprocess tells it: negative is the signal that ended it."""
    output: tuple[str, ...] = ()
    """Last lines of its stdout and stderr."""
    fault: str = ""
    """What we did to it, or held against it, before it ended."""
    had_begun: bool = False

    @property
    def is_unsaved(self) -> bool:
        """It may have had work to save, and did not live to say that it has."""
        return self.ended is None and self.had_begun

    def describe(self) -> str:
        """Half a sentence for a person."""
        if self.fault:
            what = self.fault
        elif self.exit_status < 0:
            name = signal.Signals(-self.exit_status).name
            hint = ", most often because memory ran out" if name == "SIGKILL" else ""
            what = f"ended by {name}{hint}"
        else:
            what = f"exit status {self.exit_status}"
        last = next((line for line in reversed(self.output) if line.strip()), "")
        return f"{what}; its last line: {last.strip()[:300]}" if last else what


class Child:
    """A running worker. Made by `spawn`; `wait` must be awaited exactly once."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        link: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        output: tuple[asyncio.StreamReader, asyncio.ReadTransport],
        start: Start,
        on_message: Callable[[Up], None],
    ) -> None:
        self.mode = start.mode
        self.asked: str | None = None
        """How it was asked to stop, if it was."""
        self.heard = False
        """Whether it has said anything yet."""
        self._process = process
        self._reader, self._writer = link
        self._output_reader, self._output_pipe = output
        self._on_message = on_message
        self._ended: Ended | None = None
        self._fault = ""
        self._output: deque[str] = deque(maxlen=OUTPUT_LINES_KEPT)
        self._tasks = [asyncio.create_task(self._read_link()), asyncio.create_task(self._read_output())]
        for task in self._tasks:
            task.add_done_callback(self._reader_done)
        self._writer.write(encode(start))

    @classmethod
    async def spawn(cls, command: Sequence[str], start: Start, on_message: Callable[[Up], None]) -> Child:
        """Start `command --fd N` and send it `start`. Raises OSError where the system refuses a process."""
        ours, theirs = socket.socketpair()
        # A pipe of our own: with asyncio's, `Process.wait` would wait for whatever the worker left behind with it open.
        output_fd, output_end_fd = os.pipe()
        output, output_end = os.fdopen(output_fd, "rb", buffering=0), os.fdopen(output_end_fd, "wb", buffering=0)
        with theirs, output_end:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--fd",
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output_end,
                    stderr=output_end,
                    env=WORKER_ENVIRONMENT | os.environ,
                )
            except OSError:
                ours.close()
                output.close()
                raise
        link = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), output)
        return cls(process, link, (lines, pipe), start, on_message)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, stop: Stop) -> None:
        """Ask it to end. The caller sets the deadline."""
        self.asked = stop.how
        self._writer.write(encode(stop))

    def tell(self, message: Down) -> None:
        self._writer.write(encode(message))

    def kill(self, fault: str) -> None:
        """End its whole group now. `fault` says why, for `Fate`; the first reason stays."""
        if not self._fault:
            logger.warning("Worker %d is killed: %s", self.pid, fault)
            self._fault = fault
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> Fate:
        """Until it is dead, its group too, and its last words are read."""
        try:
            status = await self._process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            _done, late = await asyncio.wait(self._tasks, timeout=DRAIN_S)
            for task in late:
                task.cancel()
            self._writer.close()
            self._output_pipe.close()
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return Fate(self._ended, status, tuple(self._output), self._fault, self.heard)

    def _reader_done(self, task: asyncio.Task[None]) -> None:
        """A reader that failed is a bug of ours: end the worker at once, so that `wait` raises it."""
        if not task.cancelled() and task.exception() is not None:
            self.kill("the supervisor failed at its message")

    async def _read_link(self) -> None:
        while True:
            try:
                line = await self._reader.readline()
            except (ConnectionError, ValueError) as exc:
                # ConnectionError: it died with our words unread. ValueError: a line longer than the limit.
                if isinstance(exc, ValueError):
                    self.kill("it sent a line that is too long")
                return
            if not line.endswith(b"\n"):
                return
            try:
                message = decode_up(line)
            except ValidationError as exc:
                logger.error("The worker sent a line that is no message: %s", exc)
                self.kill("it sent a line that is no message")
                return
            self.heard = True
            if isinstance(message, Ended):
                self._ended = message
            self._on_message(message)

    async def _read_output(self) -> None:
        rest = ""
        while data := await self._output_reader.read(READ_BYTES):
            *lines, rest = (rest + data.decode(errors="replace")).replace("\r", "\n").split("\n")
            if len(rest) > LINE_LENGTH_MAX:
                lines.append(rest)
                rest = ""
            for line in lines:
                self._keep(line)
        self._keep(rest)

    def _keep(self, line: str) -> None:
        if line.strip():
            self._output.append(line[:LINE_LENGTH_MAX])
            output_logger.debug("%s", line[:LINE_LENGTH_MAX])

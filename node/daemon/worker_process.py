"""Starts one worker process, exchanges messages with it, keeps its last output and kills it on request.

Each worker leads a session and process group of its own. When the worker ends, even cleanly, the whole group is killed,
so that no child process (such as hivemind's `p2pd`) survives it. `worker_watchdog` decides when to kill a worker.
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

import psutil
from pydantic import ValidationError

from node.worker_protocol import (
    MAX_LINE_BYTES,
    WORKER_MESSAGE,
    Ended,
    Start,
    Stop,
    SupervisorMessage,
    WorkerMessage,
    encode,
)

logger = logging.getLogger(__name__)
output_logger = logging.getLogger("node.worker.output")

OUTPUT_LINES_KEPT = 50
READ_BYTES = 65536
LINE_LENGTH_MAX = 2000
WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}
"""Variables that torch reads when it is loaded. With the first, threads sleep at barriers instead of spinning: two
trainers with 2 threads each on 2 cores made 9,500 tokens/s each when sleeping, 570 when spinning; a single trainer is
equally fast. With the second, large tensors are in huge pages, which halves the time to copy all parameters, because
most of that time is page faults."""
DRAIN_S = 1.0
"""Time limit for reading what a dead worker has left in its output pipe."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended."""

    ended: Ended | None
    """The worker's last message; None if it crashed."""
    exit_status: int
    """As in subprocess: a negative number is the signal that ended the worker."""
    output: tuple[str, ...] = ()
    """Last lines of stdout and stderr."""
    fault: str = ""
    """Why the supervisor killed the worker; empty if it did not."""
    had_begun: bool = False
    """Whether the worker had sent a message."""

    @property
    def is_unsaved(self) -> bool:
        """Whether the worker may have lost work: it had begun and sent no `Ended`."""
        return self.ended is None and self.had_begun

    @property
    def lacked_memory(self) -> bool:
        """Whether the kernel has probably ended the worker because memory ran out."""
        return not self.fault and self.exit_status == -signal.SIGKILL

    def describe(self) -> str:
        """Return the cause of the exit as a clause, with the last line of output."""
        if self.fault:
            cause = self.fault
        elif self.exit_status < 0:
            name = signal.Signals(-self.exit_status).name
            hint = ", most often because memory ran out" if self.lacked_memory else ""
            cause = f"ended by {name}{hint}"
        else:
            cause = f"exit status {self.exit_status}"
        last_line = next((line for line in reversed(self.output) if line.strip()), "")
        return f"{cause}; its last line of output: {last_line.strip()[:300]}" if last_line else cause


class WorkerProcess:
    """A running worker process. Create it with `spawn`, and await `wait` exactly once."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        output: tuple[asyncio.StreamReader, asyncio.ReadTransport],
        on_message: Callable[[WorkerMessage], None],
    ) -> None:
        self.asked: str | None = None
        """The `how` of the last `Stop` that was sent to the worker; None before one."""
        self.has_begun = False
        """Whether the worker has sent a message."""
        self._process = process
        self._reader, self._writer = channel
        self._output_reader, self._output_pipe = output
        self._on_message = on_message
        self._ended: Ended | None = None
        self._fault = ""
        self._output: deque[str] = deque(maxlen=OUTPUT_LINES_KEPT)
        self._readers = [asyncio.create_task(self._read_messages()), asyncio.create_task(self._read_output())]
        for task in self._readers:
            task.add_done_callback(self._reader_done)

    @classmethod
    async def spawn(
        cls, command: Sequence[str], start: Start, on_message: Callable[[WorkerMessage], None]
    ) -> WorkerProcess:
        """Run `command --fd N` and send it `start`. Raises OSError."""
        ours, theirs = socket.socketpair()
        # With asyncio's own pipe, `Process.wait` would wait until every process that inherited the pipe has ended.
        read_fd, write_fd = os.pipe()
        output, output_end = os.fdopen(read_fd, "rb", buffering=0), os.fdopen(write_fd, "wb", buffering=0)
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
        channel = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), output)
        worker = cls(process, channel, (lines, pipe), on_message)
        worker.send(start)
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    def processor_s(self) -> float:
        """The processor time that the process has used; 0 if it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    def send(self, message: SupervisorMessage) -> None:
        if isinstance(message, Stop):
            self.asked = message.how
        self._writer.write(encode(message))

    def kill(self, fault: str, level: int = logging.WARNING) -> None:
        """Kill the process group. `fault` says why; later calls do not replace it."""
        if not self._fault:
            logger.log(level, "Worker process %d is killed: %s.", self.pid, fault)
            self._fault = fault
        self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> WorkerExit:
        """Wait until the worker has ended, kill the rest of its process group, and read its last output."""
        try:
            status = await self._process.wait()
        finally:
            self._kill_group()
            _done, late = await asyncio.wait(self._readers, timeout=DRAIN_S)
            for task in late:
                task.cancel()
            self._writer.close()
            self._output_pipe.close()
        for task in self._readers:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return WorkerExit(self._ended, status, tuple(self._output), self._fault, self.has_begun)

    def _reader_done(self, task: asyncio.Task[None]) -> None:
        """Kill the worker if a reader task failed. That is our own bug, so `wait` raises the exception."""
        if not task.cancelled() and task.exception() is not None:
            self.kill("the supervisor failed to process its output")

    async def _read_messages(self) -> None:
        while True:
            try:
                line = await self._reader.readline()
            except ConnectionError:
                return  # The worker died before it read our last message.
            except ValueError:
                self.kill("it sent a line that is too long")
                return
            if not line.endswith(b"\n"):
                return
            try:
                message = WORKER_MESSAGE.validate_json(line)
            except ValidationError as exc:
                logger.error("The worker sent a line that is not a valid message: %s", exc)
                self.kill("it sent a line that is not a valid message")
                return
            self.has_begun = True
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
                self._add_output(line)
        self._add_output(rest)

    def _add_output(self, line: str) -> None:
        if line.strip():
            self._output.append(line[:LINE_LENGTH_MAX])
            output_logger.debug("%s", line[:LINE_LENGTH_MAX])

"""Passes the curves of the run to the sinks, each of which is a process of its own (`node.sinks`).

A sink may hang, crash, refuse or be missing: nothing waits for it. Its newest points wait for it in a bounded queue,
the owner is told once with the remedy, and it is started again later. Used by the supervisor's event loop only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from node.host.priority import helper_environment
from node.sinks.series import NOT_INSTALLED, Point, SinkTarget
from node.status import Notice, Report, RoundRecord, Stage

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "node.sinks")
FOLDER = "metrics"
WAITING_MAX = 2000
"""Points that wait for a sink. When there are more, the oldest is dropped."""
REASON_LENGTH_MAX = 200
KILLED_S = 5.0
"""Time for a killed process to end."""


@dataclass(frozen=True, slots=True)
class SinkTimings:
    answer_s: float = 180.0
    """A sink that has not written a point within this time is killed. Its package may take long to import, at low
    priority."""
    retry_s: float = 300.0
    """Pause before a sink that failed is started again."""
    close_s: float = 5.0
    """Time for a sink to write what is left when the node ends."""


class SinkFailed(Exception):
    """A sink does not take points. The message is a clause that says why."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final
        """Whether another start cannot help."""


def point_of(record: RoundRecord) -> Point | None:
    """Return the curves at a committed round; None for any other record.

    The values named `run/..` follow from what the members signed and from the manifest, so they are equal on all nodes.
    """
    if not record.head or record.dropped:
        return None
    included = [member.weight for member in record.members if member.included]
    stages = {stage.value: float(getattr(record.seconds, stage.value)) for stage in Stage}
    values: dict[str, float | None] = {
        "run/training_loss": record.training_loss,
        "run/evaluation_loss": record.evaluation_loss,
        "run/learning_rate": record.learning_rate,
        "run/pseudo_gradient_norm": record.mean_norm,
        "run/contribution_cosine": record.contribution_cosine,
        "run/members": len(included),
        "run/round_tokens": sum(included),
        "node/sent_bytes": record.bytes_sent,
        "node/received_bytes": record.bytes_received,
        **{f"node/{stage}_s": stage_s for stage, stage_s in stages.items()},
        "node/blocked_s": record.seconds.blocked,
    }
    began_at_s = datetime.fromisoformat(record.started_at).timestamp() if record.started_at else 0.0
    known = {name: float(value) for name, value in values.items() if value is not None}
    return Point(record.round, record.swarm_tokens, began_at_s + sum(stages.values()), known)


class MetricSinks:
    """Implements `node_state.RecordsHistory`. `run` works until it is cancelled, then `close` ends the processes."""

    def __init__(
        self,
        names: Sequence[str],
        data_dir: Path,
        node: str,
        set_notice: Callable[[str, Notice | None], None],
        *,
        command: Sequence[str] = COMMAND,
        timings: SinkTimings | None = None,
    ) -> None:
        """`node` is the node's name; empty means a short form of its peer id."""
        self._data_dir, self._node = data_dir, node
        self._target: SinkTarget | None = None
        timings = timings or SinkTimings()
        self._feeds = [Feed(name, (*command, name), set_notice, timings) for name in dict.fromkeys(names)]

    def add_report(self, report: Report) -> None:
        run = report.run
        if run.manifest_hash and self._feeds:
            run_id, node_id = run.manifest_hash[:12], report.peer_id[-8:]
            folder = str(self._data_dir / FOLDER / run_id)
            self._target = SinkTarget(folder, run.name, run_id, self._node or node_id, node_id)

    def add_round(self, record: RoundRecord) -> None:
        if self._target is not None and (point := point_of(record)) is not None:
            for feed in self._feeds:
                feed.put(self._target, point)

    async def run(self) -> None:
        """Feed all sinks. Never ends by itself, whatever a sink does."""
        await asyncio.gather(*(feed.run() for feed in self._feeds))
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Let the sinks write what is left, for at most `close_s`, and end their processes."""
        await asyncio.gather(*(feed.close() for feed in self._feeds))


class Feed:
    """One sink: the points that wait for it, and its process."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        set_notice: Callable[[str, Notice | None], None],
        timings: SinkTimings,
    ) -> None:
        self._name, self._command, self._timings = name, command, timings
        self._set_notice = set_notice
        self._target: SinkTarget | None = None
        self._points: deque[Point] = deque(maxlen=WAITING_MAX)
        self._has_points = asyncio.Event()
        self._is_writing = False
        """Whether the first of `_points` was sent to the sink, which has not answered yet."""
        self._has_failed = False
        """Whether the owner knows that the sink does not work."""
        self._is_over = False
        """Whether no further start can help."""
        self._process: asyncio.subprocess.Process | None = None

    def put(self, target: SinkTarget, point: Point) -> None:
        """Add a point. Never waits."""
        if not self._is_over:
            self._target = target
            self._points.append(point)
            self._has_points.set()

    async def run(self) -> None:
        """Feed the sink, and start it again when it fails. Returns if no further start can help."""
        while not self._is_over:
            try:
                await self._serve()
            except SinkFailed as exc:
                await self._kill()
                again = f"the node tries again every {self._timings.retry_s:g} s, or remove it from metrics.sinks"
                install = f"run `pip install 'diloco-node[{self._name}]'` with the node's own pip, and start it again"
                self._tell(str(exc), install if exc.is_final else again)
                self._is_over = exc.is_final
            except Exception:
                await self._kill()
                logger.exception("A bug has stopped the sink %s. The node goes on without it.", self._name)
                self._tell("a bug, which the log shows", "please report it, and start the node again")
                self._is_over = True
            await asyncio.sleep(0 if self._is_over else self._timings.retry_s)
        self._points.clear()

    async def _serve(self) -> None:
        """Start the sink for the first point, and send it one point at a time. Raises SinkFailed."""
        self._is_writing = False
        await self._has_points.wait()
        assert self._target is not None
        process = await self._start(Path(self._target.folder))
        assert process.stdin is not None and process.stdout is not None
        try:
            self._write(asdict(self._target))
            while True:
                await self._has_points.wait()
                point, self._is_writing = self._points[0], True
                self._write(asdict(point))
                async with asyncio.timeout(self._timings.answer_s):
                    await process.stdin.drain()
                    if not await process.stdout.readline():
                        raise await self._reason_of_end(process)
                self._is_writing = False
                if self._points and self._points[0] is point:  # It may have been dropped meanwhile.
                    self._points.popleft()
                if not self._points:
                    self._has_points.clear()
                if self._has_failed:
                    self._has_failed = False
                    self._set_notice(self._code, None)
                    logger.info("The sink %s works again.", self._name)
        except TimeoutError as exc:
            raise SinkFailed(f"it has not answered for {self._timings.answer_s:g} s") from exc
        except ConnectionError as exc:
            raise await self._reason_of_end(process) from exc

    async def _start(self, folder: Path) -> asyncio.subprocess.Process:
        try:
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            self._log_file = folder / f"{self._name}.log"
            # A file, because nobody would read a pipe while a sink is written to.
            with await _open(self._log_file) as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=helper_environment(),
                    start_new_session=True,
                )
        except OSError as exc:
            raise SinkFailed(f"its process cannot be started ({exc.strerror})") from exc
        return self._process

    def _write(self, *lines: dict[str, object]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    async def _reason_of_end(self, process: asyncio.subprocess.Process) -> SinkFailed:
        """Why the sink's process has ended: the last line of its output."""
        try:
            async with asyncio.timeout(self._timings.answer_s):
                status = await process.wait()
        except TimeoutError:
            return SinkFailed("it reads no more points, but its process has not ended")
        if status == NOT_INSTALLED:
            return SinkFailed("its packages are not installed", is_final=True)
        text = await asyncio.to_thread(_tail, self._log_file)
        return SinkFailed(text or f"its process has ended with exit status {status}")

    @property
    def _code(self) -> str:
        return f"sink_{self._name}"

    def _tell(self, reason: str, remedy: str) -> None:
        """Tell the owner, once until the sink works again."""
        if self._has_failed:
            return
        self._has_failed = True
        text = f"The curves are not written to {self._name} ({reason}): {remedy}."
        logger.warning("%s", text)
        self._set_notice(self._code, Notice(code=self._code, text=text))

    async def close(self) -> None:
        process, is_written = self._process, not self._points
        stdin = process.stdin if process is not None and process.returncode is None else None
        if process is not None and stdin is not None and not stdin.is_closing():
            with suppress(ConnectionError, TimeoutError):
                # One write: asyncio logs a warning for each write to a process that has ended.
                self._write(*(asdict(point) for point in list(self._points)[1 if self._is_writing else 0 :]))
                stdin.close()
                async with asyncio.timeout(self._timings.close_s):
                    is_written = await process.wait() == 0
        await self._kill()
        if not is_written:
            logger.warning("The curves in %s may lack the last %d rounds.", self._name, len(self._points))

    async def _kill(self) -> None:
        """End the process and all that it has started."""
        process = self._process
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(TimeoutError):
                async with asyncio.timeout(KILLED_S):
                    await process.wait()
                    if process.stdout is not None:
                        await process.stdout.read()  # At its end, asyncio closes the pipes.
        self._process = None  # Only now: `close` repeats a kill that was cancelled.


async def _open(file: Path) -> BinaryIO:
    """Open a file for writing, on a thread. If this task is cancelled meanwhile, the file is closed again."""
    opening = asyncio.ensure_future(asyncio.to_thread(file.open, "wb"))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        (await opening).close()
        raise


def _tail(log: Path) -> str:
    """The last line of a sink's output, shortened."""
    with suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip()[:REASON_LENGTH_MAX] for line in reversed(lines) if line.strip()), "")
    return ""

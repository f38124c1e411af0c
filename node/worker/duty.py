"""What the duties of a worker share: rounds that wait on the disk, the process that works on them, and its events."""

from __future__ import annotations

import logging
import queue
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from node.publication.waiting_rounds import SCRATCH, WaitingRounds
from node.swarm.chain.chain import Tip
from node.training.checkpoint import CheckpointStore
from node.worker.duty_process import DutyProcess
from node.worker.reporter import Reporter

logger = logging.getLogger(__name__)

Event = TypeVar("Event", bound=BaseModel)
"""What a line of the process says."""


class Duty(Generic[Event]):
    """`let_wait` is called on the checkpointer's thread, all other methods on the main thread."""

    notice: ClassVar[str]
    """The code of the owner's notice."""
    name: ClassVar[str]
    """As a sentence begins with it."""
    done: ClassVar[str]
    """What is done with a round, as a participle."""

    def __init__(self, folder: Path, store: CheckpointStore, reporter: Reporter, event: type[Event]) -> None:
        self._folder, self._store, self._reporter, self._event = folder, store, reporter, event
        self._rounds = WaitingRounds(folder)
        self._events: queue.SimpleQueue[Event | str] = queue.SimpleQueue()
        self._newest_added = ""
        """The head of the newest round that waits or has waited."""
        self._problem = ""
        self._process: DutyProcess | None = None

    def begin(self, command: Callable[..., DutyProcess], module: str, start: Callable[[], str]) -> None:
        """Start the process. `start` returns its first line."""
        self._process = command(module, start, self._rounds, self._on_line, self._events.put)

    def clear(self) -> None:
        """Remove what an earlier process was to work on, because the owner has turned the duty off."""
        self._rounds.clear()
        shutil.rmtree(self._folder / SCRATCH, ignore_errors=True)

    def let_wait(self, tip: Tip, rank: int) -> bool:
        """Let the round of this tip wait, whose checkpoint is on the disk. Returns False if it waits already."""
        try:
            is_new = self._rounds.add(self._store, tip.round, tip.digest, rank)
        except OSError as exc:
            logger.warning("Round %d is not %s by this node, as its disk refused it: %s", tip.round, self.done, exc)
            return False
        self._newest_added = tip.head
        if is_new and self._process is not None:
            self._process.wake()
        return is_new

    def chain_left(self) -> None:
        """Forget the rounds that wait, because the node has left their chain."""
        self._rounds.clear()

    def attend(self) -> None:
        """Report what the process has done."""
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, str):
                    self.tell_problem(f"{self.name} does not work: {event}")
                else:
                    self.handle(event)

    def handle(self, event: Event) -> None:
        """Act on what the process says."""
        raise NotImplementedError

    def tell_problem(self, text: str) -> None:
        """Tell the owner, and log a problem once. An empty text withdraws it."""
        if text and text != self._problem:
            logger.warning("%s", text)
        if text != self._problem:
            self._reporter.notice(self.notice, text)
        self._problem = text

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _on_line(self, line: str) -> None:
        try:
            self._events.put(self._event.model_validate_json(line))
        except ValidationError:
            self._events.put(f"its process wrote {line[:80]!r}")

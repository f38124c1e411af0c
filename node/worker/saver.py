"""Writes checkpoints beside the training, one at a time. Knows the store and who is served from it; no trainer."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from node.swarm.chain import Tip
from node.training.checkpoint import Checkpoint, CheckpointStore
from node.worker.session import CheckpointSource


class Saver:
    """Its thread only writes; what it writes is a snapshot that nobody changes."""

    def __init__(self, store: CheckpointStore, source: CheckpointSource) -> None:
        self._store, self._source = store, source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._running: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def begin(self, checkpoint: Checkpoint, tip: Tip) -> None:
        """Write it beside. Raises what the one before raised: MachineError where the disk did not take it."""
        self.wait()
        self._running = self._thread.submit(self._save, checkpoint, tip)

    def check(self) -> None:
        """Raises what the newest one raised, if it has ended."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _save(self, checkpoint: Checkpoint, tip: Tip) -> None:
        self._store.save(checkpoint)
        self._source.publish(tip)

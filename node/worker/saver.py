"""When checkpoints are taken, and their writing beside the training, one at a time. Knows no trainer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

from node.errors import QuotaError
from node.swarm.chain import Tip
from node.swarm.faults import Faults
from node.training.checkpoint import Checkpoint, CheckpointStore
from node.worker.session import CheckpointSource

logger = logging.getLogger(__name__)

EVERY_ROUNDS = 4
"""A checkpoint at least so often, times fragments: joiners replay from it, and peers keep the results of twice that."""
SETTLE_S = 1.0


class Calendar:
    """When a checkpoint is to be taken: every few rounds, or every `every_s`, and a moment after the round."""

    def __init__(self, round_: int, every_s: float, turns: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`round_`: that of the newest checkpoint. `turns`: rounds in which all parameters have their turn."""
        self._clock, self._every_s, self._every_rounds = clock, every_s, EVERY_ROUNDS * turns
        self._due_at_s: float | None = None
        self.taken(round_)

    def taken(self, round_: int) -> None:
        """A checkpoint has been taken, of this round."""
        self._taken_at_s, self._taken_round, self._due_at_s = self._clock(), round_, None

    def round_over(self, round_: int) -> None:
        """All nodes save the same rounds, too, so that a joiner finds several that serve one state."""
        is_common = (round_ + 1) % self._every_rounds == 0
        since_s, since_rounds = self._clock() - self._taken_at_s, round_ - self._taken_round
        if is_common or since_s >= self._every_s or since_rounds >= self._every_rounds:
            self._due_at_s = self._clock() + SETTLE_S

    @property
    def is_wanted(self) -> bool:
        """One is to be taken of the newest round; at the latest before the next."""
        return self._due_at_s is not None

    @property
    def is_due(self) -> bool:
        """The processors have done with the round by now."""
        return self._due_at_s is not None and self._clock() >= self._due_at_s


class Saver:
    """Its thread only writes; what it writes is a snapshot that nobody changes."""

    def __init__(self, store: CheckpointStore, source: CheckpointSource, faults: Faults) -> None:
        self._store, self._source, self._faults = store, source, faults
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._running: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def begin(self, checkpoint: Checkpoint, tip: Tip) -> None:
        """Write it beside, while none is being written. Raises what the one before raised: MachineError."""
        assert not self.is_busy, "wait first"
        self.wait(0.0)
        self._running = self._thread.submit(self._save, checkpoint, tip)

    def check(self) -> None:
        """Raises what the newest one raised, if it has ended."""
        if self._running is not None and self._running.done():
            self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is being written, or so long; returns whether that is so. Raises what the newest one raised."""
        running = self._running
        if running is None:
            return True
        if not futures.wait((running,), timeout_s).done:
            return False
        self._running = None
        running.result()
        return True

    def _save(self, checkpoint: Checkpoint, tip: Tip) -> None:
        try:
            self._faults.meet("save", checkpoint.round)
            self._store.save(checkpoint)
        except QuotaError as exc:
            # What the node has is on disk still, if older: no reason to end. The owner has been told.
            logger.warning("The checkpoint of round %d is left out. %s", checkpoint.round, exc)
            return
        self._source.publish(tip)

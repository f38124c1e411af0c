"""Checkpoints of a training node: their contents, when they are due, writing them in the background, serving them."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from node.config.manifest import Manifest
from node.diloco.digest import leaf_bounds
from node.diloco.outer import OuterState
from node.errors import QuotaError
from node.swarm.chain.chain import Tip
from node.swarm.chain.fork_choice import Link
from node.swarm.consensus.context import Rules
from node.swarm.faults import Faults
from node.swarm.messages import Proof
from node.swarm.state_sync.partial_download import remove_partial_downloads
from node.swarm.state_sync.server import Snapshot, verified_tip
from node.training.checkpoint import Checkpoint, CheckpointStore
from node.training.tensorfile import read_slice

logger = logging.getLogger(__name__)

MAX_ROUNDS = 4
"""Rounds between checkpoints, per fragment: joiners replay from a checkpoint, and peers keep results for twice that."""
SETTLE_S = 1.0
"""Between the end of a round and the checkpoint, when the processors are busy with the round."""


def outer_checkpoint(manifest: Manifest, tip: Tip) -> Checkpoint:
    """A checkpoint of the outer state; its fields for the node's own state have their defaults."""
    return Checkpoint(
        manifest_hash=manifest.hash,
        head=tip.head,
        round=tip.round,
        tokens=tip.state.tokens,
        state_digest=tip.digest,
        leaves=tuple(leaf.hex() for leaf in tip.leaves),
        anchor=tip.state.anchor,
        momentum=tip.state.momentum,
        records=[dataclasses.asdict(link) for link in tip.links],
        extra={"proof": tip.proof.model_dump(mode="json") if tip.proof else None},
    )


def initial_checkpoint(manifest: Manifest, tip: Tip) -> Checkpoint:
    """The checkpoint of a new run. `tip` has the draft manifest's head."""
    return dataclasses.replace(outer_checkpoint(manifest, tip), head=manifest.hash)


def tip_of_checkpoint(checkpoint: Checkpoint, rules: Rules) -> Tip:
    """The tip that a checkpoint stands for. Raises PeerError if its proof does not lead to its head. Slow: hashes."""
    state = OuterState(checkpoint.anchor, checkpoint.momentum, checkpoint.round, checkpoint.tokens)
    proof = checkpoint.extra.get("proof")
    links = tuple(Link(**{**record, "members": tuple(record["members"])}) for record in checkpoint.records)
    return verified_tip(
        state, checkpoint.head, Proof.model_validate(proof) if proof else None, rules, time.monotonic(), links
    )


class CheckpointSource:
    """Serves checkpoints to joiners: hash trees from memory, tensors from the disk."""

    def __init__(self, store: CheckpointStore, parameters: int, cache: Path) -> None:
        self._store, self._parameters, self._cache = store, parameters, cache
        self._snapshots: tuple[Snapshot, ...] = ()
        """Newest first."""

    def publish(self, tip: Tip) -> None:
        """Serve the checkpoint of this tip, which is on the disk. Removes downloads, which are no longer needed."""
        new = Snapshot(tip.round, tip.head, tip.state.tokens, tip.digest, tip.leaves, tip.proof)
        on_disk = set(self._store.rounds())
        self._snapshots = (new, *(old for old in self._snapshots if old.round != new.round and old.round in on_disk))
        remove_partial_downloads(self._cache)

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        for snapshot in self._snapshots:
            if not name or snapshot.head == name or snapshot.digest.startswith(name):
                if hold:
                    self._store.pin(snapshot.round)
                return snapshot
        return None

    def oldest_needed_round(self) -> int | None:
        """The oldest round that a joiner, or this node after a crash, replays from."""
        return min((*(snapshot.round for snapshot in self._snapshots[:1]), *self._store.pinned()), default=None)

    def leaf(self, digest: str, index: int) -> bytes:
        snapshot = self.find(digest, hold=True)
        path = self._store.outer_file(snapshot.round) if snapshot is not None else None
        if path is None:
            raise LookupError("that state is not kept")
        bounds = leaf_bounds(self._parameters)
        vector, leaf = divmod(index, len(bounds))
        start, end = bounds[leaf]
        return read_slice(path, ("anchor", "momentum")[vector], 4 * start, 4 * (end - start))


class CheckpointSchedule:
    """When to take a checkpoint: every few rounds or every `interval_s`, SETTLE_S after the end of the round."""

    def __init__(
        self, round_: int, interval_s: float, fragments: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`round_`: the round of the newest checkpoint."""
        self._clock, self._interval_s, self._max_rounds = clock, interval_s, MAX_ROUNDS * fragments
        self._due_at: float | None = None
        self.taken(round_)

    def taken(self, round_: int) -> None:
        """A checkpoint of this round was taken."""
        self._taken_at, self._taken_round, self._due_at = self._clock(), round_, None

    def round_over(self, round_: int) -> None:
        # All nodes save these rounds, so that a joiner finds several peers with the same state.
        is_common = (round_ + 1) % self._max_rounds == 0
        passed_s, passed_rounds = self._clock() - self._taken_at, round_ - self._taken_round
        if is_common or passed_s >= self._interval_s or passed_rounds >= self._max_rounds:
            self._due_at = self._clock() + SETTLE_S

    @property
    def is_wanted(self) -> bool:
        """Whether to take a checkpoint of the newest round, at the latest before the next round."""
        return self._due_at is not None

    @property
    def is_due(self) -> bool:
        """Whether to take it now."""
        return self._due_at is not None and self._clock() >= self._due_at


class _Cancelled(Exception):
    """A checkpoint is no longer wanted."""


class Checkpointer:
    """Writes checkpoints on a thread of its own, one at a time. A checkpoint must not change while it is written."""

    def __init__(self, store: CheckpointStore, source: CheckpointSource, faults: Faults) -> None:
        self._store, self._source, self._faults = store, source, faults
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpointer")
        self._running: Future[None] | None = None
        self._is_cancelled = threading.Event()

    @property
    def is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def begin(self, checkpoint: Checkpoint, tip: Tip) -> None:
        """Start writing; only while not busy. Raises the previous checkpoint's error, such as MachineError."""
        assert not self.is_busy
        self.wait(0.0)
        self._is_cancelled.clear()
        self._running = self._thread.submit(self._save, checkpoint, tip)

    def cancel(self) -> None:
        """End the checkpoint that is being written, if any, as a newer one replaces it. The older ones stay."""
        self._is_cancelled.set()

    def check(self) -> None:
        """Raise the error of the newest checkpoint if it has failed."""
        if not self.is_busy:
            self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being written; False after `timeout_s`. Raises the newest checkpoint's error."""
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
            self._store.save(checkpoint, self._check_wanted)
        except _Cancelled:
            logger.debug("The checkpoint of round %d is replaced by a newer one before it is whole.", checkpoint.round)
            return
        except QuotaError as exc:
            # The older checkpoint stays on the disk, and the owner sees a notice, so training continues.
            logger.warning("The checkpoint of round %d is left out. %s", checkpoint.round, exc)
            return
        self._source.publish(tip)

    def _check_wanted(self) -> None:
        if self._is_cancelled.is_set():
            raise _Cancelled

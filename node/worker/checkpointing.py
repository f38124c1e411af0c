"""Checkpoints of a training node: what they contain, when they are due, and how they are written and served."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from node.config.manifest import Manifest
from node.diloco.credit import decode as decode_credit
from node.diloco.digest import state_digest, tree_slices
from node.diloco.outer import OuterState
from node.errors import PeerError, QuotaError
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
"""Most rounds of a fragment between checkpoints. Peers keep results for twice as many, so that joiners can replay."""
SAVE_RATIO = 20.0
"""Within a round, the time between checkpoints is at least this many times the time that the newest took to write."""
ROLLBACK_PIN_S = 600.0
"""A state that a join has promised for a rollback stays for so long at least."""
SETTLE_S = 1.0
"""Pause between the end of a round and its checkpoint, because the processors are still busy with the round."""


def outer_checkpoint(manifest: Manifest, tip: Tip) -> Checkpoint:
    """Make a checkpoint of the outer state. The fields for this node's own state keep their defaults."""
    return Checkpoint(
        manifest_hash=manifest.hash,
        head=tip.head,
        round=tip.round,
        tokens=tip.state.tokens,
        state_digest=tip.digest,
        leaves=tuple(leaf.hex() for leaf in tip.leaves),
        anchor=tip.state.anchor,
        momentum=tip.state.momentum,
        credit=_tensor_of(tip.state.credit.encode()),
        amendments=tip.state.amendments.decode(),
        records=[dataclasses.asdict(link) for link in tip.links],
        extra={"proof": tip.proof.model_dump(mode="json") if tip.proof else None},
    )


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def initial_checkpoint(manifest: Manifest, tip: Tip) -> Checkpoint:
    """Make the checkpoint of a new run. `tip` has the head of the draft manifest, which `manifest` replaces."""
    return dataclasses.replace(outer_checkpoint(manifest, tip), head=manifest.hash)


def tip_of_checkpoint(checkpoint: Checkpoint, rules: Rules) -> Tip:
    """Hash a checkpoint's state, and return its tip. Raises PeerError if the proof does not lead to the head."""
    state = _state_of(checkpoint)
    proof = checkpoint.extra.get("proof")
    links = tuple(Link(**{**record, "members": tuple(record["members"])}) for record in checkpoint.records)
    return verified_tip(
        state, checkpoint.head, Proof.model_validate(proof) if proof else None, rules, time.monotonic(), links
    )


def _state_of(checkpoint: Checkpoint) -> OuterState:
    """The outer state of a checkpoint. Raises PeerError if its table of credit is not valid."""
    try:
        credit = decode_credit(checkpoint.credit.numpy().tobytes())
    except ValueError as exc:
        raise PeerError(str(exc)) from exc
    parts = checkpoint.anchor, checkpoint.momentum, checkpoint.round, checkpoint.tokens, credit
    return OuterState(*parts, checkpoint.amendments.encode())


class CheckpointSource:
    """Serves checkpoints to joiners. Hash trees come from memory, tensors from the disk."""

    def __init__(self, store: CheckpointStore, parameters: int, cache: Path, moments: int = 1) -> None:
        self._store, self._cache = store, cache
        self._slices = tree_slices(parameters, moments)
        self._snapshots: tuple[Snapshot, ...] = ()
        """Newest first."""
        self._credit: dict[str, bytes] = {}
        """The encoded table of credit of each snapshot, by digest."""

    def publish(self, tip: Tip) -> None:
        """Serve the checkpoint of this tip, which is on the disk. Removes partial downloads, as none is needed now."""
        state = tip.state
        new = Snapshot(
            tip.round,
            tip.head,
            state.tokens,
            tip.digest,
            tip.leaves,
            tip.proof,
            state.credit.root,
            state.amendments,
        )
        self._credit = {old.digest: self._credit[old.digest] for old in self._snapshots if old.digest in self._credit}
        self._credit[tip.digest] = state.credit.encode()
        on_disk = set(self._store.rounds())
        self._snapshots = (new, *(old for old in self._snapshots if old.round != new.round and old.round in on_disk))
        remove_partial_downloads(self._cache)

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        """The newest snapshot whose head is `name` or whose digest begins with it. `hold` pins its checkpoint."""
        for snapshot in self._snapshots:
            if not name or snapshot.head == name or snapshot.digest.startswith(name):
                if hold:
                    self._store.pin(snapshot.round)
                return snapshot
        return None

    def oldest_needed_round(self) -> int | None:
        """The oldest checkpointed round from which a joiner, or this node after a crash, may replay. Reads no disk."""
        snapshots = self._snapshots
        needed = [*snapshots[:1], *(snapshot for snapshot in snapshots[1:] if self._store.is_pinned(snapshot.round))]
        return min((snapshot.round for snapshot in needed), default=None)

    def hold(self, round_: int, digest: str) -> bool:
        self._store.pin(round_, ROLLBACK_PIN_S)
        return self._store.digest_at(round_) == digest

    def load(self, round_: int, digest: str) -> OuterState | None:
        checkpoint = self._store.at(round_)
        if checkpoint is None or checkpoint.state_digest != digest:
            return None
        try:
            state = _state_of(checkpoint)
        except PeerError:
            return None
        return state if state_digest(state) == digest else None

    def leaf(self, digest: str, index: int) -> bytes:
        snapshot = self.find(digest, hold=True)
        path = self._store.outer_file(snapshot.round) if snapshot is not None else None
        if path is None:
            raise LookupError("this node does not have that state")
        if snapshot is not None and index == len(self._slices):
            return self._credit[snapshot.digest]
        vector, start, end = self._slices[index]
        return read_slice(path, ("anchor", "momentum")[vector], 4 * start, 4 * (end - start))


class CheckpointSchedule:
    """Decides when to take a checkpoint: every few rounds, and after `interval_s`, also within a round.

    After the end of a round it waits SETTLE_S. A checkpoint of gigabytes that takes long to write comes less often.
    """

    def __init__(
        self, round_: int, interval_s: float, fragments: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`round_` is the round of the newest checkpoint."""
        self._clock, self._interval_s, self._max_rounds = clock, interval_s, MAX_ROUNDS * fragments
        self._due_at: float | None = None
        self.taken(round_)

    def taken(self, round_: int) -> None:
        """Record that a checkpoint during the round after this one was taken."""
        self._taken_at, self._taken_round, self._due_at = self._clock(), round_, None

    def round_over(self, round_: int, *, is_needed: bool = False) -> None:
        """`is_needed` asks for a checkpoint of this round."""
        # All nodes save these rounds, so that a joiner finds several peers with the same state.
        is_common = (round_ + 1) % self._max_rounds == 0
        passed_s, passed_rounds = self._clock() - self._taken_at, round_ - self._taken_round
        if is_needed or is_common or passed_s >= self._interval_s or passed_rounds >= self._max_rounds:
            self._due_at = self._clock() + SETTLE_S

    @property
    def is_wanted(self) -> bool:
        """Whether a checkpoint of the newest round has to be taken before the next round."""
        return self._due_at is not None

    def is_due(self, save_s: float) -> bool:
        """Whether to take a checkpoint now. `save_s` is the time that the newest one took to write."""
        now_s = self._clock()
        if self._due_at is not None:
            return now_s >= self._due_at
        return now_s - self._taken_at >= max(self._interval_s, SAVE_RATIO * save_s)


class _Cancelled(Exception):
    """The checkpoint that is being written is no longer wanted."""


class Checkpointer:
    """Writes checkpoints on a thread of its own, one at a time. A checkpoint must not change while it is written."""

    def __init__(
        self,
        store: CheckpointStore,
        source: CheckpointSource,
        faults: Faults,
        on_saved: Callable[[Tip], None] = lambda _tip: None,
    ) -> None:
        """`on_saved` is called on this thread with the tip of each checkpoint that is on the disk."""
        self._store, self._source, self._faults, self._on_saved = store, source, faults, on_saved
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpointer")
        self._running: Future[None] | None = None
        self.save_s = 0.0
        """Seconds that the newest checkpoint took to write."""
        self.refusal = ""
        """Why the quota refused the newest checkpoint; empty if it did not."""
        self._is_cancelled = threading.Event()
        self._is_written = False
        """Whether a checkpoint has been written since the last `check`."""

    @property
    def is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def begin(self, checkpoint: Checkpoint, tip: Tip) -> None:
        """Start to write a checkpoint. Call only while not busy. Raises the previous checkpoint's error."""
        assert not self.is_busy
        self.wait(0.0)
        self._is_cancelled.clear()
        self.refusal = ""
        self._running = self._thread.submit(self._save, checkpoint, tip)

    def cancel(self) -> None:
        """Stop writing the current checkpoint, if any, as a newer one will replace it. Finished checkpoints stay."""
        self._is_cancelled.set()

    def check(self) -> bool:
        """Whether a checkpoint has been written since the last call. Raises its error if it has failed."""
        if not self.is_busy:
            self.wait(0.0)
        written, self._is_written = self._is_written, False
        return written

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being written; return False after `timeout_s`. Raises the newest checkpoint's error."""
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
            began_s = time.monotonic()
            self._faults.meet("save", checkpoint.round)
            self._store.save(checkpoint, self._check_wanted)
            self.save_s = time.monotonic() - began_s
        except _Cancelled:
            logger.debug("The unfinished checkpoint of round %d is discarded for a newer one.", checkpoint.round)
            return
        except QuotaError as exc:
            # The older checkpoint stays on the disk, and the owner sees a notice, so training continues.
            logger.warning("The checkpoint of round %d is not written. %s", checkpoint.round, exc)
            self.refusal = str(exc)
            return
        self._is_written = True
        self._source.publish(tip)
        self._on_saved(tip)

    def _check_wanted(self) -> None:
        if self._is_cancelled.is_set():
            raise _Cancelled

"""The reducers' error feedback: what encoding lost of a chunk's mean is added to the next mean of this chunk.

Without it, the second encoding of a round loses what the members' own feedback has just repaid. A residual belongs to
the member that reduces the chunk. It is lost if the chunk gets another reducer, which costs one round's error.

A residual counts only if the round is committed with the bytes that this node has encoded: a failed attempt, or a round
with other members, leaves it as it was.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import msgpack
import numpy as np
import torch
from torch import Tensor

from node.diloco.codec import Codec
from node.diloco.feedback import FEEDBACK_RATIO, ErrorFeedback, FeedbackRule
from node.swarm.allreduce.reducer import chunk_hash
from node.swarm.allreduce.result_store import ResultStore
from node.swarm.transport.wire import MALFORMED_ERRORS

logger = logging.getLogger(__name__)

FILE = "feedback.bin"


class ResultFeedback:
    """This node's residuals as a reducer. `encode` may run in any thread."""

    def __init__(self, rule: FeedbackRule | None, store: ResultStore, fragments: int) -> None:
        """Read the residuals of an earlier process."""
        self._rule, self._store, self._fragments = rule, store, fragments
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], ErrorFeedback] = {}
        """The residual of each (fragment, chunk)."""
        self._sent: dict[tuple[int, int], bytes] = {}
        """The hash of what this node has encoded of each chunk since the last round of its fragment."""
        if rule is not None:
            self._load(rule)

    @property
    def stretch_ratio(self) -> float:
        """By how much feedback may lengthen a mean, relative to the norm of its contributions."""
        return 0.0 if self._rule is None else FEEDBACK_RATIO

    @property
    def residual_bytes(self) -> int:
        """Size of all residuals that this node keeps."""
        with self._lock:
            return sum(one.stored.numel() * one.stored.element_size() for one in self._kept.values())

    def encode(self, round_: int, chunk: int, mean: Tensor, codec: Codec) -> bytes:
        """Encode a chunk's mean, fp32 [n] on the cpu, with the residual of the rounds before. Slow."""
        if self._rule is None:
            return codec.encode(mean)
        key, n = (round_ % self._fragments, chunk), mean.numel()
        with self._lock:
            feedback = self._kept.setdefault(key, ErrorFeedback(n, self._rule))
            wanted = feedback.add(mean, FEEDBACK_RATIO)
            data = codec.encode(wanted)
            feedback.record_error(wanted, codec.decode(data, n))
            self._sent[key] = chunk_hash(data)
            return data

    def round_over(self, round_: int, hashes: Sequence[bytes]) -> None:
        """Keep the new residuals of the chunks that were committed as this node has encoded them, and no others."""
        fragment, number = round_ % self._fragments, round_ // self._fragments
        with self._lock:
            for key in [key for key in self._kept if key[0] == fragment]:
                if self._sent.pop(key, None) == hashes[key[1]]:
                    self._kept[key].advance(number)
                else:
                    del self._kept[key]

    def clear(self) -> None:
        """Forget all residuals, because this node has left their chain."""
        with self._lock:
            self._kept, self._sent = {}, {}

    def save(self) -> None:
        """Write the residuals to the disk. After a write error, a restart begins without them. Slow."""
        if self._rule is None:
            return
        with self._lock:
            kept = [(*key, one.parameters, one.stored.numpy().tobytes()) for key, one in self._kept.items()]
        self._store.write_file(FILE, msgpack.packb(kept))

    def _load(self, rule: FeedbackRule) -> None:
        data = self._store.read_file(FILE)
        if data is None:
            return
        dtype: type[np.generic] = np.uint8 if rule.is_8bit else np.float32
        try:
            for fragment, chunk, elements, stored in msgpack.unpackb(data):
                tensor = torch.from_numpy(np.frombuffer(bytearray(stored), dtype))
                self._kept[fragment, chunk] = ErrorFeedback(elements, rule, tensor)
        except MALFORMED_ERRORS as exc:
            logger.warning("The stored residuals of means are damaged and are not used: %s", exc)
            self._kept = {}

"""The reducers' error feedback: what encoding lost of a chunk's mean is added to the next mean of this chunk.

Without it, the second encoding of a round loses again what the members' own feedback repays. A residual belongs to the
member that reduces the chunk, and is lost if the chunk gets another reducer. Handing it over would cost bytes.

A new residual counts only if the round is committed with the bytes from which it results. A failed attempt changes
none.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from node.diloco.feedback import MOST_RESIDUAL_RATIO, FeedbackRule
from node.swarm.allreduce.reducer import ChunkLayout, chunk_hash
from node.swarm.allreduce.result_store import ResultStore
from node.swarm.transport.wire import MALFORMED_ERRORS

logger = logging.getLogger(__name__)

MOST_ENCODINGS = 4
"""Residuals of one chunk that are kept until the commit: one for each attempt, but only the newest ones."""

Place = tuple[int, int]
"""Fragment and chunk."""


class ResultFeedback:
    """This node's residuals as a reducer. `encode` may run in any thread, the other methods run on the event loop."""

    def __init__(
        self,
        rule: FeedbackRule | None,
        layout_at: Callable[[int], ChunkLayout],
        fragments: int,
        store: ResultStore,
        head: str,
    ) -> None:
        """Continue with the residuals of an earlier process, as soon as this node is at their head.

        `layout_at` gives the layout of a round's mean. `head` is this node's head.
        """
        self._rule, self._layout_at, self._fragments, self._store = rule, layout_at, fragments, store
        self._kept: dict[Place, Tensor] = {}
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        """Held while the residuals are written, because the next round may end meanwhile."""
        self._head = head
        self._encoded: dict[Place, OrderedDict[bytes, Tensor]] = {}
        """For each chunk, the residual that follows from each encoding since the last round, by the chunk's hash."""
        self._saved: tuple[str, dict[Place, Tensor]] = ("", {})
        if rule is not None and store.feedback is not None:
            self._saved, store.feedback = self._parse(rule, store.feedback), None
        self.continue_at(head)

    def follow(self, rule: FeedbackRule | None, layout_at: Callable[[int], ChunkLayout], fragments: int) -> None:
        """Follow the rules that an amendment has changed. Residuals of other chunks or encodings are of no use."""
        layouts = [self._layout_at(i) for i in range(self._fragments)], [layout_at(i) for i in range(fragments)]
        if rule != self._rule or layouts[0] != layouts[1]:
            self.clear()
        self._rule, self._layout_at, self._fragments = rule, layout_at, fragments

    @property
    def residual_bytes(self) -> int:
        """Size of all residuals."""
        return sum(stored.numel() * stored.element_size() for stored in self._kept.values())

    def stretch_ratio(self, codec_name: str) -> float:
        """By how much feedback may lengthen a mean, relative to the norm of its contributions."""
        return 0.0 if self._rule is None else MOST_RESIDUAL_RATIO[codec_name]

    def encode(self, round_: int, chunk: int, mean: Tensor) -> bytes:
        """Encode a chunk's mean, fp32 [n] on the cpu, with the residual of the rounds before. Slow."""
        codec, rule, place = self._layout_at(round_).codec, self._rule, (round_ % self._fragments, chunk)
        if rule is None or not MOST_RESIDUAL_RATIO[codec.name]:
            return codec.encode(mean)
        stored = self._kept.get(place)
        wanted = rule.add(mean, stored, MOST_RESIDUAL_RATIO[codec.name])
        data = codec.encode(wanted)
        after = rule.residual_after(wanted, codec.decode(data, mean.numel()), stored)
        with self._lock:
            encoded = self._encoded.setdefault(place, OrderedDict())
            encoded[chunk_hash(data)] = after
            while len(encoded) > MOST_ENCODINGS:
                encoded.popitem(last=False)
        return data

    def round_over(self, round_: int, hashes: Sequence[bytes], head: str) -> None:
        """Keep the residuals that follow from the committed chunks, and no others. `head` is that of the round."""
        if self._rule is None:
            return
        fragment, is_reset = round_ % self._fragments, self._rule.is_reset_after(round_ // self._fragments)
        with self._lock:
            encoded = {place: self._encoded.pop(place) for place in list(self._encoded) if place[0] == fragment}
        # A thread of an abandoned attempt may have encoded a chunk of a layout that an amendment has replaced.
        encoded = {place: by_hash for place, by_hash in encoded.items() if place[1] < len(hashes)}
        after = {place: by_hash.get(hashes[place[1]]) for place, by_hash in encoded.items()}
        lost = {place for place in self._kept if place[0] == fragment and after.get(place) is None}
        others = {place: stored for place, stored in self._kept.items() if place[0] != fragment}
        kept = {} if is_reset else {place: stored for place, stored in after.items() if stored is not None}
        with self._lock:
            self._kept, self._head = others | kept, head
        self.continue_at(head)
        if lost:
            logger.debug("The errors of %d means are lost, because other members have reduced these chunks.", len(lost))

    def clear(self) -> None:
        """Forget all residuals, because this node has left their chain."""
        with self._lock:
            self._kept, self._encoded = {}, {}

    def save(self, head: str) -> None:
        """Write the residuals at this head to the disk. Slow: call it in a thread."""
        with self._saving:
            with self._lock:
                kept, newest = self._kept, self._head  # The residuals are replaced, and never changed.
            if self._rule is None or not kept or newest != head:  # Then a later call saves those of the newest head.
                return
            index = [[*place, stored.numel()] for place, stored in kept.items()]
            parts = [stored.numpy().view(np.uint8).data for stored in kept.values()]
            self._store.save_feedback([json.dumps({"head": head, "index": index}).encode() + b"\n", *parts])

    def continue_at(self, head: str) -> None:
        """Keep all residuals at this head, or take those that an earlier process has saved at it."""
        self._head = head
        if self._saved[0] == head:
            self._kept, self._saved = self._saved[1], ("", {})

    def _parse(self, rule: FeedbackRule, data: bytearray) -> tuple[str, dict[Place, Tensor]]:
        dtype: type[np.generic] = np.uint8 if rule.is_8bit else np.float32
        try:
            at = data.index(b"\n") + 1
            header, saved = json.loads(data[:at]), {}
            for fragment, chunk, size in header["index"]:
                values = np.frombuffer(data, dtype, size, at)
                stored, at = torch.from_numpy(values), at + values.nbytes
                layout = self._layout_at(fragment)
                if not 0 <= chunk < len(layout.bounds) or not rule.fits(stored, layout.elements(chunk)):
                    raise ValueError(f"chunk {chunk} of fragment {fragment} has another size")
                saved[fragment, chunk] = stored
            return str(header["head"]), saved
        except MALFORMED_ERRORS as exc:
            logger.warning("The stored errors of means are damaged and are not used: %s", exc)
            return "", {}

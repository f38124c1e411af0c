"""Documents packed into rows of tokens without padding; each peer reads the shards in its own order.

No node assigns shards. Each peer reads all shards of a source in a random order of its own, drawn from the run and its
peer id, and none twice before it has read all. So a peer that joins or leaves changes nothing for the others. If the
peers have read the ratios f_1, f_2, .. of all shards, a shard is read by at least one peer with probability
1 - (1 - f_1)(1 - f_2)... The rest of f_1 + f_2 + .. is repeated text, which is little while each peer has read little.

A peer reads several shards side by side, in lanes, and takes the rows of a batch from them in turn, so that the rows
come from different files. Shapes: B rows of a batch, T sequence length.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.errors import Damaged, MachineError
from node.training.documents import Documents, is_held_out
from node.training.tokenizer import Tokenizer

LANES = 8
LEAST_TRIES = 1024
"""How many shards in a row may have no document for a lane. With a single document, all but one have none."""

logger = logging.getLogger(__name__)


class ShardOrder:
    """The endless order in which one peer reads the shards of one source: a new permutation for each pass."""

    def __init__(self, name: str, shards: int) -> None:
        self._seed = int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")
        self._shards = shards
        self._pass: tuple[int, npt.NDArray[np.int64]] | None = None

    def __getitem__(self, ordinal: int) -> int:
        number, place = divmod(ordinal, self._shards)
        if self._pass is None or self._pass[0] != number:
            seeds = np.random.SeedSequence(self._seed, spawn_key=(number,))
            self._pass = number, np.random.Generator(np.random.PCG64(seeds)).permutation(self._shards)
        return int(self._pass[1][place])


class Lane:
    """Every `lanes`-th shard of the order, as one endless sequence of tokens."""

    def __init__(
        self,
        documents: Documents,
        order: ShardOrder,
        tokenizer: Tokenizer,
        *,
        lanes: int,
        held_out_one_in: int,
        state: Sequence[int],
    ) -> None:
        """`state` is a value of the property `state`; for a new lane it is (number of the lane, 0, 0)."""
        self._documents, self._order, self._tokenizer = documents, order, tokenizer
        self._lanes, self._held_out_one_in = lanes, held_out_one_in
        ordinal, document, self._offset = state
        self._next = (ordinal, document)
        """The next document to read: (place of its shard in the order, number of the document in its file)."""
        self._buffer: deque[tuple[tuple[int, int], npt.NDArray[np.int32]]] = deque()
        """(place, tokens) of each document, the place as in `_next`. `_offset` tokens of the first one are consumed."""
        self._buffered = -self._offset
        """Number of buffered tokens that are not consumed."""
        self._reading: Iterator[tuple[int, str]] | None = None
        self._empty_shards = 0
        """Number of shards in a row without a document."""

    @property
    def state(self) -> tuple[int, int, int]:
        """(place of the shard in the order, number of the document in its file, number of its consumed tokens)."""
        place = self._buffer[0][0] if self._buffer else self._next
        return (*place, self._offset)

    def row_into(self, out: npt.NDArray[np.int64]) -> None:
        """Fill `out` [T + 1] and consume T tokens. The last token of a row is the first of the next row.

        Raises Unreachable, with nothing consumed, and MachineError if no shard has any text.
        """
        while self._buffered < len(out):
            self._read_document()
        filled, skip = 0, self._offset
        for _, tokens in self._buffer:
            part = tokens[skip : skip + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled, skip = filled + len(part), 0
            if filled == len(out):
                break
        self._offset += len(out) - 1
        self._buffered -= len(out) - 1
        while self._buffer and self._offset >= len(self._buffer[0][1]):
            self._offset -= len(self._buffer.popleft()[1])

    def _read_document(self) -> None:
        ordinal, start = self._next
        if self._reading is None:
            self._reading = self._documents.read(self._order[ordinal], start)
        try:
            number, text = next(self._reading)
        except StopIteration:
            self._next_shard("no text")
            return
        except Damaged as exc:
            logger.warning("A part of the text is left out, because it cannot be read: %s.", exc)
            self._next_shard(str(exc))
            return
        except Exception:
            self._reading = None
            raise
        is_used = not self._held_out_one_in or not is_held_out(text, self._held_out_one_in)
        tokens = tokens_of(text, self._tokenizer) if is_used else None
        self._next = (ordinal, number)
        if tokens is None:
            return
        self._empty_shards = 0
        self._buffer.append(((ordinal, start), tokens))
        self._buffered += len(tokens)

    def _next_shard(self, reason: str) -> None:
        self._reading, self._next = None, (self._next[0] + self._lanes, 0)
        self._empty_shards += 1
        if self._empty_shards > max(LEAST_TRIES, 2 * self._documents.shards):
            raise MachineError(
                f"run.data.sources: a source has no text in any of its files ({reason}): repair or remove the file.",
                code="no_data",
            )


class RowPacker:
    """Packs rows of several sources by their weights. The lanes of a source take turns."""

    def __init__(
        self,
        sources: Sequence[Documents],
        weights: Sequence[float],
        tokenizer: Tokenizer,
        *,
        seed: str,
        held_out_one_in: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        """`seed` names the run and the peer. `state` is a value of the property `state`; None means the beginning."""
        self._weights = [weight / sum(weights) for weight in weights]
        self._given_weights = list(weights)
        self._shards = [source.shards for source in sources]
        self._layouts = [source.layout for source in sources]
        fresh = [[(lane, 0, 0) for lane in range(min(LANES, shards))] for shards in self._shards]
        if state is not None and len(state["shards"]) != len(sources):
            logger.warning("The text has another number of sources than before, so it is read from the beginning.")
            state = None
        if state is None:
            state = {"taken": [0] * len(sources), "lanes": fresh, "layouts": self._layouts}
        places = list(state["lanes"])
        for number, layout in enumerate(_layouts_of(state, sources)):
            if layout != self._layouts[number]:
                logger.warning("Files of text source %d have changed, so it is read from the beginning.", number + 1)
                places[number] = fresh[number]
        self._rows: list[npt.NDArray[np.int64]] = []
        """Rows of the batch that is being packed."""
        self._taken: list[int] = list(state["taken"])
        """Rows taken from each source."""
        is_unchanged = state.get("weights", self._given_weights) == self._given_weights
        self._taken_before: list[int] = list(
            state.get("taken_before", [0] * len(sources)) if is_unchanged else self._taken
        )
        """Rows taken from each source before the present weights held."""
        self._lanes = [
            [
                Lane(
                    source,
                    ShardOrder(f"{seed}\0{number}", source.shards),
                    tokenizer,
                    lanes=len(own),
                    held_out_one_in=held_out_one_in,
                    state=place,
                )
                for place in own
            ]
            for number, (source, own) in enumerate(zip(sources, places, strict=True))
        ]

    @property
    def state(self) -> dict[str, Any]:
        """The position in all sources, as JSON. Valid between two batches."""
        lanes = [[list(lane.state) for lane in lanes] for lanes in self._lanes]
        return {
            "taken": list(self._taken),
            "taken_before": list(self._taken_before),
            "weights": list(self._given_weights),
            "lanes": lanes,
            "shards": list(self._shards),
            "layouts": list(self._layouts),
        }

    def next_batch(self, batch_size: int, sequence_length: int) -> Tensor:
        """Return a batch, int64 cpu [B, T + 1]. Inputs are `[:, :-1]`, targets `[:, 1:]`. Consumes B * T tokens.

        Raises Unreachable. The next call then continues with the rows that are packed already.
        """
        while len(self._rows) < batch_size:
            source = self._next_source()
            lanes = self._lanes[source]
            row = np.empty(sequence_length + 1, dtype=np.int64)
            lanes[self._taken[source] % len(lanes)].row_into(row)
            self._taken[source] += 1
            self._rows.append(row)
        rows, self._rows = self._rows, []
        return torch.from_numpy(np.stack(rows))

    def _next_source(self) -> int:
        """The source that is furthest behind its share of the rows since the present weights hold."""
        counts = [taken - before for taken, before in zip(self._taken, self._taken_before, strict=True)]
        rows = sum(counts) + 1
        behind = [weight * rows - taken for weight, taken in zip(self._weights, counts, strict=True)]
        return behind.index(max(behind))


def _layouts_of(state: dict[str, Any], sources: Sequence[Documents]) -> list[str]:
    """The layouts at which a state was saved. Older states name only the number of shards, and cut no document."""
    if "layouts" in state:
        return list(state["layouts"])
    kept = zip(sources, state["shards"], strict=True)
    return ["" if one.cuts_documents or one.shards != shards else one.layout for one, shards in kept]


def tokens_of(text: str, tokenizer: Tokenizer) -> npt.NDArray[np.int32] | None:
    """The tokens of a document; None, with a warning, if the tokenizer fails on it."""
    try:
        return tokenizer.document(text)
    except Damaged as exc:
        logger.warning("A document is left out: %s.", exc)
        return None


def first_rows(source: Documents, tokenizer: Tokenizer, rows: int, length: int, one_in: int) -> npt.NDArray[np.int64]:
    """Return the first tokens, [rows, length], of a source's held-out documents, or of all documents if `one_in` is 0.

    Too few tokens are repeated. Parts that cannot be read are left out, as in training. Raises Unreachable, Damaged if
    nothing can be read, and MachineError if there is no document.
    """
    damage: Damaged | None = None
    parts: list[npt.NDArray[np.int32]] = []
    found = 0
    for shard in range(source.shards):
        if found >= rows * length:
            break
        try:
            for _, text in source.read(shard, 0):
                if one_in and not is_held_out(text, one_in):
                    continue
                if (part := tokens_of(text, tokenizer)) is None:
                    continue
                parts.append(part)
                found += len(part)
                if found >= rows * length:
                    break
        except Damaged as exc:
            logger.warning("A part of the text for evaluation is left out, because it cannot be read: %s.", exc)
            damage = exc
    if not parts and damage is not None:
        raise damage
    if not parts:
        raise MachineError(
            "run.data: no document is held out for evaluation: set run.data.held_out_one_in to a smaller number, or "
            "run.evaluation.batches to 0.",
            code="no_data",
        )
    tokens = np.concatenate(parts).astype(np.int64)
    return np.resize(tokens, rows * length).reshape(rows, length)

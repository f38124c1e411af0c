"""A reducer of the butterfly all-reduce collects contributions to its chunks and averages them. It does no networking.

A contribution counts only if it arrives whole and every chunk decodes to finite numbers. The encoded inputs stay
unchanged until the attempt ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from blake3 import blake3
from torch import Tensor

from node.diloco.aggregate import clip_scales, square_norm, weighted_mean
from node.diloco.buffers import vectors
from node.diloco.codec import Codec, chunk_bounds
from node.diloco.fragments import Ranges, elements
from node.errors import PeerError

NORM_TOLERANCE = 1e-3
"""Relative tolerance of a norm. `square_norm` is exact to 1e-12, but a peer whose version sums in fp32 is off by up to
5e-4. The norm of an encoded mean may exceed its bound by the codec's `stretch_ratio` in addition."""
TINY_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """How a round's vector, the P parameters or the P_f of a fragment, is cut into chunks and encoded."""

    codec: Codec
    bounds: Sequence[tuple[int, int]]
    """Start and end of each chunk, in elements of the round's vector."""
    ranges: Ranges
    """The parts of the flat vector of all parameters that the round's vector consists of."""

    def elements(self, chunk: int) -> int:
        start, end = self.bounds[chunk]
        return end - start

    def encoded_bytes(self, chunks: Collection[int] | None = None) -> int:
        """Encoded size of these chunks, or of all chunks by default."""
        selected = range(len(self.bounds)) if chunks is None else chunks
        return sum(self.codec.encoded_bytes(self.elements(chunk)) for chunk in selected)

    def decode(self, chunks: Sequence[bytes]) -> Tensor:
        """The round's vector, fp32 [P_f], from all of its chunks."""
        return self.decode_and_measure(chunks)[0]

    def norm(self, chunks: Sequence[bytes]) -> float:
        """L2 norm of an encoded vector, as every decoder computes it. Holds one decoded chunk at a time."""
        sized = zip(chunks, self.bounds, strict=True)
        return math.sqrt(sum(square_norm(self.codec.decode(data, end - start)) for data, (start, end) in sized))

    def decode_and_measure(self, chunks: Sequence[bytes]) -> tuple[Tensor, float]:
        """The round's vector, fp32 [P_f], and its L2 norm, summed chunk by chunk, as reducers do."""
        vector, squares = vectors.empty(self.bounds[-1][1] if self.bounds else 0), 0.0
        for data, (start, end) in zip(chunks, self.bounds, strict=True):
            part = self.codec.decode(data, end - start)
            squares += square_norm(part)
            vector[start:end] = part
        return vector, math.sqrt(squares)

    def check(self, chunk: int, data: bytes) -> None:
        """Raise PeerError unless `data` has the right size and finite values for this chunk."""
        if len(data) != self.codec.encoded_bytes(self.elements(chunk)):
            raise PeerError(f"chunk {chunk} has {len(data)} bytes", code="bad_size")
        try:
            self.codec.check(data, self.elements(chunk))
        except ValueError as exc:
            raise PeerError(f"chunk {chunk}: {exc}", code="not_finite") from exc


def chunk_layouts(codec: Codec, fragments: Sequence[Ranges]) -> tuple[ChunkLayout, ...]:
    """The layout of each fragment."""
    return tuple(ChunkLayout(codec, chunk_bounds(elements(ranges)), ranges) for ranges in fragments)


EncodeMean = Callable[[int, Tensor], bytes]


class Reducer:
    """One reducer in one attempt. Lives on the swarm's loop; `check` and `average` may run in a thread."""

    def __init__(
        self,
        layout: ChunkLayout,
        chunks: Sequence[int],
        weights: Mapping[str, int],
        norms: Mapping[str, float],
        encode: EncodeMean | None = None,
    ) -> None:
        """Collect contributions to these chunks.

        Args:
            weights, norms: the tokens and the L2 norm of each member's whole contribution, from its join.
            encode: encodes the mean, fp32 [n], of a chunk; None uses the codec of the contributions.
        """
        self.chunks = tuple(chunks)
        self._layout = layout
        self._encode = encode or (lambda _chunk, mean: layout.codec.encode(mean))
        self._weights, self._norms = dict(weights), dict(norms)
        self._parts: dict[str, Mapping[int, bytes]] = {}
        self._refused: set[str] = set()
        self._changed = asyncio.Event()

    def check(self, sender: str, parts: Mapping[int, bytes]) -> None:
        """Raise PeerError unless these are the chunks that this reducer needs from the sender, and are valid. Slow."""
        if sender not in self._weights:
            raise PeerError("a contribution from outside the group")
        if sorted(parts) != sorted(self.chunks):
            raise PeerError("a contribution has the wrong chunks", code="bad_size")
        for chunk, data in parts.items():
            self._layout.check(chunk, data)

    def take(self, sender: str, parts: Mapping[int, bytes]) -> None:
        """Keep a checked contribution. The first one from each sender counts."""
        self._parts.setdefault(sender, parts)
        self._changed.set()

    def refuse(self, sender: str) -> None:
        """Stop waiting for a member that sent an invalid contribution."""
        self._refused.add(sender)
        self._changed.set()

    async def collect(self, awaited: Callable[[], Collection[str]], timeout_s: float) -> list[str]:
        """Wait for the contributions of the peers in `awaited()`. Returns the senders of those that have arrived.

        `awaited` is called repeatedly, because peers may die. If a contribution is late here, no chunk includes it.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not set(awaited()) - self._refused <= set(self._parts):
                    self._changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.5):
                            await self._changed.wait()
        return self.arrived

    @property
    def arrived(self) -> list[str]:
        """The senders whose contributions have arrived, sorted."""
        return sorted(self._parts)

    def average(self, included: Sequence[str]) -> tuple[dict[int, bytes], dict[str, float]]:
        """Return the encoded, clipped, weighted mean of each chunk, and each sender's sum of squares over these chunks.

        Contributions are added in the given order, so that the mean is reproducible. The sums of squares of all
        reducers together must equal the squared norm that the sender signed.
        """
        missing = [peer for peer in included if peer not in self._parts]
        if missing:
            raise PeerError(f"the leader includes {len(missing)} contributions that have not arrived")
        weights = [self._weights[peer] for peer in included]
        scales = clip_scales([self._norms[peer] for peer in included], weights)
        squares = dict.fromkeys(included, 0.0)

        def decoded(chunk: int) -> Iterator[Tensor]:
            for peer in included:
                part = self._layout.codec.decode(self._parts[peer][chunk], self._layout.elements(chunk))
                squares[peer] += square_norm(part)
                yield part

        means = {chunk: self._encode(chunk, weighted_mean(decoded(chunk), weights, scales)) for chunk in self.chunks}
        return means, squares


def is_norm_misdeclared(norm: float, squares: Sequence[float]) -> bool:
    """Whether these sums of squares contradict the norm that a member signed."""
    total = sum(squares)
    return not 0 <= total < math.inf or abs(math.sqrt(total) - norm) > NORM_TOLERANCE * norm + TINY_NORM


def exceeds_norm_bound(norm: float, bound: float, stretch_ratio: float) -> bool:
    """Whether a mean of this L2 norm is longer than its contributions and its encoding allow."""
    return not norm <= bound * (1 + NORM_TOLERANCE + stretch_ratio) + TINY_NORM


def chunk_hash(data: bytes) -> bytes:
    """The BLAKE3 hash of a chunk, 32 bytes."""
    return blake3(data).digest()

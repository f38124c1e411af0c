"""The reducer's bench: contributions in, encoded means out. Knows no peer that leads and no wire.

A contribution counts only when it is here whole and every chunk of it decodes to finite numbers. Inputs stay as they
came until the round is committed, so nothing is ever half-averaged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from node.diloco.aggregate import clip_scales, square_norm, weighted_mean
from node.diloco.codec import Codec, chunk_bounds
from node.diloco.fragments import Ranges, elements
from node.errors import PeerError

NORM_TOLERANCE = 1e-3
"""Relative. `square_norm` is good to 1e-12; the rest is for peers whose version sums in fp32, which is off by up to
5e-4. What a mean's own encoding adds is the codec's `stretch_ratio`."""
TINY_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class Grid:
    """How a round's vector, the P parameters or the P_f of a fragment, is cut for the wire, and written."""

    codec: Codec
    bounds: Sequence[tuple[int, int]]
    """First element and end of each chunk, in the vector that is sent."""
    ranges: Ranges
    """Which elements of the flat vector of all parameters that one is made of."""

    def elements(self, chunk: int) -> int:
        start, end = self.bounds[chunk]
        return end - start

    def encoded_bytes(self, chunks: Collection[int] | None = None) -> int:
        """Bytes of these chunks (of all) on the wire."""
        wanted = range(len(self.bounds)) if chunks is None else chunks
        return sum(self.codec.encoded_bytes(self.elements(chunk)) for chunk in wanted)

    def decode(self, chunks: Sequence[bytes]) -> Tensor:
        """The round's vector, fp32 [P_f], from all of its chunks."""
        vector = torch.empty(self.bounds[-1][1] if self.bounds else 0)
        for data, (start, end) in zip(chunks, self.bounds, strict=True):
            vector[start:end] = self.codec.decode(data, end - start)
        return vector

    def norm(self, chunks: Sequence[bytes]) -> float:
        """L2 norm of an encoded vector, as every decoder gets it."""
        return self.length(self.decode(chunks))

    def length(self, vector: Tensor) -> float:
        """L2 norm of the round's vector, fp32 [P_f], summed up chunk by chunk, as reducers do."""
        return math.sqrt(sum(square_norm(vector[start:end]) for start, end in self.bounds))

    def check(self, chunk: int, data: bytes) -> None:
        """Raises PeerError unless `data` is this chunk: right size, finite values."""
        if len(data) != self.codec.encoded_bytes(self.elements(chunk)):
            raise PeerError(f"chunk {chunk} has {len(data)} bytes", code="bad_size")
        try:
            self.codec.check(data, self.elements(chunk))
        except ValueError as exc:
            raise PeerError(f"chunk {chunk}: {exc}", code="not_finite") from exc


def grids_of(codec: Codec, fragments: Sequence[Ranges]) -> tuple[Grid, ...]:
    """One for each fragment."""
    return tuple(Grid(codec, chunk_bounds(elements(ranges)), ranges) for ranges in fragments)


class Bench:
    """One reducer in one attempt. `take` and `arrived` run on the swarm's loop, `average` may run in a thread."""

    def __init__(
        self, grid: Grid, chunks: Sequence[int], weights: Mapping[str, int], norms: Mapping[str, float]
    ) -> None:
        """`weights`, `norms`: tokens and L2 norm of each member's whole contribution, as it has signed them."""
        self.chunks = tuple(chunks)
        self._grid = grid
        self._weights, self._norms = dict(weights), dict(norms)
        self._parts: dict[str, Mapping[int, bytes]] = {}
        self._refused: set[str] = set()
        self._changed = asyncio.Event()

    def check(self, sender: str, parts: Mapping[int, bytes]) -> None:
        """Raises PeerError unless this is all that the sender owes this reducer. Heavy: decodes."""
        if sender not in self._weights:
            raise PeerError("a contribution from outside the group")
        if sorted(parts) != sorted(self.chunks):
            raise PeerError("a contribution has the wrong chunks", code="bad_size")
        for chunk, data in parts.items():
            self._grid.check(chunk, data)

    def take(self, sender: str, parts: Mapping[int, bytes]) -> None:
        """Keep a checked contribution. The first one counts."""
        self._parts.setdefault(sender, parts)
        self._changed.set()

    def refuse(self, sender: str) -> None:
        """What this member sent broke a rule: nobody waits for it any longer."""
        self._refused.add(sender)
        self._changed.set()

    async def arrived(self, awaited: Callable[[], Collection[str]], timeout_s: float) -> list[str]:
        """Who is here whole, once all of `awaited()` (asked again as peers die) are, or the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while not set(awaited()) - self._refused <= set(self._parts):
                    self._changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.5):
                            await self._changed.wait()
        except TimeoutError:
            pass  # Who is not here by now is left out, for everybody alike.
        return sorted(self._parts)

    def average(self, included: Sequence[str]) -> tuple[dict[int, bytes], dict[str, float]]:
        """Of each chunk the encoded, clipped, weighted mean, added up in the order given (by peer id), encoded once.

        Also each sender's sum of squares over these chunks: all reducers' together must be the norm that it signed.
        """
        missing = [peer for peer in included if peer not in self._parts]
        if missing:
            raise PeerError(f"asked to include {len(missing)} contributions that are not here")
        weights = [self._weights[peer] for peer in included]
        scales = clip_scales([self._norms[peer] for peer in included], weights)
        means, squares = {}, dict.fromkeys(included, 0.0)
        for chunk in self.chunks:
            n = self._grid.elements(chunk)
            parts = [self._grid.codec.decode(self._parts[peer][chunk], n) for peer in included]
            for peer, part in zip(included, parts, strict=True):
                squares[peer] += square_norm(part)
            means[chunk] = self._grid.codec.encode(weighted_mean(parts, weights, scales))
        return means, squares


def misdeclared(norm: float, squares: Sequence[float]) -> bool:
    """Whether these sums of squares are not those of a vector with this norm."""
    total = sum(squares)
    return not 0 <= total < math.inf or abs(math.sqrt(total) - norm) > NORM_TOLERANCE * norm + TINY_NORM


def exceeds(mean: Tensor, bound: float, stretch_ratio: float) -> bool:
    """Whether a mean, fp32 [P_f], is longer than the contributions behind it, and its own encoding, allow."""
    return not math.sqrt(square_norm(mean)) <= bound * (1 + NORM_TOLERANCE + stretch_ratio) + TINY_NORM


def chunk_hash(data: bytes) -> bytes:
    """BLAKE3, 32 bytes."""
    return blake3(data).digest()

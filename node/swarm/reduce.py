"""The reducer's bench: contributions in, encoded means out. Knows no peer that leads and no wire.

A contribution counts only when it is here whole and every chunk of it decodes to finite numbers. Inputs stay as they
came until the round is committed, so nothing is ever half-averaged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from node.diloco.aggregate import weighted_mean
from node.diloco.codec import Codec
from node.errors import PeerError


@dataclass(frozen=True, slots=True)
class Grid:
    """How the flat vector of P parameters is cut for the wire, and written."""

    codec: Codec
    bounds: Sequence[tuple[int, int]]
    """First element and end of each chunk."""

    def elements(self, chunk: int) -> int:
        start, end = self.bounds[chunk]
        return end - start

    def encoded_bytes(self, chunks: Collection[int] | None = None) -> int:
        """Bytes of these chunks (of all) on the wire."""
        wanted = range(len(self.bounds)) if chunks is None else chunks
        return sum(self.codec.encoded_bytes(self.elements(chunk)) for chunk in wanted)

    def decode(self, chunks: Sequence[bytes]) -> Tensor:
        """The whole vector, fp32 [P], from all of its chunks."""
        vector = torch.empty(self.bounds[-1][1] if self.bounds else 0)
        for data, (start, end) in zip(chunks, self.bounds, strict=True):
            vector[start:end] = self.codec.decode(data, end - start)
        return vector

    def check(self, chunk: int, data: bytes) -> None:
        """Raises PeerError unless `data` is this chunk: right size, finite values."""
        if len(data) != self.codec.encoded_bytes(self.elements(chunk)):
            raise PeerError(f"chunk {chunk} has {len(data)} bytes", code="bad_size")
        try:
            self.codec.check(data, self.elements(chunk))
        except ValueError as exc:
            raise PeerError(f"chunk {chunk}: {exc}", code="not_finite") from exc


class Bench:
    """One reducer in one attempt. `take` and `arrived` run on the swarm's loop, `average` may run in a thread."""

    def __init__(self, grid: Grid, chunks: Sequence[int], weights: Mapping[str, int]) -> None:
        self.chunks = tuple(chunks)
        self._grid = grid
        self._weights = dict(weights)
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

    def average(self, included: Sequence[str]) -> dict[int, bytes]:
        """The encoded weighted mean of each chunk, added up in the order given (by peer id), encoded once."""
        missing = [peer for peer in included if peer not in self._parts]
        if missing:
            raise PeerError(f"asked to include {len(missing)} contributions that are not here")
        weights = [self._weights[peer] for peer in included]
        means = {}
        for chunk in self.chunks:
            n = self._grid.elements(chunk)
            parts = [self._grid.codec.decode(self._parts[peer][chunk], n) for peer in included]
            means[chunk] = self._grid.codec.encode(weighted_mean(parts, weights))
        return means


def chunk_hash(data: bytes) -> bytes:
    """BLAKE3, 32 bytes."""
    return blake3(data).digest()

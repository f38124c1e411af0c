"""Encoded results, found by hash: of the round in progress in memory, of the last rounds on disk. Knows a wire.

Whoever has a chunk may give it: its hash says whether it is the right one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from node.errors import PeerError, QuotaError, RoundFailed
from node.quota import Room, any_room
from node.swarm.base import Message, Wire
from node.swarm.calls import while_live
from node.swarm.directory import Directory
from node.swarm.records import Outcome
from node.swarm.reduce import Grid, chunk_hash

logger = logging.getLogger(__name__)

KEPT_ROUNDS = 8
MAX_KEPT_ROUNDS = 72
"""While somebody downloads an older state, or replays. A slower one begins again, from a newer state."""

IN_USE_S = 60.0


class ResultStore:
    """The encoded means of the last `kept_rounds` rounds, one file a round, found by chunk hash."""

    def __init__(
        self, folder: Path, turns: int = 1, clock: Callable[[], float] = time.monotonic, *, room: Room = any_room
    ) -> None:
        """`turns`: rounds in which all parameters have their turn; as many times more rounds are kept."""
        self._room = room
        self._clock, self.turns = clock, turns
        self._fetched_at_s: dict[str, float] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob("results-*.bin"):
            left_over.unlink()
        self.kept_rounds = KEPT_ROUNDS * turns
        self._folder = folder
        self._rounds: OrderedDict[str, dict[bytes, tuple[int, int]]] = OrderedDict()

    def put(self, head: str, hashes: Sequence[bytes], chunks: Sequence[bytes]) -> None:
        """A disk that does not take them is no reason to miss the round: only late peers cannot replay it from here."""
        index, offset = {}, 0
        for digest, chunk in zip(hashes, chunks, strict=True):
            index[digest] = (offset, len(chunk))
            offset += len(chunk)
        try:
            with self._room(offset):
                self._path(head).write_bytes(b"".join(chunks))
        except (OSError, QuotaError) as exc:
            self._path(head).unlink(missing_ok=True)
            why = exc.strerror if isinstance(exc, OSError) else exc
            logger.warning("A round's result could not be kept for late peers in %s: %s.", self._folder, why)
            return
        self._rounds[head] = index
        while len(self._rounds) > self.kept_rounds:
            old, _ = self._rounds.popitem(last=False)
            self._path(old).unlink(missing_ok=True)

    def get(self, digest: bytes) -> bytes | None:
        for head, index in list(self._rounds.items()):  # `put` runs in a thread.
            if digest in index:
                offset, size = index[digest]
                self._fetched_at_s[head] = self._clock()
                with suppress(FileNotFoundError), self._path(head).open("rb") as file:
                    file.seek(offset)
                    return file.read(size)
        return None

    def in_use(self) -> int:
        """The newest rounds, back to the oldest that was fetched lately: somebody is replaying them."""
        since_s = self._clock() - IN_USE_S
        heads = list(self._rounds)
        self._fetched_at_s = {h: at for h, at in dict(self._fetched_at_s).items() if at > since_s and h in self._rounds}
        return next((len(heads) - i for i, head in enumerate(heads) if head in self._fetched_at_s), 0)

    def _path(self, head: str) -> Path:
        return self._folder / f"results-{head[:16]}.bin"


def kept_rounds(newest: int, wanted_since: int | None, in_use: int = 0, turns: int = 1) -> int:
    """Rounds whose results are kept, so that a state of round `wanted_since` can be brought up to date."""
    wanted = newest - wanted_since + 1 if wanted_since is not None else 0
    return min(MAX_KEPT_ROUNDS * turns, max(KEPT_ROUNDS * turns, wanted, in_use + 1))


class Results:
    """Chunks of the round in progress, and the way to those that others have."""

    def __init__(
        self,
        wire: Wire,
        directory: Directory,
        grid_at: Callable[[int], Grid],
        store: ResultStore,
        timeout_s: float,
        others: Callable[[], Iterable[str]],
    ) -> None:
        """`grid_at`: the grid of a round. `others`: peers that may be asked, best first."""
        self._wire, self._directory, self._grid_at = wire, directory, grid_at
        self._store, self._timeout_s, self._others = store, timeout_s, others
        self._chunks: dict[bytes, bytes] = {}
        self._running: dict[str, asyncio.Future[list[bytes]]] = {}

    def add(self, chunks: Iterable[bytes]) -> list[bytes]:
        """Keep these; returns their hashes."""
        hashes = []
        for data in chunks:
            hashes.append(chunk_hash(data))
            self._chunks[hashes[-1]] = data
        return hashes

    def get(self, digest: bytes) -> bytes | None:
        return self._chunks.get(digest) or self._store.get(digest)

    def clear(self) -> None:
        """The round is over."""
        self._chunks = {}

    async def complete(self, outcome: Outcome, hashes: Sequence[bytes]) -> list[bytes]:
        """All chunks of a result, in order: from their reducers first, then from anybody. Raises RoundFailed.

        A proposal and the commit that overtakes it ask for the same: it is fetched once.
        """
        running = self._running.get(outcome.results)
        if running is None:
            running = self._running[outcome.results] = asyncio.ensure_future(self._complete(outcome, hashes))
            running.add_done_callback(lambda done: self._forget(outcome.results, done))
        return await asyncio.shield(running)

    def _forget(self, results: str, done: asyncio.Future[list[bytes]]) -> None:
        self._running.pop(results, None)
        if not done.cancelled():
            done.exception()  # Who still waits is told; if nobody does, it is nobody's error.

    def close(self) -> None:
        for running in list(self._running.values()):
            running.cancel()

    async def _complete(self, outcome: Outcome, hashes: Sequence[bytes]) -> list[bytes]:
        by_owner: dict[str, list[int]] = {}
        grid = self._grid_at(outcome.round)
        for chunk in self._missing(hashes):
            by_owner.setdefault(outcome.plan.reducers[outcome.plan.owners[chunk]], []).append(chunk)
        await asyncio.gather(*(self._fetch(owner, chunks, hashes, grid) for owner, chunks in by_owner.items()))
        for peer in dict.fromkeys((*outcome.plan.members, *self._others())):
            missing = self._missing(hashes)
            if not missing:
                break
            if peer != self._wire.peer_id:
                await self._fetch(peer, missing, hashes, grid)
        if self._missing(hashes):
            raise RoundFailed("nobody has all of the result's chunks", code="reducer_lost")
        return [self._chunks[digest] for digest in hashes]

    def _missing(self, hashes: Sequence[bytes]) -> list[int]:
        return [chunk for chunk, digest in enumerate(hashes) if digest not in self._chunks]

    async def _fetch(self, peer: str, chunks: Sequence[int], hashes: Sequence[bytes], grid: Grid) -> None:
        """Take what is right of what a peer gives; what is not stays missing."""
        request = Message({"hashes": [hashes[chunk] for chunk in chunks]})
        try:
            size = grid.encoded_bytes()
            call = self._wire.call(peer, "fetch", request, timeout_s=self._timeout_s, max_reply_bytes=size)
            reply = await while_live(self._directory, peer, call)
            for chunk, data in zip(chunks, reply.blobs, strict=False):
                if chunk_hash(data) != hashes[chunk]:
                    raise PeerError(f"chunk {chunk} has a wrong hash")
                grid.check(chunk, data)
                self._chunks[hashes[chunk]] = data
        except PeerError as exc:
            self._wire.traffic.reject(exc)
            logger.info("Peer %s did not give %d result chunks: %s", peer[-6:], len(chunks), exc)

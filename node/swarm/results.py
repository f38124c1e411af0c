"""Encoded results, found by hash: of the round in progress in memory, of the last rounds on disk. Knows a wire.

Any peer may give a chunk: its hash says whether it is the right one. On disk a result has its proof beside it, so a
node that crashed takes its rounds again without the swarm.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node.errors import PeerError, QuotaError, RoundFailed, SwarmError
from node.files import sync_folder
from node.quota import Room, any_room
from node.swarm.base import Message, Wire
from node.swarm.calls import while_live
from node.swarm.directory import Directory
from node.swarm.records import Outcome, Proof, parse, split_hashes
from node.swarm.reduce import Grid, chunk_hash

logger = logging.getLogger(__name__)

KEPT_ROUNDS = 8
MAX_KEPT_ROUNDS = 72
"""While somebody downloads an older state, or replays. A slower one begins again, from a newer state."""

IN_USE_S = 60.0
MAX_HEAD_BYTES = 32 * 2**20
"""More than a proof can have."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StoredRound:
    """A committed round that an earlier process of this node has left on the disk."""

    head: str
    parent: str
    proof: Proof


class ResultStore:
    """The committed rounds of the last `kept_rounds`: one file each, with the proof and the encoded mean.

    A file is the length of its head (8 bytes, little-endian), the head as JSON, and the chunks. The methods access the
    disk; any thread may call them.
    """

    def __init__(
        self, folder: Path, turns: int = 1, clock: Callable[[], float] = time.monotonic, *, room: Room = any_room
    ) -> None:
        """`turns`: rounds in which all parameters have their turn; as many times more rounds are kept.

        Damaged files of an earlier process are removed.
        """
        self._room = room
        self._clock, self.turns = clock, turns
        self._fetched_at_s: dict[str, float] = {}
        self.kept_rounds = KEPT_ROUNDS * turns
        self._folder = folder
        self._rounds: OrderedDict[str, dict[bytes, tuple[int, int]]] = OrderedDict()
        self.stored: list[StoredRound] = []
        """What was found at the start, oldest first; `open_chain` takes it over."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("results-*"), key=lambda path: path.stat().st_mtime_ns):
            self._find(path)

    def _find(self, path: Path) -> None:
        try:
            head_bytes, sizes, proof = _read_head(path)
            stored = StoredRound(proof.outcome.hash, parse(Outcome, proof.outcome.text).plan.parent, proof)
            index = _index(proof, sizes, head_bytes)
            if path != self._path(stored.head) or path.stat().st_size != head_bytes + sum(sizes):
                raise ValueError("it is not whole")
        except (OSError, ValueError, KeyError, TypeError, SwarmError) as exc:
            logger.warning("The result %s of an earlier start is damaged (%s): removed.", path.name, exc)
            path.unlink(missing_ok=True)
            return
        self._rounds[stored.head] = index
        self.stored.append(stored)

    def put(self, proof: Proof, chunks: Sequence[bytes]) -> None:
        """A committed round, forced onto the disk when this returns.

        A disk that does not take it is no reason to miss the round; it only cannot be replayed from here.
        """
        head = proof.outcome.hash
        sizes = [len(chunk) for chunk in chunks]
        first = _encode_head(sizes, proof)
        path = self._path(head)
        temporary = path.with_suffix(".new")
        try:
            with self._room(len(first) + sum(sizes)):
                with temporary.open("wb") as file:
                    file.writelines((first, *chunks))
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
                sync_folder(self._folder)
        except (OSError, QuotaError) as exc:
            with suppress(OSError):
                temporary.unlink()
            why = exc.strerror if isinstance(exc, OSError) else exc
            logger.warning(
                "A round counts, but its result could not be kept in %s: a crash before the next checkpoint loses it "
                "here, and late peers cannot take it from here: %s.", self._folder, why,
            )  # fmt: skip
            return
        self._rounds[head] = _index(proof, sizes, len(first))
        while len(self._rounds) > self.kept_rounds:
            old, _ = self._rounds.popitem(last=False)
            self._path(old).unlink(missing_ok=True)

    def keep_only(self, heads: Collection[str]) -> None:
        """Remove the results of other lines of rounds."""
        for head in [head for head in self._rounds if head not in heads]:
            del self._rounds[head]
            self._path(head).unlink(missing_ok=True)
        self.stored = [stored for stored in self.stored if stored.head in heads]

    def load(self, proof: Proof) -> list[bytes]:
        """All chunks of a round, in order. Raises OSError, or ValueError where one does not have its hash."""
        index, chunks = self._rounds.get(proof.outcome.hash, {}), []
        with self._path(proof.outcome.hash).open("rb") as file:
            for digest in split_hashes(proof.hashes):
                offset, size = index.get(digest, (0, 0))
                file.seek(offset)
                chunks.append(file.read(size))
                if chunk_hash(chunks[-1]) != digest:
                    raise ValueError("a chunk does not have its hash")
        return chunks

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


def _encode_head(sizes: Sequence[int], proof: Proof) -> bytes:
    text = json.dumps({"sizes": list(sizes), "proof": proof.model_dump(mode="json")}).encode()
    return _LENGTH.pack(len(text)) + text


def _read_head(path: Path) -> tuple[int, list[int], Proof]:
    """Bytes of the head, sizes of the chunks, proof. Raises OSError, ValueError, KeyError, TypeError, PeerError."""
    with path.open("rb") as file:
        prefix = file.read(_LENGTH.size)
        length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else MAX_HEAD_BYTES + 1
        if length > MAX_HEAD_BYTES:
            raise ValueError("it has no head")
        head = json.loads(file.read(length))
    return _LENGTH.size + length, [int(size) for size in head["sizes"]], parse(Proof, json.dumps(head["proof"]))


def _index(proof: Proof, sizes: Sequence[int], offset: int) -> dict[bytes, tuple[int, int]]:
    """Chunk hash to its place in the file; the first chunk begins at `offset`. Raises ValueError."""
    index = {}
    for digest, size in zip(split_hashes(proof.hashes), sizes, strict=True):
        index[digest] = (offset, size)
        offset += size
    return index


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

    def get_all(self, hashes: Sequence[bytes]) -> list[bytes] | None:
        """These chunks, in order; None if one of them is not here. Accesses the disk; any thread may call it."""
        found = []
        for digest in hashes:
            data = self.get(digest)
            if data is None:
                return None
            found.append(data)
        return found

    def hold(self, hashes: Sequence[bytes], chunks: Sequence[bytes]) -> None:
        """Keep these, whose hashes the caller has checked."""
        self._chunks.update(zip(hashes, chunks, strict=True))

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

"""Encoded means of rounds, addressed by chunk hash: the current round in memory, the last rounds on disk.

Any peer may serve a chunk, because the hash proves its content. The disk keeps each mean with its proof, so that a node
can replay its own rounds after a crash.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from node.errors import PeerError, QuotaError, RoundFailed, SwarmError
from node.host.disk_quota import Room, any_room
from node.host.files import sync_folder
from node.swarm.allreduce.reducer import ChunkLayout, chunk_hash
from node.swarm.membership.peer_table import PeerTable, while_live
from node.swarm.messages import AcceptedOutcome, Proof, RoundOutcome, SavedBallot, parse, split_hashes
from node.swarm.transport.wire import Message, Wire, retrieve_exception, timeout_error

logger = logging.getLogger(__name__)

KEPT_ROUNDS = 8
MAX_KEPT_ROUNDS = 72
"""Limit on the kept rounds while a peer replays from an older state. A slower peer starts over from a newer state."""
KEPT_ATTEMPTS = 256
"""Limit on the rounds whose lowest attempts are kept. It is as long as the branch that a node knows (`MAX_LINKS`)."""
IN_USE_S = 60.0  # A round counts as in use for this time after a chunk of it was read
MAX_HEAD_BYTES = 32 * 2**20  # A stored proof is always smaller
BALLOT_FILE, FEEDBACK_FILE = "ballot.json", "feedback.bin"
REPLY_BYTES = 32 * 2**20
"""Most bytes of chunks that one reply holds from the disk, unless its first chunk is larger."""
FIRST_S = 20.0
"""Timeout of the first bytes of a fetched chunk. A peer that has the chunk reads it from the disk at once."""
MOST_AVERAGED = 4
"""Limit on the attempts of a round whose means stay in memory. A mean for which this node has voted is on the disk."""
SERVED_BYTES = 4 * REPLY_BYTES
"""Limit on such bytes in all replies that are being sent. Peers that are no members get half of it together."""


class ResultStore:
    """The last committed rounds on disk. Any thread may call the methods; they access the disk.

    A round has two files: its chunks, one after the other, and its proof with the chunks' sizes as JSON. The chunks are
    written before this node votes, the proof when the round is committed. Another file holds the newest ballot.

    A lost fork may lead the node back to a round. So the rounds of a chain that it has left stay for a while, with
    another name, and a vote for an outcome that it did not commit keeps a file of its own.
    """

    def __init__(
        self, folder: Path, fragments: int = 1, clock: Callable[[], float] = time.monotonic, *, room: Room = any_room
    ) -> None:
        """Index the files of an earlier process and remove damaged ones. Keeps KEPT_ROUNDS rounds of each fragment."""
        self._room, self._clock, self._fragments, self._folder = room, clock, fragments, folder
        self._writing = threading.Lock()
        """Held while chunks are written, because a vote and a commit that overtakes it write the same file."""
        self._saving = threading.Lock()
        """Held while a ballot is written, because a vote and a promise may be saved at the same time."""
        self._read_at_s: dict[str, float] = {}
        self._kept_rounds = KEPT_ROUNDS * fragments
        self._is_full = False
        """Whether the disk had no room for the newest round."""
        self._rounds: OrderedDict[str, dict[bytes, tuple[int, int]]] = OrderedDict()
        """For each head, where each chunk is in the file of results: chunk hash to (offset, size)."""
        self._votes: dict[str, str] = {}
        """Parent to the outcome that this node has voted for, oldest first. Its chunks are on the disk."""
        self._newest_vote = ""
        """The parent of the ballot in BALLOT_FILE, if that ballot has a vote."""
        self._stored: list[tuple[str, Proof]] = []
        self._aside: list[tuple[str, Proof]] = []
        self.feedback: bytearray | None = None
        """What an earlier process has written with `save_feedback`."""
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            self.feedback = bytearray((folder / FEEDBACK_FILE).read_bytes())
        for path in _by_age(folder, "aside-*.json"):
            self._load_proof(path, self._aside)
        for path in _by_age(folder, "proof-*.json"):
            self._load_proof(path, self._stored)
        kept = {self._path(head).name for head in self._rounds}
        self._lowest_attempts: dict[str, int] = {}
        """For the parent of each round in which this node has saved a ballot, its `lowest_attempt`, newest last."""
        newest = folder / BALLOT_FILE
        for path in [*_by_age(folder, "vote-*.json"), newest]:
            if (ballot := self._read_ballot(path)) is None:
                continue
            self._lowest_attempts |= {**ballot.earlier, ballot.parent: ballot.lowest_attempt}
            if ballot.accepted is not None:
                self._newest_vote = ballot.parent if path == newest else ""
                head = self._votes[ballot.parent] = ballot.accepted.outcome.hash
                kept.add(self._path(head).name)
                with suppress(ValueError, PeerError):  # Then the vote is damaged, and `load_accepted` says so.
                    self._rounds.setdefault(head, _index(ballot.accepted.hashes, ballot.sizes))
                    self._rounds.move_to_end(head, last=path == newest or self._is_committed(head))
        for path in [*folder.glob("results-*"), *folder.glob("*.new")]:
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _load_proof(self, path: Path, stored: list[tuple[str, Proof]]) -> None:
        try:
            if path.stat().st_size > MAX_HEAD_BYTES:
                raise ValueError("it is too long")
            content = json.loads(path.read_bytes())
            proof, sizes = parse(Proof, json.dumps(content["proof"])), [int(size) for size in content["sizes"]]
            head, parent = proof.outcome.hash, parse(RoundOutcome, proof.outcome.text).plan.parent
            index = _index(proof.hashes, sizes)
            names = (self._proof_path(head), self._aside_path(head))
            if path not in names or self._path(head).stat().st_size != sum(sizes):
                raise ValueError("its name or the size of its results is wrong")
        except (OSError, ValueError, KeyError, TypeError, SwarmError) as exc:
            logger.warning("The stored round %s is damaged and is removed: %s", path.name, exc)
            path.unlink(missing_ok=True)
            return
        self._rounds[head] = index
        stored.append((parent, proof))

    def _read_ballot(self, path: Path) -> SavedBallot | None:
        try:
            return parse(SavedBallot, path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, SwarmError) as exc:
            logger.warning("The stored vote %s is damaged and is not used: %s", path.name, exc)
            return None

    def _ballot_with_vote(self, parent: str) -> SavedBallot | None:
        ballots = [self._read_ballot(path) for path in (self._folder / BALLOT_FILE, self._vote_path(parent))]
        return next((one for one in ballots if one and one.parent == parent and one.accepted is not None), None)

    def has_vote(self, parent: str) -> bool:
        """Whether this node has voted in the round after `parent`. Does not access the disk."""
        return parent in self._votes

    def load_accepted(self, parent: str) -> AcceptedOutcome | None:
        """The outcome that this node has accepted in the round after `parent`, if all its chunks are intact."""
        ballot = self._ballot_with_vote(parent)
        if ballot is None or ballot.accepted is None:
            return None
        try:
            data = self._path(ballot.accepted.outcome.hash).read_bytes()
            index = _index(ballot.accepted.hashes, ballot.sizes)
            if any(chunk_hash(data[start : start + size]) != digest for digest, (start, size) in index.items()):
                raise ValueError("a chunk does not have its hash")
        except (OSError, ValueError, PeerError) as exc:
            logger.warning("The stored vote is not used because its chunks cannot be read: %s", exc)
            return None
        return ballot.accepted

    def lowest_attempt(self, parent: str) -> int:
        """The first attempt at the round after `parent` in which this node may still act (`SavedBallot`)."""
        return self._lowest_attempts.get(parent, 0)

    def save_ballot(self, ballot: SavedBallot, chunks: Sequence[bytes] | None = None) -> None:
        """Write the newest promise or vote, with the chunks of a new vote, and sync it to the disk.

        A write error is only logged: the node forgets its vote only if it crashes within this round.
        """
        with self._saving:
            others = [entry for entry in self._lowest_attempts.items() if entry[0] != ballot.parent]
            earlier = dict(others[-KEPT_ATTEMPTS:])
            lowest = max(ballot.lowest_attempt, self.lowest_attempt(ballot.parent))
            self._lowest_attempts = {**earlier, ballot.parent: lowest}
            try:
                if ballot.accepted is not None and chunks is not None:
                    self._votes[ballot.parent] = ballot.accepted.outcome.hash
                    self._write_chunks(ballot.accepted.outcome.hash, ballot.accepted.hashes, chunks)
                accepted, sizes = ballot.accepted, tuple(len(chunk) for chunk in chunks or ())
                if chunks is None and (before := self._ballot_with_vote(ballot.parent)) is not None:
                    accepted, sizes = before.accepted, before.sizes  # A promise does not replace the vote.
                self._keep_vote(ballot.parent)
                full = SavedBallot(
                    parent=ballot.parent, lowest_attempt=lowest, accepted=accepted, sizes=sizes, earlier=earlier
                )
                self._write(self._folder / BALLOT_FILE, [full.model_dump_json().encode()])
                self._newest_vote = ballot.parent if accepted is not None else ""
            except (OSError, QuotaError) as exc:
                logger.warning("This node's vote could not be stored in %s: %s", self._folder, _reason(exc))

    def _keep_vote(self, parent: str) -> None:
        """Keep the vote in BALLOT_FILE before another round's ballot replaces it, unless its own round is committed."""
        before = self._newest_vote
        if before not in ("", parent) and (head := self._votes.get(before)) and not self._is_committed(head):
            (self._folder / BALLOT_FILE).replace(self._vote_path(before))
            self._newest_vote = ""

    def save_chunks(self, head: str, hashes: str, chunks: Sequence[bytes]) -> None:
        """Write the chunks of an outcome before the vote for it. After a write error, `save_ballot` tries again."""
        with suppress(OSError, QuotaError):
            self._write_chunks(head, hashes, chunks)

    def discard(self, head: str) -> None:
        """Remove the chunks of an outcome that this node does not vote for, unless the round was committed with it."""
        if not self._is_committed(head):
            self.remove(head)

    def _write_chunks(self, head: str, hashes: str, chunks: Sequence[bytes]) -> None:
        """Write the chunks of an outcome, unless they are on the disk already."""
        sizes = [len(chunk) for chunk in chunks]
        path = self._path(head)
        with self._writing:
            if not path.exists() or path.stat().st_size != sum(sizes):
                self._write(path, chunks)
        self._rounds[head] = _index(hashes, sizes)

    def _write(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        """Replace a file atomically and sync it to the disk. Raises OSError, QuotaError."""
        temporary = path.with_suffix(".new")
        try:
            with self._room(sum(map(len, parts))):
                with temporary.open("wb") as file:
                    file.writelines(parts)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
                sync_folder(self._folder)
        except (OSError, QuotaError):
            with suppress(OSError):
                temporary.unlink()
            raise

    def save_feedback(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write this node's residuals as a reducer. A write error is only logged: then they are lost in a restart."""
        try:
            self._write(self._folder / FEEDBACK_FILE, parts)
        except (OSError, QuotaError) as exc:
            logger.warning("The errors of means could not be stored in %s: %s", self._folder, _reason(exc))

    def take_stored(self) -> list[tuple[str, Proof]]:
        """Return the (parent, proof) pairs of an earlier process, oldest first. A second call returns none."""
        stored, self._stored = self._stored, []
        return stored

    def take_aside(self) -> list[tuple[str, Proof]]:
        """Return the (parent, proof) pairs that an earlier process has set aside. A second call returns none."""
        aside, self._aside = self._aside, []
        return aside

    def set_aside(self, heads: Iterable[str]) -> None:
        """Mark these rounds as those of a chain that this node has left, so that a restart does not replay them.

        The newest round comes first. So after a crash, those that are not marked yet can still be replayed in a row.
        """
        try:
            for head in heads:
                with suppress(FileNotFoundError):
                    self._proof_path(head).replace(self._aside_path(head))
            sync_folder(self._folder)
        except OSError as exc:
            logger.warning("Rounds of another chain could not be set aside in %s: %s", self._folder, exc.strerror)

    def take_back(self, head: str) -> None:
        """Mark a round that was set aside as one of this node's chain again. Raises OSError."""
        with suppress(FileNotFoundError):  # It could not be set aside on the disk, so it has its old name.
            self._aside_path(head).replace(self._proof_path(head))
        os.utime(self._proof_path(head))
        sync_folder(self._folder)
        self._rounds.move_to_end(head)

    def put(self, proof: Proof, chunks: Sequence[bytes]) -> None:
        """Write a committed round and sync it to the disk.

        A write error is only logged: the round still counts, but no peer can replay it from this node.
        """
        head, sizes = proof.outcome.hash, [len(chunk) for chunk in chunks]
        self._trim(head, self._kept_rounds if head in self._rounds else self._kept_rounds - 1)
        text = json.dumps({"sizes": sizes, "proof": proof.model_dump(mode="json")}).encode()
        try:
            self._write_chunks(head, proof.hashes, chunks)
            self._write(self._proof_path(head), [text])
            self._aside_path(head).unlink(missing_ok=True)
        except (OSError, QuotaError) as exc:
            self.remove(head)
            self._is_full = True
            logger.warning(
                "The round counts, but its result could not be stored in %s: %s. Late peers cannot fetch it from this "
                "node. If the node crashes before the next checkpoint, it loses the round.", self._folder, _reason(exc),
            )  # fmt: skip
            return
        self._is_full = False
        self._rounds.move_to_end(head)

    def _trim(self, head: str, rounds: int) -> None:
        """Remove the oldest rounds beyond so many, but not the one of this head. It makes room on a full disk."""
        for oldest in [one for one in self._rounds if one != head][: max(0, len(self._rounds) - rounds)]:
            self.remove(oldest)

    def remove(self, head: str) -> None:
        """Remove a round, its result and the vote for it. A file that cannot be removed stays until the next start."""
        self._rounds.pop(head, None)
        paths = [self._proof_path(head), self._aside_path(head), self._path(head)]
        for parent in [parent for parent, voted in list(self._votes.items()) if voted == head]:
            self._votes.pop(parent, None)
            paths.append(self._vote_path(parent))
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                logger.warning("%s cannot be removed: %s", path, exc.strerror)

    def follow(self, fragments: int) -> None:
        """Keep rounds for so many fragments from now on, because an amendment has changed their number."""
        self._fragments, before = fragments, self._fragments
        self._kept_rounds = self._kept_rounds * fragments // before if fragments > before else self._kept_rounds

    def set_retention(self, newest: int, oldest_needed: int | None) -> int:
        """Keep enough rounds for a peer to replay from round `oldest_needed`. Returns the number of rounds kept."""
        needed = newest - oldest_needed + 1 if oldest_needed is not None else 0
        in_use = 0 if self._is_full else self._in_use() + 1  # Anybody may read, so a reader must not fill the disk.
        kept_rounds = max(KEPT_ROUNDS * self._fragments, needed, in_use)
        self._kept_rounds = min(MAX_KEPT_ROUNDS * self._fragments, kept_rounds)
        return self._kept_rounds

    def _in_use(self) -> int:
        """How many of the newest rounds a peer is replaying: all back to the oldest that was read within IN_USE_S."""
        since_s = self._clock() - IN_USE_S
        heads = list(self._rounds)
        self._read_at_s = {h: at for h, at in dict(self._read_at_s).items() if at > since_s and h in self._rounds}
        return next((len(heads) - i for i, head in enumerate(heads) if head in self._read_at_s), 0)

    def holds(self, head: str) -> bool:
        """Whether this round, or its result, is in the store. Does not access the disk."""
        return head in self._rounds

    def load(self, proof: Proof) -> list[bytes]:
        """Read all chunks of a round, in order. Raises OSError, or ValueError if a chunk does not match its hash."""
        index, chunks = self._rounds.get(proof.outcome.hash, {}), []
        with self._path(proof.outcome.hash).open("rb") as file:
            for digest in split_hashes(proof.hashes):
                offset, size = index.get(digest, (0, 0))
                file.seek(offset)
                chunks.append(file.read(size))
                if chunk_hash(chunks[-1]) != digest:
                    raise ValueError("a chunk does not have its hash")
        return chunks

    def size_of(self, digest: bytes) -> int | None:
        """The size of a chunk; None if it is not here. Does not access the disk."""
        rounds = list(self._rounds.values())  # A copy, as `put` runs in another thread.
        return next((index[digest][1] for index in rounds if digest in index), None)

    def find(self, hashes: Sequence[bytes]) -> dict[bytes, bytes]:
        """Read those of these chunks that are here. A damaged chunk counts as missing."""
        found = {digest: data for digest in hashes if (data := self.get(digest)) is not None}
        return {digest: data for digest, data in found.items() if chunk_hash(data) == digest}

    def get(self, digest: bytes) -> bytes | None:
        for head, index in list(self._rounds.items()):  # A copy, as `put` runs in another thread.
            if digest in index:
                offset, size = index[digest]
                self._read_at_s[head] = self._clock()
                try:
                    with self._path(head).open("rb") as file:
                        file.seek(offset)
                        return file.read(size)
                except FileNotFoundError:
                    continue
                except OSError as exc:
                    logger.warning("%s cannot be read: %s", self._path(head), exc.strerror)
        return None

    def _path(self, head: str) -> Path:
        return self._folder / f"results-{head[:16]}.bin"

    def _proof_path(self, head: str) -> Path:
        return self._folder / f"proof-{head[:16]}.json"

    def _aside_path(self, head: str) -> Path:
        return self._folder / f"aside-{head[:16]}.json"

    def _is_committed(self, head: str) -> bool:
        return self._proof_path(head).exists() or self._aside_path(head).exists()

    def _vote_path(self, parent: str) -> Path:
        return self._folder / f"vote-{parent[:16]}.json"


def _by_age(folder: Path, pattern: str) -> list[Path]:
    """The files of this pattern, oldest first."""
    return sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def _index(hashes: str, sizes: Sequence[int]) -> dict[bytes, tuple[int, int]]:
    """Offset and size of each chunk in the file, by hash. Raises ValueError if the counts of both lists differ."""
    index, offset = {}, 0
    for digest, size in zip(split_hashes(hashes), sizes, strict=True):
        index[digest] = (offset, size)
        offset += size
    return index


def _reason(error: OSError | QuotaError) -> object:
    return error.strerror if isinstance(error, OSError) else error


class ResultCache:
    """Keeps the chunks of the current round in memory, and fetches missing chunks from peers."""

    def __init__(
        self,
        wire: Wire,
        peer_table: PeerTable,
        layout_at: Callable[[int], ChunkLayout],
        store: ResultStore,
        timeout_s: float,
        others: Callable[[], Iterable[str]],
    ) -> None:
        """`layout_at` gives the layout of a round's mean, `others` the peers to ask after the members of the group."""
        self._wire, self._peer_table, self._layout_at = wire, peer_table, layout_at
        self._store, self._timeout_s, self._others = store, timeout_s, others
        self._chunks: dict[bytes, bytes] = {}
        self._averaged: OrderedDict[int, Sequence[bytes]] = OrderedDict()
        """The hashes of the means that this node made as a reducer, by attempt."""
        self._fetches: dict[str, asyncio.Future[list[bytes]]] = {}
        self._served_bytes = 0
        """Chunks from the disk in replies that are not sent yet."""

    def follow(self, layout_at: Callable[[int], ChunkLayout], timeout_s: float) -> None:
        """Use other layouts from the next round on, because an amendment has changed the rules."""
        self._layout_at, self._timeout_s = layout_at, timeout_s

    def add(self, attempt: int, hashes: Sequence[bytes], chunks: Sequence[bytes]) -> None:
        """Keep the means that this node made in an attempt. They replace those that it made before in this attempt.

        A leader may ask for the mean of any subset of the contributions, so the memory for means needs a limit.
        """
        dropped = set(self._averaged.pop(attempt, ()))
        self._averaged[attempt] = hashes
        while len(self._averaged) > MOST_AVERAGED:
            dropped.update(self._averaged.popitem(last=False)[1])
        for digest in dropped.difference(*self._averaged.values()):
            self._chunks.pop(digest, None)
        self.hold(hashes, chunks)

    def hold(self, hashes: Sequence[bytes], chunks: Sequence[bytes]) -> None:
        """Keep these chunks, whose hashes the caller has checked."""
        self._chunks.update(zip(hashes, chunks, strict=True))

    def reserve(self, hashes: Sequence[bytes], *, is_member: bool) -> tuple[Sequence[bytes], Callable[[], None]]:
        """Choose which of these chunks one reply holds: the first ones, as many as the limits allow.

        Chunks of the current round are in memory anyway and count nothing. Returns their hashes, and a function to call
        when the reply was sent. Raises PeerError if the first chunk is not here, or if other replies use up the limit.
        """
        chosen, size = [], 0
        for digest in hashes:
            if digest not in self._chunks:
                more = self._store.size_of(digest)
                if more is None or (size and size + more > REPLY_BYTES):
                    break
                size += more
            chosen.append(digest)
        if not chosen:
            raise PeerError("this node does not have these chunks", code="round_failed")
        limit = SERVED_BYTES if is_member else SERVED_BYTES // 2
        if size and self._served_bytes and self._served_bytes + size > limit:
            raise PeerError("too many chunks are being sent", code="busy")
        self._served_bytes += size

        def release() -> None:
            self._served_bytes -= size

        return chosen, release

    def get_all(self, hashes: Sequence[bytes]) -> list[bytes] | None:
        """Return these chunks, in order, or None if one is missing. Reads the disk. Any thread may call it."""
        found = []
        for digest in hashes:
            data = self._chunks.get(digest) or self._store.get(digest)
            if data is None:
                return None
            found.append(data)
        return found

    def clear(self) -> None:
        """Drop the chunks of the round that is over."""
        self._chunks = {}
        self._averaged.clear()

    async def complete(self, outcome: RoundOutcome, hashes: Sequence[bytes]) -> list[bytes]:
        """Fetch all chunks of a result, in order, from their reducers or any other peer. Raises RoundFailed.

        If a commit arrives while its proposal is being fetched, both share one fetch.
        """
        fetch = self._fetches.get(outcome.results)
        if fetch is None:
            fetch = self._fetches[outcome.results] = asyncio.ensure_future(self._complete(outcome, hashes))
            fetch.add_done_callback(retrieve_exception)  # All waiters may have been cancelled.
            fetch.add_done_callback(lambda _done: self._fetches.pop(outcome.results, None))
        return await asyncio.shield(fetch)

    def close(self) -> None:
        for fetch in list(self._fetches.values()):
            fetch.cancel()

    async def _complete(self, outcome: RoundOutcome, hashes: Sequence[bytes]) -> list[bytes]:
        by_owner: dict[str, list[int]] = {}
        layout = self._layout_at(outcome.round)
        # After a crash, the chunks of this node's vote are only on the disk.
        self._chunks.update(await asyncio.to_thread(self._store.find, [hashes[i] for i in self._missing(hashes)]))
        for chunk in self._missing(hashes):
            by_owner.setdefault(outcome.plan.reducers[outcome.plan.owners[chunk]], []).append(chunk)
        fetches = (self._fetch(owner, chunks, hashes, layout) for owner, chunks in by_owner.items())
        answered = await asyncio.gather(*fetches)
        hung = {owner for owner, has_answered in zip(by_owner, answered, strict=True) if not has_answered}
        for peer in dict.fromkeys((*outcome.plan.members, *self._others())):
            missing = self._missing(hashes)
            if not missing:
                break
            if peer != self._wire.peer_id and peer not in hung:
                await self._fetch(peer, missing, hashes, layout)
        if self._missing(hashes):
            raise RoundFailed("no peer has all chunks of the result", code="reducer_lost")
        return [self._chunks[digest] for digest in hashes]

    def _missing(self, hashes: Sequence[bytes]) -> list[int]:
        return [chunk for chunk, digest in enumerate(hashes) if digest not in self._chunks]

    async def _fetch(self, peer: str, chunks: Sequence[int], hashes: Sequence[bytes], layout: ChunkLayout) -> bool:
        """Keep the valid chunks that a peer sends; the others stay missing. Returns False if the peer hangs."""
        clock, left, max_bytes = asyncio.get_running_loop().time, list(chunks), layout.encoded_bytes()
        until_s = clock() + self._timeout_s
        try:
            while left:  # A reply may hold only the first of the chunks.
                request, timeout_s = Message({"hashes": [hashes[chunk] for chunk in left]}), until_s - clock()
                if timeout_s <= 0:
                    raise timeout_error(peer, "fetch", self._timeout_s)
                call = self._wire.call(
                    peer, "fetch", request, timeout_s=timeout_s, first_s=FIRST_S, max_reply_bytes=max_bytes
                )
                named = list(zip(left, (await while_live(self._peer_table, peer, call)).blobs, strict=False))
                if not named:
                    raise PeerError("a reply has no chunk")
                await asyncio.to_thread(self._keep_valid, named, hashes, layout)
                left = left[len(named) :]
        except PeerError as exc:
            self._wire.traffic.reject(exc)
            logger.info("Peer %s did not send %d chunks of the result: %s", peer[-6:], len(left), exc)
            return exc.code != "timeout"
        return True

    def _keep_valid(self, named: Sequence[tuple[int, bytes]], hashes: Sequence[bytes], layout: ChunkLayout) -> None:
        """Keep these numbered chunks. Raises PeerError at the first invalid chunk, after those before it. Slow."""
        for chunk, data in named:
            if chunk_hash(data) != hashes[chunk]:
                raise PeerError(f"chunk {chunk} has a wrong hash")
            layout.check(chunk, data)
            self._chunks[hashes[chunk]] = data

"""Fetches an outer state from several peers at once, and goes on where an earlier try broke off.

Knows offers and leaves. The digest is a hash tree, so every leaf is checked before it is kept, whoever sent it. Knows
no checkpoint format and no replay.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from node.diloco.digest import LEAF_BYTES, leaf_hash
from node.diloco.outer import OuterState
from node.errors import PeerError, TransferFailed
from node.quota import Room, any_room
from node.swarm.base import Message, Wire
from node.swarm.chain import Tip
from node.swarm.directory import Directory
from node.swarm.line import Link, read_line
from node.swarm.offers import Offer, Offers, Target
from node.swarm.partial import PartialState, begun, forget
from node.swarm.rounds import Rules
from node.swarm.state import Snapshot, tip_of

logger = logging.getLogger(__name__)

LEAF_S = 120.0
"""For one leaf, while STREAMS share a line of 2 Mbit/s; who is hung or gone is noticed long before."""
STREAMS = 6
"""Leaves on their way at once, from all peers together."""
STREAMS_PER_PEER = 3
LINE_S = 20.0
"""For an answer of 4 MiB at 2 Mbit/s."""
COPIES = 2
"""Peers that may be asked for the same leaf when there is nothing else left to ask for."""
HURRY_S = 1.0
"""A leaf is asked for again only when it is on its way for so long."""
LOOK_S = 0.1
REFRESH_S = 5.0
BUSY_S = 0.5
MAX_TRIES = 3
MAX_LATE = 3
"""Leaves that a peer may fail to give in time before it is asked no more."""


class Download:
    """All of a node's downloads of states. Peers that sent wrong bytes once are not asked again."""

    def __init__(
        self,
        wire: Wire,
        directory: Directory,
        rules: Rules,
        folder: Path,
        rng: random.Random,
        room: Room = any_room,
        digest_at: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """`digest_at`: this node's own word about a head, where it comes from a state that did not hold."""
        self._room = room
        self._wire, self._directory, self._rules, self._folder, self._rng = wire, directory, rules, folder, rng
        self._offers = Offers(wire, directory, rules, rng, digest_at)
        self._banned: set[str] = set()

    async def run(self, target: Target, on_progress: Callable[[float], None]) -> Tip:
        """The state that most peers stand behind. Raises TransferFailed; what to do is the caller's policy.

        What has come stays in `folder` until `forget` is called, so that the next try, or process, goes on from it.
        """
        offers = await self._offers.find(target, begun(self._folder), self._banned)
        if not offers:
            raise TransferFailed("No peer serves a state yet, or none that the others share.")
        forget(self._folder, keep=[offer.snapshot.digest for offer in offers[:MAX_TRIES]])
        problem = None
        for offer in offers[:MAX_TRIES]:
            try:
                return await self._fetch(offer, target, on_progress)
            except TransferFailed as exc:
                logger.info("The state after round %d could not be had: %s", offer.snapshot.round, exc)
                problem = problem or exc
        assert problem is not None
        raise problem

    async def _fetch(self, offer: Offer, target: Target, on_progress: Callable[[float], None]) -> Tip:
        snapshot, clock = offer.snapshot, asyncio.get_running_loop().time
        partial = PartialState(self._folder, snapshot.digest, target.parameters, self._room)
        try:
            missing = await asyncio.to_thread(partial.open, snapshot.leaves)
            total = len(snapshot.leaves)
            logger.info(
                "Downloading the state after round %d from %d %s; %d of %d parts are here already.",
                snapshot.round, len(offer.servers), "peer" if len(offer.servers) == 1 else "peers",
                total - len(missing), total,
            )  # fmt: skip
            on_progress(1 - len(missing) / total)
            self._rng.shuffle(missing)
            began_s, fetched_bytes = clock(), sum(partial.size_of(index) for index in missing)
            transfer = Transfer(self._wire, snapshot, partial, missing, self._banned, on_progress)
            await transfer.run(sorted(offer.servers), lambda: self._servers(snapshot, transfer.peers))
            took_s = max(1e-3, clock() - began_s)
            logger.info(
                "The state after round %d is here: %.1f MB in %.1f s, %.2f MB/s.",
                snapshot.round, fetched_bytes / 1e6, took_s, fetched_bytes / 1e6 / took_s,
            )  # fmt: skip
            tip = await asyncio.to_thread(self._read, partial, snapshot, clock())
        finally:
            partial.close()
        if tip.digest != snapshot.digest:
            partial.remove()
            raise TransferFailed("What was downloaded is not on the disk as it was written.")
        return replace(tip, line=await self._line_to(tip, sorted({*offer.servers, *transfer.peers})))

    async def _line_to(self, tip: Tip, peers: Sequence[str]) -> tuple[Link, ...]:
        """The rounds that led to the tip, from the first that shows them: who has none can be weighed by nobody."""
        for peer in peers[:MAX_TRIES] if tip.proof else ():
            try:
                reply = await self._wire.call(peer, "line", Message({"heads": []}), timeout_s=LINE_S)
                line = await asyncio.to_thread(read_line, reply.blobs, self._rules.bounds)
            except PeerError as exc:
                logger.info("Peer %s does not show its line: %s", peer[-6:], exc)
                continue
            place = next((i for i, link in enumerate(line) if link.head == tip.head), -1)
            if place >= 0:
                return line[: place + 1]
        return tip.line

    async def _servers(self, snapshot: Snapshot, known: Collection[str]) -> list[str]:
        """Who serves it now; those of the known that live say themselves when they do no more."""
        found = await self._offers.servers(snapshot, self._banned)
        live = {record.peer_id for record in self._directory.others()}
        return sorted({*found, *(peer for peer in known if peer in live)})

    def _read(self, partial: PartialState, snapshot: Snapshot, now_s: float) -> Tip:
        anchor, momentum = partial.load()
        state = OuterState(anchor=anchor, momentum=momentum, round=snapshot.round, tokens=snapshot.tokens)
        return tip_of(state, snapshot.head, snapshot.proof, self._rules, now_s)


class Transfer:
    """The leaves of one state, drawn by the peers that serve it: who is faster is asked more.

    When all are asked for, those still on their way are asked for once more from another peer: the last ones do not
    wait for whoever is slow or hung. `dropped`: peers that sent what is not of this state, earlier ones included.
    """

    def __init__(
        self,
        wire: Wire,
        snapshot: Snapshot,
        partial: PartialState,
        missing: Sequence[int],
        dropped: set[str],
        on_progress: Callable[[float], None],
    ) -> None:
        self._wire, self._snapshot, self._partial, self._on_progress = wire, snapshot, partial, on_progress
        self._todo = list(missing)
        self._missing = set(missing)
        self._flying: dict[int, dict[str, asyncio.Task[bytes]]] = {}
        self._asked_at_s: dict[int, float] = {}
        self._workers: dict[str, list[asyncio.Task[None]]] = {}
        self._late: dict[str, int] = {}
        self._dropped = dropped
        self._clock = asyncio.get_running_loop().time

    @property
    def peers(self) -> list[str]:
        """Who is being asked."""
        return list(self._workers)

    async def run(self, servers: Sequence[str], refresh: Callable[[], Awaitable[list[str]]]) -> None:
        """Until nothing is missing. Raises TransferFailed where nobody serves what is, MachineError by the disk."""
        refreshed_at_s, missing_before = self._clock(), 0
        try:
            self._enlist(servers)
            while self._missing:
                if self._workers:
                    done, _ = await asyncio.wait(self._running(), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    self._reap(done)
                    if self._clock() - refreshed_at_s < REFRESH_S:
                        continue
                elif len(self._missing) == missing_before:
                    break  # Asked everybody once more, and nothing came.
                else:
                    missing_before = len(self._missing)
                self._enlist(await refresh())
                refreshed_at_s = self._clock()
        finally:
            await self._end()
        if self._missing:
            total = len(self._snapshot.leaves)
            raise TransferFailed(f"{len(self._missing)} of {total} parts of the state could not be had from any peer.")

    def _running(self) -> list[asyncio.Task[None]]:
        return [task for tasks in self._workers.values() for task in tasks]

    def _enlist(self, servers: Sequence[str]) -> None:
        """Give every server its share of the streams; those that serve no more are let go of."""
        chosen = [peer for peer in servers if peer not in self._dropped and self._late.get(peer, 0) < MAX_LATE]
        for peer in [peer for peer in self._workers if peer not in chosen]:
            for task in self._workers.pop(peer):
                task.cancel()
        chosen = sorted(chosen, key=lambda peer: peer not in self._workers)[:STREAMS]
        for peer in chosen:
            workers = self._workers.setdefault(peer, [])
            wanted = max(1, min(STREAMS_PER_PEER, STREAMS // len(chosen)) - self._late.get(peer, 0))
            for task in workers[wanted:]:
                task.cancel()
            workers += [asyncio.create_task(self._draw(peer)) for _ in range(wanted - len(workers))]

    def _reap(self, done: set[asyncio.Task[None]]) -> None:
        for peer, tasks in list(self._workers.items()):
            self._workers[peer] = [task for task in tasks if task not in done]
            if not self._workers[peer]:
                del self._workers[peer]
        for task in done:
            if not task.cancelled():
                task.result()

    async def _end(self) -> None:
        tasks: list[asyncio.Task[Any]] = [*self._running()]
        tasks += [task for some in self._flying.values() for task in some.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _draw(self, peer: str) -> None:
        """One stream from one peer. Ends when nothing is missing, or the peer is of no use."""
        while self._missing and peer not in self._dropped:
            index = self._next(peer)
            if index is None:
                await asyncio.sleep(LOOK_S)
                continue
            task = asyncio.create_task(self._leaf(peer, index))
            self._flying.setdefault(index, {})[peer] = task
            self._asked_at_s[index] = self._clock()
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                self._land(peer, index)
            if task.cancelled():
                continue  # Another peer has brought it.
            error = task.exception()
            if isinstance(error, PeerError):
                if not await self._goes_on(peer, error):
                    return
            elif error is not None:
                raise error

    def _next(self, peer: str) -> int | None:
        """The leaf to ask this peer for."""
        if self._todo:
            return self._todo.pop()
        before_s = self._clock() - HURRY_S
        late = [
            index
            for index, asked in self._flying.items()
            if peer not in asked and len(asked) < COPIES and self._asked_at_s[index] < before_s
        ]
        return min(late, key=lambda index: (len(self._flying[index]), self._asked_at_s[index]), default=None)

    def _land(self, peer: str, index: int) -> None:
        """This request is over; whoever else is asked for the same leaf need not go on once it is here."""
        asked = self._flying[index]
        del asked[peer]
        if index not in self._missing:
            for task in asked.values():
                task.cancel()
        elif not asked:
            self._todo.append(index)
        if not asked:
            del self._flying[index]

    async def _leaf(self, peer: str, index: int) -> bytes:
        """Ask for a leaf, check it, keep it."""
        message = Message({"digest": self._snapshot.digest, "index": index})
        reply = await self._wire.call(peer, "leaf", message, timeout_s=LEAF_S, max_reply_bytes=LEAF_BYTES)
        try:
            await asyncio.to_thread(self._check, index, reply)
        except PeerError as exc:
            if peer not in self._dropped:
                self._dropped.add(peer)
                self._wire.traffic.reject(exc)
                logger.warning("Peer %s is dropped from the download: %s.", peer[-6:], exc)
            raise
        if index in self._missing:
            await asyncio.to_thread(self._partial.put, index, reply.blobs[0])
            self._missing.discard(index)
            self._on_progress(1 - len(self._missing) / len(self._snapshot.leaves))
        return reply.blobs[0]

    def _check(self, index: int, reply: Message) -> None:
        if len(reply.blobs) != 1 or leaf_hash(reply.blobs[0]) != self._snapshot.leaves[index]:
            raise PeerError(f"leaf {index} has a wrong hash")
        if len(reply.blobs[0]) != self._partial.size_of(index):
            raise PeerError(f"leaf {index} has {len(reply.blobs[0])} bytes", code="bad_size")
        if not np.isfinite(np.frombuffer(reply.blobs[0], dtype="<f4")).all():
            raise PeerError(f"leaf {index} has a value that is not finite", code="not_finite")

    async def _goes_on(self, peer: str, error: PeerError) -> bool:
        """Whether to ask this peer again. One that is late is asked less, one that is gone may come back later."""
        if peer in self._dropped:
            return False
        if error.code == "busy":
            await asyncio.sleep(BUSY_S)
            return True
        logger.info("Peer %s did not give a part of the state: %s", peer[-6:], error)
        if error.code != "timeout":
            return False
        self._late[peer] = self._late.get(peer, 0) + 1
        return self._late[peer] < MAX_LATE and len(self._workers.get(peer, ())) == 1

"""Downloads an outer state from several peers at once, and resumes a partial download.

The digest of a state is the root of a Merkle tree, so each leaf can be verified on its own before it is kept.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from node.diloco.credit import EMPTY, CreditTable
from node.diloco.credit import MOST_BYTES as MOST_CREDIT_BYTES
from node.diloco.credit import decode as decode_credit
from node.diloco.digest import LEAF_BYTES, leaf_hash
from node.diloco.outer import OuterState
from node.errors import PeerError, TransferFailed
from node.host.disk_quota import Room, any_room
from node.swarm.chain.chain import Tip
from node.swarm.chain.fork_choice import Link
from node.swarm.consensus.context import SLOWEST_BYTES_PER_S, Rules
from node.swarm.membership.peer_table import PeerTable, while_live
from node.swarm.state_sync.partial_download import PartialState, partial_downloads, remove_partial_downloads
from node.swarm.state_sync.providers import AvailableState, ProviderSearch, Target
from node.swarm.state_sync.server import CHAIN_TIMEOUT_S, Snapshot, links_of, verified_tip
from node.swarm.transport.wire import Message, Wire

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAF_TIMEOUT_S = 120.0
"""Timeout of one leaf, long enough if STREAMS requests share 2 Mbit/s. The endgame does not wait so long."""
CREDIT_TIMEOUT_S = 20.0  # The largest table takes 5 s at 2 Mbit/s. If an answer is lost, another peer is asked soon.
STREAMS = 6  # Limit on requests in flight, to all peers together
STREAMS_PER_PEER = 3
ENDGAME_S = 1.0  # Age at which a request may be repeated to a second peer, after all leaves have been requested
LOOK_S = 0.1
REFRESH_S = 5.0  # Time between two searches for servers during a transfer
BUSY_S = 0.5  # Pause after a peer answers that it is busy
STALLED_S = LEAF_TIMEOUT_S
"""A transfer without a new leaf for so long is given up. Servers could answer for ever that they are busy."""
RETRY_S = 1.0  # Pause between two tries
CHECK_S = 0.5  # Time between two looks whether the download is still of use
MAX_TRIES = 3
MAX_LATE = 3  # Timeouts after which a peer is not asked again


class Downloader:
    """Downloads states for one node. A peer that has sent wrong bytes is not asked again."""

    def __init__(
        self,
        wire: Wire,
        peer_table: PeerTable,
        rules: Rules,
        folder: Path,
        rng: random.Random,
        room: Room = any_room,
    ) -> None:
        self._wire, self._peer_table, self._rules, self._folder, self._rng = wire, peer_table, rules, folder, rng
        self._room = room
        self._providers = ProviderSearch(wire, peer_table, rules, rng)
        self._banned: set[str] = set()
        self._local_s = 0.0
        """Seconds of work on this machine alone, for which no peer is to blame."""
        self._is_local = False
        self._first_parts_s = 0.0
        """Seconds until the first parts of the newest state are here on the slowest line."""

    async def run_until(
        self,
        target: Target,
        on_progress: Callable[[float], None],
        on_try: Callable[[str], None],
        patience_s: float = math.inf,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> Tip | None:
        """Try again and again to download a state. Raises MachineError if the disk fails.

        Returns None if there is no progress for `patience_s`, or if the state is no longer needed. A larger part of one
        state than ever before is progress, so nobody can feign it by offering one state after another. On a slow line,
        STREAMS large parts arrive at the same time, so the time for these is added. Work on this machine takes no
        patience.

        Args:
            on_try: called with an empty text when a try begins, and with the reason when it fails.
        """
        clock = asyncio.get_running_loop().time
        best_ratio, progress_at_s = 0.0, clock()
        self._local_s = self._first_parts_s = 0.0

        def note(ratio: float) -> None:
            nonlocal best_ratio, progress_at_s
            if ratio > best_ratio:
                best_ratio, progress_at_s = ratio, clock()
                self._local_s = 0.0
            on_progress(ratio)

        self._providers.begin()
        logged, running = "", asyncio.create_task(self.run(target, note))
        try:
            while is_needed() and self._waited_s(progress_at_s) <= patience_s:
                await asyncio.wait([running], timeout=CHECK_S)
                if not running.done():
                    continue
                try:
                    return running.result()
                except TransferFailed as exc:
                    on_try(str(exc))
                    if str(exc) != logged:
                        logger.info("The state could not be downloaded yet: %s", exc)
                    logged = str(exc)
                await asyncio.sleep(RETRY_S)
                on_try("")
                running = asyncio.create_task(self.run(target, note))
            return None
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _waited_s(self, since_s: float) -> float:
        """Seconds since then, without work on this machine and the time of the first parts."""
        elapsed_s = asyncio.get_running_loop().time() - since_s
        return 0.0 if self._is_local else elapsed_s - self._local_s - self._first_parts_s

    async def run(self, target: Target, on_progress: Callable[[float], None]) -> Tip:
        """Download the best state that peers serve (`ProviderSearch.find`). Raises TransferFailed, or MachineError.

        Finished leaves stay in `folder` until `remove_partial_downloads`, so a later call or process can resume.
        """
        names = await asyncio.to_thread(partial_downloads, self._folder)
        states = await self._providers.find(target, names, self._banned)
        if not states:
            raise TransferFailed("No peer serves a state yet, or none that the others share for long enough.")
        states = states[:MAX_TRIES]
        digests = [state.snapshot.digest for state in states]
        await asyncio.to_thread(remove_partial_downloads, self._folder, keep=digests)
        problems = []
        for state in states:
            try:
                return await self._download(state, target, on_progress)
            except TransferFailed as exc:
                logger.info("The state after round %d could not be downloaded: %s", state.snapshot.round, exc)
                problems.append(exc)
        raise problems[0]

    async def _download(self, state: AvailableState, target: Target, on_progress: Callable[[float], None]) -> Tip:
        snapshot, clock = state.snapshot, asyncio.get_running_loop().time
        partial = PartialState(self._folder, snapshot.digest, target.parameters, self._room, target.moments)
        try:
            missing = await self._locally(partial.open, snapshot.leaves)
            total, servers = len(snapshot.leaves), len(state.servers)
            logger.info(
                "Downloading the state after round %d from %d %s; %d of its %d parts are here already.",
                snapshot.round, servers, "peer" if servers == 1 else "peers", total - len(missing), total,
            )  # fmt: skip
            on_progress(1 - len(missing) / total)
            first_bytes = sum(sorted(map(partial.size_of, missing), reverse=True)[:STREAMS])
            self._first_parts_s = first_bytes / SLOWEST_BYTES_PER_S
            self._rng.shuffle(missing)
            began_at_s, missing_mb = clock(), sum(partial.size_of(index) for index in missing) / 1e6
            transfer = Transfer(self._wire, snapshot, partial, missing, self._banned, on_progress)
            await transfer.run(sorted(state.servers), lambda: self._find_servers(snapshot, transfer.peers))
            servers_now = sorted({*state.servers, *transfer.peers}, key=lambda peer: (-transfer.delivered[peer], peer))
            credit = await self._fetch_credit(snapshot, servers_now)
            took_s = max(1e-3, clock() - began_at_s)
            logger.info(
                "Downloaded the state after round %d: %.1f MB in %.1f s, %.2f MB/s.",
                snapshot.round, missing_mb, took_s, missing_mb / took_s,
            )  # fmt: skip
            tip = await self._locally(self._read, partial, snapshot, credit, clock())
        finally:
            partial.close()
        if tip.digest != snapshot.digest:
            partial.remove()
            raise TransferFailed("The downloaded state on the disk is not what was written to it.")
        return replace(tip, links=await self._links_to(tip, servers_now))

    async def _locally(self, work: Callable[..., T], *args: Any) -> T:
        """Do slow work on this machine in a thread. It takes no patience (`run_until`)."""
        clock = asyncio.get_running_loop().time
        began_s, self._is_local = clock(), True
        try:
            return await asyncio.to_thread(work, *args)
        finally:
            self._local_s += clock() - began_s
            self._is_local = False

    async def _find_servers(self, snapshot: Snapshot, known: Collection[str]) -> list[str]:
        """The peers that serve the state now, and the known servers that are live and have not said that it is gone.

        A leaf that was requested from a peer without the state may never arrive.
        """
        serving, gone = await self._providers.servers(snapshot.digest, self._banned)
        live = {record.peer_id for record in self._peer_table.others()}
        return sorted({*serving, *live.intersection(known).difference(gone)})

    async def _fetch_credit(self, snapshot: Snapshot, peers: Sequence[str]) -> CreditTable:
        """Fetch the table of credit, which must have the root in the description. Raises TransferFailed.

        The first of `peers` have sent leaves.
        """
        if snapshot.credit_root == EMPTY.root:
            return EMPTY
        message = Message({"digest": snapshot.digest, "index": len(snapshot.leaves)})
        for peer in peers:
            if peer in self._banned:
                continue
            try:
                call = self._wire.call(
                    peer, "leaf", message, timeout_s=CREDIT_TIMEOUT_S, max_reply_bytes=MOST_CREDIT_BYTES
                )
                reply = await while_live(self._peer_table, peer, call)
                return await asyncio.to_thread(_checked_credit, reply, snapshot)
            except PeerError as exc:
                if exc.code == "bad_credit":
                    self._banned.add(peer)
                    self._wire.traffic.reject(exc)
                logger.info("Peer %s did not send the table of credit: %s", peer[-6:], exc)
        raise TransferFailed("The table of credit is not available from any peer.")

    def _read(self, partial: PartialState, snapshot: Snapshot, credit: CreditTable, now_s: float) -> Tip:
        anchor, momentum = partial.load()
        state = OuterState(anchor, momentum, snapshot.round, snapshot.tokens, credit, snapshot.amendments)
        return verified_tip(state, snapshot.head, snapshot.proof, self._rules, now_s)

    async def _links_to(self, tip: Tip, peers: Sequence[str]) -> tuple[Link, ...]:
        """Fetch the links up to the tip, which fork choice needs, from the first peer that has them.

        In `peers`, those that have sent leaves come first, because the others may hang.
        """
        for peer in peers[:MAX_TRIES] if tip.proof else ():
            try:
                reply = await self._wire.call(peer, "chain", Message({"heads": []}), timeout_s=CHAIN_TIMEOUT_S)
                links = await asyncio.to_thread(links_of, reply, self._rules)
            except PeerError as exc:
                logger.info("Peer %s did not send the light proofs of its chain: %s", peer[-6:], exc)
                continue
            heads = [link.head for link in links]
            if tip.head in heads:
                return links[: heads.index(tip.head) + 1]
        return tip.links


@dataclass(frozen=True, slots=True)
class _Request:
    peer: str
    index: int
    asked_at_s: float


def _checked_credit(reply: Message, snapshot: Snapshot) -> CreditTable:
    try:
        (data,) = reply.blobs
        table = decode_credit(data)
    except ValueError as exc:
        raise PeerError(f"a table of credit is not valid: {exc}", code="bad_credit") from exc
    if table.root != snapshot.credit_root or table.tokens != snapshot.tokens:
        raise PeerError("a table of credit has another root or sum than the state", code="bad_credit")
    return table


class Transfer:
    """Requests the missing leaves of one state. A faster peer gets more requests.

    In the endgame (Cohen, "Incentives Build Robustness in BitTorrent", 2003), when all leaves have been requested, late
    leaves are requested from a second peer as well, so that they do not wait for a slow or hung peer.
    """

    def __init__(
        self,
        wire: Wire,
        snapshot: Snapshot,
        partial: PartialState,
        missing: Sequence[int],
        banned: set[str],
        on_progress: Callable[[float], None],
    ) -> None:
        """`banned` are the peers not to ask. Peers that send wrong bytes are added to it."""
        self._wire, self._snapshot, self._partial, self._on_progress = wire, snapshot, partial, on_progress
        self._queue = list(missing)
        self._missing = set(missing)
        self._banned = banned
        self._streams: dict[str, int] = {}
        """For each peer that is asked, the limit on its requests in flight."""
        self._requests: dict[asyncio.Task[bytes], _Request] = {}
        self.delivered: Counter[str] = Counter()
        """The number of leaves that each peer has sent."""
        self._late: Counter[str] = Counter()
        self._paused_until_s: dict[str, float] = {}
        self._clock = asyncio.get_running_loop().time
        self._kept_at_s = self._clock()
        """When the newest leaf was kept."""

    @property
    def peers(self) -> list[str]:
        """The peers that are being asked."""
        return list(self._streams)

    async def run(self, servers: Sequence[str], find_servers: Callable[[], Awaitable[list[str]]]) -> None:
        """Download the missing leaves. Raises TransferFailed if no peer serves them, MachineError if the disk fails."""

        async def find_later() -> list[str]:
            await asyncio.sleep(REFRESH_S)
            return await find_servers()

        self._use_servers(servers)
        finding, missing_before = asyncio.create_task(find_later()), 0
        try:
            while self._missing and self._clock() - self._kept_at_s <= STALLED_S:
                self._send_requests()
                if self._streams or self._requests:
                    await self._receive()
                    if finding.done():
                        self._use_servers(finding.result())
                        finding = asyncio.create_task(find_later())
                elif len(self._missing) == missing_before:
                    break  # All peers have been asked once more without progress.
                else:
                    missing_before = len(self._missing)
                    self._use_servers(await find_servers())
        finally:
            for task in (finding, *self._requests):
                task.cancel()
            await asyncio.gather(finding, *self._requests, return_exceptions=True)
        if self._missing:
            total = len(self._snapshot.leaves)
            raise TransferFailed(f"{len(self._missing)} of {total} parts of the state are not available from any peer.")

    def _use_servers(self, servers: Sequence[str]) -> None:
        """Share the streams among these servers, preferring those in use. Cancels the requests to all other peers."""
        usable = [peer for peer in servers if peer not in self._banned and self._late[peer] < MAX_LATE]
        chosen = sorted(usable, key=lambda peer: peer not in self._streams)[:STREAMS]
        share = min(STREAMS_PER_PEER, STREAMS // max(1, len(chosen)))
        self._streams = {peer: max(1, share - self._late[peer]) for peer in chosen}
        for task, request in self._requests.items():
            if request.peer not in self._streams:
                task.cancel()

    def _send_requests(self) -> None:
        now_s = self._clock()
        for peer, limit in self._streams.items():
            in_flight = sum(request.peer == peer for request in self._requests.values())
            while in_flight < limit and now_s >= self._paused_until_s.get(peer, 0.0):
                index = self._queue.pop() if self._queue else self._late_leaf(peer)
                if index is None:
                    break
                self._requests[asyncio.create_task(self._fetch(peer, index))] = _Request(peer, index, now_s)
                in_flight += 1

    def _late_leaf(self, peer: str) -> int | None:
        """A leaf for which exactly one other peer has been asked, more than ENDGAME_S ago; None if there is none."""
        copies, before_s = Counter(request.index for request in self._requests.values()), self._clock() - ENDGAME_S
        for request in self._requests.values():
            is_late = request.asked_at_s < before_s and request.index in self._missing
            if is_late and request.peer != peer and copies[request.index] == 1:
                return request.index
        return None

    async def _receive(self) -> None:
        """Handle the requests that end within LOOK_S."""
        if not self._requests:
            await asyncio.sleep(LOOK_S)
            return
        await asyncio.wait(self._requests, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in self._requests if task.done()]:
            request = self._requests.pop(task)
            error = None if task.cancelled() else task.exception()
            if isinstance(error, PeerError):
                self._handle_error(request.peer, error)
            elif error is not None:
                raise error
            elif not task.cancelled() and request.index in self._missing:
                await self._keep(request.index, task.result())
                self.delivered[request.peer] += 1
            if request.index in self._missing and all(r.index != request.index for r in self._requests.values()):
                self._queue.append(request.index)

    async def _keep(self, index: int, data: bytes) -> None:
        await asyncio.to_thread(self._partial.put, index, data)
        self._missing.discard(index)
        self._kept_at_s = self._clock()
        for task, request in self._requests.items():
            if request.index == index:
                task.cancel()
        self._on_progress(1 - len(self._missing) / len(self._snapshot.leaves))

    async def _fetch(self, peer: str, index: int) -> bytes:
        """Request a leaf and verify it. A peer that sends a wrong leaf is banned."""
        message = Message({"digest": self._snapshot.digest, "index": index})
        reply = await self._wire.call(peer, "leaf", message, timeout_s=LEAF_TIMEOUT_S, max_reply_bytes=LEAF_BYTES)
        try:
            await asyncio.to_thread(self._check, index, reply)
        except PeerError as exc:
            if peer not in self._banned:
                self._banned.add(peer)
                self._wire.traffic.reject(exc)
                logger.warning("Peer %s is dropped from the download: %s.", peer[-6:], exc)
            raise
        return reply.blobs[0]

    def _check(self, index: int, reply: Message) -> None:
        if len(reply.blobs) != 1 or leaf_hash(reply.blobs[0]) != self._snapshot.leaves[index]:
            raise PeerError(f"leaf {index} has a wrong hash")
        if len(reply.blobs[0]) != self._partial.size_of(index):
            raise PeerError(f"leaf {index} has {len(reply.blobs[0])} bytes", code="bad_size")
        if not np.isfinite(np.frombuffer(reply.blobs[0], dtype="<f4")).all():
            raise PeerError(f"leaf {index} has a value that is not finite", code="not_finite")

    def _handle_error(self, peer: str, error: PeerError) -> None:
        """Ask a busy peer again later and a late peer less often. Drop others until they are found as servers again."""
        if error.code == "busy" and peer not in self._banned:
            self._paused_until_s[peer] = self._clock() + BUSY_S
            return
        if peer not in self._banned:
            logger.info("Peer %s did not send a part of the state: %s", peer[-6:], error)
        if error.code == "timeout":
            self._late[peer] += 1
            if self._late[peer] < MAX_LATE and peer in self._streams:
                self._streams[peer] = max(1, self._streams[peer] - 1)
                return
        self._streams.pop(peer, None)

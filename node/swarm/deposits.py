"""Contributions that are handed over before the round has a plan, so that nobody waits for a slow uplink.

A member on a slow line gives its whole contribution, signed, to a member on a fast one: its *depositary*. When the plan
comes it asks the depositary to forward to each reducer what that one averages. A reducer checks every chunk against the
member's signature, so a depositary can withhold, but not alter; the member then sends by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from node.errors import PeerError
from node.swarm.attempt import Attempt, Contribution
from node.swarm.base import Message
from node.swarm.calls import while_live
from node.swarm.records import Deposit, Document, Plan, check_deposit, results_root, sign
from node.swarm.reduce import chunk_hash
from node.swarm.rendezvous import depositaries, grace_seconds

if TYPE_CHECKING:
    from node.swarm.rounds import Rounds

logger = logging.getLogger(__name__)

CALL_S = 5.0
FIXED_S = 1.0
"""Of a deposit, beside its bytes."""
MARGIN_RATIO = 0.1
"""By which a line may be slower than in the round before."""
MEMORY_BYTES = 256 * 2**20
"""For what others deposit, where a contribution is small."""
LEAST_PLACES, MOST_PLACES = 2, 64
ANSWER_S = 1.0
"""A depositary answers so long before the member stops waiting."""
SIDE_BY_SIDE = 2
"""Deposits on their way to one reducer at a time."""


def places_for(round_bytes: int) -> int:
    """Deposits that one member holds at a time: what fits into MEMORY_BYTES, within bounds."""
    return min(MOST_PLACES, max(LEAST_PLACES, MEMORY_BYTES // max(1, round_bytes)))


def check_chunks(hashes: Sequence[bytes], chunks: Sequence[int], blobs: Sequence[bytes]) -> dict[int, bytes]:
    """These chunks by number, each as it was signed. Raises PeerError. Heavy: hashes them."""
    if len(chunks) != len(blobs) or len(set(chunks)) != len(chunks):
        raise PeerError("a deposit has the wrong chunks", code="bad_size")
    for chunk, blob in zip(chunks, blobs, strict=True):
        if not 0 <= chunk < len(hashes) or chunk_hash(blob) != hashes[chunk]:
            raise PeerError(f"chunk {chunk} of a deposit is not the one that was signed", code="bad_signature")
    return dict(zip(chunks, blobs, strict=True))


class Depositor:
    """The member's side: whether its uplink is slow, who may send for it, and what that one has."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._uplinks_bytes_s: dict[str, float] = {}
        """Of members, as they signed it last; without those that have not measured theirs."""
        self._distrusted: set[str] = set()
        """They did not take a contribution of this node in time, or the reducers did not get it from them."""
        self._given: tuple[Contribution, str] | None = None
        """What was handed over, and to whom."""
        self.is_sending = False

    def round_over(self, plan: Plan, uplinks_bytes_s: Mapping[str, float], included: Sequence[str]) -> None:
        """A round is committed: `uplinks_bytes_s` are what the members of its plan have signed; 0: not known."""
        rounds, given = self._rounds, self._given
        if given is not None and given[0].parent == plan.parent and rounds.me not in included:
            self._distrusted.add(given[1])
        self._given = None
        live = {record.peer_id for record in rounds.directory.live()}
        known = {**self._uplinks_bytes_s, **uplinks_bytes_s}
        self._uplinks_bytes_s = {peer: rate for peer, rate in known.items() if rate > 0 and peer in live}

    @property
    def upload_s(self) -> float:
        """Seconds for which a whole contribution takes this node's uplink, as it is now; 0 while unknown."""
        rounds = self._rounds
        rates = [rate for rate in (rounds.upload_bytes_s, rounds.uplink.newest_bytes_s) if rate > 0]
        return rounds.grid.encoded_bytes() / min(rates) if rates else 0.0

    @property
    def lead_s(self) -> float:
        """How long before the end of a round a contribution has to leave; 0 where it need not be deposited."""
        rounds = self._rounds
        rate, size_bytes = rounds.upload_bytes_s, rounds.grid.encoded_bytes()
        is_slow = rate > 0 and size_bytes / rate > grace_seconds(rounds.chain.tip.round_s) / 2
        return (1 + MARGIN_RATIO) * self.upload_s + FIXED_S if is_slow and self._candidates() else 0.0

    def _candidates(self) -> list[str]:
        """Whom to try, best first. Overlapped, nobody stands still while contributions are on their way."""
        rounds = self._rounds
        if rounds.rules.overlapped:
            return []
        found = depositaries(rounds.me, rounds.chain.tip.head, rounds.upload_bytes_s, self._uplinks_bytes_s)
        callable_now = set(rounds.directory.callable_members())
        return [peer for peer in found if peer in callable_now and peer not in self._distrusted]

    async def hand_over(self, mine: Contribution) -> None:
        """Deposit this contribution, if that is worth it and somebody takes it. Ends early when its round does."""
        rounds = self._rounds
        if not self.lead_s:
            if not self._candidates():
                self._distrusted.clear()  # They get another chance.
            return
        hashes = await asyncio.to_thread(lambda: [chunk_hash(chunk) for chunk in mine.chunks])
        deposit = Deposit(run=rounds.rules.run, parent=mine.parent, root=results_root(hashes))
        document = sign(rounds.directory.identity, deposit)
        message = Message({"deposit": document.model_dump(), "hashes": b"".join(hashes)}, mine.chunks)

        def is_wanted() -> bool:
            return rounds.mine is mine and rounds.chain.tip.head == mine.parent

        self.is_sending = True
        try:
            for peer in self._candidates():
                if not is_wanted():
                    return
                if await self._give(peer, message, mine, is_wanted):
                    return
        finally:
            self.is_sending = False

    async def _give(self, peer: str, message: Message, mine: Contribution, is_wanted: Callable[[], bool]) -> bool:
        rounds = self._rounds
        began_s, upload_s = rounds.clock(), self.upload_s
        try:
            timeout_s = min(rounds.rules.bulk_s, 2 * upload_s + CALL_S)
            call = rounds.wire.call(peer, "deposit", message, timeout_s=timeout_s)
            await while_live(rounds.directory, peer, call, is_wanted)
        except PeerError as exc:
            logger.info("Peer %s did not take this node's contribution: %s", peer[-6:], exc)
            # A refusal for want of room costs nothing, and a round may end before the contribution could be there.
            excused_s = FIXED_S if exc.code == "busy" else 0.0 if is_wanted() else upload_s
            elapsed_s = rounds.clock() - began_s
            if elapsed_s > excused_s:
                self._distrusted.add(peer)
            if elapsed_s > upload_s:  # The line is at most so fast: the next contribution leaves earlier.
                rounds.uplink.sent(f"{mine.parent} deposit to {peer}", message.blob_bytes, elapsed_s)
            return False
        rounds.uplink.sent(f"{mine.parent} deposit to {peer}", message.blob_bytes, rounds.clock() - began_s)
        self._given = (mine, peer)
        logger.debug("Peer %s has this node's contribution.", peer[-6:])
        return True

    async def forward(self, key: Mapping[str, Any], plan: Plan, mine: Contribution) -> list[str]:
        """Have the depositary give the plan's reducers their chunks. Returns those to which this node has to itself."""
        rounds = self._rounds
        if self._given is None or self._given[0] is not mine:
            return list(plan.reducers)
        peer = self._given[1]
        wanted = {one: chunks for one in plan.reducers if one != rounds.me and (chunks := plan.chunks_of(one))}
        # A depositary is several times as fast as this node: one that needs longer is not worth waiting for.
        timeout_s = min(rounds.rules.bulk_s, max(CALL_S, self.upload_s))
        taken: Any = None
        try:
            message = Message({**key, "chunks": wanted, "wait_s": timeout_s - ANSWER_S})
            call = rounds.wire.call(peer, "forward", message, timeout_s=timeout_s)
            taken = (await while_live(rounds.directory, peer, call)).header.get("taken")
        except PeerError as exc:
            logger.info("Peer %s does not forward this node's contribution: %s", peer[-6:], exc)
        taken = [one for one in taken if one in wanted] if isinstance(taken, list) else []
        if wanted and not taken:
            self._distrusted.add(peer)
            self._given = None
        return [one for one in plan.reducers if one not in taken]


@dataclass(slots=True)
class Held:
    """One member's deposit."""

    document: Document
    hashes: bytes
    chunks: Sequence[bytes]
    attempts: set[int] = field(default_factory=set)
    """Of its round, in which it was sent on: once in each."""


class Depositary:
    """The other side: holds what members on slow lines deposit, for one round, and sends it to the reducers."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._places = places_for(rounds.rules.round_bytes)
        self._held: dict[str, Held] = {}
        self._coming: set[str] = set()
        self._doors: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(SIDE_BY_SIDE))

    def clear(self) -> None:
        """The round is over."""
        self._held.clear()
        self._doors.clear()

    @contextmanager
    def place(self, caller: str) -> Iterator[None]:
        """Room in memory for one deposit of this member. PeerError where there is none."""
        taken = self._held.keys() | self._coming
        if caller not in taken and len(taken) >= self._places:
            raise PeerError("this node holds as many contributions of others as it can", code="busy")
        self._coming.add(caller)
        try:
            yield
        finally:
            self._coming.discard(caller)

    async def take(self, caller: str, message: Message) -> None:
        """Hold a member's contribution to the round that this node is in. Raises PeerError."""
        rounds = self._rounds
        parent, grid = rounds.chain.tip.head, rounds.grid
        document = Document.model_validate(message.header.get("deposit"))
        hashes = message.header.get("hashes")
        named = check_deposit(document, hashes, rounds.rules.bounds, parent, rounds.next_round)
        if document.signer != caller:
            raise PeerError("a deposit is not the caller's")
        sizes = [grid.encoded_bytes([chunk]) for chunk in range(len(named))]
        if [len(blob) for blob in message.blobs] != sizes:
            raise PeerError("a deposit has chunks of the wrong size", code="bad_size")
        await asyncio.to_thread(check_chunks, named, range(len(named)), message.blobs)
        if parent != rounds.chain.tip.head:
            raise PeerError("that round is over", code="round_failed")
        before = self._held.get(caller)
        self._held[caller] = Held(document, b"".join(named), message.blobs, before.attempts if before else set())

    async def forward(
        self, attempt: Attempt, caller: str, wanted: Mapping[str, Sequence[int]], wait_s: float
    ) -> list[str]:
        """Send each of these reducers these chunks of the caller's deposit. Returns those that took them in `wait_s`.

        The other sends go on: one reducer that hangs does not keep the member waiting for all.
        """
        held = self._held.get(caller)
        if held is None:
            raise PeerError("this node has no contribution of that member", code="gone")
        numbers = [chunk for chunks in wanted.values() for chunk in chunks]
        if len(set(numbers)) != len(numbers) or not set(numbers) <= set(range(len(held.chunks))):
            raise PeerError("a request to forward names chunks twice, or such as there are not")
        await self._rounds.mishaps.at("forward")
        if attempt.number in held.attempts:
            raise PeerError("that contribution was forwarded in this attempt already", code="busy")
        held.attempts.add(attempt.number)
        key = {"parent": attempt.parent, "attempt": attempt.number}
        sends = {peer: self._rounds.spawn(self._send(peer, key, held, chunks)) for peer, chunks in wanted.items()}
        if sends:
            await asyncio.wait(sends.values(), timeout=wait_s)
        return [peer for peer, send in sends.items() if send.done() and not send.cancelled() and send.result()]

    async def _send(self, peer: str, key: Mapping[str, Any], held: Held, chunks: Sequence[int]) -> bool:
        rounds = self._rounds
        if not rounds.directory.is_member(peer):
            return False
        header = {**key, "deposit": held.document.model_dump(), "hashes": held.hashes, "chunks": list(chunks)}
        blobs = rounds.mishaps.spoil("forward", [held.chunks[chunk] for chunk in chunks])
        message = Message(header, blobs)
        async with self._doors[peer]:
            try:
                call = rounds.wire.call(peer, "contribute_for", message, timeout_s=rounds.rules.bulk_s)
                await while_live(rounds.directory, peer, call, lambda: rounds.chain.tip.head == key["parent"])
            except PeerError as exc:
                logger.info("Reducer %s did not take another member's chunks: %s", peer[-6:], exc)
                return False
        if peer != rounds.me:
            rounds.wire.traffic.forwarded_bytes += message.blob_bytes
        return True

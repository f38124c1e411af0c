"""Sends a contribution to the reducers: directly, or from a slow uplink through a *depositary*.

A member on a slow uplink uploads its whole signed contribution to a depositary, a member on a fast uplink, before the
round has a plan. When the plan arrives, the depositary sends each reducer its chunks. A reducer checks each chunk
against the member's signature: a depositary can only withhold chunks, and then the member sends them itself.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from node.errors import PeerError
from node.swarm.allreduce.reducer import ChunkLayout, chunk_hash
from node.swarm.consensus.ballot import Attempt, Ballot, LocalContribution
from node.swarm.consensus.context import CALL_S, Context, Rules
from node.swarm.consensus.leader_election import FASTER, leader_order
from node.swarm.membership.peer_table import while_live
from node.swarm.messages import Deposit, Document, Plan, check_deposit, results_root, sign
from node.swarm.transport.wire import Message

logger = logging.getLogger(__name__)

FIXED_S = 1.0
"""Seconds that a deposit takes in addition to the transfer of its bytes."""
MARGIN_RATIO = 0.1
"""A deposit allows for an uplink that is slower than in the round before by this share."""
MEMORY_BYTES = 256 * 2**20
"""Memory for the deposits of others. LEAST_PLACES deposits are held even if they need more."""
LEAST_PLACES, MOST_PLACES = 2, 64
ANSWER_S = 1.0
"""A depositary answers a request to forward this long before the member's timeout."""
MOST_FORWARDS = 8
"""Limit on the attempts in which one deposit is forwarded. In later ones, the member sends its contribution itself."""
BUSY_S = 1.0
"""Pause before a member sends its chunks again to a reducer that had no memory for them."""
SIDE_BY_SIDE = 2
"""Limit on concurrent transfers of deposits to one reducer."""


def depositaries(me: str, parent: str, own_bytes_s: float, uplinks_bytes_s: Mapping[str, float]) -> list[str]:
    """Members with which this node may deposit its contribution, in the order to try them.

    The uplink of a depositary is at least FASTER times as fast as this node's. The list is empty unless the lower
    median of the others' uplinks is that fast too, so that a minority that claims fast uplinks does not attract all
    deposits. Each member has its own order, which spreads the load.
    """
    others = [rate for peer, rate in uplinks_bytes_s.items() if peer != me]
    if not others or FASTER * own_bytes_s > statistics.median_low(others):
        return []
    fast = [peer for peer, rate in uplinks_bytes_s.items() if peer != me and rate >= FASTER * own_bytes_s > 0]
    return leader_order(f"deposit {me} {parent}", fast)


def places_for(round_bytes: int) -> int:
    """Limit on the deposits that a member holds: as many as fit into MEMORY_BYTES, from LEAST_PLACES to MOST_PLACES."""
    return min(MOST_PLACES, max(LEAST_PLACES, MEMORY_BYTES // max(1, round_bytes)))


def check_chunks(hashes: Sequence[bytes], chunks: Sequence[int], blobs: Sequence[bytes]) -> dict[int, bytes]:
    """Check each chunk against its signed hash, and return the chunks by number. Slow. Raises PeerError."""
    if len(chunks) != len(blobs) or len(set(chunks)) != len(chunks):
        raise PeerError("a deposit has the wrong chunks", code="bad_size")
    for chunk, blob in zip(chunks, blobs, strict=True):
        if not 0 <= chunk < len(hashes) or chunk_hash(blob) != hashes[chunk]:
            raise PeerError(f"chunk {chunk} of a deposit is not the one that was signed", code="bad_signature")
    return dict(zip(chunks, blobs, strict=True))


async def contribute(ctx: Context, peer: str, message: Message, is_wanted: Callable[[], bool] = lambda: True) -> float:
    """Send a reducer its chunks, again after a pause if it has no memory for them now. Returns the seconds it took.

    Raises PeerError if the reducer does not accept them within `bulk_s`.
    """
    until_s = ctx.clock() + ctx.rules.bulk_s
    while True:
        began_s = ctx.clock()
        try:
            call = ctx.wire.call(peer, "contribute", message, timeout_s=until_s - began_s)
            await while_live(ctx.peer_table, peer, call, is_wanted)
        except PeerError as exc:
            if exc.code != "busy" or not is_wanted() or ctx.clock() + BUSY_S >= until_s:
                raise
            await asyncio.sleep(BUSY_S)
        else:
            return ctx.clock() - began_s


class Sender:
    """The member's side: sends this node's contribution to the reducers, directly or through a depositary."""

    def __init__(self, ctx: Context, ballot: Ballot) -> None:
        self._ctx, self._ballot = ctx, ballot
        self._uplinks_bytes_s: dict[str, float] = {}
        """The uplink rate that each member signed last. Members that have not measured a rate are missing."""
        self._distrusted: set[str] = set()
        """Members that did not take this node's deposit in time, or did not forward it to the reducers."""
        self._given: tuple[LocalContribution, str] | None = None
        """The deposited contribution and its depositary."""
        self.is_depositing = False

    def round_over(self, plan: Plan, uplinks_bytes_s: Mapping[str, float], included: Sequence[str]) -> None:
        """Prepare for the next round. `uplinks_bytes_s` are the rates that the contributors signed; 0 if unknown."""
        ctx, given = self._ctx, self._given
        if given is not None and given[0].parent == plan.parent and ctx.me not in included:
            self._distrusted.add(given[1])
        self._given = None
        live = {record.peer_id for record in ctx.peer_table.live()}
        known = {**self._uplinks_bytes_s, **uplinks_bytes_s}
        self._uplinks_bytes_s = {peer: rate for peer, rate in known.items() if rate > 0 and peer in live}

    @property
    def upload_s(self) -> float:
        """Seconds to upload a whole contribution at the current rate; 0 while unknown."""
        ctx = self._ctx
        rates = [rate for rate in (ctx.upload_bytes_s, ctx.uplink.newest_bytes_s) if rate > 0]
        return ctx.layout.encoded_bytes() / min(rates) if rates else 0.0

    @property
    def lead_s(self) -> float:
        """Seconds before the end of a round at which to deposit the contribution; 0 if no deposit is needed."""
        is_slow = self._takes_long(self._ctx.layout)
        return (1 + MARGIN_RATIO) * self.upload_s + FIXED_S if is_slow and self._candidates() else 0.0

    @property
    def is_slow(self) -> bool:
        """Whether all would wait for this node's uplink if it reduced."""
        ctx = self._ctx
        return bool(self._candidates()) and any(
            self._takes_long(layout) for layout in (ctx.layout, ctx.rules.result_layout_at(ctx.next_round))
        )

    def _takes_long(self, layout: ChunkLayout) -> bool:
        ctx = self._ctx
        rate, grace_s = ctx.upload_bytes_s, ctx.rules.closing.grace_s(ctx.chain.tip.round_s)
        return rate > 0 and layout.encoded_bytes() / rate > grace_s / 2

    def _candidates(self) -> list[str]:
        """Depositaries to try, in order. Overlapped runs have none, because there no member waits for transfers."""
        ctx = self._ctx
        if ctx.rules.overlapped:
            return []
        found = depositaries(ctx.me, ctx.chain.tip.head, ctx.upload_bytes_s, self._uplinks_bytes_s)
        callable_now = set(ctx.peer_table.callable_members())
        return [peer for peer in found if peer in callable_now and peer not in self._distrusted]

    async def deposit(self, mine: LocalContribution) -> None:
        """Deposit this contribution if the uplink is slow and a member accepts it. Stops if the round ends first."""
        ctx = self._ctx
        if not self.lead_s:
            if not self._candidates():
                self._distrusted.clear()  # The distrusted members get another chance.
            return
        hashes = await asyncio.to_thread(lambda: [chunk_hash(chunk) for chunk in mine.chunks])
        deposit = Deposit(run=ctx.rules.run, parent=mine.parent, root=results_root(hashes))
        document = sign(ctx.peer_table.identity, deposit)
        message = Message({"deposit": document.model_dump(), "hashes": b"".join(hashes)}, mine.chunks)

        def is_wanted() -> bool:
            return self._ballot.mine is mine and ctx.chain.tip.head == mine.parent

        self.is_depositing = True
        try:
            for peer in self._candidates():
                if not is_wanted():
                    return
                if await self._give(peer, message, mine, is_wanted):
                    return
        finally:
            self.is_depositing = False

    async def _give(self, peer: str, message: Message, mine: LocalContribution, is_wanted: Callable[[], bool]) -> bool:
        ctx = self._ctx
        began_s, upload_s = ctx.clock(), self.upload_s
        try:
            timeout_s = min(ctx.rules.bulk_s, 2 * upload_s + CALL_S)
            call = ctx.wire.call(peer, "deposit", message, timeout_s=timeout_s)
            await while_live(ctx.peer_table, peer, call, is_wanted)
        except PeerError as exc:
            logger.info("Peer %s did not accept this node's contribution for forwarding: %s", peer[-6:], exc)
            # A refusal for lack of memory is not the peer's fault, nor is a round that ends before the upload could.
            excused_s = FIXED_S if exc.code == "busy" else 0.0 if is_wanted() else upload_s
            elapsed_s = ctx.clock() - began_s
            if elapsed_s > excused_s:
                self._distrusted.add(peer)
            if elapsed_s > upload_s:  # The uplink is slower than estimated, so the next deposit starts earlier.
                ctx.uplink.record_send(f"{mine.parent} deposit to {peer}", message.blob_bytes, elapsed_s)
            return False
        ctx.uplink.record_send(f"{mine.parent} deposit to {peer}", message.blob_bytes, ctx.clock() - began_s)
        self._given = (mine, peer)
        logger.debug("Peer %s holds this node's contribution for forwarding.", peer[-6:])
        return True

    async def send(self, attempt: Attempt, plan: Plan, mine: LocalContribution) -> None:
        """Send every reducer its chunks."""
        await self._ctx.hooks.at("reduce")
        left = await self._forward(attempt, plan, mine)
        mine = replace(mine, chunks=self._ctx.hooks.damage("reduce", mine.chunks))
        await asyncio.gather(*(self._send_to(peer, attempt, plan, mine) for peer in left))

    async def _send_to(self, peer: str, attempt: Attempt, plan: Plan, mine: LocalContribution) -> None:
        ctx, chunks = self._ctx, plan.chunks_of(peer)
        message = Message({**attempt.key, "chunks": chunks}, [mine.chunks[chunk] for chunk in chunks])
        try:
            elapsed_s = await contribute(ctx, peer, message)
            if peer != ctx.me:
                batch = f"{attempt.parent} {attempt.number}"
                ctx.uplink.record_send(batch, message.blob_bytes, elapsed_s)
        except PeerError as exc:
            # The reducer tells the leader which contributions have arrived.
            logger.info("Reducer %s did not accept this node's chunks: %s", peer[-6:], exc)

    async def _forward(self, attempt: Attempt, plan: Plan, mine: LocalContribution) -> list[str]:
        """Ask the depositary to send the chunks. Returns the reducers to which this node must send them itself."""
        ctx = self._ctx
        if self._given is None or self._given[0] is not mine:
            return list(plan.reducers)
        peer = self._given[1]
        wanted = {one: chunks for one in plan.reducers if one != ctx.me and (chunks := plan.chunks_of(one))}
        # A depositary is several times as fast as this node. After this time, the node sends the chunks itself.
        timeout_s = min(ctx.rules.bulk_s, max(CALL_S, self.upload_s))
        taken: Any = None
        try:
            message = Message({**attempt.key, "chunks": wanted, "wait_s": timeout_s - ANSWER_S})
            call = ctx.wire.call(peer, "forward", message, timeout_s=timeout_s)
            taken = (await while_live(ctx.peer_table, peer, call)).header.get("taken")
        except PeerError as exc:
            logger.info("Peer %s did not forward this node's contribution: %s", peer[-6:], exc)
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
    """Attempts in which the deposit was forwarded. In each attempt it is forwarded at most once."""


class Depositary:
    """The depositary's side: holds the deposits of members on slow uplinks, and forwards them to the reducers."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._places = places_for(ctx.rules.contribution_bytes)
        self._held: dict[str, Held] = {}
        self._coming: set[str] = set()
        self._doors: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(SIDE_BY_SIDE))

    def follow(self, rules: Rules) -> None:
        """Reserve memory for contributions of these rules."""
        self._places = places_for(rules.contribution_bytes)

    def clear(self) -> None:
        """Drop all deposits, because the round is over."""
        self._held.clear()
        self._doors.clear()

    @contextmanager
    def place(self, caller: str) -> Iterator[None]:
        """Reserve memory for one deposit of this member. Raises PeerError if no memory is left."""
        taken = self._held.keys() | self._coming
        if caller not in taken and len(taken) >= self._places:
            raise PeerError("this node has no memory for another deposit", code="busy")
        self._coming.add(caller)
        try:
            yield
        finally:
            self._coming.discard(caller)

    async def take(self, caller: str, message: Message) -> None:
        """Check and hold a member's contribution to the current round. Raises PeerError."""
        ctx = self._ctx
        parent, layout = ctx.chain.tip.head, ctx.layout
        document = Document.model_validate(message.header.get("deposit"))
        hashes = message.header.get("hashes")
        named = check_deposit(document, hashes, ctx.rules.bounds, parent, ctx.next_round)
        if document.signer != caller:
            raise PeerError("a deposit is not the caller's")
        sizes = [layout.encoded_bytes([chunk]) for chunk in range(len(named))]
        if [len(blob) for blob in message.blobs] != sizes:
            raise PeerError("a deposit has chunks of the wrong size", code="bad_size")
        await asyncio.to_thread(check_chunks, named, range(len(named)), message.blobs)
        if parent != ctx.chain.tip.head:
            raise PeerError("that round is over", code="round_failed")
        before = self._held.get(caller)
        self._held[caller] = Held(document, b"".join(named), message.blobs, before.attempts if before else set())

    async def forward(
        self, attempt: Attempt, caller: str, wanted: Mapping[str, Sequence[int]], wait_s: float
    ) -> list[str]:
        """Send the caller's chunks to each reducer. Returns the reducers that accepted theirs within `wait_s`.

        The other transfers go on after that, so that one slow reducer does not delay the answer.
        """
        held = self._held.get(caller)
        if held is None:
            raise PeerError("this node has no contribution of that member", code="gone")
        numbers = [chunk for chunks in wanted.values() for chunk in chunks]
        is_valid = all(type(chunk) is int and 0 <= chunk < len(held.chunks) for chunk in numbers)
        if not is_valid or len(set(numbers)) != len(numbers):
            raise PeerError("a request to forward names a chunk twice, or one that does not exist")
        await self._ctx.hooks.at("forward")
        if attempt.number in held.attempts or len(held.attempts) >= MOST_FORWARDS:
            raise PeerError("that contribution has already been forwarded", code="busy")
        held.attempts.add(attempt.number)
        sends = {
            peer: self._ctx.tasks.spawn(self._send(peer, attempt, held, chunks)) for peer, chunks in wanted.items()
        }
        if sends:
            await asyncio.wait(sends.values(), timeout=wait_s)
        return [peer for peer, send in sends.items() if send.done() and not send.cancelled() and send.result()]

    async def _send(self, peer: str, attempt: Attempt, held: Held, chunks: Sequence[int]) -> bool:
        ctx = self._ctx
        if not ctx.peer_table.is_member(peer):
            return False
        header = {**attempt.key, "deposit": held.document.model_dump(), "hashes": held.hashes, "chunks": list(chunks)}
        blobs = ctx.hooks.damage("forward", [held.chunks[chunk] for chunk in chunks])
        message = Message(header, blobs)
        async with self._doors[peer]:
            try:
                await contribute(ctx, peer, message, lambda: ctx.chain.tip.head == attempt.parent)
            except PeerError as exc:
                logger.info("Reducer %s did not accept the chunks that this node forwards: %s", peer[-6:], exc)
                return False
        if peer != ctx.me:
            ctx.wire.traffic.forwarded_bytes += message.blob_bytes
        return True

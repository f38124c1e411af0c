"""Serves a node's outer state, and the proofs and links of its chain, to joiners and to peers that are behind.

A state is sent with its proof and its Merkle tree, so the receiver can verify each leaf on its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from node.diloco.credit import EMPTY
from node.diloco.outer import OuterState
from node.errors import PeerError
from node.status import Channel, Phase
from node.swarm.chain.chain import Tip, make_tip
from node.swarm.chain.fork_choice import MAX_LINKS, Link, heads_of, links_after, read_links
from node.swarm.consensus.context import Context, KeptStates, Rules
from node.swarm.messages import Join, Proof, check_proof, included_joins
from node.swarm.transport.wire import MALFORMED_ERRORS, Message, Service, Wire

MIN_NAME = 16  # Characters of a head or digest that identify a state
LEAVES_PER_CALLER = 8
"""Limit on the leaves that are sent to one caller at a time, because they are held in memory."""
MOST_LEAVES, MOST_CHAINS = 32, 8
"""Limits on the leaves and the long chains that are sent at a time. Both have up to 4 MiB. Chains for members and those
for other peers have a limit each, so that strangers cannot keep members from a chain."""
CHAINS_PER_CALLER = 2
SHORT_BYTES = 64 * 2**10
"""A chain below this size is always sent."""
STATES_PER_CALLER = 64  # A caller asks once for each state that it has been offered; most replies are brief
YIELD_S = 10.0  # A leaf waits at most this long for a round that needs the uplink
LOOK_S = 0.1
PROOFS_BYTES = 2**20
"""Limit on the proofs in one reply: at 2 Mbit/s they arrive within the timeout. The caller asks again for the rest."""
CHAIN_TIMEOUT_S = 20.0  # Timeout of a `chain` call. All links are 4 MiB, which take 17 s at 2 Mbit/s
SERVING_PHASES = frozenset({Phase.TRAINING, Phase.SYNCING, Phase.DRAINING, Phase.PAUSED})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checkpoint of the outer state, as it is served."""

    round: int
    head: str
    tokens: int
    digest: str
    leaves: Sequence[bytes]
    """Leaf hashes of the Merkle tree whose root is `digest`."""
    proof: Proof | None
    """The commit certificate of `head`; None for the initial state."""
    credit_root: bytes = EMPTY.root
    """Root of the table of credit, which is the part after the last leaf."""
    amendments: bytes = b""
    """The accepted amendments (`config.amendments.encode_list`)."""


class StateSource(Protocol):
    """The immutable checkpoints of this node. Its methods are called from threads."""

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        """The newest checkpoint, or the one with this head or digest prefix. `hold` keeps its files for a while."""

    def leaf(self, digest: str, index: int) -> bytes:
        """Read one leaf, and keep its files for a while. Raises LookupError if the state is gone.

        The index after the last leaf is that of the encoded table of credit.
        """

    def oldest_needed_round(self) -> int | None:
        """The oldest round from which a joiner, or this node after a crash, will replay."""


class KeptSource(StateSource, KeptStates, Protocol):
    """Checkpoints that this node serves, and to which a rollback can go back."""


def joins_at(head: str, round: int, proof: Proof | None, rules: Rules, amendments: bytes = b"") -> Mapping[str, Join]:
    """The joins that the record at `head` includes. Raises PeerError if the proof does not lead to that head.

    Only the initial state has no proof. It is of any round, because a run may be founded from a state of another run.
    `rules` are those of the manifest, and `amendments` are those of the state at the head.
    """
    rules.check_amendments(amendments)
    if proof is None:
        if head != rules.run:
            raise PeerError("a state comes without proof of its round")
        return {}
    outcome, joins = check_proof(proof, rules.bounds_in(amendments))
    if proof.outcome.hash != head or outcome.round != round:
        raise PeerError("a state's proof is for another round")
    return included_joins(outcome, joins)


def verified_tip(
    state: OuterState, head: str, proof: Proof | None, rules: Rules, now_s: float, links: tuple[Link, ...] = ()
) -> Tip:
    """The tip of a checkpoint. Slow: verifies and hashes. Raises PeerError if the proof does not lead to the head.

    `links` are the rounds that led to the head, if they are known.
    """
    amendments = state.amendments
    included = joins_at(head, state.round, proof, rules, amendments)
    if not links and proof is not None:
        links = read_links([proof.model_dump_json()], rules.bounds_in(amendments))
    outer, next_outer = (rules.at(amendments, round_).outer for round_ in (state.round, state.round + 1))
    return make_tip(state, head, proof, outer, included, now_s, links, next_outer)


class StateServer:
    """Serves outer states from checkpoints. It needs no model, so a paused node can serve as well."""

    def __init__(
        self,
        wire: Wire,
        source: StateSource,
        is_uplink_busy: Callable[[], bool] = lambda: False,
        inject_faults: Callable[[Sequence[bytes]], Awaitable[Sequence[bytes]]] | None = None,
    ) -> None:
        """Register the services.

        Args:
            is_uplink_busy: says whether a round needs the uplink now. If so, joiners wait for a moment.
            inject_faults: replaces the blobs of a reply, for tests.
        """
        self._source, self._is_uplink_busy = source, is_uplink_busy
        self._inject_faults = inject_faults
        self._leaves = asyncio.Semaphore(MOST_LEAVES)
        wire.serve(
            {
                "state": Service(self._on_state, Channel.STATE, per_caller=STATES_PER_CALLER),
                "leaf": Service(self._on_leaf, Channel.STATE, per_caller=LEAVES_PER_CALLER),
            }
        )

    async def _on_state(self, caller: str, message: Message) -> Message:
        """Describe the newest state, or the one whose digest starts with `digest`. `brief` omits leaves and proofs."""
        name = message.header.get("digest", "")
        if not isinstance(name, str) or 0 < len(name) < MIN_NAME:
            raise PeerError("a request for a state has the wrong form")
        snapshot = await asyncio.to_thread(self._source.find, name, hold=True)
        if snapshot is None:
            raise PeerError("this node does not have that state" if name else "this node has no state yet", code="gone")
        header = {"round": snapshot.round, "head": snapshot.head, "tokens": snapshot.tokens, "digest": snapshot.digest}
        if message.header.get("brief") is True:
            return Message(header)
        proof = snapshot.proof.model_dump_json().encode() if snapshot.proof else b""
        return Message(header, [b"".join(snapshot.leaves), proof, snapshot.credit_root, snapshot.amendments])

    async def _on_leaf(self, caller: str, message: Message) -> Message:
        digest, index = message.header.get("digest"), message.header.get("index")
        if not isinstance(digest, str) or not isinstance(index, int) or index < 0:
            raise PeerError("a request for a leaf has the wrong form")
        for _ in range(int(YIELD_S / LOOK_S)):
            if not self._is_uplink_busy():
                break
            await asyncio.sleep(LOOK_S)
        release = await _place(self._leaves)
        try:
            blobs: Sequence[bytes] = [await asyncio.to_thread(self._source.leaf, digest, index)]
            return Message(blobs=await self._inject_faults(blobs) if self._inject_faults else blobs, release=release)
        except (LookupError, OSError) as exc:
            release()
            raise PeerError("this node does not have that state any more", code="gone") from exc
        except BaseException:
            release()
            raise


class ChainServer:
    """Serves this node's chain: whole proofs to a peer on the same chain, light proofs to a peer on another chain."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._chains = {is_member: asyncio.Semaphore(MOST_CHAINS) for is_member in (True, False)}
        ctx.wire.serve({"chain": Service(self._on_chain, Channel.STATE, per_caller=CHAINS_PER_CALLER)})

    async def _on_chain(self, caller: str, message: Message) -> Message:
        """Return the rounds after the newest of the caller's heads that is on this node's chain (the common head).

        If the common head is the caller's newest head and this node keeps the proofs after it, the reply has as many of
        these proofs as fit. Otherwise, or if the caller asks for them (`light`), it has light proofs: all links after
        the common head, if there is one.
        """
        heads = message.header.get("heads")
        if (
            not isinstance(heads, list)
            or len(heads) > MAX_LINKS + 1
            or not all(isinstance(head, str) for head in heads)
        ):
            raise PeerError("a request for a chain has the wrong form")
        reply = self._rounds_after(heads, is_light=message.header.get("light") is True)
        if reply.blob_bytes < SHORT_BYTES:
            return reply
        del reply  # It is made again when there is room for it.
        release = await _place(self._chains[self._ctx.peer_table.is_member(caller)])
        try:
            return replace(self._rounds_after(heads, is_light=message.header.get("light") is True), release=release)
        except BaseException:
            release()
            raise

    def _rounds_after(self, heads: Sequence[str], *, is_light: bool) -> Message:
        tip, newest = self._ctx.chain.tip, heads[0] if heads else ""
        header = {"head": tip.head, "age_s": self._ctx.age_s, "light": False}
        amendments = {"amendments": tip.state.amendments} if tip.state.amendments else {}
        proofs = self._ctx.chain.proofs_after(newest)
        if (proofs or newest == tip.head) and not is_light:
            return Message(header, _first(proofs))
        known = set(heads_of(tip.links, tip.head))
        common = next((head for head in heads if head in known), "")
        links = [link.text.encode() for link in links_after(tip.links, common)]
        return Message(header | amendments | {"light": True}, links)


async def _place(places: asyncio.Semaphore) -> Callable[[], None]:
    """Wait until one more reply may be in memory. Returns a function to call when it was sent. Raises PeerError."""
    try:
        async with asyncio.timeout(YIELD_S):
            await places.acquire()
    except TimeoutError as exc:
        raise PeerError("too many replies are being sent", code="busy") from exc
    return places.release


def links_of(reply: Message, rules: Rules) -> tuple[Link, ...]:
    """Check and return the light proofs of a reply to `chain`. Raises PeerError. Slow.

    The peer also sends the amendments of its chain, which decide how many members and chunks each round had. `rules`
    are those of the manifest.
    """
    amendments = reply.header.get("amendments", b"")
    if not isinstance(amendments, bytes):
        raise PeerError("the amendments of a chain have the wrong form")
    try:
        rules.check_amendments(amendments)
        return read_links(reply.blobs, rules.bounds_in(amendments))
    except MALFORMED_ERRORS as exc:
        raise PeerError("the light proofs of a chain have the wrong form") from exc


def _first(proofs: Sequence[Proof]) -> list[bytes]:
    """The first of these proofs: as many as fit into PROOFS_BYTES, but at least one."""
    blobs: list[bytes] = []
    for proof in proofs:
        blob = proof.model_dump_json().encode()
        if blobs and sum(map(len, blobs)) + len(blob) > PROOFS_BYTES:
            break
        blobs.append(blob)
    return blobs

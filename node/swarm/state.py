"""Outer state for joiners and for those behind: served from checkpoints, checked chunk by chunk, then replayed.

Knows no checkpoint format: a `StateSource` reads slices. The digest is a hash tree, so every leaf is checked before it
is kept, whoever sent it; the end of the replay is checked against the digest that most signed tokens stand behind.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from node.diloco.digest import HASH_BYTES, LEAF_ELEMENTS, leaf_bounds, leaf_hash, root_digest
from node.diloco.outer import OuterState
from node.errors import PeerError, SwarmError, TransferFailed
from node.status import Channel, Phase
from node.swarm.base import Message, Service, Wire
from node.swarm.chain import Tip, tip_at
from node.swarm.directory import Directory, PeerRecord
from node.swarm.records import Join, Proof, check_proof, included_joins, parse
from node.swarm.rounds import Rounds, Rules

logger = logging.getLogger(__name__)

CALL_S = 5.0
LEAF_S = 30.0
PARALLEL = 4
"""Leaves asked for at once from one peer."""
LOOK_S = 1.0
SERVING_PHASES = frozenset({Phase.TRAINING, Phase.SYNCING, Phase.DRAINING, Phase.PAUSED})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checkpoint of the outer state, as it is served."""

    round: int
    head: str
    tokens: int
    digest: str
    leaves: Sequence[bytes]
    proof: Proof | None
    """What led to `head`; None for the initial state."""


class StateSource(Protocol):
    """Immutable checkpoints of this node. Read in a thread."""

    def newest(self) -> Snapshot | None:
        """The newest one, or None while there is none."""

    def leaf(self, round: int, index: int) -> bytes:
        """One slice of the digest tree. LookupError if it is not kept any more."""


def included_at(head: str, round: int, proof: Proof | None, rules: Rules) -> Mapping[str, Join]:
    """The joins that the record at `head` counts. Raises PeerError where the proof does not lead to it."""
    if proof is None:
        if head != rules.run or round != -1:
            raise PeerError("a state comes without proof of its round")
        return {}
    chunks, min_peers = len(rules.grid.bounds), rules.quorum.min_peers
    outcome, joins = check_proof(proof, run=rules.run, chunks=chunks, min_peers=min_peers)
    if proof.outcome.hash != head or outcome.round != round:
        raise PeerError("a state's proof is for another round")
    return included_joins(outcome, joins)


def tip_of(state: OuterState, head: str, proof: Proof | None, rules: Rules, now_s: float) -> Tip:
    """The tip that a checkpoint stands for. Raises PeerError where its proof does not lead to its head. Heavy."""
    included = included_at(head, state.round, proof, rules)
    return tip_at(state, head, proof, rules.outer, included, now_s)


class StateServer:
    """Answers joiners. Needs no model, so it serves while the node is paused, too."""

    def __init__(self, wire: Wire, source: StateSource) -> None:
        self._source = source
        wire.serve({"state": Service(self._on_state, Channel.STATE), "leaf": Service(self._on_leaf, Channel.STATE)})

    async def _on_state(self, caller: str, message: Message) -> Message:
        snapshot = await asyncio.to_thread(self._source.newest)
        if snapshot is None:
            raise PeerError("this node has no state yet")
        header = {"round": snapshot.round, "head": snapshot.head, "tokens": snapshot.tokens, "digest": snapshot.digest}
        proof = snapshot.proof.model_dump_json().encode() if snapshot.proof else b""
        return Message(header, [b"".join(snapshot.leaves), proof])

    async def _on_leaf(self, caller: str, message: Message) -> Message:
        round_, index = message.header.get("round"), message.header.get("index")
        if not isinstance(round_, int) or not isinstance(index, int):
            raise PeerError("a request for a leaf has the wrong form")
        return Message(blobs=[await asyncio.to_thread(self._source.leaf, round_, index)])


class Download:
    """Fetches a state from several peers at once. Keeps what was verified when a peer breaks off."""

    def __init__(
        self, wire: Wire, directory: Directory, rules: Rules, parameters: int, on_progress: Callable[[float], None]
    ) -> None:
        self._wire, self._directory, self._rules = wire, directory, rules
        self._parameters = parameters
        self._on_progress = on_progress

    async def run(self, rng: random.Random) -> Tip:
        """The newest checkpoint that live peers serve. Raises TransferFailed; what to do is the caller's policy."""
        offers = await self._offers()
        if not offers:
            raise TransferFailed("No peer serves a state yet.")
        problem = None
        for snapshot, peers in sorted(offers.values(), key=lambda offer: (offer[0].round, len(offer[1])), reverse=True):
            logger.info("Downloading the state after round %d from %d peers.", snapshot.round, len(peers))
            try:
                state = await self._fetch(snapshot, peers, rng)
            except TransferFailed as exc:
                problem = problem or exc
                continue
            now_s = asyncio.get_running_loop().time()
            return await asyncio.to_thread(tip_of, state, snapshot.head, snapshot.proof, self._rules, now_s)
        assert problem is not None
        raise problem

    async def _offers(self) -> dict[str, tuple[Snapshot, list[str]]]:
        """Digest to checkpoint, and who serves it."""
        peers = [r.peer_id for r in self._directory.live()[1:] if r.phase in SERVING_PHASES]
        found = await asyncio.gather(*(self._offer(peer) for peer in peers))
        offers: dict[str, tuple[Snapshot, list[str]]] = {}
        for peer, snapshot in zip(peers, found, strict=True):
            if snapshot is not None:
                offers.setdefault(snapshot.digest, (snapshot, []))[1].append(peer)
        return offers

    async def _offer(self, peer: str) -> Snapshot | None:
        try:
            reply = await self._wire.call(peer, "state", Message(), timeout_s=CALL_S)
            snapshot = self._read_offer(reply)
            await asyncio.to_thread(included_at, snapshot.head, snapshot.round, snapshot.proof, self._rules)
            return snapshot
        except (PeerError, ValueError, LookupError, TypeError) as exc:
            logger.info("Peer %s offers no state: %s", peer[-6:], exc)
            return None

    def _read_offer(self, reply: Message) -> Snapshot:
        joined, proof = reply.blobs
        leaves = [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]
        header: dict[str, Any] = dict(reply.header)
        snapshot = Snapshot(
            round=int(header["round"]),
            head=str(header["head"]),
            tokens=int(header["tokens"]),
            digest=str(header["digest"]),
            leaves=leaves,
            proof=parse(Proof, proof) if proof else None,
        )
        if len(leaves) != 2 * len(leaf_bounds(self._parameters)):
            raise PeerError("a state has the wrong number of leaves", code="bad_size")
        if root_digest(snapshot.round, snapshot.tokens, self._parameters, leaves) != snapshot.digest:
            raise PeerError("a state's leaves do not have its digest")
        return snapshot

    async def _fetch(self, snapshot: Snapshot, peers: Sequence[str], rng: random.Random) -> OuterState:
        vectors = (torch.empty(self._parameters), torch.empty(self._parameters))
        todo = list(range(len(snapshot.leaves)))
        rng.shuffle(todo)
        total = len(todo)
        good = list(peers)

        async def draw(peer: str) -> None:
            while todo and peer in good:
                index = todo.pop()
                try:
                    data = await self._leaf(peer, snapshot, index)
                except PeerError as exc:
                    self._wire.traffic.reject(exc)
                    todo.append(index)
                    if peer in good:
                        good.remove(peer)
                        logger.warning("Peer %s is dropped from the download: %s", peer[-6:], exc)
                    return
                _put(vectors, index, data)
                self._on_progress(1 - len(todo) / max(1, total))

        while todo and good:  # A peer may break off when the others have found nothing left to do: once more, then.
            await asyncio.gather(*(draw(peer) for peer in good for _ in range(PARALLEL)))
        if todo:
            raise TransferFailed(f"{len(todo)} of {total} parts of the state could not be had from {len(peers)} peers.")
        return OuterState(anchor=vectors[0], momentum=vectors[1], round=snapshot.round, tokens=snapshot.tokens)

    async def _leaf(self, peer: str, snapshot: Snapshot, index: int) -> bytes:
        message = Message({"round": snapshot.round, "index": index})
        reply = await self._wire.call(peer, "leaf", message, timeout_s=LEAF_S)
        if len(reply.blobs) != 1 or leaf_hash(reply.blobs[0]) != snapshot.leaves[index]:
            raise PeerError(f"leaf {index} has a wrong hash")
        start, end = leaf_bounds(self._parameters)[index % (len(snapshot.leaves) // 2)]
        if len(reply.blobs[0]) != 4 * (end - start):
            raise PeerError(f"leaf {index} has {len(reply.blobs[0])} bytes", code="bad_size")
        if not np.isfinite(np.frombuffer(reply.blobs[0], dtype="<f4")).all():
            raise PeerError(f"leaf {index} has a value that is not finite", code="not_finite")
        return reply.blobs[0]


def _put(vectors: Sequence[torch.Tensor], index: int, data: bytes) -> None:
    """Leaves are the anchor's slices, then the momentum's."""
    per_vector = len(leaf_bounds(vectors[0].numel()))
    which, place = divmod(index, per_vector)
    values = torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))
    start = place * LEAF_ELEMENTS
    vectors[which][start : start + values.numel()] = values


class CatchUp:
    """Brings a node that missed rounds back to the head, by replay; says so where only a download can.

    `on_lost` is called with the reason, once a look, until the rounds go on from another tip.
    """

    def __init__(self, wire: Wire, directory: Directory, rounds: Rounds, on_lost: Callable[[str], None]) -> None:
        self._wire, self._directory, self._rounds = wire, directory, rounds
        self._on_lost = on_lost
        wire.serve({"proofs": Service(self._on_proofs, Channel.STATE)})

    async def run(self) -> None:
        """Look for peers ahead for ever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._rounds.behind.wait()
            self._rounds.behind.clear()
            if outvoted(self._directory.live(), self._rounds.chain.tip):
                self._on_lost("most others have another state after the same rounds")
                await asyncio.sleep(LOOK_S)
            ahead = self._ahead()
            if ahead and not await self.replay(ahead):
                await asyncio.sleep(LOOK_S)

    async def align(self) -> None:
        """Ask whoever is furthest for what this node has missed, and how old the round is."""
        tip = self._rounds.chain.tip
        known = [r for r in self._directory.live()[1:] if r.phase in SERVING_PHASES]
        ahead = sorted((r for r in known if r.swarm_tokens >= tip.state.tokens), key=lambda r: -r.swarm_tokens)
        await self.replay(ahead)

    def _ahead(self) -> list[PeerRecord]:
        tip = self._rounds.chain.tip
        records = [r for r in self._directory.live()[1:] if r.swarm_tokens > tip.state.tokens and r.head != tip.head]
        return sorted(records, key=lambda r: r.swarm_tokens, reverse=True)

    async def replay(self, ahead: Sequence[PeerRecord]) -> bool:
        """Take over what peers have committed since. False, after telling, if none of them knows this node's head."""
        unknown, began = 0, self._rounds.chain.tip
        for record in ahead:
            tip = self._rounds.chain.tip
            try:
                reply = await self._wire.call(record.peer_id, "proofs", Message({"after": tip.head}), timeout_s=CALL_S)
                if reply.header.get("status") == "unknown":
                    unknown += 1
                    continue
                for blob in reply.blobs:
                    await self._rounds.adopt(parse(Proof, blob))
            except SwarmError as exc:
                logger.info("Peer %s does not help to catch up: %s", record.peer_id[-6:], exc)
                continue
            moved = self._rounds.chain.tip is not tip
            if moved:
                logger.info("Caught up to round %d.", self._rounds.chain.tip.round)
            if reply.header.get("head") == self._rounds.chain.tip.head:
                self._set_age(reply)
            if moved or record.swarm_tokens <= tip.state.tokens:
                return True
            # It says that it is ahead, and shows nothing: the next one, then.
        if unknown and self._rounds.chain.tip is began:
            self._on_lost("the others' rounds do not follow from this node's")
        return False

    def _set_age(self, reply: Message) -> None:
        age_s = reply.header.get("age_s")
        if isinstance(age_s, float) and 0 <= age_s < 1e6:
            tip = self._rounds.chain.tip
            self._rounds.chain.tip = replace(tip, anchor_at_s=self._rounds.clock() - age_s)

    async def _on_proofs(self, caller: str, message: Message) -> Message:
        """Status: ok, or unknown where this node cannot lead from there to its own head."""
        tip = self._rounds.chain.tip
        after = str(message.header.get("after"))
        proofs = self._rounds.chain.proofs_after(after)
        header: dict[str, Any] = {"status": "ok" if proofs or after == tip.head else "unknown"}
        header |= {"head": tip.head, "age_s": float(self._rounds.clock() - tip.anchor_at_s)}
        return Message(header, [proof.model_dump_json().encode() for proof in proofs])


def outvoted(records: Sequence[PeerRecord], tip: Tip) -> bool:
    """Whether another state after the same head has more signed tokens behind it; a tie goes to the smaller digest.

    The first record is this node's own. Who did not contribute to the newest record has the weight of one token.
    """
    votes: dict[str, int] = defaultdict(int)
    for record in records:
        if record.head == tip.head and record.state_digest:
            votes[record.state_digest] += tip.last_weights.get(record.peer_id, 1)
    best = min(votes, key=lambda digest: (-votes[digest], digest), default=tip.digest)
    return best != tip.digest


def most_trusted_digest(records: Sequence[PeerRecord], round_: int) -> str | None:
    """The state digest after `round_` that the most swarm tokens stand behind; None if nobody tells."""
    votes: dict[str, int] = defaultdict(int)
    for record in records:
        if record.round == round_ and record.state_digest:
            votes[record.state_digest] += record.swarm_tokens
    return max(votes, key=lambda digest: votes[digest], default=None)

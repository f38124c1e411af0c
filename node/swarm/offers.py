"""Which state to begin with: what live peers serve, and who of them stands behind it. Knows no leaf's bytes.

A head is proven by signatures, a state's digest is not: so peers are asked what their digest was at that head. They
weigh what the proof's signed joins give them, one token at least, and nobody more than all others together: what a peer
says about its own tokens, or proves with keys that only it holds, wins over nobody. `catchup` weighs by the same rule.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from node.diloco.digest import HASH_BYTES, leaf_bounds, root_digest
from node.errors import PeerError
from node.swarm.base import MAX_REPLY_BYTES, STUMBLES, Message, Wire
from node.swarm.directory import Directory, PeerRecord
from node.swarm.records import Proof, parse
from node.swarm.rounds import Rules
from node.swarm.state import SERVING_PHASES, Snapshot, included_at

logger = logging.getLogger(__name__)

CALL_S = 5.0
MAX_ASKED = 16
"""Peers that are asked, drawn by chance where there are more."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a joiner knows of the state that it wants."""

    parameters: int
    initial_digest: str | None = None
    """Of the state before the first round, as the manifest tells."""
    avoid: frozenset[str] = frozenset()
    """Heads and digests of states that lead nowhere."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A state that can be had."""

    snapshot: Snapshot
    tokens: Mapping[str, int]
    """Of each contributor, as the joins that its proof counts were signed."""
    servers: set[str] = field(default_factory=set)
    told: dict[str, str] = field(default_factory=dict)
    """Peer id to its digest at this head; empty where it does not know the head."""

    @property
    def is_backed(self) -> bool:
        """Whether the peers that tell this digest weigh more than all others that were asked."""
        weights = weigh(self.tokens, self.told)
        behind = sum(weights[peer] for peer, digest in self.told.items() if digest == self.snapshot.digest)
        return 2 * behind > sum(weights.values())

    @property
    def is_outvoted(self) -> bool:
        """Whether another digest at this head prevails."""
        return prevailing(self.tokens, self.told) not in ("", self.snapshot.digest)


def weigh(tokens: Mapping[str, int], peers: Collection[str]) -> dict[str, int]:
    """Tokens that a peer's voice weighs: those that it signed for, nobody more than all others together."""
    weights = {peer: tokens.get(peer, 1) for peer in peers}
    if weights:
        first = max(weights, key=lambda peer: weights[peer])
        weights[first] = max(1, min(weights[first], sum(weights.values()) - weights[first]))
    return weights


def prevailing(tokens: Mapping[str, int], told: Mapping[str, str]) -> str:
    """Of the digests that peers tell, the one with most weight behind it; empty where nobody tells one.

    Of equal weight is what one tells against all others: then more peers prevail, and of as many the smaller digest.
    """
    told = {peer: digest for peer, digest in told.items() if digest}
    votes: dict[str, list[int]] = {}
    for peer, weight in weigh(tokens, told).items():
        votes.setdefault(told[peer], []).append(weight)
    return min(votes, key=lambda digest: (-sum(votes[digest]), -len(votes[digest]), digest), default="")


class Offers:
    """Asks around. `digest_at`: this node's own word about a head, None where it has none."""

    def __init__(
        self,
        wire: Wire,
        directory: Directory,
        rules: Rules,
        rng: random.Random,
        digest_at: Callable[[str], str | None],
    ) -> None:
        self._wire, self._directory, self._rules, self._rng = wire, directory, rules, rng
        self._digest_at = digest_at

    async def find(self, target: Target, begun: Sequence[str], banned: Collection[str]) -> list[Offer]:
        """Best first: backed by most, then begun already, then served by several, then the newest.

        None that is outvoted: better no state than that of one against several. That nobody else knows a head is no
        vote against it: the line that holds after a split may have one peer left.
        """
        peers = self._peers(banned)
        asked = [(peer, name) for name in ("", *begun) for peer in peers]
        found = await asyncio.gather(*(self._ask(peer, name, target) for peer, name in asked))
        offers: dict[str, Offer] = {}
        for (peer, _), one in zip(asked, found, strict=True):
            if one is not None and not {one.snapshot.head, one.snapshot.digest} & target.avoid:
                offers.setdefault(one.snapshot.digest, one).servers.add(peer)
        await asyncio.gather(*(self._vouch(offer, peer) for offer in offers.values() for peer in peers))
        for offer in offers.values():
            if own := self._digest_at(offer.snapshot.head):
                offer.told[self._wire.peer_id] = own

        def worth(offer: Offer) -> tuple[Any, ...]:
            digest = offer.snapshot.digest
            is_begun = any(digest.startswith(name) for name in begun)
            return offer.is_backed, is_begun, min(2, len(offer.servers)), offer.snapshot.round

        # Of the state that the run began with the manifest knows more than all voices.
        held = [o for o in offers.values() if o.snapshot.digest == target.initial_digest or not o.is_outvoted]
        return sorted(held, key=worth, reverse=True)

    async def servers(self, snapshot: Snapshot, banned: Collection[str]) -> list[str]:
        """Who serves it now."""
        offer = Offer(snapshot, {})
        await asyncio.gather(*(self._vouch(offer, peer) for peer in self._peers(banned)))
        return sorted(offer.servers)

    def _peers(self, banned: Collection[str]) -> list[str]:
        peers = [r.peer_id for r in self._directory.others() if _has_state(r) and r.peer_id not in banned]
        return self._rng.sample(peers, min(MAX_ASKED, len(peers)))

    async def _ask(self, peer: str, name: str, target: Target) -> Offer | None:
        try:
            reply = await self._wire.call(
                peer,
                "state",
                Message({"digest": name} if name else {}),
                timeout_s=CALL_S,
                max_reply_bytes=2 * HASH_BYTES * len(leaf_bounds(target.parameters)) + MAX_REPLY_BYTES,
            )
        except PeerError as exc:
            logger.debug("Peer %s offers no state: %s", peer[-6:], exc)
            return None
        try:
            snapshot = read_offer(reply, target)
            included = await asyncio.to_thread(included_at, snapshot.head, snapshot.round, snapshot.proof, self._rules)
        except (PeerError, *STUMBLES) as exc:
            self._wire.traffic.reject(exc if isinstance(exc, PeerError) else PeerError("a wrong form"))
            logger.warning("Peer %s offers a state that is none: %s.", peer[-6:], exc)
            return None
        return Offer(snapshot, {peer: join.tokens for peer, join in included.items()})

    async def _vouch(self, offer: Offer, peer: str) -> None:
        snapshot = offer.snapshot
        try:
            reply = await self._wire.call(peer, "vouch", Message({"head": snapshot.head}), timeout_s=CALL_S)
        except PeerError as exc:
            logger.debug("Peer %s does not vouch: %s", peer[-6:], exc)
            return
        digest = reply.header.get("digest")
        offer.told[peer] = digest if isinstance(digest, str) else ""
        if reply.header.get("serves") == snapshot.digest:
            offer.servers.add(peer)


def _has_state(record: PeerRecord) -> bool:
    """Also one that seeks another has its own still, and a voice: whoever makes all others seek shall not be alone."""
    return record.phase in SERVING_PHASES or bool(record.state_digest)


def read_offer(reply: Message, target: Target) -> Snapshot:
    """Raises PeerError, or one of `STUMBLES`."""
    joined, proof = reply.blobs
    leaves = [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]
    fields = {"round": int, "head": str, "tokens": int, "digest": str}
    if not all(type(reply.header.get(name)) is kind for name, kind in fields.items()):
        raise PeerError("a state's description has the wrong form")
    snapshot = Snapshot(
        **{name: reply.header[name] for name in fields},
        leaves=leaves,
        proof=parse(Proof, proof) if proof else None,
    )
    if len(leaves) != 2 * len(leaf_bounds(target.parameters)):
        raise PeerError("a state has the wrong number of leaves", code="bad_size")
    if root_digest(snapshot.round, snapshot.tokens, target.parameters, leaves) != snapshot.digest:
        raise PeerError("a state's leaves do not have its digest")
    if snapshot.round == -1 and target.initial_digest not in (None, snapshot.digest):
        raise PeerError("a state is not the one that the run began with")
    return snapshot

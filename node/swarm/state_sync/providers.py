"""Which outer state to download, which peers serve it, and the vote that decides between digests.

Signatures prove a head, but not the digest of its state, so peers are asked for their digest at that head. A vote
weighs the tokens of the peer's signed join, at least one, and never more than all other votes together: neither
made-up tokens nor self-made keys win a vote.
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
from node.swarm.chain.chain import Tip
from node.swarm.consensus.context import Rules
from node.swarm.membership.peer_table import PeerRecord, PeerTable
from node.swarm.messages import Proof, parse
from node.swarm.state_sync.server import SERVING_PHASES, Snapshot, joins_at
from node.swarm.transport.wire import MALFORMED_ERRORS, MAX_REPLY_BYTES, Message, Wire

logger = logging.getLogger(__name__)

CALL_S = 5.0
MAX_ASKED = 16  # Peers asked in one search; drawn at random


def vote_weights(tokens: Mapping[str, int], peers: Collection[str]) -> dict[str, int]:
    """The weight of each peer's vote: the tokens that it signed, and no more than all others together."""
    weights = {peer: tokens.get(peer, 1) for peer in peers}
    if weights:
        heaviest = max(weights, key=lambda peer: weights[peer])
        weights[heaviest] = max(1, min(weights[heaviest], sum(weights.values()) - weights[heaviest]))
    return weights


def winning_digest(tokens: Mapping[str, int], votes: Mapping[str, str]) -> str:
    """The digest with the heaviest votes; empty if there is none. `votes`: peer id to its digest, empty if unknown.

    Two digests can have equal weights, for example if one peer votes against all others. Then the digest with more
    votes wins, and among these the smaller one.
    """
    votes = {peer: digest for peer, digest in votes.items() if digest}
    by_digest: dict[str, list[int]] = {}
    for peer, weight in vote_weights(tokens, votes).items():
        by_digest.setdefault(votes[peer], []).append(weight)
    return min(by_digest, key=lambda d: (-sum(by_digest[d]), -len(by_digest[d]), d), default="")


def is_outvoted(records: Sequence[PeerRecord], tip: Tip) -> bool:
    """Whether another digest than this node's wins the vote at its head.

    Only contributors to the newest record vote, as strangers cost nothing. A contributor whose record for this head is
    not known yet counts for this node: right after a commit, the first record may be that of the damaged peer.

    Args:
        records: live peers, this node first.
    """
    own, *others = records
    votes = {own.peer_id: tip.digest}
    for record in others:
        if record.peer_id in tip.last_weights:
            votes[record.peer_id] = (record.head == tip.head and record.state_digest) or tip.digest
    return winning_digest(tip.last_weights, votes) not in ("", tip.digest)


@dataclass(frozen=True, slots=True)
class Target:
    """What a joiner knows about the state that it needs."""

    parameters: int
    initial_digest: str | None = None
    """Digest of the initial state, from the manifest."""
    avoid: frozenset[str] = frozenset()
    """Heads and digests of states on a chain that lost."""
    own_tokens: int = -1
    """Tokens of the state that this node has; -1 if it has none. Older states are of no use."""


@dataclass(frozen=True, slots=True)
class AvailableState:
    """A state that at least one peer serves."""

    snapshot: Snapshot
    tokens: Mapping[str, int]
    """Contributor to tokens, from the joins in the state's proof."""
    servers: set[str] = field(default_factory=set)
    votes: dict[str, str] = field(default_factory=dict)
    """Peer id to its digest at this head; empty if it does not know the head."""

    @property
    def has_majority(self) -> bool:
        """Whether this digest has more than half of the weight of all peers that answered."""
        weights = vote_weights(self.tokens, self.votes)
        agreeing = sum(weights[peer] for peer, digest in self.votes.items() if digest == self.snapshot.digest)
        return 2 * agreeing > sum(weights.values())

    @property
    def is_outvoted(self) -> bool:
        """Whether another digest at this head wins the vote."""
        return winning_digest(self.tokens, self.votes) not in ("", self.snapshot.digest)


class ProviderSearch:
    """Asks peers which states they serve, and how they vote."""

    def __init__(
        self,
        wire: Wire,
        peer_table: PeerTable,
        rules: Rules,
        rng: random.Random,
        digest_at: Callable[[str], str | None],
    ) -> None:
        """`digest_at`: this node's own digest at a head; None if it is unknown."""
        self._wire, self._peer_table, self._rules, self._rng = wire, peer_table, rules, rng
        self._digest_at = digest_at

    async def find(self, target: Target, begun: Sequence[str], banned: Collection[str]) -> list[AvailableState]:
        """The available states, best first: majority, begun already, several servers, newest.

        Leaves out states that are outvoted: no state is better than that of one peer against several. A peer that does
        not know a head does not vote against it, as the chain that won a fork may have one peer left.

        Args:
            begun: digest prefixes of partial downloads.
        """
        peers = self._peers(banned)
        requests = [(peer, name) for name in ("", *begun) for peer in peers]
        found = await asyncio.gather(*(self._ask_state(peer, name, target) for peer, name in requests))
        states: dict[str, AvailableState] = {}
        for (peer, _), one in zip(requests, found, strict=True):
            if one is not None and _is_wanted(one.snapshot, target):
                states.setdefault(one.snapshot.digest, one).servers.add(peer)
        await asyncio.gather(*(self._ask_vote(state, peer) for state in states.values() for peer in peers))
        for state in states.values():
            if own := self._digest_at(state.snapshot.head):
                state.votes[self._wire.peer_id] = own

        def rank(state: AvailableState) -> tuple[Any, ...]:
            digest = state.snapshot.digest
            is_begun = any(digest.startswith(name) for name in begun)
            return state.has_majority, is_begun, min(2, len(state.servers)), state.snapshot.round

        # The manifest proves the initial state, so no vote is needed.
        valid = [s for s in states.values() if s.snapshot.digest == target.initial_digest or not s.is_outvoted]
        return sorted(valid, key=rank, reverse=True)

    async def servers(self, snapshot: Snapshot, banned: Collection[str]) -> list[str]:
        """The peers that serve a state now."""
        state = AvailableState(snapshot, {})
        await asyncio.gather(*(self._ask_vote(state, peer) for peer in self._peers(banned)))
        return sorted(state.servers)

    def _peers(self, banned: Collection[str]) -> list[str]:
        """Peers to ask. One that is downloading still has its old state and votes, so that an attacker that makes all
        others download does not become the only voter."""
        others = [r for r in self._peer_table.others() if r.phase in SERVING_PHASES or r.state_digest]
        peers = [r.peer_id for r in others if r.peer_id not in banned]
        return self._rng.sample(peers, min(MAX_ASKED, len(peers)))

    async def _ask_state(self, peer: str, name: str, target: Target) -> AvailableState | None:
        """The newest state that a peer serves, or the one whose digest starts with `name`."""
        request = Message({"digest": name} if name else {})
        max_bytes = 2 * HASH_BYTES * len(leaf_bounds(target.parameters)) + MAX_REPLY_BYTES
        try:
            reply = await self._wire.call(peer, "state", request, timeout_s=CALL_S, max_reply_bytes=max_bytes)
        except PeerError as exc:
            logger.debug("Peer %s serves no state: %s", peer[-6:], exc)
            return None
        try:
            snapshot = read_snapshot(reply, target)
            joins = await asyncio.to_thread(joins_at, snapshot.head, snapshot.round, snapshot.proof, self._rules)
        except (PeerError, *MALFORMED_ERRORS) as exc:
            self._wire.traffic.reject(exc if isinstance(exc, PeerError) else PeerError("a wrong form"))
            logger.warning("Peer %s describes an invalid state: %s.", peer[-6:], exc)
            return None
        return AvailableState(snapshot, {peer: join.tokens for peer, join in joins.items()})

    async def _ask_vote(self, state: AvailableState, peer: str) -> None:
        """Ask a peer for its digest at the state's head, and whether it serves the state."""
        try:
            reply = await self._wire.call(peer, "vouch", Message({"head": state.snapshot.head}), timeout_s=CALL_S)
        except PeerError as exc:
            logger.debug("Peer %s does not vote: %s", peer[-6:], exc)
            return
        digest = reply.header.get("digest")
        state.votes[peer] = digest if isinstance(digest, str) else ""
        if reply.header.get("serves") == state.snapshot.digest:
            state.servers.add(peer)


def _is_wanted(snapshot: Snapshot, target: Target) -> bool:
    return snapshot.tokens >= target.own_tokens and not {snapshot.head, snapshot.digest} & target.avoid


def read_snapshot(reply: Message, target: Target) -> Snapshot:
    """Parse and check the description of a state. Raises PeerError, or one of `MALFORMED_ERRORS`."""
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
        raise PeerError("a state is not the initial state of the run")
    return snapshot

"""Chooses the outer state to download and the peers that serve it, if need be by a vote between digests.

The joins of a committed round name the digest of the outer state before that round. So the certificate of the next
round proves the digest of a state. The newest state has no next round yet, so the peers' records vote on its digest. A
vote weighs as much as the tokens of the peer's signed join: at least one, and at most as much as all other votes
together. So neither made-up tokens nor made-up identities win a vote.

A hostile peer can sign a whole chain of its own, in which each state is proven. So the servers also send the rounds
after their states, and the state with the most live peers on its chain is chosen.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from node.diloco.credit import EMPTY
from node.diloco.digest import HASH_BYTES, root_digest, tree_slices
from node.errors import PeerError
from node.swarm.chain.chain import Tip
from node.swarm.chain.fork_choice import Link, continued, contributors_to, heads_of, links_after
from node.swarm.consensus.context import Rules
from node.swarm.membership.peer_table import PeerRecord, PeerTable
from node.swarm.messages import Proof, joins_of, parse, voters
from node.swarm.state_sync.server import CHAIN_TIMEOUT_S, SERVING_PHASES, Snapshot, joins_at, links_of
from node.swarm.transport.wire import MALFORMED_ERRORS, MAX_REPLY_BYTES, Message, Wire

logger = logging.getLogger(__name__)

CALL_S = 5.0
MAX_ASKED = 16  # Limit on the peers asked in one search, which are drawn at random
MOST_STRANGERS = 2
"""Limit on those of them that have not contributed to this node's chain, if it has one, as far as it is known."""
MAX_HEADS = 4
"""Peers are asked for the chains to this many heads at a time, the most common ones."""


def vote_weights(tokens: Mapping[str, int], peers: Collection[str]) -> dict[str, int]:
    """The weight of each peer's vote: the tokens that the peer signed, but no more than all other votes together."""
    weights = {peer: tokens.get(peer, 1) for peer in peers}
    if weights:
        heaviest = max(weights, key=lambda peer: weights[peer])
        weights[heaviest] = max(1, min(weights[heaviest], sum(weights.values()) - weights[heaviest]))
    return weights


def winning_digest(tokens: Mapping[str, int], votes: Mapping[str, str], others: Collection[str] = ()) -> str:
    """The digest with the heaviest votes; empty if there is none. `votes` has each peer's digest, empty if unknown.

    Two digests can have equal weights, for example if one peer votes against all others. Then the digest with more
    votes wins, then the one that more of `others` have, the digests of peers without a vote, and then the smaller one.
    """
    votes = {peer: digest for peer, digest in votes.items() if digest}
    by_digest: dict[str, list[int]] = {}
    for peer, weight in vote_weights(tokens, votes).items():
        by_digest.setdefault(votes[peer], []).append(weight)
    more = Counter(others)
    return min(by_digest, key=lambda d: (-sum(by_digest[d]), -len(by_digest[d]), -more[d], d), default="")


def is_outvoted(records: Sequence[PeerRecord], tip: Tip) -> bool:
    """Whether another digest than this node's wins the vote about the state at this node's head.

    Only contributors to the newest record vote, because other identities cost nothing; the others decide if the vote is
    a tie. A contributor whose record for this head is not known yet counts for this node: after a commit, the first
    record may be from a damaged peer.

    Args:
        records: live peers, this node first.
    """
    own, *others = records
    votes, here = {own.peer_id: tip.digest}, list[str]()
    for record in others:
        if record.peer_id in tip.last_weights:
            votes[record.peer_id] = (record.head == tip.head and record.state_digest) or tip.digest
        elif record.head == tip.head:
            here.append(record.state_digest)
    return winning_digest(tip.last_weights, votes, here) not in ("", tip.digest)


@dataclass(frozen=True, slots=True)
class Target:
    """What a node knows about the state that it needs."""

    parameters: int
    initial_digest: str | None = None
    """Digest of the initial state, from the manifest."""
    avoid: frozenset[str] = frozenset()
    """Heads and digests of states that must not be downloaded."""
    own_progress: tuple[int, int] = (-1, -1)
    """Tokens and round of the state that this node has; -1 if it has none. An earlier state is of no use."""
    heads: tuple[str, ...] = ()
    """The known heads of this node's chain, newest first; empty if it has no chain."""
    links: tuple[Link, ...] = ()
    """The rounds that led to this node's head, as far as they are known."""
    preferred: frozenset[str] = frozenset()
    """Heads of the chain to which this node goes; empty if any chain will do. It accepts no state of a chain that has
    none of them, except for a state that is on its own chain as well."""
    moments: int = 1
    """Moments for each parameter (`OuterOptimizer.moments`)."""

    @property
    def slices(self) -> list[tuple[int, int, int]]:
        """The leaves of the state (`digest.tree_slices`)."""
        return tree_slices(self.parameters, self.moments)


@dataclass(frozen=True, slots=True)
class AvailableState:
    """A state that at least one peer serves."""

    snapshot: Snapshot
    tokens: Mapping[str, int]
    """Tokens of each contributor, from the joins in the state's proof."""
    servers: set[str] = field(default_factory=set)
    votes: Mapping[str, str] = field(default_factory=dict)
    """Each peer's digest at this head; empty if the peer is at another head."""
    is_proven: bool = False
    """Whether the manifest or the certificate of the next round proves the digest."""
    standing: int = 0
    """The number of live peers that are on the state's chain, at its head or later."""

    @property
    def has_majority(self) -> bool:
        """Whether this digest has more than half of the weight of all peers."""
        weights = vote_weights(self.tokens, self.votes)
        agreeing = sum(weights[peer] for peer, digest in self.votes.items() if digest == self.snapshot.digest)
        return 2 * agreeing > sum(weights.values())

    @property
    def is_outvoted(self) -> bool:
        """Whether another digest at this head wins the vote."""
        return winning_digest(self.tokens, self.votes) not in ("", self.snapshot.digest)


class Sightings:
    """Since when states have been found in every search."""

    def __init__(self) -> None:
        self._at_s: dict[str, float] = {}
        self._any_at_s = math.inf

    def settled(
        self, found: Sequence[AvailableState], now_s: float, settle_s: float, *, has_chain: bool
    ) -> list[AvailableState]:
        """The states that may be taken now, of those that a search has found.

        A state that is neither proven nor has a majority must have been there for `settle_s`. A node that has a chain
        must have looked for `settle_s`. The peers that contradict may need this time to be heard.
        """
        self._at_s = {digest: self._at_s.get(digest, now_s) for digest in (one.snapshot.digest for one in found)}
        self._any_at_s = min(self._any_at_s, now_s) if found else math.inf

        def since_s(one: AvailableState) -> float:
            if not (one.is_proven or one.has_majority):
                return self._at_s[one.snapshot.digest]
            return self._any_at_s if has_chain else -math.inf

        return [one for one in found if now_s - since_s(one) >= settle_s]


class ProviderSearch:
    """Asks peers which states they serve."""

    def __init__(self, wire: Wire, peer_table: PeerTable, rules: Rules, rng: random.Random) -> None:
        self._wire, self._peer_table, self._rules, self._rng = wire, peer_table, rules, rng
        self._sightings = Sightings()
        self._known: set[str] = set()
        """The contributors to this node's chain, as far as they are known."""

    def begin(self) -> None:
        """Begin to look for a state. States that were found earlier count as new."""
        self._sightings = Sightings()

    async def find(self, target: Target, begun: Sequence[str], banned: Collection[str]) -> list[AvailableState]:
        """The available states of the chain with the most live peers, best first; none until they have settled.

        Proven states and those with a majority come before all others. Next come states of which a partial download
        exists, states with several servers, and newer states. States that are outvoted are left out. A peer at another
        head does not vote against a state, because the chain that won a fork may have only one peer left.

        Args:
            begun: digest prefixes of partial downloads.
        """
        self._known = contributors_to(target.links)
        peers = self._peers(banned)
        requests = [(peer, name) for name in ("", *begun) for peer in peers]
        found = await asyncio.gather(*(self._ask_state(peer, name, target) for peer, name in requests))
        states: dict[str, AvailableState] = {}
        for (peer, _), one in zip(requests, found, strict=True):
            if one is not None and _is_wanted(one.snapshot, target):
                states.setdefault(one.snapshot.digest, one).servers.add(peer)
        servers = await asyncio.gather(*(self.servers(digest, banned, peers) for digest in states))
        for state, (serving, _) in zip(states.values(), servers, strict=True):
            state.servers.update(serving)
        heads = [record.head for record in self._peer_table.others()]  # Before the calls, so that the chains have them.
        chains = await self._chains(states.values(), target, peers)
        judged = [await asyncio.to_thread(self._judge, one, target, chains, heads) for one in states.values()]
        valid = [one for one in judged if one is not None and (one.is_proven or not one.is_outvoted)]
        usable = [one for one in valid if not any(_is_outnumbered_by(one, links, heads) for links in chains)]
        best = max((one.standing for one in usable), default=0)
        now_s, settle_s = asyncio.get_running_loop().time(), self._peer_table.timings.settle_s
        found_now = [one for one in usable if one.standing == best]
        settled = self._sightings.settled(found_now, now_s, settle_s, has_chain=bool(target.heads))

        def rank(state: AvailableState) -> tuple[Any, ...]:
            is_begun = any(state.snapshot.digest.startswith(name) for name in begun)
            return state.is_proven or state.has_majority, is_begun, min(2, len(state.servers)), state.snapshot.round

        return sorted(settled, key=rank, reverse=True)

    async def _chains(
        self, states: Collection[AvailableState], target: Target, peers: Sequence[str]
    ) -> list[tuple[Link, ...]]:
        """The chains of several peers: this node's rounds and those after them, or else after the oldest of the states.

        It asks one server of each state, and two peers at each of the most common heads. A hostile peer may send a
        chain that does not lead to its head. So it asks more, until each head is on a chain or all peers were asked.
        """
        oldest_first = sorted((state.snapshot for state in states), key=lambda snapshot: snapshot.round)
        heads = target.heads or tuple(snapshot.head for snapshot in oldest_first)
        chains, most = list[tuple[Link, ...]](), 2
        others = {peer: record.head for peer in peers if (record := self._peer_table.find(peer)) is not None}
        asked = {self._rng.choice(sorted(state.servers)) for state in states}
        asked.update(self._at_common_heads(others, most) if states else ())
        while asked:
            found = await self._ask_chains(sorted(asked), heads, is_first=not chains)
            chains += [continued(target.links, links) for links in found]
            known = {head for links in chains if links for head in heads_of(links, links[-1].head)}
            others = {peer: head for peer, head in others.items() if peer not in asked and head not in known}
            most *= 2
            asked = set(self._at_common_heads(others, most))
        return chains

    def _at_common_heads(self, others: Mapping[str, str], most: int) -> list[str]:
        """For each of the MAX_HEADS most common heads, up to `most` of the peers that are there, at random."""
        common = [head for head, _ in Counter(others.values()).most_common(MAX_HEADS)]
        there = [[peer for peer, its_head in others.items() if its_head == head] for head in common]
        return [peer for one in there for peer in self._rng.sample(one, min(most, len(one)))]

    async def _ask_chains(
        self, peers: Sequence[str], heads: Sequence[str], *, is_first: bool
    ) -> list[tuple[Link, ...]]:
        """The answers that come within CALL_S. Without any, `is_first` waits for one."""
        calls = [asyncio.create_task(self._rounds_after(peer, heads)) for peer in peers]
        try:
            done, _ = await asyncio.wait(calls, timeout=CALL_S)
            if is_first and not done:
                done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return [call.result() for call in calls if call in done]

    async def _rounds_after(self, peer: str, heads: Sequence[str]) -> tuple[Link, ...]:
        """The rounds of a peer's chain after the first of these heads that the peer knows; empty if it has none."""
        request = Message({"heads": list(heads), "light": True})
        try:
            reply = await self._wire.call(peer, "chain", request, timeout_s=CHAIN_TIMEOUT_S)
            return await asyncio.to_thread(links_of, reply, self._rules)
        except PeerError as exc:
            logger.debug("Peer %s did not send the rounds of its chain: %s", peer[-6:], exc)
            return ()

    def _judge(
        self, state: AvailableState, target: Target, chains: Sequence[Sequence[Link]], heads: Sequence[str]
    ) -> AvailableState | None:
        """Add what the rounds after a state tell about it. Returns None if the state must not be downloaded. Slow.

        Args:
            chains: those of several peers (`_chains`).
            heads: those of all live peers.
        """
        snapshot = state.snapshot
        passing = [links for links in chains if links and snapshot.head in heads_of(links, links[-1].head)]
        around = {snapshot.head}.union(*(heads_of(links, links[-1].head) for links in passing))
        if target.preferred and snapshot.head not in target.heads and not target.preferred & around:
            return None
        later = {snapshot.head}.union(*({link.head for link in links_after(links, snapshot.head)} for links in passing))
        is_proven = state.is_proven
        for links in (target.links, *passing):
            following = next((link for link in links if link.parent == snapshot.head), None)
            if following is None:
                continue
            proof = parse(Proof, following.text)
            has_majority = 2 * len(voters(proof).intersection(state.tokens)) > len(state.tokens)
            if has_majority or links is target.links:
                if any(join.state != snapshot.digest for join in joins_of(proof.outcome).values()):
                    logger.warning(
                        "A false state of round %d is refused: the next round names another.", snapshot.round
                    )
                    return None
                is_proven = True
        return replace(state, is_proven=is_proven, standing=sum(head in later for head in heads))

    async def servers(
        self, digest: str, banned: Collection[str], peers: Sequence[str] = ()
    ) -> tuple[list[str], list[str]]:
        """The peers that serve this state now, and those that say that they do not have it any more.

        Asks `peers`, or a random choice of all if `peers` is empty.
        """

        async def serves(peer: str) -> bool | None:
            """None if the peer does not say."""
            request = Message({"digest": digest, "brief": True})
            try:
                reply = await self._wire.call(peer, "state", request, timeout_s=CALL_S)
            except PeerError as exc:
                return False if exc.code == "gone" else None
            return reply.header.get("digest") == digest or None

        peers = peers or self._peers(banned)
        answers = list(zip(peers, await asyncio.gather(*map(serves, peers)), strict=True))
        return [peer for peer, answer in answers if answer], [peer for peer, answer in answers if answer is False]

    def _votes(self, head: str) -> dict[str, str]:
        """Each live peer's digest of the state at a head, from its newest record. This node is included."""
        records = [record for record in self._peer_table.live() if record.state_digest]
        return {r.peer_id: r.state_digest if r.head == head else "" for r in records}

    def _peers(self, banned: Collection[str]) -> list[str]:
        """The peers to ask, at random. A peer that is downloading may still serve its old state.

        Any number of strangers may claim a state and never answer. After a split, the others are known contributors.
        """
        others = [r for r in self._peer_table.others() if r.phase in SERVING_PHASES or r.state_digest]
        peers = [r.peer_id for r in others if r.peer_id not in banned]
        known = [peer for peer in peers if peer in self._known]
        strangers = [peer for peer in peers if peer not in self._known]
        most = MOST_STRANGERS if known else MAX_ASKED
        chosen = self._rng.sample(known, min(MAX_ASKED, len(known)))
        return [*chosen, *self._rng.sample(strangers, min(most, len(strangers)))]

    async def _ask_state(self, peer: str, name: str, target: Target) -> AvailableState | None:
        """Ask for the newest state that a peer serves, or for the state whose digest starts with `name`."""
        request = Message({"digest": name} if name else {})
        max_bytes = HASH_BYTES * len(target.slices) + MAX_REPLY_BYTES
        try:
            reply = await self._wire.call(peer, "state", request, timeout_s=CALL_S, max_reply_bytes=max_bytes)
        except PeerError as exc:
            logger.debug("Peer %s serves no state: %s", peer[-6:], exc)
            return None
        try:
            snapshot = read_snapshot(reply, target)
            joins = await asyncio.to_thread(
                joins_at, snapshot.head, snapshot.round, snapshot.proof, self._rules, snapshot.amendments
            )
        except (PeerError, *MALFORMED_ERRORS) as exc:
            self._wire.traffic.reject(exc if isinstance(exc, PeerError) else PeerError("a wrong form"))
            logger.warning("Peer %s offers an invalid state: %s.", peer[-6:], exc)
            return None
        tokens = {peer: join.tokens for peer, join in joins.items()}
        is_proven = snapshot.digest == target.initial_digest
        return AvailableState(snapshot, tokens, votes=self._votes(snapshot.head), is_proven=is_proven)


def _is_outnumbered_by(state: AvailableState, links: Sequence[Link], heads: Sequence[str]) -> bool:
    """Whether a chain without the state has more live peers than the state's chain. `heads` are theirs."""
    later = {link.head for link in links}
    has_state = state.snapshot.head in later | {link.parent for link in links}
    return not has_state and sum(head in later for head in heads) > state.standing


def _is_wanted(snapshot: Snapshot, target: Target) -> bool:
    is_later = (snapshot.tokens, snapshot.round) >= target.own_progress
    return is_later and not {snapshot.head, snapshot.digest} & target.avoid


def read_snapshot(reply: Message, target: Target) -> Snapshot:
    """Parse and check the description of a state. Raises PeerError, or one of `MALFORMED_ERRORS`."""
    joined, proof, credit_root, amendments = reply.blobs
    leaves = [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]
    fields = {"round": int, "head": str, "tokens": int, "digest": str}
    if not all(type(reply.header.get(name)) is kind for name, kind in fields.items()):
        raise PeerError("a state's description has the wrong form")
    snapshot = Snapshot(
        **{name: reply.header[name] for name in fields},
        leaves=leaves,
        proof=parse(Proof, proof) if proof else None,
        credit_root=credit_root,
        amendments=amendments,
    )
    if len(leaves) != len(target.slices):
        raise PeerError("a state has the wrong number of leaves", code="bad_size")
    if len(credit_root) != HASH_BYTES:
        raise PeerError("a state's table of credit has a root of the wrong size", code="bad_size")
    if (credit_root == EMPTY.root) != (snapshot.tokens == 0):
        raise PeerError("a state's table of credit is not that of its tokens")
    parts = leaves, credit_root, target.moments, amendments
    digest = root_digest(snapshot.round, snapshot.tokens, target.parameters, *parts)
    if digest != snapshot.digest:
        raise PeerError("a state's leaves do not have its digest")
    if snapshot.proof is None and target.initial_digest not in (None, snapshot.digest):
        raise PeerError("a state is not the initial state of the run")
    return snapshot

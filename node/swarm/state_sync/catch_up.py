"""Brings a node that is behind back to the head of the chain.

The node tries these steps in order, and goes to the next one if a step does not help:

1. After a restart, the node replays the rounds on its own disk (`Committer.replay_next`).
2. It replays the proofs that peers have kept (`CatchUp.replay`).
3. It downloads a state (`Downloader`). `CatchUp` only reports the reason as a `ResyncCause`: peers no longer keep the
   proofs or the results (`far_behind`), this node's chain lost a fork (`fork`), or its state is damaged (`outvoted`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from node.errors import PeerError, RoundFailed, SwarmError
from node.status import Phase
from node.swarm.chain.chain import Tip
from node.swarm.chain.fork_choice import (
    Link,
    contributors_at,
    contributors_to,
    heads_of,
    is_heavier,
    links_after,
    overlapping,
    weight,
)
from node.swarm.consensus.context import StateMissing
from node.swarm.consensus.participant import Participant
from node.swarm.membership.peer_table import PeerRecord, while_live
from node.swarm.messages import Proof, parse
from node.swarm.state_sync.providers import Target, is_outvoted
from node.swarm.state_sync.server import CHAIN_TIMEOUT_S, SERVING_PHASES, ChainServer, links_of
from node.swarm.transport.wire import Message

logger = logging.getLogger(__name__)

MOST_STRANGERS = 2
"""Limit on the peers that have not contributed to this chain, as far as it is known, that are asked in one pass."""
UNSERVED_S = 20.0
"""If no peer has had the result of the next round for so long, the node downloads a state instead."""
PATIENCE_S = 20.0
CHECKPOINT_ROUNDS = 5
"""Members that go on serve a new state at least every four rounds of a fragment (`worker.checkpointing.MAX_ROUNDS`)."""
JUDGE_AGAIN_S = 20.0
"""How long a chain that has lost against this node's is not judged again. Members may go over to it meanwhile."""
ROOM_CHECK_S = 0.1
FIRST_ROUND_S = 60.0
"""Length of a round, as long as there was none."""


@dataclass(frozen=True, slots=True)
class ResyncCause:
    """Why this node must download a state."""

    reason: str
    code: Literal["outvoted", "fork", "far_behind"]
    avoid: frozenset[str] = frozenset()
    """The digest of this node's state, the heads of its side of a fork, and all heads of its chain if it is only
    behind. These states must not be downloaded."""
    own_progress: tuple[int, int] = (-1, -1)
    """Tokens and round of this node's state if the node is only behind, else -1. An earlier state must not be
    downloaded."""
    dropped: tuple[Link, ...] = ()
    """The rounds that only this node's side of a fork has committed."""
    patience_s: float = PATIENCE_S
    """If no peer serves another state and the download makes no progress for so long, this node goes on with its own
    state. Both sides of a fork could wait for each other, and those who claim to be ahead could lie."""
    heads: tuple[str, ...] = ()
    """The known heads of this node's chain, newest first."""
    links: tuple[Link, ...] = ()
    """The rounds that led to this node's head."""
    preferred: frozenset[str] = frozenset()
    """Heads of the chain to which this node goes; empty if it has not judged which chain is right."""
    rivals: frozenset[str] = frozenset()
    """The contributors to the chain that has won a fork, and the peer that has shown it."""

    def target(self, parameters: int, initial_digest: str | None, moments: int = 1) -> Target:
        """What to download: a state with this number of parameters, of the run with this initial state."""
        known = self.heads, self.links, self.preferred
        return Target(parameters, initial_digest, self.avoid, self.own_progress, *known, moments)


def _progress(record: PeerRecord) -> tuple[int, int]:
    """How far a peer claims to be. Rounds of a paused run add no tokens."""
    return record.swarm_tokens, record.round


class CatchUp:
    """Replays missed rounds, and applies the rule of `fork_choice` to peers on another chain."""

    def __init__(
        self,
        participant: Participant,
        on_lost: Callable[[ResyncCause], None],
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """Build it.

        Args:
            on_lost: called when this node's chain has lost, and then every second until a state is downloaded.
            has_room: whether to replay one more round. Each replayed round holds a whole state in memory until the
                trainer has applied it.
        """
        self._has_room = has_room
        self._ctx, self._ballot, self._committer = participant.ctx, participant.ballot, participant.committer
        self._wire, self._peer_table = self._ctx.wire, self._ctx.peer_table
        self._on_lost = on_lost
        self._rng = random.Random(self._ctx.me)  # noqa: S311 - not a secret
        self._unserved = "", 0.0
        """The head after which no peer has had the result of the next round, and since when."""
        ChainServer(self._ctx)

    async def run(self) -> None:
        """Check for peers ahead of this node, for ever: every `look_ahead_s`, or when a handler has met one."""
        look_s = self._peer_table.timings.look_ahead_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(look_s):
                    await self._ctx.behind.wait()
            self._ctx.behind.clear()
            if self._is_outvoted():
                tip = self._ctx.chain.tip
                preferred = heads_of(tip.links, tip.head)
                self._lose("most other peers have another state after the same rounds", "outvoted", preferred)
                await asyncio.sleep(look_s)
            elsewhere = self._peers_elsewhere()
            if elsewhere and not await self.replay(elsewhere):
                await asyncio.sleep(look_s)

    def _lose(
        self,
        reason: str,
        code: Literal["outvoted", "fork", "far_behind"],
        preferred: Collection[str] = (),
        dropped: tuple[Link, ...] = (),
        rivals: Collection[str] = (),
    ) -> None:
        tip = self._ctx.chain.tip
        heads = heads_of(tip.links, tip.head)
        avoid = {tip.digest, *(heads if code == "far_behind" else (link.head for link in dropped))}
        # In the other cases, its state is of no use.
        own_progress = (tip.state.tokens, tip.round) if code == "far_behind" else (-1, -1)
        rounds_s = CHECKPOINT_ROUNDS * len(self._ctx.rules.layouts) * (tip.round_s or FIRST_ROUND_S)
        patience_s = PATIENCE_S + (rounds_s if code == "far_behind" else 0.0)
        self._on_lost(
            ResyncCause(
                reason,
                code,
                avoid=frozenset(avoid),
                own_progress=own_progress,
                dropped=dropped,
                patience_s=patience_s,
                heads=tuple(heads),
                links=tip.links,
                preferred=frozenset(preferred),
                rivals=frozenset(rivals),
            )
        )

    def _is_outvoted(self) -> bool:
        live = [record for record in self._peer_table.live() if not self._ballot.has_false_claim(record)]
        return is_outvoted(live, self._ctx.chain.tip)

    def is_needed(self, cause: ResyncCause) -> bool:
        """Whether this node still needs the state that it must download for this cause.

        A node that is only behind needs none as soon as it has replayed a round, because the others may wait for it and
        have no newer state.
        """
        if cause.code == "outvoted":
            return self._is_outvoted()
        tip = self._ctx.chain.tip
        return cause.code == "fork" or (tip.state.tokens, tip.round) <= cause.own_progress

    def restart_here(self, cause: ResyncCause) -> Tip:
        """Continue from the present tip, because no state was downloaded for this cause. Returns the tip.

        If the state is still needed, others claimed what they did not serve. They are doubted for as long as this node
        has waited. After a fork, these are the members of the chain that has won. One hostile member may have made that
        chain and keep its states back, and the others must find each other meanwhile.
        """
        for peer_id in cause.rivals:
            self._ballot.doubt(peer_id, cause.patience_s)
        doubts = cause.code != "fork" and self.is_needed(cause)
        return self._committer.restart_here(cause.patience_s if doubts else 0.0)

    async def align(self) -> None:
        """Catch up once, at the start. If a peer is at the same head, take over the age of the round from it."""
        tokens = self._ctx.chain.tip.state.tokens
        serving = [r for r in self._peer_table.others() if r.phase in SERVING_PHASES and r.swarm_tokens >= tokens]
        await self.replay(self._by_trust(serving))

    def _peers_elsewhere(self) -> list[PeerRecord]:
        """Peers that may be on a better chain.

        These are peers that claim more tokens, or equal tokens and a smaller head, and peers on a side branch that left
        this chain within the rounds that this node knows.
        """
        tip = self._ctx.chain.tip
        known, oldest = set(heads_of(tip.links, tip.head)), tip.links[0].round if tip.links else tip.round

        def may_be_better(record: PeerRecord) -> bool:
            if record.head in known or self._ballot.has_false_claim(record):
                return False
            return record.round >= oldest or (-record.swarm_tokens, record.head) < (-tip.state.tokens, tip.head)

        elsewhere = [record for record in self._peer_table.others() if may_be_better(record)]
        return self._by_trust(elsewhere)

    def _by_trust(self, records: Iterable[PeerRecord]) -> list[PeerRecord]:
        """The last contributors first, then earlier ones, then who claims the most.

        A stranger may claim much and never answer. After a split, the others are earlier contributors.
        """
        tip = self._ctx.chain.tip
        last, known = tip.last_weights, contributors_to(tip.links)

        def trust(record: PeerRecord) -> tuple[bool, bool, int, int]:
            return record.peer_id in last, record.peer_id in known, *_progress(record)

        return sorted(records, key=trust, reverse=True)

    async def replay(self, peers: Sequence[PeerRecord]) -> bool:
        """Ask these peers in turn for rounds after this node's head, and adopt the rounds of the first that has some.

        Stops at the first peer that sends rounds or is at this node's head. Returns whether there was one.
        Peers that send light proofs may be on another chain. If no contributor to this chain sends a round,
        `fork_choice` decides between their chains and this node's, before any stranger is asked. At most MOST_STRANGERS
        of these are asked, because each may take CHAIN_TIMEOUT_S.
        """
        has_led, has_moved, is_unserved, unrelated = False, False, False, list[tuple[PeerRecord, Message]]()
        lacks_state = False
        old_head, known = self._ctx.chain.tip.head, contributors_to(self._ctx.chain.tip.links)
        strangers = [record for record in peers if record.peer_id not in known]
        chosen = self._rng.sample(strangers, min(MOST_STRANGERS, len(strangers)))
        for record in [*(record for record in peers if record.peer_id in known), *chosen]:
            if record.peer_id not in known and await self._has_lost_to_one_of(unrelated):
                return False
            tip = self._ctx.chain.tip
            try:
                reply, has_moved = await self._replay_from(record.peer_id)
            except SwarmError as exc:
                logger.info("This node could not catch up from peer %s: %s", record.peer_id[-6:], exc)
                is_unserved |= isinstance(exc, RoundFailed)  # A peer could refuse with any code.
                lacks_state |= isinstance(exc, StateMissing)
                if record.peer_id not in known:
                    self._ballot.add_false_claim(record, JUDGE_AGAIN_S)
                continue
            if reply.header.get("light") is True and not has_moved:
                unrelated.append((record, reply))  # The peer may be on this chain, but keep few proofs after a restart.
                continue
            is_here = record.head == tip.head == reply.header.get("head")
            if has_moved:
                logger.info("This node has caught up to round %d.", self._ctx.chain.tip.round)
            elif is_here and self._ctx.chain.tip.head == tip.head:  # Else, the reply is about an earlier round.
                self._ctx.chain.set_anchor(self._ctx.clock() - self._ctx.stated_age_s(reply.header))
            if has_led := has_moved or is_here:
                break
            self._ballot.add_false_claim(record)
        if not has_moved:
            await self._has_lost_to_one_of(unrelated)
        if lacks_state and self._ctx.chain.tip.head == old_head:
            self._lose("the run has gone back to a state that this node does not have", "far_behind")
        elif is_unserved and self._ctx.chain.tip.head == old_head:
            self._wait_for_result(old_head)
        return has_led

    async def _has_lost_to_one_of(self, replies: list[tuple[PeerRecord, Message]]) -> bool:
        """Judge and drop these light proofs until this node's chain has lost.

        This node may have committed rounds since the replies came. Rounds that follow each other faster than the peers
        answer must not keep a node on a chain that has lost.
        """
        while replies:
            if await self._has_lost_to(*replies.pop(0)):
                return True
        return False

    def _wait_for_result(self, head: str) -> None:
        """No peer has the result of the round after this head: some may be away, or their disks could not keep it."""
        now_s = self._ctx.clock()
        if self._unserved[0] != head:
            self._unserved = head, now_s
        elif now_s - self._unserved[1] > UNSERVED_S:
            self._lose("no peer has the result of the round after this node's head", "far_behind")

    async def _replay_from(self, peer_id: str) -> tuple[Message, bool]:
        """Adopt one peer's proofs until the peer's head is reached or no proof is adopted.

        Returns the last reply, and whether a round that the peer sent is on this node's chain now.
        """
        has_moved = False
        while True:
            tip = self._ctx.chain.tip
            heads = Message({"heads": heads_of(tip.links, tip.head)})
            call = self._wire.call(peer_id, "chain", heads, timeout_s=CHAIN_TIMEOUT_S)
            reply = await while_live(self._peer_table, peer_id, call)
            if reply.header.get("light") is True:
                return reply, has_moved
            newest_at_s = self._ctx.clock() - self._ctx.stated_age_s(reply.header)
            for blob in reply.blobs:
                proof = parse(Proof, blob)
                is_newest = proof.outcome.hash == reply.header.get("head")
                while not self._has_room():  # noqa: ASYNC110 - the trainer's thread makes room
                    await asyncio.sleep(ROOM_CHECK_S)
                await self._committer.adopt(proof, newest_at_s if is_newest else None, is_behind=not is_newest)
                now = self._ctx.chain.tip  # Another call may have adopted the same round.
                has_moved |= proof.outcome.hash in heads_of(now.links, now.head)
            if self._ctx.chain.tip.head in (tip.head, reply.header.get("head")):
                return reply, has_moved

    def _leaving(self, tip: Tip) -> list[PeerRecord]:
        """Live peers at this node's head that are downloading another state.

        They count as members here until they have left. Otherwise each of two members may leave while the other does.
        """
        live = self._peer_table.live() if tip.round >= 0 else []  # At the start of a run, all joiners have this head.
        return [record for record in live if record.phase is Phase.DOWNLOADING and record.head == tip.head]

    def _is_behind(self, theirs: Sequence[Link], standing: Mapping[str, str]) -> bool:
        """Whether to believe rounds that follow this node's head, or that are ahead of it without a known common round.

        Without a known common round, this node believes them if at least as many live members are on their chain as on
        its own, or if the newest votes suffice for an adoption. One member alone could invent the rounds.
        """
        tip = self._ctx.chain.tip
        if theirs[0].parent == tip.head:
            return self._committer.is_supported(parse(Proof, theirs[0].text))
        their_heads, own_heads = {link.head for link in theirs}, set(heads_of(tip.links, tip.head))
        there, here = (sum(head in heads for head in standing.values()) for heads in (their_heads, own_heads))
        return there >= here or self._committer.is_supported(parse(Proof, theirs[-1].text))

    async def _has_lost_to(self, record: PeerRecord, reply: Message) -> bool:
        """Compare a peer's light proofs with this node's chain. If this node's chain lost, report it to `on_lost`."""
        tip, peer_id = self._ctx.chain.tip, record.peer_id
        heads = heads_of(tip.links, tip.head)
        try:
            theirs = await asyncio.to_thread(links_of, reply, self._ctx.manifest_rules)
        except PeerError as exc:
            logger.info("Peer %s sent invalid light proofs of its chain: %s", peer_id[-6:], exc)
            self._wire.traffic.reject(exc)
            self._ballot.add_false_claim(record)
            return False
        if not theirs or theirs[0].head in heads or self._ctx.chain.tip is not tip:
            return False  # There is nothing to judge, or this node has moved since the reply came.
        fork_point = theirs[0].parent
        is_fork_point_known, mine = fork_point in heads, links_after(tip.links, fork_point)
        standing = {r.peer_id: r.head for r in [*self._peer_table.members(), *self._leaving(tip)]}
        standing[self._ctx.me] = tip.head
        if fork_point == tip.head or (not is_fork_point_known and theirs[0].round > tip.round):
            if self._is_behind(theirs, standing):
                self._lose("the other peers no longer keep the rounds after this node's head", "far_behind")
                return True
            if fork_point != tip.head:
                self._ballot.add_false_claim(record, JUDGE_AGAIN_S)
            return False
        electorate = contributors_at(tip.links, fork_point)
        if not is_fork_point_known:  # The split was longer than MAX_LINKS, or a chain came from a download.
            theirs, mine = overlapping(theirs, tip.links)
        has_lost = await asyncio.to_thread(is_heavier, theirs, mine, electorate, standing)
        if self._ctx.chain.tip is not tip:
            return False
        if has_lost:
            self._committer.prefer(theirs[0].head, [link.head for link in mine])
            reason = f"the others' chain has {weight(theirs)} tokens since the fork, this node's chain {weight(mine)}"
            if weight(theirs) <= weight(mine):
                reason = "more members support the others' chain"
            rivals = {peer_id, *contributors_to(theirs)} - {self._ctx.me}
            self._lose(reason, "fork", [link.head for link in theirs], mine, rivals)
            return True
        self._ballot.add_false_claim(record, JUDGE_AGAIN_S)
        proven_tokens = tip.state.tokens + weight(theirs) - weight(mine)
        if is_fork_point_known and theirs[-1].head == record.head and record.swarm_tokens > proven_tokens:
            logger.warning("Peer %s claims more tokens than the members of its chain have signed.", peer_id[-6:])
            self._wire.traffic.reject(PeerError("a false claim", code="bad_weight"))
        return False

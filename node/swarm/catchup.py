"""Brings a node that missed rounds back to the head of the line.

Knows proofs and the directory. Knows no checkpoint and no download: where replay does not lead, it says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from node.errors import PeerError, SwarmError
from node.status import Channel
from node.swarm.base import Message, Service, Wire
from node.swarm.chain import Tip
from node.swarm.directory import Directory, PeerRecord
from node.swarm.line import LINE_ROUNDS, Link, abreast, heads_of, prevails, read_line, since
from node.swarm.offers import prevailing
from node.swarm.records import Proof, parse
from node.swarm.rounds import Rounds
from node.swarm.state import SERVING_PHASES

logger = logging.getLogger(__name__)

CALL_S = 5.0
LINE_S = 20.0
"""For an answer of 4 MiB at 2 Mbit/s."""
LOOK_S = 1.0
PROOFS_BYTES = 2**20
"""Of one answer: what 2 Mbit/s bring within CALL_S. Who needs more asks again."""


Why = Literal["outvoted", "fork", "far_behind"]


@dataclass(frozen=True, slots=True)
class Loss:
    """Why only a download leads back to the others."""

    reason: str
    code: Why
    avoid: frozenset[str]
    """Heads of states that do not lead there. Empty where the votes decide: they do so again when a state is sought."""
    dropped: tuple[Link, ...] = ()
    """Rounds of this node's line that do not hold."""


class CatchUp:
    """Brings a node that missed rounds back to the head, by replay; says so where only a download can.

    `on_lost` is called with the loss, once a look, until the rounds go on from another tip.
    """

    def __init__(self, wire: Wire, directory: Directory, rounds: Rounds, on_lost: Callable[[Loss], None]) -> None:
        self._wire, self._directory, self._rounds = wire, directory, rounds
        self._on_lost = on_lost
        self._lighter: set[tuple[str, str, str]] = set()
        """(peer, its head, this node's) that were weighed, and theirs did not hold."""
        wire.serve({"proofs": Service(self._on_proofs, Channel.STATE), "line": Service(self._on_line, Channel.STATE)})

    async def run(self) -> None:
        """Look for peers ahead for ever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._rounds.behind.wait()
            self._rounds.behind.clear()
            tip = self._rounds.chain.tip
            if outvoted(self._directory.live(), tip):
                reason = "most others have another state after the same rounds"
                self._on_lost(Loss(reason, "outvoted", frozenset()))
                await asyncio.sleep(LOOK_S)
            ahead = self._ahead()
            if ahead and not await self.replay(ahead):
                await asyncio.sleep(LOOK_S)

    async def align(self) -> None:
        """Ask whoever is furthest for what this node has missed, and how old the round is."""
        tip = self._rounds.chain.tip
        known = [r for r in self._directory.others() if r.phase in SERVING_PHASES]
        ahead = sorted((r for r in known if r.swarm_tokens >= tip.state.tokens), key=lambda r: -r.swarm_tokens)
        await self.replay(ahead)

    def _ahead(self) -> list[PeerRecord]:
        """Who says to be further, most tokens first; of as many tokens the smaller head would hold."""
        tip, false = self._rounds.chain.tip, self._rounds.false_claims
        mine = (-tip.state.tokens, tip.head)
        records = [
            r
            for r in self._directory.others()
            if (-r.swarm_tokens, r.head) < mine and r.head != tip.head and false.get(r.peer_id) != r.head
        ]
        return sorted(records, key=lambda r: r.swarm_tokens, reverse=True)

    async def replay(self, ahead: Sequence[PeerRecord]) -> bool:
        """Take over what peers have committed since. False where none of them leads on from this node's head."""
        led, astray = False, []
        asked_at = self._rounds.chain.tip
        for record in ahead:
            tip = self._rounds.chain.tip
            try:
                reply = await self._follow(record.peer_id)
            except SwarmError as exc:
                logger.info("Peer %s does not help to catch up: %s", record.peer_id[-6:], exc)
                continue
            moved = self._rounds.chain.tip is not tip
            if reply.header.get("status") == "unknown" and not moved:
                astray.append(record)  # Another may know the way: a peer that came back keeps few rounds.
                continue
            if moved:
                logger.info("Caught up to round %d.", self._rounds.chain.tip.round)
            elif record.head == tip.head == reply.header.get("head"):
                self._set_age(reply)
            if led := moved or record.swarm_tokens <= tip.state.tokens:
                break
            self._rounds.false_claims[record.peer_id] = record.head
        for record in astray:
            if self._rounds.chain.tip.head != asked_at.head or await self._try_to_weigh(record):
                break
        return led

    async def _follow(self, peer_id: str) -> Message:
        """Adopt what this peer has committed since, until an answer leads to its head, or no further. Returns it."""
        while True:
            before = self._rounds.chain.tip.head
            reply = await self._wire.call(peer_id, "proofs", Message({"after": before}), timeout_s=CALL_S)
            began_at_s = self._rounds.clock() - self._rounds.told_age_s(reply.header)
            for blob in reply.blobs:
                proof = parse(Proof, blob)
                is_newest = proof.outcome.hash == reply.header.get("head")
                await self._rounds.adopt(proof, began_at_s if is_newest else None)
            if self._rounds.chain.tip.head in (before, reply.header.get("head")):
                return reply

    async def _try_to_weigh(self, record: PeerRecord) -> bool:
        try:
            return await self._weigh(record)
        except SwarmError as exc:
            logger.info("Peer %s does not show its line: %s", record.peer_id[-6:], exc)
            return False

    async def _weigh(self, record: PeerRecord) -> bool:
        """This peer's line does not follow from this node's head: which of the two holds since they parted?

        True where this node's does not, and `on_lost` was told.
        """
        tip = self._rounds.chain.tip
        if (record.peer_id, record.head, tip.head) in self._lighter:
            return False
        heads = heads_of(tip.line, tip.head)
        reply = await self._wire.call(record.peer_id, "line", Message({"heads": heads}), timeout_s=LINE_S)
        try:
            theirs = await asyncio.to_thread(read_line, reply.blobs, self._rounds.rules.bounds)
        except PeerError as exc:
            self._wire.traffic.reject(exc)
            self._rounds.false_claims[record.peer_id] = record.head
            raise
        if not theirs or self._rounds.chain.tip is not tip:
            return False
        parting, mine = theirs[0].parent, since(tip.line, theirs[0].parent)
        is_common = parting in heads
        if parting == tip.head or (not is_common and theirs[0].round > tip.round):
            self._on_lost(Loss("the rounds since are not kept any more", "far_behind", frozenset()))
            return True
        if not is_common:  # A split longer than lines are, or one that has come from a download without them.
            theirs, mine = abreast(theirs, tip.line)
        if prevails(theirs, mine):
            avoid = frozenset(link.head for link in mine)
            self._on_lost(Loss(_tell_fork(theirs, mine), "fork", avoid, mine))
            return True
        self._lighter.add((record.peer_id, record.head, tip.head))
        self._rounds.false_claims[record.peer_id] = record.head
        shown = tip.state.tokens + sum(link.tokens for link in theirs) - sum(link.tokens for link in mine)
        if is_common and theirs[-1].head == record.head and record.swarm_tokens > shown:
            logger.warning("Peer %s claims tokens that nobody has signed.", record.peer_id[-6:])
            self._wire.traffic.reject(PeerError("a false claim", code="bad_weight"))
        return False

    def _set_age(self, reply: Message) -> None:
        tip = self._rounds.chain.tip
        self._rounds.chain.tip = replace(tip, anchor_at_s=self._rounds.clock() - self._rounds.told_age_s(reply.header))

    async def _on_proofs(self, caller: str, message: Message) -> Message:
        """The next rounds. Status: ok, or unknown where this node cannot lead from there to its own head."""
        tip = self._rounds.chain.tip
        after = str(message.header.get("after"))
        proofs = self._rounds.chain.proofs_after(after)
        header: dict[str, Any] = {"status": "ok" if proofs or after == tip.head else "unknown"}
        header |= {"head": tip.head, "age_s": self._rounds.age_s}
        blobs: list[bytes] = []
        for blob in (proof.model_dump_json().encode() for proof in proofs):
            if blobs and sum(map(len, blobs)) + len(blob) > PROOFS_BYTES:
                break
            blobs.append(blob)
        return Message(header, blobs)

    async def _on_line(self, caller: str, message: Message) -> Message:
        """This node's rounds after the newest of the caller's heads that is in its line; all, if none is."""
        heads = message.header.get("heads")
        if not isinstance(heads, list) or len(heads) > LINE_ROUNDS + 1:
            raise PeerError("a request for a line has the wrong form")
        tip = self._rounds.chain.tip
        known = set(heads_of(tip.line, tip.head))
        parting = next((head for head in heads if head in known), "")
        return Message(blobs=[link.text.encode() for link in since(tip.line, parting)])


def _tell_fork(theirs: Sequence[Link], mine: Sequence[Link]) -> str:
    others, own = sum(link.tokens for link in theirs), sum(link.tokens for link in mine)
    return f"the others' line has {others} tokens since the swarm was split, this one {own}"


def outvoted(records: Sequence[PeerRecord], tip: Tip) -> bool:
    """Whether another state after the same head prevails, by the rule by which a joiner chooses (`offers.prevailing`).

    The first record is this node's own; of the others only those that contributed to the newest record are heard, as a
    stranger can say anything for nothing. Whose word is not here yet is taken to side with this node: right after a
    commit, the first to be heard of may be the damaged one.
    """
    own, *others = records
    told = {own.peer_id: tip.digest}
    for record in others:
        if record.peer_id in tip.last_weights:
            told[record.peer_id] = (record.head == tip.head and record.state_digest) or tip.digest
    return prevailing(tip.last_weights, told) not in ("", tip.digest)

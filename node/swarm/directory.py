"""Who is there: signed records of peers, spread by gossip. Knows no round and no transport.

Every node signs a record of itself about once a second, with a number that only grows, and exchanges what it knows
with a few random peers (gossip heartbeats, van Renesse et al. 1998). A record whose number has not grown for DEAD_S is
a dead peer's: nobody vouches for anybody else. hivemind's DHT holds the same records for strangers to find
(`discovery`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from node.errors import PeerError
from node.manifest import PROTOCOL_VERSION
from node.status import Channel, PeerRow, Phase
from node.swarm.base import Message, Service, Wire
from node.swarm.identity import Identity, verify

logger = logging.getLogger(__name__)

PULSE_S = 1.0
DEAD_S = 7.0
"""Without news for so long, a peer is dead. Seven pulses: a node starved of CPU misses one or two."""
RELAYED_S = 4.0
"""Only records with news this young are passed on, so a dead peer's fade everywhere."""
GOSSIP_FANOUT = 2
MAX_GOSSIP_BYTES = 8 * 2**20
"""A record is about 1 kB, and a message holds those of all live peers."""
MEMBER_PHASES = frozenset({Phase.TRAINING, Phase.SYNCING, Phase.DRAINING})
"""Phases in which a peer takes part in rounds."""
PURPOSE = "diloco peer record"

Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Address = Annotated[str, StringConstraints(max_length=256, pattern=r"^/")]


class PeerRecord(BaseModel):
    """What a peer says about itself. Hostile until its signature is checked, and its text is hostile even then."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer_id: str = Field(max_length=64)
    number: int = Field(ge=0, lt=2**63)
    run: Hex64
    name: str = Field("", max_length=64)
    version: str = Field("", max_length=40)
    protocol: int = PROTOCOL_VERSION
    phase: Phase = Phase.STARTING
    round: int = Field(-1, ge=-1)
    head: Hex64
    state_digest: str = Field("", max_length=64)
    swarm_tokens: int = Field(0, ge=0)
    tokens_per_second: float = Field(0.0, ge=0, lt=1e12, allow_inf_nan=False)
    transport: Literal["direct", "relay"] = "direct"
    addresses: tuple[Address, ...] = Field((), max_length=16)


@dataclass(frozen=True, slots=True)
class Signed:
    """A record as it travels: the bytes that were signed, and the signature."""

    body: bytes
    signature: bytes

    def open(self, run: str) -> PeerRecord:
        """Check and read. Raises PeerError."""
        try:
            record = PeerRecord.model_validate_json(self.body)
        except ValidationError as exc:
            raise PeerError("a peer record is not valid") from exc
        if record.run != run:
            raise PeerError("a peer record is of another run")
        if not verify(record.peer_id, PURPOSE, self.body, self.signature):
            raise PeerError("a peer record has a wrong signature", code="bad_signature")
        return record


def sign_record(identity: Identity, record: PeerRecord) -> Signed:
    body = record.model_dump_json().encode()
    return Signed(body, identity.sign(PURPOSE, body))


@dataclass(slots=True)
class _Entry:
    record: PeerRecord
    signed: Signed
    heard_at_s: float
    suspected: bool = False


class Directory:
    """The table of peers. One writer: the swarm's loop. `clock` is monotonic seconds."""

    def __init__(self, identity: Identity, record: PeerRecord, clock: Callable[[], float]) -> None:
        self.identity = identity
        self.me = record
        self.changed = asyncio.Event()
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    def say(self, **changes: object) -> None:
        """Change what this node says about itself; travels with the next pulse, or at once with `announce`."""
        self.me = self.me.model_copy(update=changes)

    def pulse(self) -> Signed:
        """A fresh record of this node, with the next number."""
        self.say(number=self.me.number + 1)
        return sign_record(self.identity, self.me)

    def merge(self, records: Iterable[Signed]) -> list[PeerRecord]:
        """Take in what others tell; returns those that were news. Skips what is not valid."""
        news = []
        for signed in records:
            try:
                record = signed.open(self.me.run)
            except PeerError as exc:
                logger.debug("dropped a peer record: %s", exc)
                continue
            if self._take(record, signed):
                news.append(record)
        if news:
            self.changed.set()
        return news

    def _take(self, record: PeerRecord, signed: Signed) -> bool:
        if record.peer_id == self.me.peer_id:
            # A former life of this node still echoes: outnumber it.
            self.say(number=max(self.me.number, record.number))
            return False
        entry = self._entries.get(record.peer_id)
        if entry is not None and record.number <= entry.record.number:
            return False
        self._entries[record.peer_id] = _Entry(record, signed, self._clock())
        return True

    def suspect(self, peer_id: str) -> None:
        """A call to this peer failed: not live until it is heard of again."""
        if peer_id in self._entries:
            self._entries[peer_id].suspected = True
            self.changed.set()

    def live(self) -> list[PeerRecord]:
        """Peers with recent news that have not left, this node first."""
        return [self.me, *(e.record for e in self._entries.values() if self._is_live(e))]

    def members(self) -> list[PeerRecord]:
        """The live peers that take part in rounds, by peer id."""
        return sorted((r for r in self.live() if r.phase in MEMBER_PHASES), key=lambda r: r.peer_id)

    def is_member(self, peer_id: str) -> bool:
        return any(record.peer_id == peer_id for record in self.members())

    def find(self, peer_id: str) -> PeerRecord | None:
        if peer_id == self.me.peer_id:
            return self.me
        entry = self._entries.get(peer_id)
        return entry.record if entry else None

    def fresh(self) -> list[Signed]:
        """What is worth passing on. Own record first."""
        now = self._clock()
        young = [e.signed for e in self._entries.values() if now - e.heard_at_s < RELAYED_S]
        return [sign_record(self.identity, self.me), *young]

    def forgotten(self) -> list[PeerRecord]:
        """Peers once known that are not live now; worth a call now and then."""
        return [e.record for e in self._entries.values() if not self._is_live(e) and e.record.phase != Phase.STOPPED]

    def _is_live(self, entry: _Entry) -> bool:
        if entry.record.phase in (Phase.STOPPED, Phase.LEAVING, Phase.ERROR) or entry.suspected:
            return False
        return self._clock() - entry.heard_at_s < DEAD_S

    def rows(self) -> list[PeerRow]:
        """For people: live peers, this node first."""
        now = self._clock()
        heard = {peer_id: entry.heard_at_s for peer_id, entry in self._entries.items()}
        return [
            PeerRow(
                peer_id=r.peer_id,
                short_id=r.peer_id[-6:],
                name=r.name or r.peer_id[-6:],
                phase=r.phase,
                round=r.round,
                tokens_per_second=r.tokens_per_second,
                transport=r.transport,
                version=r.version,
                state_digest=r.state_digest,
                last_seen_s=round(now - heard.get(r.peer_id, now), 1),
                this_node=r.peer_id == self.me.peer_id,
            )
            for r in self.live()
        ]


class Gossip:
    """Keeps a directory alive over a wire."""

    def __init__(self, wire: Wire, directory: Directory, rng: random.Random) -> None:
        self._wire, self._directory, self._rng = wire, directory, rng
        wire.serve({"gossip": Service(self._answer, Channel.DHT, MAX_GOSSIP_BYTES)})

    async def run(self) -> None:
        """Pulse for ever."""
        while True:
            self._directory.pulse()
            others = [r.peer_id for r in self._directory.live()[1:]]
            chosen = self._rng.sample(others, min(GOSSIP_FANOUT, len(others)))
            lost = [r.peer_id for r in self._directory.forgotten()]
            if lost and self._rng.random() < 0.3:
                chosen.append(self._rng.choice(lost))
            calls = [asyncio.create_task(self.exchange(peer_id)) for peer_id in chosen]
            await asyncio.sleep(PULSE_S)
            for call in calls:
                if not call.done():
                    logger.debug("a gossip call takes longer than a pulse")

    async def exchange(self, peer_id: str) -> bool:
        """Tell one peer all the news, and hear its own. False if it is not there."""
        try:
            reply = await self._wire.call(peer_id, "gossip", self._message(), timeout_s=3.0)
        except PeerError as exc:
            logger.debug("gossip with %s failed: %s", peer_id[-6:], exc)
            if exc.code == "unreachable":
                self._directory.suspect(peer_id)
            return False
        self._directory.merge(_unpack(reply))
        return True

    async def announce(self, timeout_s: float = 1.5) -> None:
        """Tell every live peer at once; for a new phase that cannot wait for the gossip, such as a goodbye."""
        self._directory.pulse()
        message = self._message()
        calls = [
            self._wire.call(record.peer_id, "gossip", message, timeout_s=timeout_s)
            for record in self._directory.live()[1:]
        ]
        await asyncio.gather(*calls, return_exceptions=True)

    async def _answer(self, caller: str, request: Message) -> Message:
        self._directory.merge(_unpack(request))
        return self._message()

    def _message(self) -> Message:
        fresh = self._directory.fresh()
        return Message({"signatures": [s.signature for s in fresh]}, [s.body for s in fresh])


def _unpack(message: Message) -> Sequence[Signed]:
    signatures = message.header.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != len(message.blobs):
        raise PeerError("a gossip message has the wrong form")
    return [Signed(body, bytes(sig)) for body, sig in zip(message.blobs, signatures, strict=True)]

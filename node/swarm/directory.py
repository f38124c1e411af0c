"""Who is there: the table of peers' signed records. Knows no round and no wire.

Records travel with their age (`gossip`), so a dead peer is dead to all at the same time, DEAD_S after its last one:
nobody vouches for anybody else. hivemind's DHT holds the same records for strangers to find (`discovery`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from node.errors import PeerError
from node.manifest import PROTOCOL_VERSION
from node.status import PeerRow, Phase
from node.swarm.base import plain
from node.swarm.identity import Identity, verify

logger = logging.getLogger(__name__)

DEAD_S = 8.0
"""Without news for so long, a peer is dead. Eight pulses: a node starved of CPU misses one or two, and news needs a few
seconds to reach all of a large swarm."""
RELAYED_S = 4.0
"""Only records with news this young are passed on, so a dead peer's fade everywhere."""
FORGOTTEN_S = 6 * 3600.0
"""A dead peer is called now and then for so long."""
MAX_KNOWN = 4000
"""Peers in the table: the longest silent goes first, the living never. Fits into the header of a message."""
SHORT_ID = 16
"""Last characters of a peer id by which records are asked for; 93 bits, so nobody makes another id with the same."""
MAX_VIA = 3
MEMBER_PHASES = frozenset({Phase.TRAINING, Phase.SYNCING, Phase.DRAINING})
"""Phases in which a peer takes part in rounds."""
PURPOSE = "diloco peer record"

Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Address = Annotated[str, StringConstraints(max_length=256, pattern=r"^/")]


RELAYING = "relaying"
"""What a relay does, in the place of a phase."""


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
    round: int = Field(-1, ge=-1, lt=2**63)
    head: Hex64
    state_digest: str = Field("", max_length=64)
    swarm_tokens: int = Field(0, ge=0, lt=2**63)
    tokens_per_second: float = Field(0.0, ge=0, lt=1e12, allow_inf_nan=False)
    compute_utilization_ratio: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    """Of its last complete round."""
    is_relay: bool = False
    """It helps others to meet and never trains, whatever its phase."""
    transport: Literal["direct", "relay"] = "direct"
    inbound: bool = True
    """Whether others can open a connection to it. If not, it keeps its own to those that can be called."""
    addresses: tuple[Address, ...] = Field((), max_length=16)
    relays: bool = False
    """Whether it carries calls between two others of the run; it can be called itself."""
    via: tuple[Annotated[str, StringConstraints(max_length=64)], ...] = Field((), max_length=MAX_VIA)
    """Relays that it keeps a connection to, by peer id: over each of them it can be called."""


@dataclass(frozen=True, slots=True)
class Signed:
    """A record as it travels: the bytes that were signed, the signature, and how long ago its teller heard it."""

    body: bytes
    signature: bytes
    age_s: float = 0.0

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
    suspected_at_s: float | None = None
    """When a call to it failed; None where it has been heard of since."""


class Directory:
    """The table of peers. One writer: the swarm's loop. `clock` is monotonic seconds."""

    def __init__(
        self,
        identity: Identity,
        record: PeerRecord,
        clock: Callable[[], float],
        drowsy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`drowsy`: whether this node has just slept, so that a call of its own that fails says nothing of a peer."""
        self.identity = identity
        self.drowsy = drowsy
        self.me = record
        self.changed = asyncio.Event()
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._evicted: dict[str, float] = {}

    def say(self, **changes: object) -> None:
        """Change what this node says about itself; travels with the next pulse, or at once with `announce`."""
        self.me = self.me.model_copy(update=changes)

    def pulse(self) -> Signed:
        """A fresh record of this node, with the next number."""
        self._forget()
        self.say(number=self.me.number + 1)
        return sign_record(self.identity, self.me)

    def merge(self, records: Iterable[Signed]) -> list[PeerRecord]:
        """Take in what others tell; returns those that were news. Skips what is not valid."""
        news = []
        for signed in records:
            if self._is_old(signed):
                continue
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

    def _is_old(self, signed: Signed) -> bool:
        """Whether no newer than what is known, by a look that is cheap beside a check of the signature."""
        try:
            told = from_json(signed.body)
            return bool(told["number"] <= self._number_of(told["peer_id"]))
        except (ValueError, TypeError, LookupError):
            return False  # `Signed.open` says what is wrong with it.

    def _number_of(self, peer_id: str) -> int:
        if peer_id == self.me.peer_id:
            return self.me.number
        entry = self._entries.get(peer_id)
        return -1 if entry is None else entry.record.number

    def _take(self, record: PeerRecord, signed: Signed) -> bool:
        if record.peer_id == self.me.peer_id:
            # A former life of this node still echoes: outnumber it.
            self.say(number=max(self.me.number, record.number))
            return False
        entry = self._entries.get(record.peer_id)
        if entry is not None and record.number <= entry.record.number:
            return False
        if entry is None and len(self._entries) >= MAX_KNOWN and not self._make_room():
            return False
        new = _Entry(record, signed, self._clock() - signed.age_s)
        if entry is not None:
            new.heard_at_s = max(new.heard_at_s, entry.heard_at_s)
            if entry.suspected_at_s is not None and new.heard_at_s < entry.suspected_at_s:
                new.suspected_at_s = entry.suspected_at_s
        self._entries[record.peer_id] = new
        return True

    def _make_room(self) -> bool:
        silent = [peer_id for peer_id, entry in self._entries.items() if not self._is_live(entry)]
        if not silent:
            return False
        del self._entries[min(silent, key=lambda peer_id: self._entries[peer_id].heard_at_s)]
        return True

    def _forget(self) -> None:
        """Let go of those that have been dead for long."""
        before_s = self._clock() - FORGOTTEN_S
        for peer_id in [p for p, entry in self._entries.items() if entry.heard_at_s < before_s]:
            del self._entries[peer_id]

    def suspect(self, peer_id: str) -> None:
        """A call to this peer failed: not live until it is heard of again."""
        if peer_id in self._entries and not self.drowsy():
            self._entries[peer_id].suspected_at_s = self._clock()
            self.changed.set()

    def evict(self, peer_id: str, for_s: float) -> None:
        """This peer broke a rule that only the ill-willed break: not live for so long, whatever it says."""
        self._evicted[peer_id] = self._clock() + for_s
        self.changed.set()

    def live(self) -> list[PeerRecord]:
        """Peers with recent news that have not left, this node first."""
        return [self.me, *(e.record for e in self._entries.values() if self._is_live(e))]

    def members(self) -> list[PeerRecord]:
        """The live peers that take part in rounds, by peer id."""
        return sorted((r for r in self.live() if r.phase in MEMBER_PHASES), key=lambda r: r.peer_id)

    def leaders(self) -> list[str]:
        """The members that may lead a round: those with an inbound port or a relay; where there is none, all members.

        Those of `callable_members` lead first. The others are for attempts in which these fail.
        """
        members = self.members()
        return [r.peer_id for r in members if r.inbound or self._relays_of(r)] or [r.peer_id for r in members]

    def callable_members(self) -> list[str]:
        """The members that lead and reduce: all others can call them.

        Best over IPv4, which most networks have; else with an inbound port at all; else over relays.
        """
        members = self.members()
        inbound = [r for r in members if r.inbound]
        chosen = [r for r in inbound if _has_ipv4(r)] or inbound or [r for r in members if self._relays_of(r)]
        return [record.peer_id for record in chosen]

    def others(self) -> list[PeerRecord]:
        """Live peers that this node may call: two without an inbound port need a relay between them."""
        return [record for record in self.live()[1:] if self.can_call(record)]

    def can_call(self, record: PeerRecord) -> bool:
        return record.inbound or self.me.inbound or bool(self._relays_of(record))

    def relays_to(self, peer_id: str) -> list[str]:
        """The live relays over which this peer can be called, in an order of the pair's own: so the load spreads."""
        record = self.find(peer_id)
        pair = " ".join(sorted((self.me.peer_id, peer_id)))
        relays = [relay for relay in self._relays_of(record) if relay != self.me.peer_id] if record else []
        return sorted(relays, key=lambda relay: sha256(f"{pair} {relay}".encode()).digest())

    def live_relays(self) -> list[str]:
        """The other live peers that carry calls for peers of the run."""
        return [r.peer_id for r in self.live()[1:] if r.relays and r.inbound]

    def _relays_of(self, record: PeerRecord) -> list[str]:
        return [relay for relay in record.via if relay != record.peer_id and self._is_live_relay(relay)]

    def _is_live_relay(self, peer_id: str) -> bool:
        record = self.find(peer_id)
        is_live = peer_id == self.me.peer_id or not self.is_gone(peer_id)
        return record is not None and is_live and record.relays and record.inbound

    def check_carried(self, caller: str, target: str) -> None:
        """Raises PeerError unless this node relays calls from one to the other: both are peers of this run."""
        if not self.me.relays:
            raise PeerError("this node relays no calls", code="no_relay")
        if not (self.knows(caller) and self.knows(target)):
            raise PeerError("this node relays only between peers of its run", code="stranger")

    def silent(self) -> list[str]:
        """Peers without news for DEAD_S. A connection to them that still stands may lead nowhere."""
        now = self._clock()
        return [peer_id for peer_id, entry in self._entries.items() if now - entry.heard_at_s >= DEAD_S]

    def is_member(self, peer_id: str) -> bool:
        if peer_id == self.me.peer_id:
            return self.me.phase in MEMBER_PHASES
        entry = self._entries.get(peer_id)
        return entry is not None and entry.record.phase in MEMBER_PHASES and self._is_live(entry)

    def is_gone(self, peer_id: str) -> bool:
        """Known, and not live any more."""
        entry = self._entries.get(peer_id)
        return entry is not None and not self._is_live(entry)

    def find(self, peer_id: str) -> PeerRecord | None:
        if peer_id == self.me.peer_id:
            return self.me
        entry = self._entries.get(peer_id)
        return entry.record if entry else None

    def knows(self, peer_id: str) -> bool:
        """Whether it has told of itself as a peer of this run."""
        return self.find(peer_id) is not None

    def own(self) -> Signed:
        return sign_record(self.identity, self.me)

    def fresh(self, wanted: Mapping[str, int] | None = None, asker: str = "") -> list[Signed]:
        """What is worth passing on to somebody who gave this `wanted`. Own record first.

        The asker's own last one however old: a node whose wall clock was set back must learn which number to pass.
        """
        now, wanted = self._clock(), wanted or {}
        news = [
            replace(entry.signed, age_s=min(DEAD_S, now - entry.heard_at_s))
            for peer_id, entry in self._entries.items()
            if entry.record.number >= wanted.get(peer_id[-SHORT_ID:], 0)
            and (now - entry.heard_at_s < RELAYED_S or peer_id == asker)
        ]
        return [self.own(), *news]

    def wanted(self) -> dict[str, int]:
        """The end of a peer's id to the number from which on its record would be news; others' from 0."""
        since_s = self._clock() - DEAD_S - RELAYED_S
        known = [entry.record for entry in self._entries.values() if entry.heard_at_s > since_s]
        return {record.peer_id[-SHORT_ID:]: record.number + 1 for record in (self.me, *known)}

    def forgotten(self) -> list[PeerRecord]:
        """Peers once known that are not live now; worth a call now and then."""
        return [e.record for e in self._entries.values() if not self._is_live(e) and e.record.phase != Phase.STOPPED]

    def _is_live(self, entry: _Entry) -> bool:
        if entry.record.phase in (Phase.STOPPED, Phase.LEAVING, Phase.ERROR) or entry.suspected_at_s is not None:
            return False
        if self._clock() < self._evicted.get(entry.record.peer_id, 0.0):
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
                name=plain(r.name, 64).strip() or r.peer_id[-6:],
                phase=RELAYING if r.is_relay else r.phase,
                round=r.round,
                tokens_per_second=r.tokens_per_second,
                transport=r.transport,
                version=plain(r.version, 40),
                state_digest=plain(r.state_digest, 64),
                last_seen_s=round(now - heard.get(r.peer_id, now), 1),
                this_node=r.peer_id == self.me.peer_id,
                compute_utilization_ratio=r.compute_utilization_ratio,
            )
            for r in self.live()
        ]


def _has_ipv4(record: PeerRecord) -> bool:
    own = ("/ip4/127.", "/ip4/0.")
    return any(a.startswith(("/ip4/", "/dns4/")) and not a.startswith(own) for a in record.addresses)

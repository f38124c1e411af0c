"""The peer table: signed records of all known peers, with a heartbeat failure detector. It does no networking.

Gossip passes records on with their age, so a silent peer is dead for all nodes at the same time, `dead_s` after the
peer's last record. A node whose call to a peer fails counts the peer as dead at once, except in quorums (`present`).
hivemind's DHT holds the same records for newcomers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from node.config.manifest import PROTOCOL_VERSION
from node.errors import PeerError
from node.host.printable import printable
from node.status import MEMBER_PHASES, PeerRow, Phase, TaskScores
from node.swarm.identity import Identity, verify
from node.swarm.membership.timings import MemberTimings
from node.swarm.suspend_clock import SuspendClock
from node.swarm.transport.wire import Gone, cancel_if_gone

logger = logging.getLogger(__name__)

T = TypeVar("T")
TIMINGS = MemberTimings()
GOSSIP_AGE_S = 4.0  # Older records are not passed on, so the records of a dead peer disappear everywhere
LEFT_S = 120.0  # A peer that has said goodbye is listed as left for this time
FORGOTTEN_S = 6 * 3600.0  # A dead peer is called now and then for this time, and then removed from the table
MAX_KNOWN = 4000
"""Limit on the peers in the table, so that `wanted_numbers` fits into a header. Only dead peers are replaced."""
SHORT_ID = 16
"""The number of last characters that stand for a peer id in `wanted_numbers`. They are 93 bits, so nobody can make a
collision."""
MAX_ROWS = 1000
"""Limit on the peers that a node shows. Their longest rows have 2.7 kB, and a worker's report at most 4 MiB."""
MAX_VIA = 3
MAX_RECORD_BYTES = 8 * 2**10
"""Limit on the size of a record. The longest one that a node writes has about 6 kB."""
MOST_FORGED = 8
"""After so many records with a wrong signature, the rest of a message is not read: checking signatures takes time."""
MAX_ANSWER_BYTES = 4 * 2**20
"""Limit on the records of one reply, which is half of what a caller accepts."""
GONE_PHASES = (Phase.STOPPED, Phase.LEAVING, Phase.ERROR)
"""Phases of a peer that has ended on purpose or with an error."""
RELAYING = "relaying"  # The API shows this for a relay in place of a phase
PURPOSE = "diloco peer record"

Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Address = Annotated[str, StringConstraints(max_length=256, pattern=r"^/")]


class PeerRecord(BaseModel):
    """What a peer says about itself. Its texts are untrusted even after the signature is verified."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer_id: str = Field(max_length=64)
    number: int = Field(ge=0, lt=2**63)
    """The sequence number of this record, which grows with each new record of the peer."""
    run: Hex64
    name: str = Field("", max_length=64)
    version: str = Field("", max_length=40)
    protocol: int = PROTOCOL_VERSION
    phase: Phase = Phase.STARTING
    round: int = Field(-1, ge=-1, lt=2**63)
    head: Hex64
    state_digest: str = Field("", max_length=64)
    attempt: int = Field(0, ge=0, lt=2**63)
    """The peer's attempt at the round after `head`."""
    swarm_tokens: int = Field(0, ge=0, lt=2**63)
    tokens_per_second: float = Field(0.0, ge=0, lt=1e12, allow_inf_nan=False)
    compute_utilization_ratio: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    """Compute seconds / wall seconds of the peer's last complete round."""
    is_relay: bool = False
    """Whether the peer only relays and never trains, whatever its phase."""
    transport: Literal["direct", "relay"] = "direct"
    inbound: bool = True
    """Whether others can open a connection to the peer. If not, it keeps connections to peers that accept them."""
    addresses: tuple[Address, ...] = Field((), max_length=16)
    relays: bool = False
    """Whether the peer relays calls between other peers of the run."""
    via: tuple[Annotated[str, StringConstraints(max_length=64)], ...] = Field((), max_length=MAX_VIA)
    """Peer ids of the relays over which the peer can be called."""
    publishes: bool = False
    """Whether the peer publishes the run. All publishers of a round take their turns in an order by hash."""
    evaluates: bool = False
    """Whether the peer evaluates the anchor on tasks. Evaluators are drawn by hash."""
    evaluation: TaskScores | None = None
    """The peer's newest scores in tasks."""


OPTIONAL_FIELDS = ("publishes", "evaluates", "evaluation")
"""Fields that a record omits while they have their defaults, so that a peer of an earlier version reads it."""


@dataclass(frozen=True, slots=True)
class Signed:
    """A peer record as sent: the signed bytes, the signature, and the record's age at the sender."""

    body: bytes
    signature: bytes
    age_s: float = 0.0

    def open(self, run: str) -> PeerRecord:
        """Verify the signature and parse the record. Raises PeerError."""
        if len(self.body) > MAX_RECORD_BYTES:
            raise PeerError("a peer record is too long", code="bad_size")
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
    unused = {name for name in OPTIONAL_FIELDS if not getattr(record, name)}
    body = record.model_dump_json(exclude=unused).encode()
    return Signed(body, identity.sign(PURPOSE, body))


@dataclass(slots=True)
class _Entry:
    record: PeerRecord
    signed: Signed
    heard_at_s: float
    suspected_at_s: float | None = None
    """When a call to the peer failed; None if none has failed since the peer's newest record."""


class PeerTable:
    """All known peers. Only the swarm's event loop writes to it."""

    def __init__(
        self,
        identity: Identity,
        record: PeerRecord,
        clock: Callable[[], float] | SuspendClock,
        timings: MemberTimings = TIMINGS,
    ) -> None:
        """`clock` counts monotonic seconds. With a SuspendClock, failed calls right after a suspension are ignored."""
        self.identity = identity
        self.timings = timings
        self.me = record
        self.changed = asyncio.Event()
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._evicted_until_s: dict[str, float] = {}
        self._oldest_dead: list[str] | None = None
        """During a merge, the dead peers, the one that has been dead for longest last; None while unknown."""
        self._started_at_s = clock()
        self.contributors: Callable[[], Collection[str]] = tuple
        """Returns the contributors to the last record; none until this node has a chain."""

    def just_resumed(self) -> bool:
        """Whether this process has resumed after a suspension within the last seconds."""
        return isinstance(self._clock, SuspendClock) and self._clock.just_resumed()

    @property
    def suspensions(self) -> int:
        """How often this process has been suspended."""
        return self._clock.suspensions if isinstance(self._clock, SuspendClock) else 0

    # this node's record

    def update_own(self, **changes: object) -> None:
        """Change this node's record. Peers see it after the next `pulse`."""
        self.me = self.me.model_copy(update=changes)

    def pulse(self) -> Signed:
        """Sign a record of this node with the next sequence number. Removes peers that are dead for FORGOTTEN_S."""
        before_s = self._clock() - FORGOTTEN_S
        self._entries = {p: entry for p, entry in self._entries.items() if entry.heard_at_s >= before_s}
        self.update_own(number=self.me.number + 1)
        return self.own()

    def own(self) -> Signed:
        return sign_record(self.identity, self.me)

    # gossip

    def merge(self, records: Iterable[Signed]) -> list[PeerRecord]:
        """Take over the records that are valid and newer than the known ones. Returns those records."""
        newer, forged, self._oldest_dead = [], 0, None
        for signed in records:
            if self._is_old(signed):
                continue
            try:
                record = signed.open(self.me.run)
            except PeerError as exc:
                logger.debug("A peer record was dropped: %s", exc)
                forged += exc.code == "bad_signature"
                if forged >= MOST_FORGED:
                    break
                continue
            if self._insert(record, signed):
                newer.append(record)
        if newer:
            self.changed.set()
        return newer

    def _is_old(self, signed: Signed) -> bool:
        """Whether a record is no newer than the known one. This check is far cheaper than verifying the signature."""
        if len(signed.body) > MAX_RECORD_BYTES:
            return False  # `Signed.open` raises the right error.
        try:
            fields = from_json(signed.body)
            known = self.find(fields["peer_id"])
            return known is not None and bool(fields["number"] <= known.number)
        except (ValueError, TypeError, LookupError):
            return False  # `Signed.open` raises the right error.

    def _insert(self, record: PeerRecord, signed: Signed) -> bool:
        if record.peer_id == self.me.peer_id:
            # Gossip still carries this node's record from before a restart: use a higher sequence number.
            self.update_own(number=max(self.me.number, record.number))
            return False
        known = self._entries.get(record.peer_id)
        if known is not None and record.number <= known.record.number:
            return False
        if known is None and len(self._entries) >= MAX_KNOWN and not self._make_room(record.peer_id):
            return False
        entry = _Entry(record, signed, self._clock() - signed.age_s)
        if known is not None:
            entry.heard_at_s = max(entry.heard_at_s, known.heard_at_s)
            if known.suspected_at_s is not None and entry.heard_at_s < known.suspected_at_s:
                entry.suspected_at_s = known.suspected_at_s
        self._entries[record.peer_id] = entry
        return True

    def _make_room(self, peer_id: str) -> bool:
        """Remove another peer. Returns False if this one has no place.

        The peer that has been dead for longest is removed. If all are live, only a contributor to the last record gets
        the place of another. No contributor is removed, so strangers cannot drive the members out.
        """
        last = self.contributors()
        if self._oldest_dead is None:  # Once for each merge, because all entries are looked at.
            dead = [peer for peer, entry in self._entries.items() if peer not in last and not self._is_live(entry)]
            self._oldest_dead = sorted(dead, key=lambda peer: self._entries[peer].heard_at_s, reverse=True)
        while self._oldest_dead:
            dead_id = self._oldest_dead.pop()
            if not self._is_live(self._entries[dead_id]):
                del self._entries[dead_id]
                return True
        other = next((peer for peer in reversed(self._entries) if peer not in last), None) if peer_id in last else None
        if other is not None:
            del self._entries[other]
        return other is not None

    def records_for(self, wanted: Mapping[str, int] | None = None, caller: str = "") -> list[Signed]:
        """This node's record, followed by the recent records that a peer with these `wanted_numbers` lacks.

        The caller's own record is included at any age. From it, a node whose clock was set back learns which sequence
        number it must exceed.
        """
        now_s, wanted = self._clock(), wanted or {}
        newer = [
            replace(entry.signed, age_s=min(self.timings.dead_s, now_s - entry.heard_at_s))
            for peer_id, entry in self._entries.items()
            if entry.record.number >= wanted.get(peer_id[-SHORT_ID:], 0)
            and (now_s - entry.heard_at_s < GOSSIP_AGE_S or peer_id == caller)
        ]
        newer.sort(key=lambda signed: len(signed.body))  # Records that hostile peers have padded are left out first.
        records = [self.own(), *newer]
        ends = accumulate(len(signed.body) for signed in records)
        return [signed for signed, end in zip(records, ends, strict=True) if end <= MAX_ANSWER_BYTES]

    def wanted_numbers(self) -> dict[str, int]:
        """For each known peer, by the end of its id, the lowest sequence number that is newer than its record."""
        since_s = self._clock() - self.timings.dead_s - GOSSIP_AGE_S
        known = [entry.record for entry in self._entries.values() if entry.heard_at_s > since_s]
        return {record.peer_id[-SHORT_ID:]: record.number + 1 for record in (self.me, *known)}

    # failure detector

    def suspect(self, peer_id: str) -> None:
        """Count this peer as dead until a newer record arrives, because a call to it failed."""
        if peer_id in self._entries and not self.just_resumed():
            self._entries[peer_id].suspected_at_s = self._clock()
            self.changed.set()

    def evict(self, peer_id: str, for_s: float) -> None:
        """Count this peer as dead for this time, whatever it says, because it broke a rule on purpose.

        A node does not evict itself, because then it would take part in no attempt that it leads.
        """
        if peer_id == self.me.peer_id:
            return
        now_s = self._clock()
        self._evicted_until_s = {peer: until_s for peer, until_s in self._evicted_until_s.items() if until_s > now_s}
        self._evicted_until_s[peer_id] = now_s + for_s
        self.changed.set()

    def is_evicted(self, peer_id: str) -> bool:
        until_s = self._evicted_until_s.get(peer_id)
        return until_s is not None and self._clock() < until_s

    def _is_live(self, entry: _Entry, *, with_evicted: bool = False) -> bool:
        if entry.record.phase in GONE_PHASES or entry.suspected_at_s is not None:
            return False
        if not with_evicted and self.is_evicted(entry.record.peer_id):
            return False
        return self._clock() - entry.heard_at_s < self.timings.dead_s

    def is_gone(self, peer_id: str) -> bool:
        """Whether the peer is known but no longer live."""
        entry = self._entries.get(peer_id)
        return entry is not None and not self._is_live(entry)

    def silent(self) -> list[str]:
        """Peers without a new record for `dead_s`. Open connections to them may be broken."""
        now_s = self._clock()
        return [peer_id for peer_id, entry in self._entries.items() if now_s - entry.heard_at_s >= self.timings.dead_s]

    def dead(self) -> list[PeerRecord]:
        """Known peers that are not live, except those that stopped on purpose. Gossip calls them now and then."""
        return [e.record for e in self._entries.values() if not self._is_live(e) and e.record.phase != Phase.STOPPED]

    def left(self) -> list[str]:
        """Ids of the peers that said goodbye within LEFT_S."""
        now_s = self._clock()
        return [
            peer_id
            for peer_id, entry in self._entries.items()
            if entry.record.phase in GONE_PHASES and now_s - entry.heard_at_s < LEFT_S
        ]

    # queries

    def find(self, peer_id: str) -> PeerRecord | None:
        if peer_id == self.me.peer_id:
            return self.me
        entry = self._entries.get(peer_id)
        return entry.record if entry else None

    def knows(self, peer_id: str) -> bool:
        """Whether this is the id of a known peer of the run, dead or alive."""
        return self.find(peer_id) is not None

    def live(self, *, with_evicted: bool = False) -> list[PeerRecord]:
        """The records of the live peers, this node's record first."""
        return [self.me, *(e.record for e in self._entries.values() if self._is_live(e, with_evicted=with_evicted))]

    def members(self, *, with_evicted: bool = False) -> list[PeerRecord]:
        """The records of the live peers that take part in rounds, sorted by peer id."""
        live = self.live(with_evicted=with_evicted)
        return sorted((r for r in live if r.phase in MEMBER_PHASES), key=lambda r: r.peer_id)

    def present(self, expected: Collection[str] = ()) -> set[str]:
        """Peers that a quorum counts as living: this node heard of them within `dead_s`, and they did not leave.

        A peer counts as living even after a failed call or a restart. A process that returns within seconds knows what
        it has accepted or committed, so the others must not go on without it.

        Args:
            expected: peers that count as living during this node's first `dead_s`, until the node hears of them.
        """
        now_s, away = self._clock(), (Phase.PAUSED, *GONE_PHASES)
        found = {self.me.peer_id}
        if now_s - self._started_at_s < self.timings.dead_s:
            found.update(expected)
        for peer_id, entry in self._entries.items():
            is_away = entry.record.phase in away or self.is_evicted(peer_id)
            if not is_away and now_s - entry.heard_at_s < self.timings.dead_s:
                found.add(peer_id)
            else:
                found.discard(peer_id)
        return found

    def is_member(self, peer_id: str) -> bool:
        record = self.find(peer_id)
        return record is not None and record.phase in MEMBER_PHASES and not self.is_gone(peer_id)

    def leaders(self) -> list[str]:
        """Members that may lead a round: those that can be called directly or over a relay. If none can, all members.

        Evicted peers are among them, because only this node may know why they are evicted, and nodes should agree about
        the leaders that they skip (`Context.next_led`).
        """
        members = self.members(with_evicted=True)
        return [r.peer_id for r in members if r.inbound or self._relays_of(r)] or [r.peer_id for r in members]

    def callable_members(self, *, with_evicted: bool = False) -> list[str]:
        """Members that can lead and reduce, because all others can call them.

        These are the members that accept connections over IPv4, which most networks have. If there are none, they are
        those that accept connections over IPv6, or else those that can be called over relays.
        """
        members = self.members(with_evicted=with_evicted)
        inbound = [r for r in members if r.inbound]
        chosen = [r for r in inbound if _has_ipv4(r)] or inbound or [r for r in members if self._relays_of(r)]
        return [record.peer_id for record in chosen]

    def others(self) -> list[PeerRecord]:
        """The live peers that this node can call."""
        return [record for record in self.live()[1:] if self.can_call(record)]

    def gossip_partners(self) -> list[PeerRecord]:
        """The peers with which this node exchanges records: those that it can call and has heard of within `dead_s`.

        A failed call makes no difference, because a quorum still counts the peer as living (`present`). This node must
        hear of the peer as soon as it can reach it again.
        """
        since_s = self._clock() - self.timings.dead_s
        heard = [entry.record for entry in self._entries.values() if entry.heard_at_s > since_s]
        here = [r for r in heard if r.phase not in GONE_PHASES and not self.is_evicted(r.peer_id)]
        return [record for record in here if self.can_call(record)]

    def can_call(self, record: PeerRecord) -> bool:
        """Whether this node can call a peer: directly if one of them accepts connections, else over a relay."""
        return record.inbound or self.me.inbound or bool(self._relays_of(record))

    def relays_to(self, peer_id: str) -> list[str]:
        """Live relays over which this peer can be called. Each pair of peers has its own order, to spread the load."""
        record = self.find(peer_id)
        pair = " ".join(sorted((self.me.peer_id, peer_id)))
        relays = [relay for relay in self._relays_of(record) if relay != self.me.peer_id] if record else []
        return sorted(relays, key=lambda relay: sha256(f"{pair} {relay}".encode()).digest())

    def live_relays(self) -> list[str]:
        """The other live peers that relay calls."""
        return [r.peer_id for r in self.live()[1:] if r.relays and r.inbound]

    def _relays_of(self, record: PeerRecord) -> list[str]:
        return [relay for relay in record.via if relay != record.peer_id and self._is_live_relay(relay)]

    def _is_live_relay(self, peer_id: str) -> bool:
        record = self.find(peer_id)
        return record is not None and not self.is_gone(peer_id) and record.relays and record.inbound

    def check_carried(self, caller: str, target: str) -> None:
        """Raise PeerError unless this node relays calls, and both are peers of this run."""
        if not self.me.relays:
            raise PeerError("this node relays no calls", code="no_relay")
        if not (self.knows(caller) and self.knows(target)):
            raise PeerError("this node relays only between peers of its run", code="stranger")

    def rows(self) -> list[PeerRow]:
        """The live peers as the API shows them, this node first, then members; at most MAX_ROWS."""
        now_s = self._clock()
        others = sorted(self.live()[1:], key=lambda record: record.phase not in MEMBER_PHASES)
        heard_at_s = {peer_id: entry.heard_at_s for peer_id, entry in self._entries.items()}
        return [
            PeerRow(
                peer_id=r.peer_id,
                short_id=r.peer_id[-6:],
                name=printable(r.name, 64).strip() or r.peer_id[-6:],
                phase=RELAYING if r.is_relay else r.phase,
                round=r.round,
                tokens_per_second=r.tokens_per_second,
                transport=r.transport,
                version=printable(r.version, 40),
                state_digest=printable(r.state_digest, 64),
                last_seen_s=round(now_s - heard_at_s.get(r.peer_id, now_s), 1),
                this_node=r.peer_id == self.me.peer_id,
                compute_utilization_ratio=r.compute_utilization_ratio,
                publishes=r.publishes,
                evaluates=r.evaluates,
                evaluation=r.evaluation,
            )
            for r in (self.me, *others[: MAX_ROWS - 1])
        ]


def _has_ipv4(record: PeerRecord) -> bool:
    own = ("/ip4/127.", "/ip4/0.")
    return any(a.startswith(("/ip4/", "/dns4/")) and not a.startswith(own) for a in record.addresses)


async def while_live(
    peer_table: PeerTable, peer_id: str, call: Coroutine[Any, Any, T], is_wanted: Callable[[], bool] = lambda: True
) -> T:
    """Await a call, but cancel it as soon as the peer dies or the call is no longer wanted.

    Raises the PeerError of the call itself, `unreachable` if the peer is not live, or `round_failed` if `is_wanted` is
    false.
    """
    try:
        return await cancel_if_gone(lambda: peer_table.is_gone(peer_id) or not is_wanted(), call)
    except Gone as exc:
        if peer_table.is_gone(peer_id):
            raise PeerError(f"peer {peer_id[-6:]} is silent", code="unreachable") from exc
        raise PeerError("the result of this call is no longer needed", code="round_failed") from exc

"""A member of a swarm, put together: wire, directory, discovery, rounds, state. Lives on one asyncio loop.

The composition root of this room. `thread` runs it beside a trainer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from node.errors import MachineError, PeerError, SwarmError
from node.multiaddress import parse
from node.ports import IN_USE, LISTEN_PORT_FILE, PortFile, choose, moved_notice
from node.quota import Room, any_room
from node.status import Channel, PeerRow, Phase
from node.swarm.addresses import addresses_of
from node.swarm.awake import AwakeClock
from node.swarm.base import Message, Service
from node.swarm.catchup import CatchUp, Loss
from node.swarm.chain import Chain, Tip, open_chain
from node.swarm.directory import MEMBER_PHASES, Directory, PeerRecord
from node.swarm.discovery import Discovery, SignedRecordValidator
from node.swarm.download import Download
from node.swarm.faults import Faults, spoil_blobs
from node.swarm.gossip import Gossip
from node.swarm.hole_punching import HolePunching
from node.swarm.identity import load_identity
from node.swarm.invitation import invite_note, invited, is_container, is_too_early, reach_of
from node.swarm.lan import LanDiscovery
from node.swarm.observer import Observer
from node.swarm.offers import Target
from node.swarm.p2p import P2PWire, open_wire
from node.swarm.p2pd import DaemonOptions
from node.swarm.places import Here, Scope, place_of, read_interfaces, with_peer
from node.swarm.reachability import Reachability, listen_ports
from node.swarm.results import ResultStore
from node.swarm.rounds import Deliver, Rounds, Rules
from node.swarm.state import StateServer, StateSource

logger = logging.getLogger(__name__)

VIEW_S = 0.5
CALL_S = 5.0
LISTEN_TRIES = 3
"""Another program may take a port between the moment it was found free and the one at which p2pd binds it."""
AROUND_S = 5.0
"""Between two looks at this machine's interfaces and at where this node sees the others."""
MAX_TOLD = 16
"""Addresses in a peer record."""


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """What a member must know before it knows its run's manifest."""

    run: str
    """Hash of the manifest."""
    data_dir: Path
    name: str
    version: str
    daemon: DaemonOptions
    bootstrap: Sequence[str] = ()
    faults: Faults = field(default_factory=Faults)
    upload_mbit_s: float = 0.0
    """Limits of the volunteer; 0: none."""
    download_mbit_s: float = 0.0
    may_move_port: bool = False
    """Nobody chose the port to listen on: where it is taken, the next free one is used."""
    lan_discovery: bool = True
    """Announce this node on private networks."""
    is_relay: bool = False
    """It never trains."""
    relays: bool = False
    """It carries calls between peers that cannot reach each other, once others are known to reach it."""
    relay_mbit_s: float = 0.0
    """Most that it carries so, each way; 0: as much as the other limits allow."""
    room: Room = any_room
    """On the disk, for what is written much of."""


@dataclass(frozen=True, slots=True)
class View:
    """What others may look at from their own thread: replaced as a whole, never changed."""

    peer_id: str = ""
    rows: tuple[PeerRow, ...] = ()
    connected: int = 0
    training: int = 0
    swarm_round: int = -1
    addresses: tuple[str, ...] = ()
    """Where others find the swarm: this node's own, or those of peers that can be called where it cannot."""
    reachability: str = "none"
    reachability_code: str = "not_tested"
    reachability_reason: str = ""
    invite_note: str = ""
    """Where an invite with these addresses cannot be used, with the mend; empty where it works everywhere."""
    stage: str = "idle"
    waiting_reason: str = ""
    waiting_code: str = ""
    sent_bytes: Mapping[Channel, int] = field(default_factory=dict)
    received_bytes: Mapping[Channel, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    upload_bytes_s: float = 0.0
    """Of this node's uplink, as measured and limited; 0: not known yet."""
    lead_s: float = 0.0
    """How long before the end of a round this node's contribution should be on its way to a depositary; 0: no need."""
    upload_s: float = 0.0
    """For a whole contribution; 0: not known yet."""
    forwarded_bytes: int = 0
    """Of contributions, for members on slow lines."""
    problem: str = ""
    """Why nobody was reached, while nobody is."""


class Member:
    """One node in the swarm. Made by `start_member`; `close` ends everything it started."""

    def __init__(self, options: MemberOptions, wire: P2PWire, directory: Directory) -> None:
        self.port_notice = ""
        """What the owner should know of the port that was taken; empty where there is nothing to say."""
        self.options, self.wire, self.directory = options, wire, directory
        self.view = View(peer_id=wire.peer_id)
        self._rng = random.Random(wire.peer_id)  # noqa: S311 - whom to gossip with is no secret
        self.gossip = Gossip(wire, directory, self._rng)
        cache = options.data_dir / "peers.json"
        self.discovery = Discovery(
            wire, directory, self.gossip, bootstrap=options.bootstrap, cache=cache, rng=self._rng
        )
        self._ports = listen_ports(directory.me.addresses)
        self.discovery.offers_relay = options.relays
        wire.routes = directory
        self.reachability = Reachability(
            wire,
            directory,
            wire.seen,
            self._ports,
            changed=self._set_inbound,
            rng=self._rng,
            announced=_announced(options.daemon.announce, self._ports),
            cache=self._cache / "addresses.json",
            is_relay=options.is_relay,
        )
        self.observer = Observer(wire, directory, self._cache / "observer", wire.listens)
        self.hole_punching = HolePunching(wire, directory)
        self.lan = LanDiscovery(
            options.run,
            wire.peer_id,
            lambda: wire.here,
            is_alone=lambda: len(directory.live()) == 1,
            is_known=lambda peer: directory.knows(peer) and not directory.is_gone(peer),
            dial=self.discovery.follow,
        )
        self._in_container = is_container()
        self._began_at_s = asyncio.get_running_loop().time()
        self._around_at_s = -AROUND_S
        self._seen: Mapping[str, Sequence[str]] = {}
        self._invite_note = ""
        self.rounds: Rounds | None = None
        self._catch_up: CatchUp | None = None
        self._download: Download | None = None
        self._wanted_since: Callable[[], int | None] = lambda: None
        self._tasks: list[asyncio.Task[Any]] = []

    def _set_inbound(self, inbound: bool) -> None:
        self.directory.say(inbound=inbound)

    @property
    def _cache(self) -> Path:
        return self.options.data_dir / "cache"

    def run(self, *work: Coroutine[Any, Any, None]) -> None:
        """Start what runs until `close`."""
        self._tasks += [asyncio.create_task(one) for one in work]

    async def watch(self) -> None:
        """End with an error when anything that should run for ever ends, or libp2p's daemon dies."""
        died = asyncio.create_task(self.wire.daemon.died.wait())
        try:
            while True:
                done, _ = await asyncio.wait([died, *self._tasks], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if died in done:
                    raise SwarmError("libp2p's daemon ended by itself.")
                for task in done:
                    task.result()
        finally:
            died.cancel()

    def adjust(self, name: str, upload_mbit_s: float, download_mbit_s: float, relay_mbit_s: float) -> None:
        """The volunteer has changed these; the others read the name with the next beat."""
        self.directory.say(name=name or self.wire.peer_id[-6:])
        for pace, mbit_s, before in (
            (self.wire.up, upload_mbit_s, self.options.upload_mbit_s),
            (self.wire.down, download_mbit_s, self.options.download_mbit_s),
            (self.wire.relay.pace, relay_mbit_s, self.options.relay_mbit_s),
        ):
            if mbit_s != before:
                pace.limit(mbit_s)
        self.options = replace(
            self.options, upload_mbit_s=upload_mbit_s, download_mbit_s=download_mbit_s, relay_mbit_s=relay_mbit_s
        )
        # Threads of their own ask torch for its number once, when they begin.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(thread_name_prefix="swarm"))

    # before the run is known

    async def fetch_manifest(self) -> bytes | None:
        """The run's manifest from whoever answers; None while nobody does. The caller checks the hash.

        A manifest of another run is returned only where every known peer answers, and none of them has the right one.
        """
        await self.discovery.meet()
        other_run: bytes | None = None
        for peer in [*(record.peer_id for record in self.directory.others()), *self.discovery.strangers]:
            with suppress(PeerError):
                reply = await self.wire.call(peer, "manifest", Message(), timeout_s=CALL_S)
                if reply.blobs and hashlib.sha256(reply.blobs[0]).hexdigest() == self.options.run:
                    return reply.blobs[0]
                other_run = reply.blobs[0] if reply.blobs else other_run
        return None if self.discovery.unreached else other_run

    def serve_manifest(self, manifest: bytes) -> None:
        async def on_manifest(_caller: str, _message: Message) -> Message:
            return Message(blobs=[manifest])

        self.wire.serve({"manifest": Service(on_manifest, Channel.STATE)})

    # taking part

    async def download(self, rules: Rules, target: Target, on_progress: Callable[[float], None]) -> Tip:
        """One try. Raises TransferFailed, or MachineError where the disk does not take it."""
        if self._download is None:
            room, digest_at = self.options.room, self._digest_at
            self._download = Download(self.wire, self.directory, rules, self._cache, self._rng, room, digest_at)
        return await self._download.run(target, on_progress)

    def serve_state(self, source: StateSource) -> None:
        self._wanted_since = source.wanted_since
        StateServer(self.wire, source, self._digest_at, self._uplink_is_busy, self._befall)

    async def _befall(self, blobs: Sequence[bytes]) -> Sequence[bytes]:
        if self.rounds is not None:
            return await self.rounds.mishaps.serve(blobs)
        faults, number = self.options.faults, self.directory.me.round + 1
        await faults.at("serve", number)
        return spoil_blobs(faults.spoils("serve", number), blobs)

    def _digest_at(self, head: str) -> str | None:
        return self.rounds.chain.digest_at(head) if self.rounds is not None else None

    def _uplink_is_busy(self) -> bool:
        return self.rounds is not None and self.rounds.stage in ("reduce", "commit")

    async def take_part(self, rules: Rules, tip: Tip, deliver: Deliver, on_lost: Callable[[Loss], None]) -> None:
        """Rounds from this tip on. `on_lost`: only a download leads back to the others."""

        def open_on_disk() -> Chain:
            return open_chain(tip, ResultStore(self._cache, len(rules.grids), room=self.options.room))

        chain = await asyncio.to_thread(open_on_disk)
        chain.wanted_since = self._wanted_since
        self.rounds = Rounds(self.wire, self.directory, rules, chain, self.options.faults, deliver)
        self.show_tip(tip)
        self._catch_up = CatchUp(self.wire, self.directory, self.rounds, on_lost)
        self.run(self.rounds.run(), self._catch_up.run())

    async def replay_next(self) -> bool:
        """Take one round again that this node committed before it was started again; False where there is none."""
        assert self.rounds is not None
        return await self.rounds.adoption.replay_next()

    async def align(self) -> Tip:
        """Reach the others if they can be reached, and come to their head and their round's age."""
        assert self.rounds is not None and self._catch_up is not None
        await self.discovery.seek()
        await self._catch_up.align()
        return self.rounds.chain.tip

    def show_tip(self, tip: Tip) -> None:
        """Say where this node stands."""
        self.directory.say(round=tip.round, head=tip.head, state_digest=tip.digest, swarm_tokens=tip.state.tokens)

    async def say(self, phase: Phase, *, at_once: bool = False) -> None:
        """To the others, one that takes part in no round, such as a relay, is never a member of them."""
        is_idle = self.rounds is None and phase in MEMBER_PHASES
        self.directory.say(phase=Phase.PAUSED if is_idle else phase)
        if at_once:
            await self.gossip.announce()

    # for people

    async def keep_view(self) -> None:
        """Refresh `view` for ever."""
        while True:
            await self._refresh()
            await asyncio.sleep(VIEW_S)

    async def _refresh(self) -> None:
        listening = tuple(await self.wire.addresses())
        await self._look_around(listening)
        told = self._told(listening)
        live = self.directory.live()
        reason, code = self.rounds.waiting() if self.rounds and self.rounds.stage == "rendezvous" else ("", "")
        inbound = self.directory.me.inbound
        relays = self.directory.relays_to(self.wire.peer_id) if not inbound else []
        self.discovery.is_reached = self.reachability.is_inbound is True
        reached_through: Literal["direct", "relay"] = "relay" if relays else "direct"
        self.directory.say(addresses=told, transport=reached_through)
        invite = self._invited(told if inbound else [a for a in listening if reach_of([a]) is not Scope.WIDE])
        self.view = View(
            peer_id=self.wire.peer_id,
            rows=tuple(map(self._row, self.directory.rows())),
            connected=len(live) - 1,
            training=sum(record.phase in MEMBER_PHASES for record in live),
            swarm_round=max(record.round for record in live),
            addresses=invite,
            reachability="direct" if self.discovery.is_reached else "relay" if relays else "none",
            reachability_code=self.reachability.code,
            reachability_reason=self._relayed_reason(relays) if relays else self.reachability.reason,
            invite_note=self._note(invite),
            stage=self.rounds.stage if self.rounds else "idle",
            waiting_reason=reason,
            waiting_code=code,
            sent_bytes=dict(self.wire.traffic.sent_bytes),
            received_bytes=dict(self.wire.traffic.received_bytes),
            rejected=dict(self.wire.traffic.rejected),
            upload_bytes_s=self.rounds.upload_bytes_s if self.rounds else 0.0,
            upload_s=self.rounds.depositor.upload_s if self.rounds else 0.0,
            lead_s=self.rounds.lead_s if self.rounds else 0.0,
            forwarded_bytes=self.wire.traffic.forwarded_bytes,
            problem=self.discovery.last_problem if len(live) == 1 else "",
        )

    def _row(self, row: PeerRow) -> PeerRow:
        """Between two without an inbound port, a connection that both have opened makes a direct peer."""
        is_punched = not self.directory.me.inbound and row.transport == "relay" and row.peer_id in self._seen
        return row.model_copy(update={"transport": "direct"}) if is_punched else row

    def _relayed_reason(self, relays: Sequence[str]) -> str:
        """For a person: why nobody calls this node directly, what would help, and over which relays others call it."""
        names = {row.peer_id: row.name for row in self.directory.rows()}
        told = ", ".join(names.get(relay, relay[-6:]) for relay in relays)
        over = "a relay" if len(relays) == 1 else "relays"
        return (
            f"{self.reachability.reason} Others call this node over {over} ({told}), at the cost of the relay's line."
        )

    async def _look_around(self, listening: Sequence[str]) -> None:
        """Keep up with interfaces that come and go, and with where the peers are."""
        now_s, is_alone = asyncio.get_running_loop().time(), len(self.directory.live()) == 1
        if now_s - self._around_at_s < AROUND_S and (self._seen or is_alone):
            return
        self._around_at_s = now_s
        places = [place for place in map(place_of, listening) if place is not None]
        self.wire.here = Here(
            interfaces=read_interfaces(),
            listening=frozenset((place.host, place.port) for place in places),
            outer=self.reachability.outer,
        )
        with suppress(PeerError):
            self._seen = await self.wire.seen()

    def _told(self, listening: Sequence[str]) -> tuple[str, ...]:
        """What this node's record lists: addresses that others have dialed, that its owner announces, of interfaces.

        Where it is called over one IP version only, its interfaces' addresses of the other lead nowhere.
        """
        known = self.reachability
        closed = [version for version in self._ports if known.is_closed(version) and known.is_inbound]
        interfaces = [a for a in listening if not a.startswith(tuple(f"/ip{version}/" for version in closed))]
        addresses = [with_peer(a, self.wire.peer_id) for a in (*known.confirmed, *known.announced, *interfaces)]
        return tuple(dict.fromkeys(addresses))[:MAX_TOLD]

    def _invited(self, own: Sequence[str]) -> tuple[str, ...]:
        """Whom an invite names: this node, where it can be called, and others that can, as it may be gone by then."""
        others = sorted((r for r in self.directory.live()[1:] if r.inbound), key=lambda r: r.peer_id)
        told = [r.model_copy(update={"addresses": addresses_of(r.peer_id, r.addresses)}) for r in others]
        addresses = invited(own, told, self._seen)
        waits = is_too_early(
            addresses,
            has_bootstrap=bool(self.options.bootstrap),
            knows_others=bool(self._seen) and len(self.directory.live()) > 1,
            age_s=asyncio.get_running_loop().time() - self._began_at_s,
        )
        return () if waits else addresses

    def _note(self, invite: Sequence[str]) -> str:
        """Where the invite cannot be used. Said in the log when that changes."""
        port, remembered = next(iter(self._ports.values()), 0), self.reachability.remembered
        note = invite_note(invite, self.wire.here, port, in_container=self._in_container, remembered=remembered)
        if note != self._invite_note:
            before, self._invite_note = self._invite_note, note
            if note:
                logger.warning("%s", note)
            elif before:
                logger.info("Others have reached this run from outside: the invite works from everywhere now.")
        return note

    async def close(self, phase: Phase) -> None:
        """Say goodbye as `phase`, and let go. Bounded to a few seconds."""
        await self.say(phase, at_once=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.rounds is not None:
            await self.rounds.close()
        await self.observer.close()
        await self.wire.close()


async def _open_wire(options: MemberOptions) -> tuple[P2PWire, str]:
    """The wire, and what the owner should know of its port. Raises MachineError, where it has none, or SwarmError."""
    listen = [parse(address) for address in options.daemon.listen]
    file = PortFile(options.data_dir / "cache" / LISTEN_PORT_FILE)
    for tries_left in reversed(range(LISTEN_TRIES)):
        reserved = await asyncio.to_thread(choose, listen, file, may_move=options.may_move_port)
        # p2pd alone knows the ports that a router has mapped, and tells them only where it tells all it knows.
        punching = not options.daemon.port_mapping
        daemon = replace(options.daemon, listen=tuple(map(str, reserved.addresses)), punching=punching)
        try:
            with reserved:
                wire = await open_wire(daemon, SignedRecordValidator(options.run))
        except MachineError as exc:
            if exc.code != IN_USE or not reserved.chosen or not tries_left:
                raise
        else:
            if not reserved.chosen:
                return wire, ""
            await asyncio.to_thread(file.remember, reserved.wanted, reserved.chosen)
            moved = reserved.wanted not in (0, reserved.chosen)
            return wire, moved_notice("swarm.listen", reserved.wanted, reserved.chosen) if moved else ""
    raise AssertionError("the last try returns or raises")


def _announced(addresses: Sequence[str], ports: Mapping[int, int]) -> tuple[str, ...]:
    """Port 0 stands for the port that is listened on."""
    filled = []
    for address in map(parse, addresses):
        version = 6 if address.host_type in ("ip6", "dns6") else 4
        filled.append(str(address.at_port(address.port or ports.get(version, 0) or ports.get(4, 0))))
    return tuple(filled)


async def start_member(options: MemberOptions) -> Member:
    """Open the wire and start to look for others. Raises MachineError or SwarmError."""
    identity = load_identity(options.daemon.identity_file)
    wire, port_notice = await _open_wire(options)
    wire.up.limit(options.upload_mbit_s)
    wire.down.limit(options.download_mbit_s)
    wire.relay.pace.limit(options.relay_mbit_s)
    record = PeerRecord(
        peer_id=identity.peer_id,
        number=time.time_ns() // 1_000_000,
        run=options.run,
        head=options.run,
        name=options.name,
        version=options.version,
        phase=Phase.CONNECTING,
        is_relay=options.is_relay,
        addresses=tuple((await wire.addresses())[:16]),
    )
    clock = AwakeClock(asyncio.get_running_loop().time)
    member = Member(options, wire, Directory(identity, record, clock, clock.drowsy))
    member.port_notice = port_notice
    member.run(
        member.gossip.run(),
        member.discovery.run(),
        member.discovery.hold(),
        member.discovery.check_relays(),
        member.reachability.run(),
        member.hole_punching.run(),
        member.observer.run(),
        member.keep_view(),
    )
    if options.lan_discovery:
        member.run(member.lan.announce(), member.lan.follow())
    return member

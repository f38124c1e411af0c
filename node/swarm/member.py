"""A member of a swarm, and the composition root of this package. It lives on one event loop, run by `member_thread`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any, Literal

from node.config.amendments import SignedAmendment
from node.errors import IdentityInUse, MachineError, PeerError, SwarmError
from node.host.disk_quota import Room, any_room
from node.host.ports import IN_USE, LISTEN_PORT_FILE, PortFile, Reservation, choose, moved_notice
from node.multiaddress import parse
from node.status import MEMBER_PHASES, Channel, PeerRow, Phase
from node.swarm.allreduce.result_store import ResultStore
from node.swarm.chain.chain import Chain, Tip
from node.swarm.connectivity.address_observer import AddressObserver
from node.swarm.connectivity.hole_punching import HolePunching
from node.swarm.connectivity.invite_addresses import (
    choose_invite_addresses,
    invite_note,
    is_container,
    is_too_early,
    widest_reach,
)
from node.swarm.connectivity.reachability import Reachability, listen_ports
from node.swarm.consensus.context import KeptStates, Rules, rules_after
from node.swarm.consensus.participant import Deliver, Participant
from node.swarm.faults import Faults, damage_blobs
from node.swarm.governance.amendment_pool import PENDING_FILE, DroppedAmendment
from node.swarm.identity import load_identity
from node.swarm.membership.directory import (
    MAX_COUNT,
    MAX_LISTED_ADDRESSES,
    Listing,
    ListingValidator,
    RunLister,
    is_listable,
)
from node.swarm.membership.discovery import Discovery, SignedRecordValidator
from node.swarm.membership.gossip import Gossip
from node.swarm.membership.lan_discovery import LanDiscovery
from node.swarm.membership.peer_table import PeerRecord, PeerTable
from node.swarm.owners.profile_exchange import ProfileExchange
from node.swarm.owners.profile_table import ProfileTable
from node.swarm.state_sync.catch_up import CatchUp, ResyncCause
from node.swarm.state_sync.downloader import Downloader
from node.swarm.state_sync.providers import Target
from node.swarm.state_sync.server import StateServer, StateSource
from node.swarm.suspend_clock import SuspendClock, awake_and_asleep_s
from node.swarm.transport.address_scope import LocalAddresses, Scope, parse_endpoint, read_interfaces, with_peer
from node.swarm.transport.libp2p import Libp2pWire, addresses_of, open_wire
from node.swarm.transport.p2pd import DaemonOptions
from node.swarm.transport.wire import Message, Service

logger = logging.getLogger(__name__)

VIEW_S = 0.5
CALL_S = 5.0
LISTEN_TRIES = 3
"""How often to try to listen. Another program may take a port after it was found free and before p2pd binds it."""
SURROUNDINGS_S = 5.0
"""Seconds between two reads of this machine's interfaces and of the observed addresses of peers."""
MAX_ADDRESSES = 16
"""Limit on the addresses in a peer record."""


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Options of a member that do not depend on the run's manifest."""

    run: str
    """Hash of the manifest."""
    data_dir: Path
    name: str
    version: str
    daemon: DaemonOptions
    bootstrap: Sequence[str] = ()
    faults: Faults = field(default_factory=Faults)
    upload_mbit_s: float = 0.0
    """The volunteer's limits on traffic; 0 means no limit."""
    download_mbit_s: float = 0.0
    may_move_port: bool = False
    """Whether another free port may replace the listen port if it is taken, because it is a default."""
    held_addresses: tuple[str, ...] = ()
    """Listen addresses that the supervisor reserves for this node."""
    lan_discovery: bool = True
    """Whether to announce this node on private networks."""
    is_relay: bool = False
    """Whether this node only relays and never trains."""
    relays: bool = False
    """Whether this node relays calls between peers that cannot reach each other, while it is reachable itself."""
    relay_mbit_s: float = 0.0
    """Limit of the relayed traffic in each direction; 0 means that only the other limits apply."""
    room: Room = any_room
    """Disk space for results and downloads."""


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """Immutable view of a member for other threads."""

    peer_id: str = ""
    rows: tuple[PeerRow, ...] = ()
    left: tuple[str, ...] = ()
    """Ids of the peers that said goodbye within the last minutes."""
    connected: int = 0
    training: int = 0
    swarm_round: int = -1
    addresses: tuple[str, ...] = ()
    """Addresses for an invite: this node's, or those of reachable peers if this node is not reachable."""
    reachability: str = "none"
    reachability_code: str = "not_tested"
    reachability_reason: str = ""
    invite_note: str = ""
    """Where the invite may not work, and the remedy; empty if the invite works everywhere."""
    stage: str = "idle"
    waiting_reason: str = ""
    waiting_code: str = ""
    sent_bytes: Mapping[Channel, int] = field(default_factory=dict)
    received_bytes: Mapping[Channel, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    amendments_refused: Mapping[str, int] = field(default_factory=dict)
    pending_amendments: tuple[SignedAmendment, ...] = ()
    dropped_amendments: tuple[DroppedAmendment, ...] = ()
    """The newest that were pending and will not be accepted, newest last."""
    upload_bytes_s: float = 0.0
    """This node's uplink rate: as measured, but at most the volunteer's limit; 0 if unknown."""
    lead_s: float = 0.0
    """Seconds before the end of a round at which to deposit the contribution (`Sender.lead_s`); 0 for no deposit."""
    upload_s: float = 0.0
    """Seconds to upload a whole contribution; 0 if unknown."""
    forwarded_bytes: int = 0
    """Bytes that this node has forwarded as a depositary."""
    problem: str = ""
    """Why this node reaches no peer; empty if it reaches one."""


class SwarmMember:
    """One node in the swarm. `start_member` makes it; `close` ends everything that it started."""

    def __init__(self, options: MemberOptions, wire: Libp2pWire, peer_table: PeerTable) -> None:
        self.listening = Reservation()
        """The addresses on which this node listens."""
        self.options, self.wire, self.peer_table = options, wire, peer_table
        self.view = MemberSnapshot(peer_id=wire.peer_id)
        self._rng = random.Random(wire.peer_id)  # noqa: S311 - not a secret
        self.gossip = Gossip(wire, peer_table, self._rng)
        self.discovery = Discovery(
            wire,
            peer_table,
            self.gossip,
            bootstrap=options.bootstrap,
            cache=options.data_dir / "peers.json",
            rng=self._rng,
            offers_relay=options.relays,
        )
        self._ports = listen_ports(peer_table.me.addresses)
        wire.routes = peer_table
        self.reachability = Reachability(
            wire,
            peer_table,
            wire.seen,
            self._ports,
            on_change=lambda inbound: peer_table.update_own(inbound=inbound),
            rng=self._rng,
            announced=_announced(options.daemon.announce, self._ports),
            cache=self._cache / "addresses.json",
            is_relay=options.is_relay,
        )
        self.observer = AddressObserver(wire, peer_table, self._cache / "observer", wire.listen_addresses)
        self.hole_punching = HolePunching(wire, peer_table)
        self.lan = LanDiscovery(
            options.run,
            wire.peer_id,
            lambda: wire.local_addresses,
            is_alone=lambda: len(peer_table.live()) == 1,
            is_known=lambda peer: peer_table.knows(peer) and not peer_table.is_gone(peer),
            dial=self.discovery.dial,
        )
        profiles = ProfileTable(wire.peer_id, self._credited)
        self.profiles = ProfileExchange(wire, peer_table, profiles, options.data_dir, self._rng)
        self._in_container, self._invite_note = is_container(), ""
        self._began_at_s, self._surroundings_at_s = asyncio.get_running_loop().time(), -SURROUNDINGS_S
        self._listening = peer_table.me.addresses
        self._seen: Mapping[str, Sequence[str]] = {}
        self.participant: Participant | None = None
        self._catch_up: CatchUp | None = None
        self._download: Downloader | None = None
        self._oldest_needed_round: Callable[[], int | None] = lambda: None
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def port_notice(self) -> str:
        """A notice for the volunteer if the listen port has changed; else empty."""
        port = self.listening
        return moved_notice("swarm.listen", port.wanted, port.chosen) if port.has_moved else ""

    @property
    def _cache(self) -> Path:
        return self.options.data_dir / "cache"

    def run(self, *work: Coroutine[Any, Any, None]) -> None:
        """Start background tasks that run until `close`."""
        self._tasks += [asyncio.create_task(one) for one in work]

    async def watch(self) -> None:
        """Wait until a background task ends, libp2p's daemon dies or a twin appears, and raise the error."""
        died = asyncio.create_task(self.wire.daemon.died.wait())
        try:
            while True:
                done, _ = await asyncio.wait([died, *self._tasks], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if died in done:
                    raise SwarmError("libp2p's daemon ended by itself.")
                for task in done:
                    error = None if task.cancelled() else task.exception()
                    raise error or SwarmError(f"A background task of the member ended: {task.get_name()}.")
                if self.participant is not None and self.participant.committer.has_twin:
                    raise IdentityInUse(self.options.daemon.identity_file)
        finally:
            died.cancel()

    def adjust(self, name: str, upload_mbit_s: float, download_mbit_s: float, relay_mbit_s: float) -> None:
        """Apply settings that the volunteer changed. Other peers learn the new name by gossip."""
        self.peer_table.update_own(name=name or self.wire.peer_id[-6:])
        for limiter, mbit_s, before in (
            (self.wire.upload_limiter, upload_mbit_s, self.options.upload_mbit_s),
            (self.wire.download_limiter, download_mbit_s, self.options.download_mbit_s),
            (self.wire.relay.limiter, relay_mbit_s, self.options.relay_mbit_s),
        ):
            if mbit_s != before:
                limiter.limit(mbit_s)
        self.options = replace(
            self.options, upload_mbit_s=upload_mbit_s, download_mbit_s=download_mbit_s, relay_mbit_s=relay_mbit_s
        )
        # A thread reads torch's number of threads when it starts, so a changed number needs a new pool.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(thread_name_prefix="swarm"))

    async def fetch_manifest(self) -> bytes | None:
        """Fetch the run's manifest from the first peer that has it. The caller checks the hash.

        Returns the manifest of another run if all known peers answer and none has the right one. Else returns None.
        """
        await self.discovery.bootstrap()
        other_run: bytes | None = None
        for peer in [*(record.peer_id for record in self.peer_table.others()), *self.discovery.strangers]:
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

    def list_run(self, manifest: bytes) -> None:
        """List this run in the directory until `close`, as long as it has members and an address."""

        def claims() -> Listing | None:
            members = self.peer_table.members()
            addresses = tuple(filter(is_listable, self.view.addresses))[:MAX_LISTED_ADDRESSES]
            if not members or not addresses:
                return None
            # A minority of members cannot make the run look complete.
            return Listing(
                manifest=manifest.decode(),
                addresses=addresses,
                members=len(members),
                round=min(MAX_COUNT, 1 + median_low(record.round for record in members)),
                tokens=median_low(record.swarm_tokens for record in members),
            )

        self.run(RunLister(self.peer_table.identity, self.wire.directory, claims, self._rng).run())

    async def download(
        self,
        rules: Rules,
        target: Target,
        on_progress: Callable[[float], None],
        on_try: Callable[[str], None],
        cause: ResyncCause | None = None,
    ) -> Tip | None:
        """Download a state, as `Downloader.run_until`. A joiner has no `cause`, and tries for ever."""
        if self._download is None:
            self._download = Downloader(self.wire, self.peer_table, rules, self._cache, self._rng, self.options.room)
        if cause is None or self._catch_up is None:
            return await self._download.run_until(target, on_progress, on_try)
        is_needed = partial(self._catch_up.is_needed, cause)
        return await self._download.run_until(target, on_progress, on_try, cause.patience_s, is_needed)

    def restart_here(self, cause: ResyncCause) -> Tip:
        """Continue from the present tip, because no state was downloaded (`CatchUp.restart_here`)."""
        assert self._catch_up is not None
        return self._catch_up.restart_here(cause)

    def serve_state(self, source: StateSource) -> None:
        self._oldest_needed_round = source.oldest_needed_round
        StateServer(self.wire, source, self._uplink_is_busy, self._inject_faults)

    async def _inject_faults(self, blobs: Sequence[bytes]) -> Sequence[bytes]:
        if self.participant is not None:
            return await self.participant.ctx.hooks.serve(blobs)
        faults, number = self.options.faults, self.peer_table.me.round + 1
        await faults.at("serve", number)
        return damage_blobs(faults.damage_kind("serve", number), blobs)

    def _uplink_is_busy(self) -> bool:
        return self.participant is not None and self.participant.stages.stage in ("reduce", "commit")

    async def take_part(
        self,
        rules: Rules,
        tip: Tip,
        states: KeptStates,
        deliver: Deliver,
        on_lost: Callable[[ResyncCause], None],
        has_room: Callable[[], bool],
    ) -> None:
        """Take part in the rounds after this tip.

        Args:
            on_lost: called if this node must download a state to go on.
            has_room: whether `deliver` can take one more replayed round (`CatchUp`).
        """

        def open_on_disk() -> Chain:
            store = ResultStore(self._cache, len(rules_after(rules, tip).layouts), room=self.options.room)
            return Chain(tip, store, self._oldest_needed_round)

        chain = await asyncio.to_thread(open_on_disk)
        file = self._cache / PENDING_FILE
        more = file, states
        self.participant = Participant(self.wire, self.peer_table, rules, chain, self.options.faults, deliver, *more)
        self.peer_table.contributors = lambda: chain.tip.last_weights
        self.show_tip(tip)
        self._catch_up = CatchUp(self.participant, on_lost, has_room)
        self.run(self.participant.run(), self._catch_up.run())
        if rules.amended is not None:
            self.run(self.participant.accept_amendments(), self.participant.pool.run())

    async def submit_amendment(self, signed: SignedAmendment) -> None:
        """Propose an amendment to the members. Raises SwarmError if no round will accept it."""
        if self.participant is None:
            raise SwarmError("this node takes no part in rounds now: let it train, and submit the amendment again")
        self.participant.pool.add(signed)

    async def replay_next(self) -> bool:
        """Replay one stored round that this node committed before a restart. Returns False if there is none."""
        assert self.participant is not None
        return await self.participant.committer.replay_next()

    async def set_aside(self) -> None:
        """After `restart_at`, mark the stored rounds of the chain that this node has left."""
        assert self.participant is not None
        await self.participant.committer.set_aside()

    async def align(self) -> Tip:
        """Search for other members, and catch up with the head and the round's age of those that are reachable."""
        assert self.participant is not None and self._catch_up is not None
        await self.discovery.dial_missing()
        await self._catch_up.align()
        return self.participant.ctx.chain.tip

    def show_tip(self, tip: Tip) -> None:
        """Announce this node's tip in its peer record."""
        self.peer_table.update_own(
            round=tip.round, head=tip.head, state_digest=tip.digest, swarm_tokens=tip.state.tokens
        )

    async def say(self, phase: Phase, *, at_once: bool = False) -> None:
        """Announce a phase. A node that takes no part in rounds, such as a relay, announces `paused` instead."""
        is_idle = self.participant is None and phase in MEMBER_PHASES
        self.peer_table.update_own(phase=Phase.PAUSED if is_idle else phase)
        if at_once:
            await self.gossip.announce()

    async def keep_view(self) -> None:
        """Refresh `view` periodically."""
        while True:
            await self._refresh()
            await asyncio.sleep(VIEW_S)

    async def _refresh(self) -> None:
        with suppress(PeerError):
            self._listening = tuple(await self.wire.addresses())
        if self.options.daemon.port_mapping:
            self.reachability.note_mapped(self._mapped())
        await self._read_surroundings()
        addresses = self._record_addresses()
        live = self.peer_table.live()
        reason, code = (
            self.participant.waiting()
            if self.participant and self.participant.stages.stage == "rendezvous"
            else ("", "")
        )
        inbound = self.peer_table.me.inbound
        relays = self.peer_table.relays_to(self.wire.peer_id) if not inbound else []
        self.discovery.is_reached = self.reachability.is_inbound is True
        reached_through: Literal["direct", "relay"] = "relay" if relays else "direct"
        self.peer_table.update_own(addresses=addresses, transport=reached_through)
        local = [address for address in self._listening if widest_reach([address]) is not Scope.WIDE]
        invite = self._invited(addresses if inbound else local)
        self.view = MemberSnapshot(
            peer_id=self.wire.peer_id,
            rows=tuple(map(self._row, self.peer_table.rows())),
            left=tuple(self.peer_table.left()),
            connected=len(live) - 1,
            training=sum(record.phase in MEMBER_PHASES for record in live),
            swarm_round=claimed_round([r.round for r in live if r.phase in MEMBER_PHASES], self.peer_table.me.round),
            addresses=invite,
            reachability="direct" if self.discovery.is_reached else "relay" if relays else "none",
            reachability_code=self.reachability.code,
            reachability_reason=self._relayed_reason(relays) if relays else self.reachability.reason,
            invite_note=self._note(invite),
            stage=self.participant.stages.stage if self.participant else "idle",
            waiting_reason=reason,
            waiting_code=code,
            sent_bytes=dict(self.wire.traffic.sent_bytes),
            received_bytes=dict(self.wire.traffic.received_bytes),
            rejected=dict(self.wire.traffic.rejected),
            amendments_refused=dict(self.participant.pool.refused) if self.participant else {},
            pending_amendments=tuple(self.participant.pool.pending) if self.participant else (),
            dropped_amendments=tuple(self.participant.pool.dropped) if self.participant else (),
            upload_bytes_s=self.participant.ctx.upload_bytes_s if self.participant else 0.0,
            upload_s=self.participant.sender.upload_s if self.participant else 0.0,
            lead_s=self.participant.sender.lead_s if self.participant else 0.0,
            forwarded_bytes=self.wire.traffic.forwarded_bytes,
            problem=self.discovery.last_problem if len(live) == 1 else "",
        )

    def _row(self, row: PeerRow) -> PeerRow:
        """A peer's row in the view. A hole-punched connection between two nodes without inbound ports is `direct`."""
        owner = self.profiles.table.owner_of(row.peer_id)
        update = {"owner": owner.key, "owner_name": owner.name, "team": owner.team}
        is_punched = not self.peer_table.me.inbound and row.transport == "relay" and row.peer_id in self._seen
        return row.model_copy(update=update | ({"transport": "direct"} if is_punched else {}))

    def _credited(self) -> Container[str]:
        """The keys that have contributed to the run; none while this node takes no part in rounds."""
        return self.participant.ctx.chain.tip.state.credit if self.participant is not None else ()

    def _relayed_reason(self, relays: Sequence[str]) -> str:
        """Tell the volunteer why peers do not reach this node directly, the remedy, and which relays carry calls."""
        names = {row.peer_id: row.name for row in self.peer_table.rows()}
        told = ", ".join(names.get(relay, relay[-6:]) for relay in relays)
        over = "a relay" if len(relays) == 1 else "relays"
        cost = "which costs the relay's bandwidth"
        return f"{self.reachability.reason} Others reach this node through {over} ({told}), {cost}."

    async def _read_surroundings(self) -> None:
        """Update this machine's interfaces and the observed addresses of peers."""
        now_s, is_alone = asyncio.get_running_loop().time(), len(self.peer_table.live()) == 1
        if now_s - self._surroundings_at_s < SURROUNDINGS_S and (self._seen or is_alone):
            return
        self._surroundings_at_s = now_s
        endpoints = [endpoint for endpoint in map(parse_endpoint, self._listening) if endpoint is not None]
        interfaces = self.wire.local_addresses.interfaces
        try:
            interfaces = read_interfaces()
        except OSError as exc:
            logger.debug("The interfaces of this machine cannot be read, so the last known ones count: %s", exc)
        self.wire.local_addresses = LocalAddresses(
            interfaces=interfaces,
            listening=frozenset((endpoint.host, endpoint.port) for endpoint in endpoints),
            observed=self.reachability.observed,
        )
        with suppress(PeerError):
            self._seen = await self.wire.seen()

    def _mapped(self) -> list[str]:
        """The addresses that a router has opened. Their ports differ from the one on which this node listens."""
        found = {address: parse_endpoint(address) for address in self._listening}
        return [
            address.partition("/p2p/")[0]
            for address, endpoint in found.items()
            if endpoint is not None
            and endpoint.ip is not None
            and endpoint.scope is Scope.WIDE
            and endpoint.port != self._ports.get(endpoint.ip.version)
        ]

    def _record_addresses(self) -> tuple[str, ...]:
        """The addresses for this node's record: those that peers confirmed, those of `announce`, those of interfaces.

        If the node is reachable over one IP version only, the interface addresses of the other version are omitted.
        """
        known = self.reachability
        closed = [version for version in self._ports if known.is_closed(version) and known.is_inbound]
        interfaces = [a for a in self._listening if not a.startswith(tuple(f"/ip{version}/" for version in closed))]
        addresses = [with_peer(a, self.wire.peer_id) for a in (*known.confirmed, *known.announced, *interfaces)]
        return tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES]

    def _invited(self, own: Sequence[str]) -> tuple[str, ...]:
        """The addresses for an invite: `own`, and those of other reachable peers."""
        # Only addresses at which this node sees a peer count, so the others' need not be parsed.
        seen = (r for r in self.peer_table.live()[1:] if r.inbound and r.peer_id in self._seen)
        others = sorted(seen, key=lambda r: r.peer_id)
        told = [r.model_copy(update={"addresses": addresses_of(r.peer_id, r.addresses)}) for r in others]
        addresses = choose_invite_addresses(own, told, self._seen)
        waits = is_too_early(
            addresses,
            has_bootstrap=bool(self.options.bootstrap),
            knows_others=bool(self._seen) and len(self.peer_table.live()) > 1,
            age_s=asyncio.get_running_loop().time() - self._began_at_s,
        )
        return () if waits else addresses

    def _note(self, invite: Sequence[str]) -> str:
        """Return where the invite may not work, and log the note when it changes."""
        port, remembered = next(iter(self._ports.values()), 0), self.reachability.remembered
        note = invite_note(
            invite, self.wire.local_addresses, port, in_container=self._in_container, remembered=remembered
        )
        if note != self._invite_note:
            before, self._invite_note = self._invite_note, note
            if note:
                logger.warning("%s", note)
            elif before:
                logger.info("Peers have reached this run from outside, so the invite now works from everywhere.")
        return note

    async def close(self, phase: Phase) -> None:
        """Announce `phase` and stop everything. Takes a few seconds at most."""
        await self.say(phase, at_once=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.participant is not None:
            await self.participant.close()
        await self.observer.close()
        await self.wire.close()


async def _open_wire(options: MemberOptions) -> tuple[Libp2pWire, Reservation]:
    """Open the wire. Returns it with the addresses on which it listens. Raises MachineError if no port is free."""
    listen = [parse(address) for address in options.daemon.listen]
    file = PortFile(options.data_dir / "cache" / LISTEN_PORT_FILE)
    for tries_left in reversed(range(LISTEN_TRIES)):
        reserved = await asyncio.to_thread(
            choose, listen, file, may_move=options.may_move_port, held=options.held_addresses
        )
        # p2pd reports mapped ports only among all its addresses, which hole punching leaves out.
        punching = not options.daemon.port_mapping
        daemon = replace(options.daemon, listen=tuple(map(str, reserved.addresses)), hole_punching=punching)
        try:
            with reserved:
                wire = await open_wire(daemon, SignedRecordValidator(options.run), ListingValidator())
        except MachineError as exc:
            if exc.code != IN_USE or not reserved.chosen or not tries_left:
                raise
        else:
            if reserved.chosen:
                await asyncio.to_thread(file.remember, reserved.wanted, reserved.chosen)
            return wire, reserved
    raise AssertionError("the last try returns or raises")


def claimed_round(claims: Sequence[int], own: int) -> int:
    """The newest round that more than half of the members claim, or this node's own round if that is newer.

    A single claim is not enough, because it may be false.
    """
    return max(own, median_low(claims)) if claims else own


def _announced(addresses: Sequence[str], ports: Mapping[int, int]) -> tuple[str, ...]:
    """Replace port 0 in the announced addresses by the listen port."""
    filled = []
    for address in map(parse, addresses):
        version = 6 if address.host_type in ("ip6", "dns6") else 4
        filled.append(str(address.at_port(address.port or ports.get(version, 0) or ports.get(4, 0))))
    return tuple(filled)


async def start_member(options: MemberOptions) -> SwarmMember:
    """Open the wire and start discovery. Raises MachineError or SwarmError."""
    identity = load_identity(options.daemon.identity_file)
    wire, reserved = await _open_wire(options)
    wire.upload_limiter.limit(options.upload_mbit_s)
    wire.download_limiter.limit(options.download_mbit_s)
    wire.relay.limiter.limit(options.relay_mbit_s)
    record = PeerRecord(
        peer_id=identity.peer_id,
        number=time.time_ns() // 1_000_000,
        run=options.run,
        head=options.run,
        name=options.name,
        version=options.version,
        phase=Phase.CONNECTING,
        is_relay=options.is_relay,
        addresses=tuple((await wire.addresses())[:MAX_ADDRESSES]),
    )
    clock = SuspendClock(asyncio.get_running_loop().time, awake_and_asleep_s)
    member = SwarmMember(options, wire, PeerTable(identity, record, clock))
    member.listening = reserved
    member.run(
        member.gossip.run(),
        member.discovery.run(),
        member.discovery.keep_connections(),
        member.discovery.check_relays(),
        member.reachability.run(),
        member.hole_punching.run(),
        member.observer.run(),
        member.keep_view(),
        member.profiles.run(),
    )
    if options.lan_discovery:
        member.run(member.lan.announce(), member.lan.dial_announced())
    return member

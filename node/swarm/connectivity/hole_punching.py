"""Direct UDP connections between two members behind NAT, by simultaneous open.

Both members connect over UDP to the observer of a relay that they share. An observer is a daemon of the relay with its
own peer id, and tells at which address it sees a peer (`address_observer`). Each member asks the relay for the other's
address, and both dial at the same time, so that each NAT takes the other's packets for answers. This works if both NATs
keep one public port for all destinations. Otherwise calls stay on relays.

A member never dials an address that the other member names, so no member can make another dial a stranger. It only
dials an address that a relay of its own choice has seen: one wide address at an unprivileged port per attempt, and one
attempt per peer within PAUSE_S.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from node.errors import PeerError
from node.host.printable import printable
from node.status import Channel
from node.swarm.identity import is_peer_id
from node.swarm.membership.peer_table import PeerRecord, PeerTable
from node.swarm.transport.address_scope import Endpoint, IPAddress, Scope, parse_endpoint, scope_of
from node.swarm.transport.libp2p import Libp2pWire
from node.swarm.transport.wire import MALFORMED_ERRORS, Message, Service

logger = logging.getLogger(__name__)

LOOK_S = 2.0
CALLED_S = 30.0
"""An attempt is made only with a peer that was called over a relay within this time."""
PAUSE_S = 120.0
"""Pause after an attempt with a peer. It doubles with each failure, up to MAX_PAUSE_S."""
MAX_PAUSE_S = 3600.0
SPACING_S = 60.0
"""Least time between two attempts of one caller that this node answers."""
MAX_ANSWERED = 8
"""Limit on the callers that are answered within SPACING_S."""
BLIND_S = 1800.0
"""Pause before a relay that did not answer over UDP is dialed again: after 100 mostly failing dials, libp2p gives up
UDP."""
IDLE_S = 30.0
"""The connection to an observer is closed when it has not been used for this time."""
ASK_S = 10.0
PUNCH_S = 2 * ASK_S
MIN_PORT = 1024


class HolePunching:
    """Makes attempts at direct connections for this member, and answers the attempts of others."""

    def __init__(self, wire: Libp2pWire, peer_table: PeerTable) -> None:
        self._wire, self._peer_table = wire, peer_table
        self._clock = asyncio.get_running_loop().time
        self._failures: dict[str, int] = {}
        """For each peer, the failed attempts since the last success."""
        self._due_at_s: dict[str, float] = {}
        self._answered_at_s: dict[str, float] = {}
        self._observers: dict[str, float] = {}
        """Peer id of an observer to the time at which the connection to it was last needed."""
        self._blind_until_s: dict[tuple[str, str], float] = {}
        """For each relay and kind of address that did not answer over UDP, when it may be dialed again."""
        self._own_ips: frozenset[IPAddress] = frozenset()
        self._dials: set[asyncio.Task[None]] = set()
        """Dials for the attempts of others."""
        service = Service(self._on_punch, Channel.DHT, per_caller=1, admits=peer_table.is_member)
        wire.serve({"punch": service})

    async def run(self) -> None:
        """Make attempts, for ever."""
        try:
            while True:
                self._end_pauses_after_move()
                for record in self._candidates():
                    await self._try(record)
                await self._leave_observers()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._dials:
                task.cancel()

    def _end_pauses_after_move(self) -> None:
        """End all pauses if this machine's addresses have changed: in another network, other attempts succeed."""
        own_ips = frozenset(one.ip for one in self._wire.local_addresses.interfaces if not one.ip.is_link_local)
        if own_ips != self._own_ips:
            self._own_ips = own_ips
            for pauses in (self._failures, self._due_at_s, self._blind_until_s):
                pauses.clear()

    def _candidates(self) -> list[PeerRecord]:
        """Members that this node calls only over relays. Of two members, the one with the smaller peer id tries."""
        me, now_s, called_at_s = self._peer_table.me, self._clock(), self._wire.relayed_at_s
        if not self._peer_table.is_member(me.peer_id):
            return []
        return [
            record
            for record in self._peer_table.members()
            if record.peer_id > me.peer_id
            and now_s - called_at_s.get(record.peer_id, -CALLED_S) < CALLED_S
            and now_s >= self._due_at_s.get(record.peer_id, 0.0)
            and self._shared_relays(record)
        ]

    def _shared_relays(self, record: PeerRecord) -> list[str]:
        """Live relays that both members use; none if one of the two can be called directly."""
        me, live = self._peer_table.me, self._peer_table.live_relays()
        if me.inbound or record.inbound:
            return []
        return [relay for relay in me.via if relay in record.via and relay in live]

    async def _try(self, record: PeerRecord) -> None:
        peer_id = record.peer_id
        try:
            relay, version = await self._find_observer(self._shared_relays(record), self._failures.get(peer_id, 0))
            await self._wire.call(peer_id, "punch", Message({"relay": relay, "version": version}), timeout_s=PUNCH_S)
            await self._dial(peer_id, await self._ask_observed(relay, peer_id, version))
        except PeerError as exc:
            self._failures[peer_id] = self._failures.get(peer_id, 0) + (exc.code != "too_soon")
            logger.debug("The attempt at a direct connection to %s failed: %s", peer_id[-6:], exc)
        else:
            self._failures.pop(peer_id, None)
        pause_s = min(MAX_PAUSE_S, PAUSE_S * 2 ** min(max(0, self._failures.get(peer_id, 0) - 1), 16))
        self._due_at_s[peer_id] = self._clock() + pause_s

    async def _find_observer(self, relays: Sequence[str], turn: int) -> tuple[str, int]:
        """Find a relay that receives UDP from this node. Returns its peer id and the IP version. Raises PeerError."""
        for relay in relays:
            try:
                return relay, await self._connect_observer(relay, None, turn)
            except PeerError as exc:
                logger.debug("Relay %s does not see this node over UDP: %s", relay[-6:], exc)
        raise PeerError("no relay sees this node over UDP", code="no_relay")

    async def _dial(self, peer_id: str, address: tuple[str, int]) -> None:
        """Dial the peer at this address. Raises PeerError if there is no connection to the peer afterwards."""
        try:
            await self._wire.connect_quic(peer_id, *address)
        except PeerError:
            if peer_id not in await self._wire.seen():  # The other member's dial may have succeeded.
                raise
        logger.info("Peer %s is now called over a direct connection, and no longer over relays.", peer_id[-6:])

    async def _on_punch(self, caller: str, message: Message) -> Message:
        relay, version = printable(message.header.get("relay"), 64), message.header.get("version")
        record, now_s = self._peer_table.find(caller), self._clock()
        if version not in (4, 6) or record is None or relay not in self._shared_relays(record):
            raise PeerError("that is no relay of both, or none is needed", code="no_relay")
        self._answered_at_s = {p: at_s for p, at_s in self._answered_at_s.items() if now_s - at_s < SPACING_S}
        if caller in self._answered_at_s or len(self._answered_at_s) >= MAX_ANSWERED:
            raise PeerError("an attempt comes too soon after another", code="too_soon")
        self._answered_at_s[caller] = now_s
        await self._connect_observer(relay, version)
        task = asyncio.create_task(self._dial_back(caller, await self._ask_observed(relay, caller, version)))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        return Message()

    async def _dial_back(self, caller: str, address: tuple[str, int]) -> None:
        try:
            await self._dial(caller, address)
        except PeerError as exc:
            logger.debug("The direct connection that %s asked for failed: %s", caller[-6:], exc)

    async def _connect_observer(self, relay: str, version: int | None, turn: int = 0) -> int:
        """Connect to a relay's observer over this IP version, or any if None. Returns the version. Raises PeerError."""
        record, seen, now_s = self._peer_table.find(relay), await self._wire.seen(), self._clock()
        pauses = self._blind_until_s.items()
        blind = tuple(f"/{kind}/" for (of, kind), until_s in pauses if of == relay and now_s < until_s)
        addresses = [address for address in (record.addresses if record else ()) if not address.startswith(blind)]
        endpoint = observer_endpoint(addresses, seen.get(relay, ()), version, turn)
        reply = await self._wire.call(relay, "observer", Message(), timeout_s=ASK_S)
        observer = printable(reply.header.get("peer"), 64)
        if not is_peer_id(observer):
            raise PeerError("a relay names an observer without a peer id")
        if self._peer_table.knows(observer) or (observer in seen and observer not in self._observers):
            raise PeerError("a relay calls another peer its observer")
        self._observers[observer] = self._clock()
        try:
            await self._wire.connect_quic(observer, endpoint.host, endpoint.port)
        except PeerError:
            self._blind_until_s[relay, endpoint.kind] = self._clock() + BLIND_S
            raise
        return 6 if endpoint.kind == "ip6" else 4

    async def _ask_observed(self, relay: str, peer_id: str, version: int) -> tuple[str, int]:
        """The IP address and UDP port at which the relay sees a peer. Raises PeerError."""
        reply = await self._wire.call(relay, "outer", Message({"of": peer_id}), timeout_s=ASK_S)
        try:
            return read_observed(reply.header, version)
        except MALFORMED_ERRORS as exc:
            raise PeerError("a relay names no valid address") from exc

    async def _leave_observers(self) -> None:
        before_s = self._clock() - IDLE_S
        for observer in [peer_id for peer_id, at_s in self._observers.items() if at_s < before_s]:
            del self._observers[observer]
            await self._wire.drop(observer)


def observer_endpoint(addresses: Sequence[str], seen: Collection[str], version: int | None, turn: int = 0) -> Endpoint:
    """The UDP endpoint of a relay's observer: the address and port number of a wide TCP endpoint of the relay.

    Prefers an IP address in `seen`, at which this node sees the relay. Without `version`, both IP versions have their
    `turn`, because the other member may have only one. Raises PeerError if no endpoint fits.
    """
    fitting = [
        endpoint
        for endpoint in map(parse_endpoint, addresses)
        if endpoint is not None
        and endpoint.ip is not None
        and endpoint.scope is Scope.WIDE
        and (version is None or endpoint.kind == f"ip{version}")
    ]
    if not fitting:
        raise PeerError("a relay has no wide address that fits and has answered over UDP", code="no_relay")
    fitting.sort(key=lambda endpoint: endpoint.host not in seen)
    kinds = list(dict.fromkeys(endpoint.kind for endpoint in fitting))
    return next(endpoint for endpoint in fitting if endpoint.kind == kinds[turn % len(kinds)])


def read_observed(header: Mapping[str, Any], version: int) -> tuple[str, int]:
    """Read the IP address and UDP port that a relay names. Raises PeerError or one of MALFORMED_ERRORS.

    Refuses all but global unicast addresses and unprivileged ports, because a member behind NAT has no others.
    """
    host, port = header["outer"]
    ip = ipaddress.ip_address(printable(host, 64))
    is_mapped = ip.version == 6 and ip.ipv4_mapped is not None
    if ip.version != version or scope_of(ip) is not Scope.WIDE or not ip.is_global or ip.is_multicast or is_mapped:
        raise PeerError("a relay names an address that no member behind NAT has")
    if not isinstance(port, int) or isinstance(port, bool) or not MIN_PORT <= port < 2**16:
        raise PeerError("a relay names a port that no member behind NAT has")
    return str(ip), port

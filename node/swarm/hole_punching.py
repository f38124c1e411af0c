"""Direct connections between two members behind NATs, by simultaneous open over UDP. Knows no round.

Both connect to the observer of a relay that they share, ask it where it sees the other, and dial that at the same time:
each NAT takes the other's packets for answers. It works where both NATs keep one outer port for all destinations.
Where it does not, calls go on over relays.

A member dials no address that the other one tells, but only what a relay of its own choice has seen, wide and at an
unprivileged port; one for each try, and one try with each peer in PAUSE_S. So no member sends others to dial strangers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from node.errors import PeerError
from node.status import Channel
from node.swarm.base import STUMBLES, Message, Service, plain
from node.swarm.directory import Directory, PeerRecord
from node.swarm.p2p import P2PWire
from node.swarm.places import Place, Scope, place_of, scope_of

logger = logging.getLogger(__name__)

LOOK_S = 2.0
CALLED_S = 30.0
"""Only peers that were called over a relay within this time are worth a try."""
PAUSE_S = 120.0
"""After a try with a peer. Doubles with each failure, up to MAX_PAUSE_S."""
MAX_PAUSE_S = 3600.0
SPACING_S = 60.0
"""Between two tries of one caller that this node answers."""
MAX_ANSWERED = 8
"""Callers within SPACING_S."""
BLIND_S = 1800.0
"""Until a relay that did not answer over UDP is asked again: libp2p gives UDP up after 100 dials that mostly fail."""
IDLE_S = 30.0
"""Until the connection to an observer that nobody needs is closed."""
ASK_S = 10.0
PUNCH_S = 2 * ASK_S
MIN_PORT = 1024


class HolePunching:
    """Tries for this member, and answers the tries of others."""

    def __init__(self, wire: P2PWire, directory: Directory) -> None:
        self._wire, self._directory = wire, directory
        self._clock = asyncio.get_running_loop().time
        self._failures: dict[str, int] = {}
        """Tries in vain, by peer, since the last success."""
        self._due_at_s: dict[str, float] = {}
        self._answered_at_s: dict[str, float] = {}
        self._observers: dict[str, float] = {}
        """When this node last needed the connection to each observer, by its peer id."""
        self._blind_until_s: dict[str, float] = {}
        """Relays that did not answer over UDP."""
        self._dials: set[asyncio.Task[None]] = set()
        """Those of the tries that this node answers."""
        service = Service(self._on_punch, Channel.DHT, per_caller=1, admits=directory.is_member)
        wire.serve({"punch": service})

    async def run(self) -> None:
        """Try now and then for ever."""
        try:
            while True:
                for record in self._candidates():
                    await self._try(record)
                await self._leave_observers()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._dials:
                task.cancel()

    def _candidates(self) -> list[PeerRecord]:
        """Members that this node calls over relays only. Of two, the one with the smaller peer id tries."""
        me, now_s, called_at_s = self._directory.me, self._clock(), self._wire.relayed_at_s
        return [
            record
            for record in self._directory.members()
            if record.peer_id > me.peer_id
            and self._directory.is_member(me.peer_id)
            and now_s - called_at_s.get(record.peer_id, -CALLED_S) < CALLED_S
            and now_s >= self._due_at_s.get(record.peer_id, 0.0)
            and self._shared_relays(record)
        ]

    def _shared_relays(self, record: PeerRecord) -> list[str]:
        """Relays of this node's choice that the other one keeps, too; none where one of the two can be called."""
        me, live = self._directory.me, self._directory.live_relays()
        if me.inbound or record.inbound:
            return []
        return [relay for relay in me.via if relay in record.via and relay in live]

    # trying

    async def _try(self, record: PeerRecord) -> None:
        peer_id = record.peer_id
        try:
            relay, version = await self._find_observer(self._shared_relays(record))
            await self._wire.call(peer_id, "punch", Message({"relay": relay, "version": version}), timeout_s=PUNCH_S)
            await self._dial(peer_id, await self._ask_outer(relay, peer_id, version))
        except PeerError as exc:
            self._failures[peer_id] = self._failures.get(peer_id, 0) + (exc.code != "too_soon")
            logger.debug("no direct connection to %s: %s", peer_id[-6:], exc)
        else:
            self._failures.pop(peer_id, None)
        pause_s = min(MAX_PAUSE_S, PAUSE_S * 2 ** min(max(0, self._failures.get(peer_id, 0) - 1), 16))
        self._due_at_s[peer_id] = self._clock() + pause_s

    async def _find_observer(self, relays: Sequence[str]) -> tuple[str, int]:
        """The first relay that sees this node over UDP, and the IP version. Raises PeerError."""
        for relay in relays:
            try:
                return relay, await self._be_observed(relay, None)
            except PeerError as exc:
                logger.debug("%s does not see this node over UDP: %s", relay[-6:], exc)
        raise PeerError("no relay sees this node over UDP", code="no_relay")

    async def _dial(self, peer_id: str, outer: tuple[str, int]) -> None:
        """Raises PeerError where no connection stands after that."""
        try:
            await self._wire.connect_quic(peer_id, *outer)
        except PeerError:
            if peer_id not in await self._wire.seen():  # The other one's dial may have come through.
                raise
        logger.info("There is a direct connection to %s now: it is not called over relays any more.", peer_id[-6:])

    # answering

    async def _on_punch(self, caller: str, message: Message) -> Message:
        relay, version = plain(message.header.get("relay"), 64), message.header.get("version")
        record, now_s = self._directory.find(caller), self._clock()
        if version not in (4, 6) or record is None or relay not in self._shared_relays(record):
            raise PeerError("that is no relay of both, or none is needed", code="no_relay")
        self._answered_at_s = {p: at_s for p, at_s in self._answered_at_s.items() if now_s - at_s < SPACING_S}
        if caller in self._answered_at_s or len(self._answered_at_s) >= MAX_ANSWERED:
            raise PeerError("a try comes too soon after another", code="too_soon")
        self._answered_at_s[caller] = now_s
        await self._be_observed(relay, version)
        task = asyncio.create_task(self._dial_back(caller, await self._ask_outer(relay, caller, version)))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        return Message()

    async def _dial_back(self, caller: str, outer: tuple[str, int]) -> None:
        try:
            await self._dial(caller, outer)
        except PeerError as exc:
            logger.debug("no direct connection to %s: %s", caller[-6:], exc)

    # observers

    async def _be_observed(self, relay: str, version: int | None) -> int:
        """Have a connection to the observer of a relay, over this IP version or any. Returns it; raises PeerError."""
        record, seen = self._directory.find(relay), await self._wire.seen()
        place = observer_place(record.addresses if record else (), seen.get(relay, ()), version)
        if self._clock() < self._blind_until_s.get(relay, 0.0):
            raise PeerError("the relay did not answer over UDP before", code="no_relay")
        reply = await self._wire.call(relay, "observer", Message(), timeout_s=ASK_S)
        observer = plain(reply.header.get("peer"), 64)
        if self._directory.knows(observer) or (observer in seen and observer not in self._observers):
            raise PeerError("a relay calls another peer its observer")
        self._observers[observer] = self._clock()
        try:
            await self._wire.connect_quic(observer, place.host, place.port)
        except PeerError:
            self._blind_until_s[relay] = self._clock() + BLIND_S
            raise
        return 6 if place.kind == "ip6" else 4

    async def _ask_outer(self, relay: str, peer_id: str, version: int) -> tuple[str, int]:
        """Where the relay sees a peer. Raises PeerError."""
        reply = await self._wire.call(relay, "outer", Message({"of": peer_id}), timeout_s=ASK_S)
        try:
            return read_outer(reply.header, version)
        except STUMBLES as exc:
            raise PeerError("a relay tells what is no address") from exc

    async def _leave_observers(self) -> None:
        before_s = self._clock() - IDLE_S
        for observer in [one for one, at_s in self._observers.items() if at_s < before_s]:
            del self._observers[observer]
            await self._wire.drop(observer)


def observer_place(addresses: Sequence[str], seen: Collection[str], version: int | None) -> Place:
    """Where the observer of a relay with these addresses listens on UDP: at the number of a wide TCP one.

    `seen`: IP addresses at which this node sees the relay; they go first. Raises PeerError where there is none.
    """
    wide = [place for place in map(place_of, addresses) if place and place.ip and place.scope is Scope.WIDE]
    fitting = [place for place in wide if version is None or place.kind == f"ip{version}"]
    if not fitting:
        raise PeerError("a relay has no wide address that fits", code="no_relay")
    return min(fitting, key=lambda place: place.host not in seen)


def read_outer(header: Mapping[str, Any], version: int) -> tuple[str, int]:
    """The IP address and UDP port that a relay tells, if a home may have them. Raises PeerError, or one of STUMBLES."""
    told, port = header["outer"]
    ip = ipaddress.ip_address(plain(told, 64))
    is_mapped = ip.version == 6 and ip.ipv4_mapped is not None
    if ip.version != version or scope_of(ip) is not Scope.WIDE or not ip.is_global or ip.is_multicast or is_mapped:
        raise PeerError("a relay tells an address that no home has")
    if not isinstance(port, int) or isinstance(port, bool) or not MIN_PORT <= port < 2**16:
        raise PeerError("a relay tells a port that no home has")
    return str(ip), port

"""How nodes of one run find each other on a local network, without a bootstrap peer: small multicast datagrams.

What is received is a hint where to dial and nothing more: libp2p authenticates the peer, and its record is checked like
any other. The run is told as a hash of its hash, which is of no use to those who do not have the invite.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256

from node.swarm.places import Here, Scope, direct_address, scope_of, with_peer

logger = logging.getLogger(__name__)

GROUP, PORT = "239.255.76.44", 31336
"""IPv4 multicast group of the organization-local scope (RFC 2365), and UDP port."""
LONELY_S, CALM_S = 10.0, 60.0
"""Between two announcements while alone, and in company."""
FIRST_S = 1.0
"""Until the first one; by then the node knows its interfaces."""
ACCEPTED_PER_S = 20
"""Datagrams that are read; the others are dropped."""
MAX_HINTS = 16
"""That wait to be dialed."""
RETRY_S = 30.0
"""Between two dials of one peer."""
MAX_BYTES = 512
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,60}")


def tag_of(run: str) -> str:
    """How a run is named to a local network."""
    return sha256(f"diloco lan discovery {run}".encode()).hexdigest()[:32]


def read_hint(data: bytes, run: str) -> tuple[str, int] | None:
    """Peer id and TCP port of a datagram; None for one of another run, and for all else."""
    if len(data) > MAX_BYTES:
        return None
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        return None
    match told:
        case {"run": str(tag), "peer": str(peer_id), "port": int(port)} if (
            tag == tag_of(run) and _PEER_ID.fullmatch(peer_id) and not isinstance(port, bool) and 0 < port < 2**16
        ):
            return peer_id, port
    return None


class LanDiscovery:
    """Announces this node on the private networks that it listens on, and dials those that are announced there."""

    def __init__(
        self,
        run: str,
        peer_id: str,
        here: Callable[[], Here],
        *,
        is_alone: Callable[[], bool],
        is_known: Callable[[str], bool],
        dial: Callable[[str], Awaitable[object]],
        port: int = PORT,
    ) -> None:
        """`is_known`: whether a peer is live already. `dial`: called with a multiaddress. `port`: UDP."""
        self._run, self._peer_id, self._here, self._port = run, peer_id, here, port
        self._is_alone, self._is_known, self._dial = is_alone, is_known, dial
        self._hints: asyncio.Queue[tuple[str, str]] = asyncio.Queue(MAX_HINTS)
        self._transport: asyncio.DatagramTransport | None = None
        self._dialed_at_s: dict[str, float] = {}
        self._second, self._accepted = 0, 0

    async def announce(self) -> None:
        """Say now and then, for ever, that this node is here."""
        wait_s = FIRST_S
        try:
            while True:
                await asyncio.sleep(wait_s)
                await self._announce_once()
                wait_s = LONELY_S if self._is_alone() else CALM_S
        finally:
            if self._transport is not None:
                self._transport.close()

    async def follow(self) -> None:
        """Dial the peers that are announced, one after another, for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            peer_id, address = await self._hints.get()
            now_s = clock()
            self._dialed_at_s = {p: at_s for p, at_s in self._dialed_at_s.items() if now_s - at_s < RETRY_S}
            if peer_id not in self._dialed_at_s and not self._is_known(peer_id):
                self._dialed_at_s[peer_id] = now_s
                logger.debug("%s is announced on this network", peer_id[-6:])
                await self._dial(address)

    async def _announce_once(self) -> None:
        places = self._private_places()
        if not places:
            return
        try:
            transport = self._transport = self._transport or await self._open()
        except OSError as exc:
            logger.debug("this node is not announced on the local network: %s", exc)
            return
        for ip, port in places:
            # Interfaces come and go, and one without multicast, or whose line is down, is nobody's trouble.
            with suppress(OSError):
                self._use(transport, ip)
                message = {"run": tag_of(self._run), "peer": self._peer_id, "port": port}
                transport.sendto(json.dumps(message).encode(), (GROUP, self._port))

    def _private_places(self) -> list[tuple[str, int]]:
        """The private IPv4 addresses, with TCP port, that this node listens on."""
        places = ((ipaddress.ip_address(host), port) for host, port in self._here().listening)
        return sorted((str(ip), port) for ip, port in places if ip.version == 4 and scope_of(ip) is Scope.NETWORK)

    async def _open(self) -> asyncio.DatagramTransport:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # All nodes on this machine hear all.
            opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            opened.bind((GROUP, self._port))  # Of the group: what is sent to this machine alone does not arrive.
        except OSError:
            opened.close()
            raise
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Receiver(self), sock=opened)
        return transport

    def _use(self, transport: asyncio.DatagramTransport, ip: str) -> None:
        """Send from this interface, and hear what others send there."""
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(ip))
        group = struct.pack("4s4s", socket.inet_aton(GROUP), socket.inet_aton(ip))
        with suppress(OSError):  # A member already; said again, as the interface may be a new one.
            opened.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)

    def hear(self, data: bytes, source: str) -> None:
        """Take a datagram in, within ACCEPTED_PER_S."""
        second = int(asyncio.get_running_loop().time())
        if second != self._second:
            self._second, self._accepted = second, 0
        self._accepted += 1
        ip = ipaddress.ip_address(source)
        if self._accepted > ACCEPTED_PER_S or scope_of(ip) is not Scope.NETWORK or not self._here().has_network_of(ip):
            return
        hint = read_hint(data, self._run)
        if hint is None or hint[0] == self._peer_id or self._is_known(hint[0]):
            return
        with suppress(asyncio.QueueFull):
            self._hints.put_nowait((hint[0], with_peer(direct_address(source, hint[1]), hint[0])))


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, discovery: LanDiscovery) -> None:
        self._discovery = discovery

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._discovery.hear(data, addr[0])

    def error_received(self, exc: Exception) -> None:
        logger.debug("an announcement on the local network failed: %s", exc)

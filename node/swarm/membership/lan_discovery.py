"""LAN discovery: nodes of one run find each other by IPv4 multicast, without a bootstrap peer.

A datagram is only a hint of an address to dial: libp2p authenticates the peer, and its record is verified as usual. A
datagram names the run by a hash of the run's own hash, so a listener does not learn what is needed to join.
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

from node.swarm.transport.address_scope import LocalAddresses, Scope, direct_address, scope_of, with_peer

logger = logging.getLogger(__name__)

GROUP, PORT = "239.255.76.44", 31336  # Multicast group of the organization-local scope (RFC 2365), and UDP port
ALONE_S, CONNECTED_S = 10.0, 60.0  # Time between two announcements of a node that knows no peer, and of one that does
FIRST_S = 1.0  # Delay of the first announcement; by then the node knows its interfaces
ACCEPTED_PER_S = 20
"""Limit on the datagrams that are read in a second. Further datagrams are dropped."""
MAX_HINTS = 16  # Length of the queue of peers to dial
RETRY_S = 30.0  # Least time between two dials of one peer
MAX_BYTES = 512
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,60}")


def tag_of(run: str) -> str:
    """The name of a run in datagrams, 32 hex digits."""
    return sha256(f"diloco lan discovery {run}".encode()).hexdigest()[:32]


def read_hint(data: bytes, run: str) -> tuple[str, int] | None:
    """Read peer id and TCP port from an announcement. Returns None for another run or invalid data."""
    if len(data) > MAX_BYTES:
        return None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    match content:
        case {"run": str(tag), "peer": str(peer_id), "port": int(port)} if (
            tag == tag_of(run) and _PEER_ID.fullmatch(peer_id) and not isinstance(port, bool) and 0 < port < 2**16
        ):
            return peer_id, port
    return None


class LanDiscovery(asyncio.DatagramProtocol):
    """Announces this node on the private networks on which it listens, and dials the peers that are announced there."""

    def __init__(
        self,
        run: str,
        peer_id: str,
        here: Callable[[], LocalAddresses],
        *,
        is_alone: Callable[[], bool],
        is_known: Callable[[str], bool],
        dial: Callable[[str], Awaitable[object]],
    ) -> None:
        """`here` gives this node's addresses. `is_known` says whether a peer is live. `dial` gets a multiaddress."""
        self._run, self._peer_id, self._here = run, peer_id, here
        self._is_alone, self._is_known, self._dial = is_alone, is_known, dial
        self._hints: asyncio.Queue[tuple[str, str]] = asyncio.Queue(MAX_HINTS)
        self._transport: asyncio.DatagramTransport | None = None
        self._dialed_at_s: dict[str, float] = {}
        self._second, self._accepted = 0, 0

    async def announce(self) -> None:
        """Announce this node every ALONE_S or CONNECTED_S, for ever."""
        wait_s = FIRST_S
        try:
            while True:
                await asyncio.sleep(wait_s)
                await self._announce_once()
                wait_s = ALONE_S if self._is_alone() else CONNECTED_S
        finally:
            if self._transport is not None:
                self._transport.close()

    async def dial_announced(self) -> None:
        """Dial announced peers, one after another, for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            peer_id, address = await self._hints.get()
            now_s = clock()
            self._dialed_at_s = {p: at_s for p, at_s in self._dialed_at_s.items() if now_s - at_s < RETRY_S}
            if peer_id not in self._dialed_at_s and not self._is_known(peer_id):
                self._dialed_at_s[peer_id] = now_s
                logger.debug("Peer %s is announced on the local network.", peer_id[-6:])
                await self._dial(address)

    async def _announce_once(self) -> None:
        addresses = self._private_addresses()
        if not addresses:
            return
        try:
            transport = self._transport = self._transport or await self._open()
        except OSError as exc:
            logger.debug("This node could not be announced on the local network: %s", exc)
            return
        for ip, port in addresses:
            with suppress(OSError):  # The interface may be gone, down, or without multicast.
                self._use_interface(transport, ip)
                message = {"run": tag_of(self._run), "peer": self._peer_id, "port": port}
                transport.sendto(json.dumps(message).encode(), (GROUP, PORT))

    def _private_addresses(self) -> list[tuple[str, int]]:
        """The private IPv4 addresses and TCP ports on which this node listens."""
        listening = ((ipaddress.ip_address(host), port) for host, port in self._here().listening)
        return sorted((str(ip), port) for ip, port in listening if ip.version == 4 and scope_of(ip) is Scope.NETWORK)

    async def _open(self) -> asyncio.DatagramTransport:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Several nodes on one machine share the port.
            opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            opened.bind((GROUP, PORT))  # A socket that is bound to the group receives no unicast.
        except OSError:
            opened.close()
            raise
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, sock=opened)
        return transport

    def _use_interface(self, transport: asyncio.DatagramTransport, ip: str) -> None:
        """Send from this interface, and join the multicast group on it."""
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(ip))
        group = struct.pack("4s4s", socket.inet_aton(GROUP), socket.inet_aton(ip))
        with suppress(OSError):  # The socket may have joined before. The interface may be new, so it joins each time.
            opened.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Queue the announced peer for dialing. Drops datagrams beyond ACCEPTED_PER_S."""
        second = int(asyncio.get_running_loop().time())
        if second != self._second:
            self._second, self._accepted = second, 0
        self._accepted += 1
        ip = ipaddress.ip_address(addr[0])
        if self._accepted > ACCEPTED_PER_S or scope_of(ip) is not Scope.NETWORK or not self._here().has_network_of(ip):
            return
        hint = read_hint(data, self._run)
        if hint is None or hint[0] == self._peer_id or self._is_known(hint[0]):
            return
        with suppress(asyncio.QueueFull):
            self._hints.put_nowait((hint[0], with_peer(direct_address(addr[0], hint[1]), hint[0])))

    def error_received(self, exc: Exception) -> None:
        logger.debug("An announcement on the local network failed: %s", exc)

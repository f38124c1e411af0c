"""Where a multiaddress leads: host, port, and from how far away it means the same machine. Knows no wire.

`choose` decides which of a peer's addresses are worth dialing from here: a private address means another machine in
every network.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import psutil

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface

MAX_DIALED = 8
"""Addresses of one peer that are dialed: so many libp2p dials at the same time, the others would wait for those."""
MAX_NAMED = 3
"""Addresses that an error text names."""
_IP_KINDS, _NAME_KINDS = ("ip4", "ip6"), ("dns", "dns4", "dns6")
_LOCAL_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fe80::/10"),
    )
)
"""Private, shared by the customers of a provider, or of one link: they mean another machine elsewhere."""


class Scope(IntEnum):
    """From how far away an address means the same machine."""

    HOST = 0
    """Loopback."""
    NETWORK = 1
    """Private and link-local addresses."""
    WIDE = 2
    """All other IP addresses, and names."""


@dataclass(frozen=True, slots=True)
class Place:
    """Host and TCP port of a multiaddress."""

    kind: str
    """`ip4`, `ip6`, `dns`, `dns4` or `dns6`."""
    host: str
    port: int

    @property
    def ip(self) -> IPAddress | None:
        """None for a name."""
        return ipaddress.ip_address(self.host) if self.kind in _IP_KINDS else None

    @property
    def scope(self) -> Scope:
        return Scope.WIDE if self.ip is None else scope_of(self.ip)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.kind == "ip6" else f"{self.host}:{self.port}"


def scope_of(ip: IPAddress) -> Scope:
    if ip.is_loopback:
        return Scope.HOST
    return Scope.NETWORK if any(ip in network for network in _LOCAL_NETWORKS) else Scope.WIDE


def place_of(address: str) -> Place | None:
    """Where a direct TCP multiaddress leads, with or without a peer id; None for all others, a relay's included."""
    parts = address.split("/")
    if len(parts) not in (5, 7) or parts[0] or parts[3] != "tcp" or (len(parts) == 7 and parts[5] != "p2p"):
        return None
    kind, host, port = parts[1], parts[2], parts[4]
    if kind not in (*_IP_KINDS, *_NAME_KINDS) or not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        return None
    try:
        if kind in _IP_KINDS and ipaddress.ip_address(host).version != int(kind[-1]):
            return None
    except ValueError:
        return None
    return Place(kind, host, int(port))


def direct_address(ip: str, port: int) -> str:
    """The multiaddress of an IP address and a TCP port, without a peer id."""
    return f"/ip{ipaddress.ip_address(ip).version}/{ip}/tcp/{port}"


def with_peer(address: str, peer_id: str) -> str:
    return address if "/p2p/" in address else f"{address}/p2p/{peer_id}"


@dataclass(frozen=True, slots=True)
class Here:
    """Where this node is."""

    interfaces: tuple[IPInterface, ...] = ()
    """Of this machine (of this container, in one), with their networks."""
    listening: frozenset[tuple[str, int]] = frozenset()
    """IP addresses and TCP ports that this node itself listens on."""
    outer: frozenset[str] = frozenset()
    """IP addresses at which others see this node."""

    def has_network_of(self, ip: IPAddress) -> bool:
        return any(ip in interface.network for interface in self.interfaces)

    def has_address(self, ip: IPAddress) -> bool:
        return any(ip == interface.ip for interface in self.interfaces)


def read_interfaces() -> tuple[IPInterface, ...]:
    """The addresses of this machine's interfaces, loopback included, as this thread's network namespace has them."""
    found = [
        f"{one.address.partition('%')[0]}/{_prefix_length(one.netmask)}"
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family.name in ("AF_INET", "AF_INET6") and one.netmask
    ]
    return tuple(map(ipaddress.ip_interface, found))


def _prefix_length(netmask: str) -> int:
    return int(ipaddress.ip_address(netmask)).bit_count()


def interface_addresses(listen: Sequence[str], interfaces: Sequence[IPInterface]) -> list[str]:
    """Direct addresses without a peer id: `listen`, with the machine's own addresses in place of 0.0.0.0 and ::."""
    found = []
    for place in filter(None, map(place_of, listen)):
        if place.ip is None or not place.ip.is_unspecified:
            found.append(direct_address(place.host, place.port))
            continue
        own = (one.ip for one in interfaces if one.ip.version == place.ip.version)
        found += [direct_address(str(ip), place.port) for ip in own if ip.version == 4 or not ip.is_link_local]
    return list(dict.fromkeys(found))


def choose(addresses: Sequence[str], here: Here) -> tuple[list[str], list[str]]:
    """Of one peer's addresses, those to dial from here, and those that lead nowhere from here. Keeps their order.

    A wide address is always dialed; a private one where this machine has an interface in its network, or where the peer
    is behind the same outer address; a loopback address where the peer is on this machine. Where nothing would be left,
    private addresses are tried all the same: networks may be joined by routers that nobody here knows of. Where the
    interfaces are not known, everything is dialed.
    """
    if not here.interfaces:
        return list(addresses[:MAX_DIALED]), list(addresses[MAX_DIALED:])
    places = {address: place_of(address) for address in addresses}
    direct = [place for place in places.values() if place is not None]
    is_own = {place for place in direct if (place.host, place.port) in here.listening}
    is_neighbour = any(place.scope is Scope.WIDE and place.host in here.outer for place in direct)
    is_here = all(place.scope is Scope.HOST for place in direct) or any(
        here.has_address(place.ip) for place in direct if place.ip and place not in is_own and not place.ip.is_loopback
    )

    def leads_somewhere(place: Place) -> bool:
        if place in is_own:
            return False
        if place.scope is Scope.HOST:
            return is_here
        return place.scope is Scope.WIDE or is_neighbour or (place.ip is not None and here.has_network_of(place.ip))

    chosen = [address for address, place in places.items() if place is None or leads_somewhere(place)]
    if not any(places[address] for address in chosen):
        chosen += [a for a, place in places.items() if place and place not in is_own and place.scope is Scope.NETWORK]
    chosen = chosen[:MAX_DIALED]
    return chosen, [address for address in addresses if address not in chosen]


def describe_dial(tried: Sequence[str], skipped: Sequence[str]) -> str:
    """Where a peer was looked for, for an error text: `203.0.113.5:31337 (and 2 private addresses that are ...)`."""
    named = [str(place_of(address) or "a relay") for address in tried]
    text = ", ".join(named[:MAX_NAMED]) or "any address that leads somewhere from here"
    text += f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    private = [place for place in map(place_of, skipped) if place is not None and place.scope is not Scope.WIDE]
    if private:
        what = "address that is" if len(private) == 1 else "addresses that are"
        text += f" (and {len(private)} private {what} not on this network)"
    return text

"""The endpoints of multiaddresses, and their scope: from how far away an address means the same machine.

`select_addresses` chooses which of a peer's addresses to dial, because a private address means another machine in each
network.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import zip_longest

import psutil

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface

MAX_DIALED = 8
"""Limit on the addresses of one peer to dial: libp2p runs this many dials at once, and further dials would queue."""
MAX_NAMED = 3
"""Limit on the addresses that an error text names."""
_IP_KINDS, _NAME_KINDS = ("ip4", "ip6"), ("dns", "dns4", "dns6")
_LOCAL_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        (
            "10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "192.0.0.0/24",
            "198.18.0.0/15", "240.0.0.0/4", "fc00::/7", "fe80::/10", "fec0::/10",
        ),
    )
)  # fmt: skip
"""Private, carrier-grade NAT and link-local networks, and those that proxies and translators use on one machine."""


class Scope(IntEnum):
    """From how far away an address still means the same machine."""

    HOST = 0
    """Loopback."""
    NETWORK = 1
    """Private and link-local addresses."""
    WIDE = 2
    """All other IP addresses, and names."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and TCP port of a multiaddress."""

    kind: str
    """`ip4`, `ip6`, `dns`, `dns4` or `dns6`."""
    host: str
    port: int

    @property
    def ip(self) -> IPAddress | None:
        """The IP address, or None for a name."""
        return ipaddress.ip_address(self.host) if self.kind in _IP_KINDS else None

    @property
    def scope(self) -> Scope:
        return Scope.WIDE if self.ip is None else scope_of(self.ip)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.kind == "ip6" else f"{self.host}:{self.port}"


def scope_of(ip: IPAddress) -> Scope:
    """The scope of an address. The unspecified one leads to this machine. An IPv6 address may stand for an IPv4 one."""
    ip = ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip
    if ip.is_loopback or ip.is_unspecified:
        return Scope.HOST
    return Scope.NETWORK if any(ip in network for network in _LOCAL_NETWORKS) else Scope.WIDE


def parse_endpoint(address: str) -> Endpoint | None:
    """Parse a direct TCP multiaddress, with or without a peer id. Returns None for any other, such as a relay's."""
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
    return Endpoint(kind, host, int(port))


def direct_address(ip: str, port: int) -> str:
    """The TCP multiaddress of an IP address and port, without a peer id."""
    return f"/ip{ipaddress.ip_address(ip).version}/{ip}/tcp/{port}"


def with_peer(address: str, peer_id: str) -> str:
    return address if "/p2p/" in address else f"{address}/p2p/{peer_id}"


def group_by_peer(addresses: Iterable[str]) -> dict[str, list[str]]:
    """Group addresses by the peer id at their end."""
    by_peer: dict[str, list[str]] = {}
    for address in addresses:
        by_peer.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    return by_peer


@dataclass(frozen=True, slots=True)
class LocalAddresses:
    """The addresses of this node."""

    interfaces: tuple[IPInterface, ...] = ()
    """Interface addresses of this machine or container, with their networks; empty if unknown."""
    listening: frozenset[tuple[str, int]] = frozenset()
    """The IP addresses and TCP ports on which this node listens."""
    observed: frozenset[str] = frozenset()
    """The IP addresses at which other peers see this node."""

    def has_network_of(self, ip: IPAddress) -> bool:
        return any(ip in interface.network for interface in self.interfaces)

    def has_address(self, ip: IPAddress) -> bool:
        return any(ip == interface.ip for interface in self.interfaces)


def read_interfaces() -> tuple[IPInterface, ...]:
    """The interface addresses of this thread's network namespace, including loopback. Raises OSError."""
    return tuple(
        ipaddress.ip_interface(f"{one.address.partition('%')[0]}/{int(ipaddress.ip_address(one.netmask)).bit_count()}")
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family.name in ("AF_INET", "AF_INET6") and one.netmask
    )


def interface_addresses(listen: Sequence[str], interfaces: Sequence[IPInterface]) -> list[str]:
    """Replace 0.0.0.0 and :: in `listen` by the interfaces' addresses. Returns direct addresses without a peer id."""
    found = []
    for endpoint in filter(None, map(parse_endpoint, listen)):
        if endpoint.ip is None or not endpoint.ip.is_unspecified:
            found.append(direct_address(endpoint.host, endpoint.port))
            continue
        own = (one.ip for one in interfaces if one.ip.version == endpoint.ip.version)
        found += [direct_address(str(ip), endpoint.port) for ip in own if ip.version == 4 or not ip.is_link_local]
    return list(dict.fromkeys(found))


def sort_by_reach(addresses: Iterable[str]) -> list[str]:
    """Put the IP versions in turn, each with its widest scope first, so that the start of the list has some of each."""

    def scope(address: str) -> Scope:
        endpoint = parse_endpoint(address)
        return endpoint.scope if endpoint is not None else Scope.HOST

    by_version: dict[str, list[str]] = {}
    for address in sorted(addresses, key=scope, reverse=True):
        by_version.setdefault(address.split("/")[1], []).append(address)
    return [address for turn in zip_longest(*by_version.values()) for address in turn if address is not None]


def select_addresses(addresses: Sequence[str], local: LocalAddresses) -> tuple[list[str], list[str]]:
    """Split one peer's addresses into those to dial and those to skip, in their order.

    A wide address is always dialed. A private address is dialed if this machine has an interface in its network, or the
    peer is behind the same public address. A loopback address is dialed if the peer is on this machine. If no address
    is left, private addresses are tried anyway, because routers may join networks. If the interfaces are unknown, all
    addresses are dialed.
    """
    if not local.interfaces:
        return list(addresses[:MAX_DIALED]), list(addresses[MAX_DIALED:])
    endpoints = {address: parse_endpoint(address) for address in addresses}
    direct = [endpoint for endpoint in endpoints.values() if endpoint is not None]
    own = {endpoint for endpoint in direct if (endpoint.host, endpoint.port) in local.listening}
    is_neighbour = any(endpoint.scope is Scope.WIDE and endpoint.host in local.observed for endpoint in direct)
    is_same_host = all(endpoint.scope is Scope.HOST for endpoint in direct) or any(
        endpoint.ip is not None and not endpoint.ip.is_loopback and local.has_address(endpoint.ip)
        for endpoint in direct
        if endpoint not in own
    )

    def is_reachable(endpoint: Endpoint) -> bool:
        if endpoint in own:
            return False
        if endpoint.scope is Scope.HOST:
            return is_same_host
        return (
            endpoint.scope is Scope.WIDE
            or is_neighbour
            or (endpoint.ip is not None and local.has_network_of(endpoint.ip))
        )

    chosen = [address for address, endpoint in endpoints.items() if endpoint is None or is_reachable(endpoint)]
    if not any(endpoints[address] for address in chosen):
        chosen += [a for a, e in endpoints.items() if e is not None and e not in own and e.scope is Scope.NETWORK]
    chosen = chosen[:MAX_DIALED]
    return chosen, [address for address in addresses if address not in chosen]


def describe_dial(tried: Sequence[str], skipped: Sequence[str]) -> str:
    """Name the dialed addresses for an error text: `203.0.113.5:31337 (and 2 private addresses that are ...)`."""
    named = [str(parse_endpoint(address) or "a relay") for address in tried]
    text = ", ".join(named[:MAX_NAMED]) or "any address that leads somewhere from here"
    text += f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    private = [e for e in map(parse_endpoint, skipped) if e is not None and e.scope is not Scope.WIDE]
    if private:
        what = "address that is" if len(private) == 1 else "addresses that are"
        text += f" (and {len(private)} private {what} not on this network)"
    return text

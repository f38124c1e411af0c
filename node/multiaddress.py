"""libp2p multiaddresses in the form that a node uses: /HOST_TYPE/HOST/tcp|udp/PORT[/quic-v1][/p2p/PEER_ID].

Parsing any other text raises a ValueError, whose message names the remedy.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import Literal, cast

import base58

HostType = Literal["ip4", "ip6", "dns", "dns4", "dns6"]
HOST_TYPES = ("ip4", "ip6", "dns", "dns4", "dns6")
FORM = "/ip4/203.0.113.7/tcp/31337"
NAME_LENGTH_MAX = 253
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
_PORT = re.compile(r"[0-9]{1,5}")
_BASE58 = re.compile(r"[1-9A-HJ-NP-Za-km-z]{1,64}")
_PEER_ID_PREFIXES = ((34, bytes([0x12, 32])), (38, bytes([0, 36])))
"""Length and first bytes of a peer id's multihash. It is the SHA-256 of an RSA key, or contains an Ed25519 key."""


@dataclass(frozen=True, slots=True)
class Multiaddress:
    """A validated multiaddress."""

    host_type: HostType
    host: str
    """An IP address in its shortest form, or a DNS name."""
    port: int
    """From 0 to 65535. The caller defines the meaning of 0."""
    transport: Literal["tcp", "udp"] = "tcp"
    quic: bool = False
    peer_id: str = ""

    def __str__(self) -> str:
        text = f"/{self.host_type}/{self.host}/{self.transport}/{self.port}"
        text += "/quic-v1" if self.quic else ""
        return f"{text}/p2p/{self.peer_id}" if self.peer_id else text

    @property
    def is_wildcard(self) -> bool:
        """Whether the host is 0.0.0.0 or ::, which stand for all addresses of the machine."""
        return self.host in ("0.0.0.0", "::")

    @property
    def is_name(self) -> bool:
        return self.host_type.startswith("dns")

    def as_tcp(self) -> Multiaddress:
        """The address of the same host and port over TCP."""
        return replace(self, transport="tcp", quic=False)

    def at_port(self, port: int) -> Multiaddress:
        return replace(self, port=port)


def parse(text: str) -> Multiaddress:
    """Parse a multiaddress. Raises ValueError."""
    wrong = ValueError(f"{text!r} is not a multiaddress: write one such as {FORM}")
    lead, *parts = text.split("/")
    if lead or len(parts) < 4 or parts[0] not in HOST_TYPES or parts[2] not in ("tcp", "udp"):
        raise wrong
    host_type, transport = cast(HostType, parts[0]), cast(Literal["tcp", "udp"], parts[2])
    rest = parts[4:]
    quic = rest[:1] == ["quic-v1"]
    rest = rest[quic:]
    peer_id = rest[1] if len(rest) == 2 and rest[0] == "p2p" else ""
    if (rest and not peer_id) or (quic and transport == "tcp"):
        raise wrong
    if peer_id and not _is_peer_id(peer_id):
        raise ValueError(f"{peer_id!r} in {text!r} is not a peer id: copy the whole address again")
    return Multiaddress(host_type, _host(host_type, parts[1], text), _port(parts[3], text), transport, quic, peer_id)


def parse_plain(text: str, *, bare_port: int | None = None) -> Multiaddress:
    """Parse a multiaddress, HOST:PORT or [IPv6]:PORT. With `bare_port`, HOST alone is valid and gets that port."""
    if text.startswith("/"):
        return parse(text)
    bare = _bare_host(text)
    if bare is not None and bare_port is not None:
        return Multiaddress(*bare, bare_port)
    host, colon, port = text.rpartition(":")
    if not colon or bare is not None:
        forms = "HOST:PORT" if bare_port is None else "HOST, HOST:PORT"
        raise ValueError(f"{text!r} is not an address: write {forms} or a multiaddress such as {FORM}")
    if host.startswith("[") and host.endswith("]"):
        return Multiaddress("ip6", _host("ip6", host[1:-1], text), _port(port, text))
    host_type: HostType = "ip4" if re.fullmatch(r"[0-9.]+", host) else "dns4"
    return Multiaddress(host_type, _host(host_type, host, text), _port(port, text))


def _bare_host(text: str) -> tuple[HostType, str] | None:
    """Parse an IP address, or a DNS name with a dot (a single word is more often a typo). Returns None for the rest."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        is_name = "." in text and not re.fullmatch(r"[0-9.]+", text) and _is_name(text)
        return ("dns4", text) if is_name else None
    if "%" in text:
        return None
    return ("ip4" if address.version == 4 else "ip6"), str(address)


def _host(host_type: HostType, host: str, text: str) -> str:
    try:
        if host_type == "ip4":
            return str(ipaddress.IPv4Address(host))
        if host_type == "ip6" and "%" not in host:
            return str(ipaddress.IPv6Address(host))
    except ValueError as exc:
        kind = "IPv4" if host_type == "ip4" else "IPv6"
        raise ValueError(f"{host!r} in {text!r} is not an {kind} address: write it such as {FORM}") from exc
    if host_type == "ip6" or not _is_name(host):
        raise ValueError(f"{host!r} in {text!r} is not a host that can be called: write it such as {FORM}")
    return host


def _port(port: str, text: str) -> int:
    if not _PORT.fullmatch(port) or int(port) > 65535:
        raise ValueError(f"{port!r} in {text!r} is not a port: write a number from 0 to 65535")
    return int(port)


def _is_name(host: str) -> bool:
    return len(host) <= NAME_LENGTH_MAX and all(_LABEL.fullmatch(label) for label in host.split("."))


def _is_peer_id(text: str) -> bool:
    data = base58.b58decode(text) if _BASE58.fullmatch(text) else b""
    return any(len(data) == length and data.startswith(prefix) for length, prefix in _PEER_ID_PREFIXES)

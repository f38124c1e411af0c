"""Describes a simulated home: its kind of internet access, its line and its addresses. `world.py` builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["public", "published", "forwarded", "cone", "symmetric", "ipv6_only"]
"""How the machines of a home reach the internet, and whether they can be reached from it.

`public`: a machine with a public address of its own; no router.
`published`: a container at 172.17.0.2 on a host with a public address, which publishes PORT as `docker run -p` does.
`forwarded`: a PC at 192.168.1.2 behind a router with NAT that forwards PORT to it.
`cone`: NAT that keeps the port, the same for all destinations, and drops packets that no machine of the home asked for
    (port-restricted cone; RFC 4787: endpoint-independent mapping, address- and port-dependent filtering).
`symmetric`: NAT with a random outer port for each destination. It drops packets that no machine of the home asked for.
`ipv6_only`: a global IPv6 address behind a firewall, without NAT and without IPv4.
"""
KINDS: tuple[Kind, ...] = get_args(Kind)
PORT = 31337
"""The TCP and UDP port that is published or forwarded to the first machine of a home. It is the nodes' default port."""


@dataclass(frozen=True, slots=True)
class Home:
    """A home to build."""

    kind: Kind
    lines: tuple[float, float] | None = (100.0, 100.0)
    """Rates of the line in Mbit/s up and down; None means no limit."""
    ipv6: bool = False
    """Whether each machine has a global IPv6 address without NAT, in addition to the IPv4 access of the kind."""
    inbound_ipv6: bool = False
    """Whether the firewall lets any host reach PORT of the first machine by IPv6. `public` homes have no firewall."""
    hairpin: bool = True
    """Whether the machines of the home can reach their published or forwarded port at the outer address."""
    machines: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is no kind of home: {', '.join(KINDS)}")
        if self.kind == "public" and self.machines != 1:
            raise ValueError("a public home is one machine; use several homes")

    @property
    def has_ipv4(self) -> bool:
        return self.kind != "ipv6_only"

    @property
    def has_ipv6(self) -> bool:
        return self.ipv6 or self.kind == "ipv6_only"

    @property
    def has_open_port(self) -> bool:
        """Whether any host can reach PORT at the home's outer IPv4 address."""
        return self.kind in ("public", "published", "forwarded")

    # addresses inside the home

    @property
    def subnet(self) -> str:
        """The first two or three numbers of the private IPv4 network, which is the same in all homes of a kind."""
        return "172.17.0" if self.kind == "published" else "192.168.1"

    @property
    def private_network(self) -> str:
        return "172.17.0.0/16" if self.kind == "published" else "192.168.1.0/24"

    @property
    def bridge(self) -> str:
        """The name of the router's interface to the machines."""
        return "docker0" if self.kind == "published" else "lan"


@dataclass(frozen=True, slots=True)
class Lease:
    """The outer addresses of home `number` after `changes` changes of address. They are in global address ranges."""

    number: int
    changes: int = 0

    @property
    def ipv4(self) -> str:
        return f"11.{self.changes}.{self.number}.2"

    @property
    def prefix(self) -> str:
        """The /48 prefix of the home."""
        return f"2a01:d0{self.changes:02x}:{self.number:x}"

    @property
    def router_ipv6(self) -> str:
        """The IPv6 address of the router's outer interface."""
        return f"{self.prefix}::2"

    def machine_ipv6(self, number: int) -> str:
        """The IPv6 address of machine `number` (from 1) behind the router."""
        return f"{self.prefix}:1::{number + 1:x}"


def line_text(lines: tuple[float, float] | None) -> str:
    """The rates of a line as text, such as `100/20`."""
    return "/".join(f"{mbit_s:g}" for mbit_s in lines) if lines else "no limit"


def parse_kinds(text: str) -> list[Kind]:
    """Parse a list of kinds such as `published,cone`. Raises ValueError."""
    return [Home(word).kind for word in text.split(",")]  # type: ignore[arg-type]  # Home checks it.


def parse_lines(text: str) -> list[tuple[float, float]]:
    """Parse a list of lines such as `2/2,10/50`, in Mbit/s up and down. Raises ValueError."""
    pairs = [tuple(map(float, word.split("/"))) for word in text.split(",")]
    if any(len(pair) != 2 or min(pair) <= 0 for pair in pairs):
        raise ValueError(f"{text!r}: a line is UP/DOWN in Mbit/s, such as 10/50")
    return [(pair[0], pair[1]) for pair in pairs]

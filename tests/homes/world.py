"""Homes on a small internet of Linux network namespaces: each home has a router, with machines behind it.

    with world([Home("published", lines=(100, 20)), Home("cone")]) as homes:
        with inside(homes[1].machine.namespace):
            connection = socket.create_connection((homes[0].address, PORT), timeout=5)

It needs root, iproute2 and iptables; `why_not` says what is missing. The names of all namespaces contain this process's
id. The machine's own interfaces and firewall are not touched. At the end, even after a failure, all processes in the
namespaces are killed and the namespaces are removed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count, permutations
from typing import overload

import psutil

from tests.homes import namespace
from tests.homes.home import PORT, Home, Lease
from tests.homes.namespace import inside
from tests.homes.router import rules_ipv4, rules_ipv6

GATEWAY = "11.255.0.1"
GATEWAY_IPV6 = "fe80::1"
"""The address of the provider on every home's line, and of each router on its private network."""
ROUTER_IPV6 = "fe80::2"
MOST_HOMES = 250
_number = count()


@dataclass(slots=True)
class Machine:
    """A computer in a home, with its network namespace and its addresses. An address may be empty."""

    namespace: str
    address: str = ""
    """The IPv4 address, which is private behind a router."""
    ipv6: str = ""
    """The global IPv6 address."""


class AttachedHome:
    """A home in a world. Its line and addresses can change while programs run in it."""

    def __init__(self, world: World, home: Home, number: int, prefix: str) -> None:
        self.home, self.number = home, number
        self.name = f"{number} {home.kind}"
        self.lines = home.lines
        """The current rates of the line in Mbit/s up and down, or None."""
        self.lease = Lease(number)
        self.port = f"home{number}"
        """The provider's end of the line. It is an interface in the namespace of the internet."""
        self.machines = [
            Machine(f"{prefix}-home{number}{f'-{i}' if i else ''}", f"{home.subnet}.{i + 2}" if home.has_ipv4 else "")
            for i in range(home.machines)
        ]
        self.router = self.machine.namespace if home.kind == "public" else f"{prefix}-router{number}"
        """The namespace with the outer interface. For a public machine it is the machine's own namespace."""
        self.wan = "eth0" if home.kind == "public" else "wan"
        self._world = world

    @property
    def machine(self) -> Machine:
        """The first machine, to which PORT is forwarded."""
        return self.machines[0]

    @property
    def address(self) -> str:
        """The current outer IPv4 address, or an empty string."""
        return self.lease.ipv4 if self.home.has_ipv4 else ""

    @property
    def announce(self) -> list[str]:
        """The multiaddresses at which any host can now reach PORT of the first machine. Empty if there are none."""
        ipv4 = [f"/ip4/{self.address}/tcp/{PORT}"] if self.home.has_open_port else []
        open_ipv6 = self.home.has_ipv6 and (self.home.inbound_ipv6 or self.home.kind == "public")
        return [*ipv4, *([f"/ip6/{self.machine.ipv6}/tcp/{PORT}"] if open_ipv6 else [])]

    # the line

    def limit(self, lines: tuple[float, float] | None) -> None:
        """Limit the line to these rates in Mbit/s up and down; None removes the limit."""
        up_mbit_s, down_mbit_s = lines or (None, None)
        namespace.shape(self.router, self.wan, up_mbit_s)
        namespace.shape(self._world.internet, self.port, down_mbit_s)
        self.lines = lines

    def sent_bytes(self) -> int:
        """The bytes that the home has sent over its line, including headers."""
        return namespace.counters(self._world.internet, self.port)[1]

    def received_bytes(self) -> int:
        return namespace.counters(self._world.internet, self.port)[0]

    def cut_off(self) -> None:
        """Drop all packets on the line. The interfaces stay up, so programs get no error."""
        self._world.cut_off([self])

    def reconnect(self) -> None:
        self._world.reconnect([self])

    def change_address(self) -> None:
        """Give the home a new IPv4 address and a new IPv6 prefix.

        Old connections end, because the router forgets them and the old addresses are no longer routed.
        """
        old, self.lease = self.lease, Lease(self.number, self.lease.changes + 1)
        self._lease_addresses()
        lines = [f"address delete {old.ipv4}/32 dev {self.wan}"] if self.home.has_ipv4 else []
        lines += [f"address delete {old.router_ipv6}/64 dev {self.wan}"] if self.home.has_ipv6 else []
        namespace.ip(self.router, *lines)
        if self.home.kind != "public":
            namespace.forget_connections(self.router)
            for number, machine in enumerate(self.machines, 1):
                if self.home.has_ipv6:
                    namespace.ip(machine.namespace, f"address delete {old.machine_ipv6(number)}/64 dev eth0")
        lines = [f"route delete {old.ipv4}/32"] if self.home.has_ipv4 else []
        lines += [f"route delete {old.prefix}::/48"] if self.home.has_ipv6 else []
        namespace.ip(self._world.internet, *lines)

    # building

    def build(self) -> None:
        internet, home = self._world.internet, self.home
        for made in {self.router, *(machine.namespace for machine in self.machines)}:
            self._world.make(made)
        if home.kind != "public":
            namespace.sysctl(self.router, {"net/ipv4/ip_forward": 1, "net/ipv6/conf/all/forwarding": 1})
            self._build_inside()
        namespace.ip(
            internet,
            f"link add {self.port} type veth peer name {self.wan} netns {self.router}",
            f"link set {self.port} up",
            f"address add {GATEWAY_IPV6}/64 dev {self.port} nodad",
        )
        namespace.ip(self.router, f"address add {ROUTER_IPV6}/64 dev {self.wan} nodad", f"link set {self.wan} up")
        self._lease_addresses()
        if home.kind != "public":
            if home.has_ipv4:
                namespace.filter_packets(self.router, rules_ipv4(home, self.machine.address), family=4)
            if home.has_ipv6:
                namespace.filter_packets(self.router, rules_ipv6(home, self.machine.ipv6), family=6)
        if home.lines:
            self.limit(home.lines)

    def _build_inside(self) -> None:
        """Make the private network, a bridge in the router to which the machines are connected."""
        home = self.home
        namespace.ip(
            self.router,
            f"link add {home.bridge} type bridge stp_state 0 forward_delay 0",
            f"link set {home.bridge} up",
            f"address add {GATEWAY_IPV6}/64 dev {home.bridge} nodad",
            *([f"address add {home.subnet}.1/{home.private_network.split('/')[1]} dev {home.bridge}"]
              if home.has_ipv4 else []),
        )  # fmt: skip
        # Older kernels send frames between the machines through the packet filter if Docker is running.
        off = {f"net/bridge/bridge-nf-call-{table}tables": 0 for table in ("ip", "ip6")}
        namespace.sysctl(self.router, off)
        for number, machine in enumerate(self.machines, 1):
            namespace.ip(
                self.router,
                f"link add machine{number} type veth peer name eth0 netns {machine.namespace}",
                f"link set machine{number} master {home.bridge} up",
            )
            if home.kind == "published" and not home.has_ipv6:
                namespace.sysctl(machine.namespace, {"net/ipv6/conf/eth0/disable_ipv6": 1})
            network = f"{machine.address}/{home.private_network.split('/')[1]}"
            ipv4 = [f"address add {network} dev eth0", f"route add default via {home.subnet}.1"]
            namespace.ip(machine.namespace, "link set eth0 up", *(ipv4 if home.has_ipv4 else []))
            if home.has_ipv6:
                namespace.ip(machine.namespace, f"route add default via {GATEWAY_IPV6} dev eth0")

    def _lease_addresses(self) -> None:
        """Set and route the addresses of the lease: on the outer interface and, for IPv6, on the machines."""
        home, lease = self.home, self.lease
        routes, outer = [], []
        if home.has_ipv4:
            routes += [f"route replace {lease.ipv4}/32 dev {self.port}"]
            outer += [f"address add {lease.ipv4}/32 dev {self.wan}"]
            outer += [f"route replace default via {GATEWAY} dev {self.wan} onlink src {lease.ipv4}"]
        if home.has_ipv6:
            routes += [f"route replace {lease.prefix}::/48 via {ROUTER_IPV6} dev {self.port}"]
            outer += [f"address add {lease.router_ipv6}/64 dev {self.wan} nodad"]
            outer += [f"route replace default via {GATEWAY_IPV6} dev {self.wan}"]
        namespace.ip(self._world.internet, *routes)
        namespace.ip(self.router, *outer)
        if home.kind == "public":
            self.machine.address, self.machine.ipv6 = self.address, lease.router_ipv6 if home.has_ipv6 else ""
        elif home.has_ipv6:
            namespace.ip(self.router, f"route replace {lease.prefix}:1::/64 dev {home.bridge}")
            for number, machine in enumerate(self.machines, 1):
                machine.ipv6 = lease.machine_ipv6(number)
                namespace.ip(machine.namespace, f"address add {machine.ipv6}/64 dev eth0 nodad")


class World(Sequence[AttachedHome]):
    """A context manager for the internet and its homes, in the order in which they were attached."""

    def __init__(self) -> None:
        self._prefix = f"dn{os.getpid()}-{next(_number)}"
        self._made: list[str] = []
        self._homes: list[AttachedHome] = []
        self._islands: dict[int, int] = {}
        """The island of each home that is cut off, by the home's number. Homes of one island reach each other."""
        self.internet = f"{self._prefix}-internet"
        """The namespace of the provider that connects all homes."""

    def __enter__(self) -> World:
        try:
            self.make(self.internet)
            forwards = {"net/ipv4/ip_forward": 1, "net/ipv6/conf/all/forwarding": 1}
            # A provider drops packets whose source address it has not assigned.
            namespace.sysctl(self.internet, {**forwards, "net/ipv4/conf/all/rp_filter": 1})
            blackholes = ("route add blackhole default", "route add blackhole ::/0")
            namespace.ip(self.internet, f"address add {GATEWAY}/32 dev lo", *blackholes)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all namespaces with their processes and interfaces."""
        while self._made:
            namespace.delete(self._made.pop())

    def make(self, name: str) -> None:
        """Make a namespace that is removed with the world."""
        self._made.append(name)
        namespace.add(name)

    @overload
    def __getitem__(self, index: int) -> AttachedHome: ...

    @overload
    def __getitem__(self, index: slice) -> list[AttachedHome]: ...

    def __getitem__(self, index: int | slice) -> AttachedHome | list[AttachedHome]:
        return self._homes[index]

    def __len__(self) -> int:
        return len(self._homes)

    def attach(self, home: Home) -> AttachedHome:
        if len(self) == MOST_HOMES:
            raise ValueError(f"a world has at most {MOST_HOMES} homes")
        attached = AttachedHome(self, home, len(self) + 1, self._prefix)
        attached.build()
        self._homes.append(attached)
        return attached

    def cut_off(self, homes: Iterable[AttachedHome]) -> None:
        """Split the world in two: these homes, and all others. The interfaces stay up."""
        island = max(self._islands.values(), default=0) + 1
        self._islands.update({home.number: island for home in homes})
        self._filter()

    def reconnect(self, homes: Iterable[AttachedHome]) -> None:
        for home in homes:
            self._islands.pop(home.number, None)
        self._filter()

    def _filter(self) -> None:
        apart = [
            (one.port, other.port)
            for one, other in permutations(self._homes, 2)
            if self._islands.get(one.number, 0) != self._islands.get(other.number, 0)
        ]
        rules = ["*filter", *(f"-A FORWARD -i {one} -o {other} -j DROP" for one, other in apart), "COMMIT"]
        for family in (4, 6):
            namespace.filter_packets(self.internet, rules, family=family)


@contextmanager
def world(homes: Iterable[Home]) -> Iterator[World]:
    """Build a world of these homes in this order. It is removed at the end of the context."""
    with World() as made:
        for home in homes:
            made.attach(home)
        yield made


def remove_orphans() -> list[str]:
    """Remove the worlds of killed processes and kill the programs in them. Returns the names of their namespaces."""
    names = [path.name for path in namespace.NAMES.glob("dn*-*")]
    owners = {name: int(name[2:].partition("-")[0]) for name in names if name[2:].partition("-")[0].isdigit()}
    orphans = sorted(name for name, pid in owners.items() if not psutil.pid_exists(pid))
    for name in orphans:
        namespace.delete(name)
    return orphans


@cache
def why_not() -> str:
    """Say in one sentence why this machine cannot build a world. Empty if it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "Homes are made of network namespaces, which need root: run as root to include these."
    if missing := [tool for tool in ("ip", "tc", "iptables", "ip6tables") if shutil.which(tool) is None]:
        return f"Not installed: {', '.join(missing)} (Debian's packages iproute2 and iptables)."
    try:
        with world([Home("forwarded", ipv6=True), Home("symmetric")]) as homes:
            homes[0].change_address()
            homes[1].cut_off()
            with inside(homes[1].machine.namespace):
                pass
    except (subprocess.SubprocessError, OSError) as exc:
        said = getattr(exc, "stderr", "") or exc
        return f"This machine does not let root build network namespaces: {said}".strip()
    return ""

"""Networks of the tests' own, made of Linux network namespaces: hosts on a switch, routers with NAT, slow lines, cuts.

Needs root and iproute2 (`iptables` too for NAT); `why_not` says what is missing. Everything lives in namespaces whose
names carry this process's id, the switch included, so the machine's own interfaces and firewall are never touched; what
was made is removed at the end, also after a failure. Knows no node.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from types import TracebackType

COMMAND_S = 10.0
CLONE_NEWNET = 0x40000000
SUBNET = "10.77.0"
_number = count()
BRIDGES = ("here", "there")
"""Two switches in one namespace: a host on the other one is cut off, without any sign that its line is dead."""


@dataclass(frozen=True, slots=True)
class Host:
    """One machine: its namespace, its address, and its port on the switch (a router's, for a host behind one)."""

    namespace: str
    address: str
    port: str
    gateway: str = ""
    """Namespace of the router in front of it."""


class Network:
    """A switch and its hosts. A context manager."""

    def __init__(self) -> None:
        self._prefix = f"dn{os.getpid()}-{next(_number)}"
        self._made: list[str] = []
        self._hosts = 0

    def __enter__(self) -> Network:
        try:
            self._switch = self._namespace("switch")
            for bridge in BRIDGES:
                _ip(self._switch, "link", "add", bridge, "type", "bridge", "stp_state", "0", "forward_delay", "0")
                _ip(self._switch, "link", "set", bridge, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove every namespace; the interfaces in them go with them."""
        while self._made:
            with suppress(subprocess.SubprocessError):
                _run("ip", "netns", "delete", self._made.pop())

    # hosts

    def host(self) -> Host:
        """A machine on the switch, open to all."""
        self._hosts += 1
        number = self._hosts
        namespace, port, address = self._namespace(f"h{number}"), f"port{number}", f"{SUBNET}.{number}"
        _ip(self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip(self._switch, "link", "set", port, "master", BRIDGES[0], "up")
        _ip(namespace, "address", "add", f"{address}/24", "dev", "eth0")
        _ip(namespace, "link", "set", "eth0", "up")
        return Host(namespace, address, port)

    def host_behind_nat(self) -> Host:
        """A machine whose router hides it behind its own address, and drops what nobody inside has asked for."""
        router = self.host()
        inside, subnet = self._namespace(f"n{self._hosts}"), f"192.168.{self._hosts}"
        _ip(router.namespace, "link", "add", "inside", "type", "veth", "peer", "name", "eth0", "netns", inside)
        _ip(router.namespace, "address", "add", f"{subnet}.1/24", "dev", "inside")
        _ip(router.namespace, "link", "set", "inside", "up")
        _ip(inside, "address", "add", f"{subnet}.2/24", "dev", "eth0")
        _ip(inside, "link", "set", "eth0", "up")
        _ip(inside, "route", "add", "default", "via", f"{subnet}.1")
        known = ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")
        for rule in (
            ("-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE"),
            ("-A", "INPUT", *known),
            ("-A", "INPUT", "-i", "eth0", "-j", "DROP"),
            ("-A", "FORWARD", *known),
            ("-A", "FORWARD", "-i", "eth0", "-j", "DROP"),
        ):
            _run("ip", "netns", "exec", router.namespace, "iptables", "-w", *rule)
        _run("ip", "netns", "exec", router.namespace, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        return Host(inside, f"{subnet}.2", router.port, gateway=router.namespace)

    def _namespace(self, name: str) -> str:
        made = f"{self._prefix}-{name}"
        _run("ip", "netns", "add", made)
        self._made.append(made)
        _ip(made, "link", "set", "lo", "up")
        return made

    # lines

    def limit(self, host: Host, *, up_mbit_s: float, down_mbit_s: float) -> None:
        """How much the host's line carries each way."""
        for namespace, device, rate in (
            (host.gateway or host.namespace, "eth0", up_mbit_s),
            (self._switch, host.port, down_mbit_s),
        ):
            shape = ("rate", f"{rate}mbit", "burst", "64kb", "latency", "200ms")
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *shape)

    def sent_bytes(self, host: Host) -> int:
        """By the host's own interface so far, headers included."""
        return self._counted(host, "tx_bytes")

    def received_bytes(self, host: Host) -> int:
        return self._counted(host, "rx_bytes")

    def _counted(self, host: Host, what: str) -> int:
        words = ("ip", "netns", "exec", host.namespace, "cat", f"/sys/class/net/eth0/statistics/{what}")
        return int(_run(*words))

    def cut_off(self, hosts: Sequence[Host]) -> None:
        """These reach one another, and the rest one another; nothing gets across, and nobody is told."""
        self._plug(hosts, BRIDGES[1])

    def reconnect(self, hosts: Sequence[Host]) -> None:
        self._plug(hosts, BRIDGES[0])

    def _plug(self, hosts: Sequence[Host], bridge: str) -> None:
        for host in hosts:
            _ip(self._switch, "link", "set", host.port, "master", bridge)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Sockets that this thread makes belong to the namespace, also afterwards."""
    with Path("/proc/thread-self/ns/net").open("rb") as home, Path("/run/netns", namespace).open("rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@cache
def why_not(*, nat: bool = False) -> str:
    """One sentence on why there can be no such network here; empty if there can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "Network namespaces need root: run the tests as root to include these."
    missing = [tool for tool in ("ip", "tc", *(("iptables",) if nat else ())) if shutil.which(tool) is None]
    if missing:
        return f"Not installed: {', '.join(missing)} (Debian's packages iproute2 and iptables)."
    try:
        with Network() as network:
            host = network.host_behind_nat() if nat else network.host()
            network.limit(host, up_mbit_s=100, down_mbit_s=100)
            with inside(host.namespace):
                pass
    except (subprocess.SubprocessError, OSError) as exc:
        said = getattr(exc, "stderr", "") or exc
        return f"This machine does not let root make network namespaces: {said}".strip()
    return ""


def _ip(namespace: str, *words: str) -> None:
    _run("ip", "-n", namespace, *words)


def _run(*words: str) -> str:
    """Raises CalledProcessError, with what it said, or TimeoutExpired."""
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=COMMAND_S).stdout

"""Commands, firewall rules and sockets inside Linux network namespaces. Needs root, iproute2 and iptables."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import psutil

COMMAND_S = 20.0
END_S = 5.0
"""Timeout for the end of killed processes."""
CLONE_NEWNET = 0x40000000
NAMES = Path("/run/netns")
NETLINK_NETFILTER = 12
CONNTRACK_DELETE = (1 << 8) | 2
"""Netlink message IPCTNL_MSG_CT_DELETE of subsystem ctnetlink (linux/netfilter/nfnetlink_conntrack.h)."""
CONGESTION_CONTROL = "reno"
"""Linux and Windows use CUBIC by default, but a namespace can choose it only if the host allows that. Every
namespace can choose Reno, and CUBIC behaves like Reno on home lines (RFC 9438, section 4.3)."""
REQUEST_AND_ACKNOWLEDGE = 0x1 | 0x4
NETLINK_HEADER = struct.Struct("=IHHII")
_number = count()


def run(*words: str, text: str = "") -> str:
    """Run a command with `text` as input and return its output. Raises CalledProcessError or TimeoutExpired."""
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=True, timeout=COMMAND_S)
    return done.stdout


def ip(namespace: str, *lines: str) -> None:
    """Run these lines as `ip` commands in the namespace. The first line that fails ends the batch."""
    run("ip", "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")


def add(namespace: str) -> None:
    """Make a namespace whose loopback interface is up and which has no address autoconfiguration."""
    run("ip", "netns", "add", namespace)
    sysctl(namespace, {"net/ipv6/conf/default/accept_ra": 0, "net/ipv6/conf/default/accept_dad": 0})
    sysctl(namespace, {"net/ipv4/tcp_congestion_control": CONGESTION_CONTROL})
    ip(namespace, "link set lo up")


def delete(namespace: str) -> None:
    """Kill the processes that still run in the namespace by their ids, and remove the namespace with its interfaces."""
    with suppress(subprocess.SubprocessError):
        killed = []
        for word in run("ip", "netns", "pids", namespace).split():
            if int(word) != os.getpid():
                with suppress(psutil.NoSuchProcess):
                    killed.append(psutil.Process(int(word)))
                    killed[-1].kill()
        ends_at_s = time.monotonic() + END_S
        while any(map(_runs, killed)) and time.monotonic() < ends_at_s:
            time.sleep(0.01)
    with suppress(subprocess.SubprocessError):
        run("ip", "netns", "delete", namespace)


def _runs(process: psutil.Process) -> bool:
    """Whether the process has not ended. Leaves the exit status of a child to whoever waits for it."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def filter_packets(namespace: str, rules: Sequence[str], *, family: int) -> None:
    """Replace all rules of the tables named in these lines of `iptables-save`. `family` is 4 or 6."""
    tool = "iptables-restore" if family == 4 else "ip6tables-restore"
    run("ip", "netns", "exec", namespace, tool, text="\n".join(rules) + "\n")


def sysctl(namespace: str, values: Mapping[str, int | str]) -> None:
    """Set kernel parameters of the namespace. Parameters that this kernel does not have are skipped."""
    with inside(namespace):
        for name, value in values.items():
            with suppress(FileNotFoundError):
                Path("/proc/sys", name).write_text(str(value))


def shape(namespace: str, device: str, mbit_s: float | None) -> None:
    """Limit the rate, in Mbit/s of whole frames, at which data leaves through a device. None removes the limit.

    A full queue holds 200 ms, as in a modem, and drops the rest.
    """
    if mbit_s is None:
        with suppress(subprocess.CalledProcessError):  # There may be no limit.
            run("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")
        return
    burst_bytes = max(8192, int(mbit_s * 1e6 / 8 * 0.005))
    words = ("rate", f"{mbit_s}mbit", "burst", f"{burst_bytes}b", "latency", "200ms")
    # A new handle makes a new queue. A packet in the old queue could be too large for a smaller burst.
    handle = f"{next(_number) % 0xFFF0 + 1:x}:"
    run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "handle", handle, "tbf", *words)


def counters(namespace: str, device: str) -> tuple[int, int]:
    """The bytes that a device has sent and received so far, including Ethernet headers."""
    (link,) = json.loads(run("ip", "-n", namespace, "-s", "-j", "link", "show", "dev", device))
    return int(link["stats64"]["tx"]["bytes"]), int(link["stats64"]["rx"]["bytes"])


def forget_connections(namespace: str) -> None:
    """Empty the connection tracking table of the namespace, as a router does after a change of address."""
    with inside(namespace), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
        netlink.settimeout(COMMAND_S)
        netlink.bind((0, 0))
        family = struct.pack("=BBH", socket.AF_UNSPEC, 0, 0)
        size = NETLINK_HEADER.size + len(family)
        netlink.send(NETLINK_HEADER.pack(size, CONNTRACK_DELETE, REQUEST_AND_ACKNOWLEDGE, 1, 0) + family)
        (error,) = struct.unpack_from("=i", netlink.recv(4096), NETLINK_HEADER.size)
        if error:
            raise OSError(-error, f"flushing the connections of {namespace}: {os.strerror(-error)}")


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Enter the namespace with this thread. Sockets that it opens inside belong to the namespace for their lifetime."""
    with Path("/proc/thread-self/ns/net").open("rb") as home, Path(NAMES, namespace).open("rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")

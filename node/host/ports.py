"""Chooses the TCP ports that a node listens on, holds them while its worker restarts, and remembers them.

A port is probed by binding and listening without SO_REUSEPORT, which detects even programs that share their port.
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from node.errors import MachineError
from node.multiaddress import Multiaddress

logger = logging.getLogger(__name__)

LISTEN_PORT_FILE, API_PORT_FILE = "port", "api-port"
"""Files in the data folder's cache."""
PORTS_TRIED = 100
"""Number of ports to try from the default port upwards, before any free port is taken."""
FREE_PORT_TRIES = 16
IN_USE = "port_in_use"
CODES = frozenset({IN_USE, "no_such_address", "port_not_permitted", "cannot_listen"})
"""Error codes of addresses on which the node cannot listen."""
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


# Reservation


def listen_error(number: int | None, address: Multiaddress) -> MachineError:
    """Return the error for an address on which the node cannot listen. `number` is the errno; None means unknown."""
    host, family = address.host, address.host_type
    anywhere = f"/{family}/{'::' if family == 'ip6' else '0.0.0.0'}/tcp"
    if number == errno.EADDRINUSE:
        code = IN_USE
        reason = "another program has the port; stop it, or use any free port with "
        reason += f"--swarm.listen /{family}/{host}/tcp/0"
    elif number in _ABSENT and address.is_wildcard:
        code, reason = "no_such_address", "this machine does not have IPv6; remove it from swarm.listen"
    elif number in _ABSENT:
        code = "no_such_address"
        reason = f"this machine does not have the address {host}; listen on all with --swarm.listen {anywhere}/0"
    elif number in (errno.EACCES, errno.EPERM):
        code = "port_not_permitted"
        reason = "this user has no permission, because ports below 1024 belong to the system; choose a higher one with "
        reason += f"--swarm.listen {anywhere}/31337"
    else:
        code, reason = "cannot_listen", f"error {errno.errorcode.get(number or 0, 'unknown')}; change swarm.listen"
    return MachineError(f"Cannot listen on {host} TCP port {address.port}: {reason}.", code=code)


@dataclass(slots=True)
class Reservation:
    """Free addresses, with locks that keep other nodes from them until the reservation is closed."""

    addresses: tuple[Multiaddress, ...] = ()
    wanted: int = 0
    """The default port; 0 means any."""
    chosen: int = 0
    """The port that was taken for `wanted`; 0 if not all addresses may move."""
    _locks: ExitStack = field(default_factory=ExitStack)

    @property
    def port(self) -> int:
        """The port of the first address; 0 without addresses."""
        return self.addresses[0].port if self.addresses else 0

    @property
    def has_moved(self) -> bool:
        """Whether another port was taken instead of the default."""
        return self.wanted != 0 and self.chosen not in (0, self.wanted)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._locks.close()


def reserve(addresses: Sequence[Multiaddress], *, held: Collection[str] = ()) -> Reservation:
    """Reserve these addresses, with one free port in place of every port 0. Raises MachineError.

    `::` is left out if the machine has no IPv6 and there is another address. `held` are addresses that a `PortHold` of
    this node holds already.
    """
    for _ in range(FREE_PORT_TRIES):
        try:
            return _reserve(addresses, held)
        except MachineError as exc:
            if exc.code != IN_USE or all(address.port for address in addresses):
                raise
            refused = exc  # The port is free on the first address, but not on another.
    raise refused


def _reserve(addresses: Sequence[Multiaddress], held: Collection[str]) -> Reservation:
    with ExitStack() as locks, ExitStack() as probes:
        free_port, reserved, locked = 0, [], set[int]()
        for address in addresses:
            wanted = address.at_port(address.port or free_port)
            try:
                port = _probe(wanted, probes)
                if port not in locked:
                    _lock(f"port/{port}", locks)
                    locked.add(port)
                if str(wanted.at_port(port)) not in held:
                    _lock(f"listen/{wanted.at_port(port)}", locks)
            except OSError as exc:
                if exc.errno in _ABSENT and address.host == "::" and len(addresses) > 1:
                    logger.debug("This machine has no IPv6, so the node does not listen on %s.", address)
                    continue
                raise listen_error(exc.errno, wanted) from exc
            free_port = free_port if address.port else port
            reserved.append(address.at_port(port))
        return Reservation(tuple(reserved), _locks=locks.pop_all())


def _probe(address: Multiaddress, probes: ExitStack) -> int:
    """Open a socket with libp2p's options, which the stack `probes` closes. Returns its port; raises OSError."""
    family = socket.AF_INET6 if address.host_type == "ip6" else socket.AF_INET
    listener = probes.enter_context(socket.socket(family, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listener.bind((address.host, address.port))
    listener.listen(1)
    return int(listener.getsockname()[1])


def _lock(name: str, locks: ExitStack) -> None:
    """Take a lock against other nodes on this machine until `locks` closes. Raises OSError (EADDRINUSE).

    A node holds `port/N` while it starts, and `listen/ADDRESS` even while its worker restarts. Two nodes may have the
    same port on different addresses. The lock is an abstract Unix socket: it belongs to a network namespace, as ports
    do, and the kernel removes it with its process. Only Linux has these; elsewhere, p2pd's error reports a conflict.
    """
    if sys.platform == "linux":
        lock = locks.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        lock.bind(f"\0diloco-node/{name}")


class PortHold:
    """Keeps other nodes from this node's addresses while its worker restarts and nothing listens on them.

    The supervisor has one. Only nodes with the same address respect it. Another program, or a node with the same port
    on another address, can still take the port.
    """

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        self._locks = ExitStack()

    def hold(self, addresses: Sequence[str]) -> None:
        """Lock these addresses, on which the worker listens, against other nodes, and unlock all others."""
        if tuple(addresses) == self.addresses:
            return
        self.close()
        for address in addresses:
            with suppress(OSError):  # Another node holds this address.
                _lock(f"listen/{address}", self._locks)
                self.addresses += (address,)

    def close(self) -> None:
        self._locks.close()
        self.addresses = ()


# Choice


@dataclass(frozen=True, slots=True)
class PortFile:
    """Remembers which port was taken for a wanted one, because invites and peer lists contain that port.

    The file holds both numbers.
    """

    path: Path

    def recall(self, wanted: int) -> int:
        """Return the port that was taken for `wanted`; 0 if none is known."""
        with suppress(OSError, ValueError):
            stored, port = (int(word) for word in self.path.read_text().split())
            if stored == wanted and 0 < port < 2**16:
                return port
        return 0

    def remember(self, wanted: int, port: int) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(f"{wanted} {port}\n")
        except OSError as exc:
            logger.warning("The port could not be written to %s: %s.", self.path, exc.strerror)


def candidates(wanted: int, remembered: int) -> Iterable[int]:
    """Return the ports to try for a default one: the remembered port, the default, those above it, then any (0)."""
    last = min(wanted + PORTS_TRIED, 2**16)
    return dict.fromkeys([*([remembered] if remembered else []), *range(wanted, last), 0])


def choose(
    listen: Sequence[Multiaddress], file: PortFile, *, may_move: bool, held: Collection[str] = ()
) -> Reservation:
    """Reserve the addresses to listen on. Raises MachineError.

    `may_move` says that the port is a default, which another one may replace. For port 0, the remembered port is taken
    if it is free. `held` is as in `reserve`.
    """
    wanted = listen[0].port if may_move and listen else 0
    movable = [address.port == wanted for address in listen]
    if not any(movable):
        return reserve(listen, held=held)
    remembered = file.recall(wanted)
    ports = candidates(wanted, remembered) if wanted else dict.fromkeys([remembered, 0])
    for port in ports:
        addresses = [a.at_port(port) if moves else a for a, moves in zip(listen, movable, strict=True)]
        try:
            reserved = reserve(addresses, held=held)
        except MachineError as exc:
            if exc.code != IN_USE or not port:
                raise
        else:
            reserved.wanted, reserved.chosen = wanted, reserved.port if all(movable) else 0
            return reserved
    raise AssertionError("the last candidate is any port")


def moved_notice(key: str, wanted: int, port: int) -> str:
    """Return the notice for an owner whose node does not use the default port."""
    return (
        f"TCP port {wanted} was in use by another program, so this node listens on {port} and keeps that port for "
        f"later starts; set {key} to choose another."
    )

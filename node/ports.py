"""Which TCP ports a node listens on: chosen by binding them, reserved while it starts, remembered for its next start.

A probe binds and listens without SO_REUSEPORT, so it sees every holder, also one that shares its port.
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from node.errors import MachineError
from node.multiaddress import Multiaddress

logger = logging.getLogger(__name__)

LISTEN_PORT_FILE, API_PORT_FILE = "port", "api-port"
"""In the data folder's cache."""
PORTS_TRIED = 100
"""From the default one upwards; then any free one will do."""
FREE_PORT_TRIES = 16
IN_USE = "port_in_use"
CODES = frozenset({IN_USE, "no_such_address", "port_not_permitted", "cannot_listen"})
"""Of the errors of a port that cannot be listened on."""
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


# What is taken


def refusal(number: int | None, address: Multiaddress) -> MachineError:
    """Why an address cannot be listened on, with the remedy. `number`: of the system's error."""
    place, host = f"{address.host} TCP port {address.port}", address.host
    anywhere = f"/{address.host_type}/{'::' if address.host_type == 'ip6' else '0.0.0.0'}/tcp"
    if number == errno.EADDRINUSE:
        return MachineError(
            f"Cannot listen on {place}: another program has the port; end that, or take any free port with "
            f"--swarm.listen /{address.host_type}/{host}/tcp/0.",
            code=IN_USE,
        )
    if number in _ABSENT:
        lacks = "IPv6" if address.is_wildcard else f"the address {host}"
        mend = "leave that address out of" if address.is_wildcard else f"listen on all addresses with {anywhere}/0 in"
        return MachineError(f"Cannot listen on {place}: this machine does not have {lacks}; {mend} swarm.listen.",
                            code="no_such_address")  # fmt: skip
    if number in (errno.EACCES, errno.EPERM):
        return MachineError(
            f"Cannot listen on {place}: this user may not, as ports below 1024 are the system's; choose a higher one "
            f"with --swarm.listen {anywhere}/31337.",
            code="port_not_permitted",
        )
    return MachineError(
        f"Cannot listen on {place} ({errno.errorcode.get(number or 0, 'unknown error')}): change swarm.listen.",
        code="cannot_listen",
    )


@dataclass(slots=True)
class Reservation:
    """Addresses that were free, and the ports' locks, which keep other nodes off until it is closed."""

    addresses: tuple[Multiaddress, ...] = ()
    wanted: int = 0
    chosen: int = 0
    """The port taken where `wanted` (0: any) was asked for and another one would do, too; 0 where none would."""
    _locks: ExitStack = field(default_factory=ExitStack)

    @property
    def port(self) -> int:
        """Of the first address; 0 where there is none."""
        return self.addresses[0].port if self.addresses else 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._locks.close()


def reserve(addresses: Sequence[Multiaddress]) -> Reservation:
    """These addresses, with one free port in place of every port 0. Raises MachineError where one cannot be had.

    `::` is left out where the machine has no IPv6 and another address remains.
    """
    for _ in range(FREE_PORT_TRIES):
        try:
            return _reserve(addresses)
        except MachineError as exc:
            if exc.code != IN_USE or all(address.port for address in addresses):
                raise
            refused = exc  # Free for the first address, and taken for another one.
    raise refused


def _reserve(addresses: Sequence[Multiaddress]) -> Reservation:
    with ExitStack() as locks, ExitStack() as probes:
        free_port, had, locked = 0, [], set[int]()
        for address in addresses:
            wanted = address.at_port(address.port or free_port)
            try:
                port = _probe(wanted, probes)
                if port not in locked:
                    _lock(port, locks)
                    locked.add(port)
            except OSError as exc:
                if exc.errno in _ABSENT and address.host == "::" and len(addresses) > 1:
                    logger.debug("This machine has no IPv6: %s is left out.", address)
                    continue
                raise refusal(exc.errno, wanted) from exc
            free_port = free_port if address.port else port
            had.append(address.at_port(port))
        return Reservation(tuple(had), _locks=locks.pop_all())


def _probe(address: Multiaddress, probes: ExitStack) -> int:
    """Listen for a moment, as libp2p does. Returns the port; raises OSError."""
    family = socket.AF_INET6 if address.host_type == "ip6" else socket.AF_INET
    listener = probes.enter_context(socket.socket(family, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listener.bind((address.host, address.port))
    listener.listen(1)
    return int(listener.getsockname()[1])


def _lock(port: int, locks: ExitStack) -> None:
    """Raises OSError (EADDRINUSE) where another node is starting on this port.

    An abstract unix socket: like the port itself it belongs to the network namespace, and the kernel removes it with
    its holder. Other systems than Linux have none; there p2pd's own refusal must do.
    """
    if sys.platform == "linux":
        lock = locks.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        lock.bind(f"\0diloco-node/port/{port}")


# What is chosen


@dataclass(frozen=True, slots=True)
class PortFile:
    """Remembers which port was taken for a wanted one: invites and the others' peer lists name it.

    A file with both numbers. What was taken for another wish is of no use.
    """

    path: Path

    def recall(self, wanted: int) -> int:
        """0 where nothing is known."""
        with suppress(OSError, ValueError):
            asked, port = (int(word) for word in self.path.read_text().split())
            if asked == wanted and 0 < port < 2**16:
                return port
        return 0

    def remember(self, wanted: int, port: int) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(f"{wanted} {port}\n")
        except OSError as exc:
            logger.warning("The port could not be noted in %s: %s.", self.path, exc.strerror)


def candidates(wanted: int, remembered: int) -> Iterable[int]:
    """The ports to try for a default one that nobody chose: the last one, the default, the next ones, any free one."""
    last = min(wanted + PORTS_TRIED, 2**16)
    return dict.fromkeys([*([remembered] if remembered else []), *range(wanted, last), 0])


def choose(listen: Sequence[Multiaddress], file: PortFile, *, may_move: bool) -> Reservation:
    """Reserve the addresses to listen on. Raises MachineError.

    `may_move`: nobody chose their port, so another one will do, too. Port 0 is the one of last time while that is free.
    """
    wanted = listen[0].port if may_move and listen else 0
    movable = [address.port == wanted for address in listen]
    if not any(movable):
        return reserve(listen)
    remembered = file.recall(wanted)
    ports = candidates(wanted, remembered) if wanted else dict.fromkeys([remembered, 0])
    for port in ports:
        addresses = [a.at_port(port) if moves else a for a, moves in zip(listen, movable, strict=True)]
        try:
            reserved = reserve(addresses)
        except MachineError as exc:
            if exc.code != IN_USE or not port:
                raise
        else:
            reserved.wanted, reserved.chosen = wanted, reserved.port if all(movable) else 0
            return reserved
    raise AssertionError("the last candidate is any port")


def moved_notice(key: str, wanted: int, port: int) -> str:
    """What a person is told who gets another port than the default one."""
    return (
        f"TCP port {wanted} was in use by another program, so this node listens on {port} and keeps that port for its "
        f"next starts; set {key} to choose another."
    )

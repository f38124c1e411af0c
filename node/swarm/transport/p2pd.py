"""Starts, watches and stops p2pd, the Go daemon of libp2p that hivemind ships.

`hivemind.P2P.create` is not used, because the kernel must kill p2pd when this process dies in any way
(PR_SET_PDEATHSIG). hivemind attaches to the running daemon, as it does in its own replicas.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import ipaddress
import json
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from node.errors import MachineError, SwarmError, cause_of
from node.host.parent_death import launch_command
from node.host.ports import listen_error
from node.multiaddress import parse
from node.swarm.transport.address_scope import interface_addresses, read_interfaces

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 2.0
MAX_BASE_CHARACTERS = 50
"""The path of a unix socket must stay under 104 bytes."""
LOCK = "lock"
_ENVIRONMENT_DEFAULTS = {"GOLOG_LOG_LEVEL": "error,swarm2=warn"}
"""Warnings are on, because p2pd starts if it can listen on one of its addresses, and only warns about the others."""
_ENVIRONMENT = {"LIBP2P_TCP_REUSEPORT": "false"}
"""With SO_REUSEPORT, two nodes could share one port, and each node would get some of the other's callers."""
_LISTEN_FAILED = "listening failed"
_GO_ERRORS = {
    "address already in use": errno.EADDRINUSE,
    "cannot assign requested address": errno.EADDRNOTAVAIL,
    "address family not supported by protocol": errno.EAFNOSUPPORT,
    "permission denied": errno.EACCES,
}


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Options of p2pd. Addresses are multiaddresses. libp2p's own relaying is off."""

    identity_file: Path
    listen: Sequence[str]
    """Addresses on which to listen; empty to listen on none."""
    announce: Sequence[str] = ()
    """Addresses for the peer record only. p2pd must not get them: they would replace the interface addresses."""
    port_mapping: bool = False
    hole_punching: bool = False
    """Whether to listen with QUIC as well, at a UDP port that is not announced."""
    is_in_dht: bool = True

    @property
    def quic_listen(self) -> list[str]:
        """The QUIC addresses for hole punching; none for loopback addresses."""
        listen = [parse(address) for address in self.listen] if self.hole_punching else []
        open_hosts = {(a.host_type, a.host) for a in listen if not ipaddress.ip_address(a.host).is_loopback}
        return [f"/{host_type}/{host}/udp/0/quic-v1" for host_type, host in sorted(open_hosts)]

    def arguments(self) -> list[str]:
        arguments = [
            f"-id={self.identity_file}",
            "-b=0",
            "-tls=1",
            "-connManager=1",
            "-autonat=0",
            "-relay=0",
            "-relayService=0",
            f"-natPortMap={int(self.port_mapping)}",
        ]
        listen = [*self.listen, *self.quic_listen]
        arguments.append("-hostAddrs=" + ",".join(listen) if listen else "-noListenAddrs")
        if self.is_in_dht:
            arguments.append("-dhtServer")
        if self.quic_listen:
            # This hides the QUIC port. After a change of network the addresses are out of date, but members dial those
            # of peer records, which are read again.
            arguments.append("-announceAddrs=" + ",".join(interface_addresses(self.listen, read_interfaces())))
        return arguments


@dataclass(slots=True)
class SocketFolder:
    """The folder of a node's unix sockets, which this process owns until `close`.

    The folder's name follows from the data folder, so the next start of a killed node finds and cleans the same folder.
    A file lock in it shows whether its owner is still running.
    """

    path: Path
    _lock: int = -1

    def clear(self) -> None:
        """Remove all files in the folder except the lock."""
        for old in self.path.iterdir():
            if old.name != LOCK:
                with suppress(OSError):
                    old.unlink()

    def close(self) -> None:
        """Remove the folder."""
        with suppress(OSError):
            self.clear()
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def open_sockets(owner: Path) -> SocketFolder:
    """Open the socket folder of the data folder `owner`, or a new one if that is in use or not private to this user."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) > MAX_BASE_CHARACTERS:
        base = Path("/tmp")  # noqa: S108 - the folder in it is private to this user
    name = hashlib.sha256(str(owner.resolve()).encode()).hexdigest()[:12]
    path = base / f"diloco-{os.getuid()}-{name}"
    try:
        folder = SocketFolder(path, _lock_folder(path))
    except OSError:
        return SocketFolder(Path(tempfile.mkdtemp(prefix="diloco-", dir=base)))
    folder.clear()
    return folder


def _lock_folder(path: Path) -> int:
    """Lock a folder. Returns the file descriptor. Raises OSError if it is in use or not private to this user."""
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not this user's own")
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino != (path / LOCK).stat().st_ino:
            raise FileNotFoundError("its owner was just leaving")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@dataclass(slots=True)
class Daemon:
    """A running p2pd. `died` is set if p2pd ends without `stop`."""

    process: asyncio.subprocess.Process
    control: str
    """The multiaddress of p2pd's control socket."""
    sockets: SocketFolder
    died: asyncio.Event = field(default_factory=asyncio.Event)
    _reader: asyncio.Task[None] | None = None
    _is_stopping: bool = False

    @property
    def socket_prefix(self) -> str:
        """The start of the multiaddress of each socket of this node."""
        return f"/unix{self.sockets.path}/"

    def client_address(self) -> str:
        """The multiaddress of a new unix socket for one client."""
        return f"{self.socket_prefix}{secrets.token_hex(4)}"

    async def stop(self) -> None:
        """Terminate p2pd, and kill it if it does not end within STOP_TIMEOUT_S."""
        self._is_stopping = True
        if self.process.returncode is None:
            self.process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self._reader is not None:
            await self._reader
        self.sockets.close()

    async def wait_ready(self) -> None:
        """Wait until p2pd answers, then log its output. Raises MachineError, SwarmError or TimeoutError."""
        async with asyncio.timeout(START_TIMEOUT_S):
            await _wait_ready(self.process)
        self._reader = asyncio.create_task(self._follow_output())

    async def _follow_output(self) -> None:
        assert self.process.stdout is not None
        while not self.process.stdout.at_eof():
            with suppress(ValueError):  # A line that is longer than the reader's buffer is dropped.
                line = await self.process.stdout.readline()
                logger.debug("p2pd: %s", line.decode(errors="replace").rstrip())
        await self.process.wait()
        if not self._is_stopping:
            self.died.set()


async def start_daemon(options: DaemonOptions) -> Daemon:
    """Start p2pd and wait until it answers.

    Raises MachineError if it cannot listen on an address or no socket can be made, else SwarmError.
    """
    try:
        sockets = open_sockets(options.identity_file.parent)
    except OSError as exc:
        raise MachineError(
            f"No folder for sockets can be made in the folder for temporary files ({cause_of(exc)}): free some space "
            "there, or set TMPDIR to another one.",
            code="disk",
        ) from exc
    control = f"/unix{sockets.path}/control"
    try:
        with resources.as_file(resources.files("hivemind.hivemind_cli") / "p2pd") as binary:
            process = await asyncio.create_subprocess_exec(
                *launch_command([str(binary), f"-listen={control}", *options.arguments()]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=_ENVIRONMENT_DEFAULTS | os.environ | _ENVIRONMENT,
            )
    except OSError as exc:
        sockets.close()
        raise SwarmError(f"libp2p's daemon cannot be started: {cause_of(exc)}") from exc
    daemon = Daemon(process, control, sockets)
    try:
        await daemon.wait_ready()
    except BaseException as exc:
        await daemon.stop()
        if isinstance(exc, TimeoutError):
            raise SwarmError(f"libp2p's daemon did not start within {START_TIMEOUT_S:.0f} s.") from exc
        raise
    return daemon


async def _wait_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    line = ""
    while raw := await process.stdout.readline():
        line = raw.decode(errors="replace").strip()
        logger.debug("p2pd: %s", line)
        if (error := parse_listen_error(line)) is not None:
            raise error
        if line.startswith("Peer ID:"):
            return
    raise SwarmError(f"libp2p's daemon did not start: {_last_message(line)}")


def parse_listen_error(line: str) -> MachineError | None:
    """Return an error if a log line of p2pd says that it cannot listen on a TCP address. p2pd can do without UDP."""
    _, marker, detail = line.partition(_LISTEN_FAILED)
    if not marker:
        return None
    try:
        fields = json.loads(detail)
        address, error = parse(fields["on"]), str(fields["error"])
    except (ValueError, KeyError, TypeError):
        return MachineError(
            f"libp2p's daemon cannot listen: {detail.strip()}; change swarm.listen.", code="cannot_listen"
        )
    if address.transport == "udp":
        return None
    return listen_error(next((number for text, number in _GO_ERRORS.items() if text in error), None), address)


def _last_message(line: str) -> str:
    try:
        return str(json.loads(line)["msg"])
    except (ValueError, KeyError, TypeError):
        return line[-300:] or "it said nothing."

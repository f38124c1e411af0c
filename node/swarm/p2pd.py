"""The Go daemon of libp2p that hivemind ships: started, watched, ended. Knows no message of ours.

Started by us rather than by `hivemind.P2P.create`, for one reason: the kernel must kill it when this process dies,
however it dies (PR_SET_PDEATHSIG). hivemind then attaches to it (`P2P.replicate`), as it does in its own replicas.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from hivemind.utils.multiaddr import Multiaddr

from node.errors import MachineError, SwarmError
from node.multiaddress import parse
from node.ports import refusal
from node.swarm.places import interface_addresses, read_interfaces
from node.swarm.sockets import SocketFolder, open_sockets

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 2.0
_LAUNCH = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""PR_SET_PDEATHSIG (1), SIGKILL (9), then become p2pd. Bound to the *thread* that starts it: the swarm's own."""


NO_SHARED_PORTS = {"LIBP2P_TCP_REUSEPORT": "false"}
"""Else libp2p binds its port with SO_REUSEPORT, and two nodes get one port, each with a part of the other's callers."""
WARNS_OF_LISTENING = {"GOLOG_LOG_LEVEL": "error,swarm2=warn"}
"""p2pd starts when it can listen on one of its addresses; of the others it warns."""
_REFUSED = "listening failed"
_REFUSALS = {
    "address already in use": errno.EADDRINUSE,
    "cannot assign requested address": errno.EADDRNOTAVAIL,
    "address family not supported by protocol": errno.EAFNOSUPPORT,
    "permission denied": errno.EACCES,
}
"""What Go calls these errors."""


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """What of p2pd can be set. Addresses are libp2p multiaddresses. It relays for nobody and asks nobody to relay."""

    identity_file: Path
    listen: Sequence[str]
    """Empty: listen on nothing."""
    announce: Sequence[str] = ()
    """For the peer record. p2pd is not told: it would leave out the addresses of the interfaces."""
    port_mapping: bool = False
    punching: bool = False
    """Also listen with QUIC, for `hole_punching`, at a UDP port that no peer is told."""
    is_in_dht: bool = True

    @property
    def hidden(self) -> list[str]:
        """The QUIC addresses to listen on; none for a node that listens on loopback only."""
        listen = [parse(address) for address in self.listen] if self.punching else []
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
        listen = [*self.listen, *self.hidden]
        arguments.append("-hostAddrs=" + ",".join(listen) if listen else "-noListenAddrs")
        if self.is_in_dht:
            arguments.append("-dhtServer")
        if self.hidden:
            arguments.append("-announceAddrs=" + ",".join(interface_addresses(self.listen, read_interfaces())))
        return arguments


@dataclass(slots=True)
class Daemon:
    """A running p2pd. `died` is set when it ends without having been asked."""

    process: asyncio.subprocess.Process
    control: Multiaddr
    sockets: SocketFolder
    died: asyncio.Event = field(default_factory=asyncio.Event)
    _reader: asyncio.Task[None] | None = None
    _stopping: bool = False

    @property
    def socket_prefix(self) -> str:
        """What the address of any socket of this node begins with."""
        return f"/unix{self.sockets.path}/"

    def client_address(self) -> Multiaddr:
        """A fresh unix socket for one more client."""
        return Multiaddr(f"{self.socket_prefix}{secrets.token_hex(4)}")

    async def stop(self) -> None:
        """Ask, then kill; bounded by STOP_TIMEOUT_S."""
        self._stopping = True
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self._reader is not None:
            await self._reader
        self.sockets.close()

    async def _follow(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            logger.debug("p2pd: %s", line.decode(errors="replace").rstrip())
        await self.process.wait()
        if not self._stopping:
            self.died.set()


async def start_daemon(options: DaemonOptions) -> Daemon:
    """Start p2pd and wait until it answers. Raises MachineError where it cannot listen on one of the addresses,
    SwarmError otherwise."""
    sockets = open_sockets(options.identity_file.parent)
    control = Multiaddr(f"/unix{sockets.path}/control")
    with resources.as_file(resources.files("hivemind.hivemind_cli") / "p2pd") as binary:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _LAUNCH, str(binary), f"-listen={control}", *options.arguments()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=WARNS_OF_LISTENING | os.environ | NO_SHARED_PORTS,
        )
    daemon = Daemon(process, control, sockets)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await _wait_ready(process)
    except TimeoutError as exc:
        await daemon.stop()
        raise SwarmError(f"libp2p's daemon did not start within {START_TIMEOUT_S:.0f} s.") from exc
    except (MachineError, SwarmError):
        await daemon.stop()
        raise
    daemon._reader = asyncio.create_task(daemon._follow())
    return daemon


async def _wait_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    said: list[str] = []
    while raw := await process.stdout.readline():
        line = raw.decode(errors="replace").strip()
        said.append(line)
        logger.debug("p2pd: %s", line)
        if (error := read_refusal(line)) is not None:
            raise error
        if line.startswith("Peer ID:"):
            return
    raise SwarmError(f"libp2p's daemon did not start: {_last_words(said)}")


def read_refusal(line: str) -> MachineError | None:
    """Why p2pd cannot listen on one of its addresses, where this line of its log says so; it does without UDP."""
    _, said, what = line.partition(_REFUSED)
    if not said:
        return None
    try:
        told = json.loads(what)
        address, why = parse(told["on"]), str(told["error"])
    except (ValueError, KeyError, TypeError):
        return MachineError(
            f"libp2p's daemon cannot listen: {what.strip()}; change swarm.listen.", code="cannot_listen"
        )
    if address.transport == "udp":
        return None
    return refusal(next((number for text, number in _REFUSALS.items() if text in why), None), address)


def _last_words(said: Sequence[str]) -> str:
    if not said:
        return "it said nothing."
    try:
        return str(json.loads(said[-1])["msg"])
    except (ValueError, KeyError, TypeError):
        return said[-1][-300:]

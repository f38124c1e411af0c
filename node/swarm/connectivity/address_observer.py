"""A relay's second libp2p daemon, which tells members behind NAT the UDP address at which it sees them.

The daemon only listens with QUIC, on the UDP port with the number of this node's TCP port. It is separate because
libp2p opens no QUIC connection to a peer that is connected over TCP, and relayed calls stay on TCP. The daemon starts
on demand and stops when it is idle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from node.errors import DataFolderError, NodeError, PeerError
from node.host.printable import printable
from node.multiaddress import parse
from node.status import Channel
from node.swarm.identity import load_identity
from node.swarm.membership.peer_table import PeerTable
from node.swarm.transport.control import DAEMON_ERRORS, ControlClient
from node.swarm.transport.p2pd import Daemon, DaemonOptions, start_daemon
from node.swarm.transport.wire import Message, Service, Wire

logger = logging.getLogger(__name__)

RETRY_S = 600.0
"""Pause before a daemon that failed to start is started again. Its UDP port may be taken, for example."""
IDLE_S = 300.0
"""The daemon takes 60 MB of memory, so it is stopped when nobody has asked for it for this time."""
LOOK_S = 5.0


class AddressObserver:
    """Serves the verbs `observer` (the daemon's peer id) and `outer` (the address at which the daemon sees a peer)."""

    def __init__(self, wire: Wire, peer_table: PeerTable, folder: Path, listen: Sequence[str]) -> None:
        """`folder` holds the daemon's key. `listen` are the TCP multiaddresses on which this node listens."""
        self._peer_table, self._folder = peer_table, folder
        self._listen = tuple(f"{address.replace('/tcp/', '/udp/')}/quic-v1" for address in listen)
        self._lock = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._retry_at_s = self._asked_at_s = 0.0
        self._peer_id = ""
        self._daemon: Daemon | None = None
        self._client: ControlClient | None = None
        wire.serve(
            {
                "observer": Service(self._on_observer, Channel.DHT, admits=peer_table.knows),
                "outer": Service(self._on_outer, Channel.DHT, admits=peer_table.knows),
            }
        )

    async def run(self) -> None:
        """Stop the daemon whenever it is idle. Runs for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            async with self._lock:
                if self._daemon is not None and self._clock() - self._asked_at_s > IDLE_S:
                    await self.close()

    async def _on_observer(self, _caller: str, _message: Message) -> Message:
        if not (self._peer_table.me.relays and self._listen):
            raise PeerError("this node is no relay that listens on UDP", code="no_relay")
        async with self._lock:
            self._asked_at_s = self._clock()
            if self._daemon is None or self._daemon.died.is_set():
                await self._start()
        return Message({"peer": self._peer_id})

    async def _start(self) -> None:
        """Start the daemon. Raises PeerError."""
        if self._clock() < self._retry_at_s:
            raise PeerError("this relay does not listen on UDP", code="no_relay")
        self._retry_at_s = self._clock() + RETRY_S
        await self.close()
        key_file = self._folder / "identity.key"
        try:
            self._peer_id = await asyncio.to_thread(_load_peer_id, key_file)
            self._daemon = await start_daemon(DaemonOptions(key_file, self._listen, is_in_dht=False))
            self._client = await ControlClient.open(self._daemon)
        except (NodeError, *DAEMON_ERRORS) as exc:
            await self.close()
            logger.info("This relay cannot help other peers to connect directly, because it cannot use UDP: %s", exc)
            raise PeerError("this relay does not listen on UDP", code="no_relay") from exc
        self._retry_at_s = 0.0

    async def _on_outer(self, caller: str, message: Message) -> Message:
        """Return the address at which the daemon sees a peer, if it sees both the peer and the caller."""
        seen, peer_id = await self._seen(), printable(message.header.get("of"), 64)
        if caller not in seen or peer_id not in seen:
            raise PeerError("this relay does not see both over UDP", code="not_seen")
        return Message({"outer": list(seen[peer_id])})

    async def _seen(self) -> dict[str, tuple[str, int]]:
        """The IP address and UDP port of each peer that is connected to the daemon."""
        if self._client is None:
            return {}
        try:
            peers = await self._client.peers()
        except DAEMON_ERRORS as exc:
            raise PeerError("the observer does not list its peers", code="internal") from exc
        last = {peer_id: parse(addresses[-1]) for peer_id, addresses in peers.items() if addresses}
        return {peer_id: (address.host, address.port) for peer_id, address in last.items()}

    async def close(self) -> None:
        """Stop the daemon. Takes at most as long as `Daemon.stop`."""
        daemon, client, self._daemon, self._client = self._daemon, self._client, None, None
        if client is not None:
            client.close()
        if daemon is not None:
            await daemon.stop()


def _load_peer_id(key_file: Path) -> str:
    key_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        return load_identity(key_file).peer_id
    except DataFolderError:  # Nobody relies on this id.
        key_file.unlink()
        return load_identity(key_file).peer_id

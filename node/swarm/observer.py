"""A relay's second libp2p daemon: tells members behind NAT at which outer UDP address each of them is seen.

It listens with QUIC on UDP, at the number of this node's TCP port, and does nothing else. A daemon of its own, because
libp2p opens no QUIC connection to a peer that it is connected with over TCP, and relayed calls stay on TCP. It is
started when a member asks for it, and ended when none has for IDLE_S.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from node.errors import MachineError, PeerError, SwarmError
from node.multiaddress import parse
from node.status import Channel
from node.swarm.base import Message, Service, Wire, plain
from node.swarm.directory import Directory
from node.swarm.identity import load_identity
from node.swarm.p2pd import Daemon, DaemonOptions, start_daemon

logger = logging.getLogger(__name__)

RETRY_S = 600.0
"""Until a daemon that could not be started, such as on a UDP port that is taken, is tried again."""


IDLE_S = 300.0
"""Until a daemon that nobody asks for is ended: it takes 60 MB."""
LOOK_S = 5.0


class Observer:
    """Answers `observer` (its peer id) and `outer` (where it sees a peer). Ended by `close`."""

    def __init__(self, wire: Wire, directory: Directory, folder: Path, listen: Sequence[str]) -> None:
        """`folder`: for its key. `listen`: the TCP multiaddresses of this node."""
        self._directory, self._folder = directory, folder
        self._listen = tuple(f"{address.replace('/tcp/', '/udp/')}/quic-v1" for address in listen)
        self._lock = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._retry_at_s = self._asked_at_s = 0.0
        self._peer_id = ""
        self._daemon: Daemon | None = None
        self._client: Client | None = None
        wire.serve(
            {
                "observer": Service(self._on_observer, Channel.DHT, admits=directory.knows),
                "outer": Service(self._on_outer, Channel.DHT, admits=directory.knows),
            }
        )

    async def run(self) -> None:
        """End the daemon when it has been idle, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            async with self._lock:
                if self._daemon is not None and self._clock() - self._asked_at_s > IDLE_S:
                    await self.close()

    async def _on_observer(self, _caller: str, _message: Message) -> Message:
        if not (self._directory.me.relays and self._listen):
            raise PeerError("this node is no relay that listens on UDP", code="no_relay")
        async with self._lock:
            self._asked_at_s = self._clock()
            if self._daemon is None or self._daemon.died.is_set():
                await self._start()
        return Message({"peer": self._peer_id})

    async def _start(self) -> None:
        """Raises PeerError."""
        if self._clock() < self._retry_at_s:
            raise PeerError("this relay does not listen on UDP", code="no_relay")
        self._retry_at_s = self._clock() + RETRY_S
        await self.close()
        try:
            identity = await asyncio.to_thread(self._load_key)
            options = DaemonOptions(self._folder / "identity.key", self._listen, is_in_dht=False)
            self._daemon = await start_daemon(options)
            self._client = await Client.create(self._daemon.control, self._daemon.client_address())
        except (MachineError, SwarmError, P2PDaemonError, OSError) as exc:
            await self.close()
            logger.info("This relay does not help others to connect directly: %s", exc)
            raise PeerError("this relay does not listen on UDP", code="no_relay") from exc
        self._peer_id, self._retry_at_s = identity, 0.0

    def _load_key(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        return load_identity(self._folder / "identity.key").peer_id

    async def _on_outer(self, caller: str, message: Message) -> Message:
        """Only to those that it sees, too."""
        seen, wanted = await self._seen(), plain(message.header.get("of"), 64)
        if caller not in seen or wanted not in seen:
            raise PeerError("this relay does not see both over UDP", code="not_seen")
        return Message({"outer": list(seen[wanted])})

    async def _seen(self) -> dict[str, tuple[str, int]]:
        """IP address and UDP port by peer id."""
        if self._client is None:
            return {}
        try:
            infos = await self._client.list_peers()
        except (P2PDaemonError, OSError, EOFError) as exc:
            raise PeerError("the observer does not tell its peers", code="internal") from exc
        places = {info.peer_id.to_base58(): parse(str(address)) for info in infos for address in info.addrs}
        return {peer_id: (place.host, place.port) for peer_id, place in places.items()}

    async def close(self) -> None:
        """Bounded by the daemon's own limit."""
        daemon, client, self._daemon, self._client = self._daemon, self._client, None, None
        if client is not None:
            client.close()
        if daemon is not None:
            await daemon.stop()

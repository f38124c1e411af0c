"""Requests to p2pd over its control socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from node.swarm.transport.p2pd import Daemon

logger = logging.getLogger(__name__)

DAEMON_ERRORS = (P2PDaemonError, OSError, EOFError, TimeoutError, RuntimeError)
"""The errors that hivemind and asyncio raise if a peer or p2pd is gone. (IncompleteReadError is an EOFError.)"""
ANSWER_S = 10.0
"""A daemon that does not answer a question about itself within this time hangs."""
_REQUESTS = ("identify", "connect", "disconnect", "list_peers", "stream_open", "stream_handler")
_opened: ContextVar[list[asyncio.StreamWriter] | None] = ContextVar("opened", default=None)
"""The connections to p2pd that the current request has opened."""


async def attach(daemon: Daemon) -> P2P:
    """Attach hivemind to a running p2pd. Its sockets lie in this node's folder, which the next start cleans."""
    attached: Any = type("AttachedP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": daemon.socket_prefix})
    p2p = await attached.replicate(Multiaddr(daemon.control))
    close_failed_requests(p2p._client)
    return p2p


def close_failed_requests(client: Client) -> None:
    """Close the connection to p2pd of each request that fails or is cancelled.

    hivemind leaves it open until the garbage collector finds it. A peer that cannot be reached costs one for each call.
    """
    control = client.control
    open_connection = control.daemon_connector.open_connection

    async def open_and_note() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await open_connection()
        if (opened := _opened.get()) is not None:
            opened.append(writer)
        return reader, writer

    control.daemon_connector.open_connection = open_and_note
    for name in _REQUESTS:
        setattr(control, name, _closing(getattr(control, name)))


def _closing(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def requested(*args: Any, **kwargs: Any) -> Any:
        opened: list[asyncio.StreamWriter] = []
        token = _opened.set(opened)
        try:
            return await request(*args, **kwargs)
        except BaseException:
            for writer in opened:
                writer.close()
            raise
        finally:
            _opened.reset(token)

    return requested


def log_task_errors(client: Any) -> None:
    """Retrieve the errors of hivemind's tasks on a control connection. These tasks fail when p2pd has ended."""
    control = getattr(client, "control", None)
    for task in (getattr(control, "_read_task", None), getattr(control, "_write_task", None)):
        if task is not None and task.done() and not task.cancelled():
            logger.debug("libp2p's daemon is gone: %r", task.exception())


class ControlClient:
    """A client of p2pd's control socket. Methods raise one of DAEMON_ERRORS, or ValueError for an invalid peer id."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @classmethod
    async def open(cls, daemon: Daemon) -> ControlClient:
        client = await Client.create(Multiaddr(daemon.control), Multiaddr(daemon.client_address()))
        close_failed_requests(client)
        return cls(client)

    async def connect(self, peer_id: str, addresses: Iterable[Multiaddr]) -> None:
        await self._client.connect(PeerID.from_base58(peer_id), addresses)

    async def disconnect(self, peer_id: str) -> None:
        await self._client.disconnect(PeerID.from_base58(peer_id))

    async def listen_addresses(self) -> list[str]:
        async with asyncio.timeout(ANSWER_S):
            _, addresses = await self._client.identify()  # P2P's own method fails if there is none
        return list(map(str, addresses))

    async def peers(self) -> dict[str, list[str]]:
        """The multiaddresses at which this node sees each connected peer."""
        peers: dict[str, list[str]] = {}
        async with asyncio.timeout(ANSWER_S):
            found = await self._client.list_peers()
        for info in found:
            peers.setdefault(info.peer_id.to_base58(), []).extend(map(str, info.addrs))
        return peers

    def close(self) -> None:
        log_task_errors(self._client)
        self._client.close()

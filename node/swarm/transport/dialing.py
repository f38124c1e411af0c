"""Finds the address at which a peer answers: resolves names, and checks by a TLS handshake which peer listens.

If an address does not answer, libp2p refuses to dial it again for 5 s up to 5 min (go-libp2p, `swarm_dial.go`). That is
too long after a network partition, so libp2p only gets an address at which the peer has just answered.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Literal

from node.errors import PeerError
from node.swarm.transport.address_scope import Endpoint, direct_address
from node.swarm.transport.tls_probe import peer_at

logger = logging.getLogger(__name__)

MAX_IPS = 8
"""Limit on the IP addresses of one name that are tried."""
Use = Literal["own", "dial", "probe"]
"""Why a name is resolved: it is in this node's settings, a peer names it as its address, or a peer wants a probe."""
MAX_LOOKUPS = 16
"""Limit on concurrent lookups of one use, because a peer's own name server may delay each lookup for a minute."""
MAX_LOOKUPS_PER_PEER = 4
_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}
_lock = threading.Lock()
_lookups: dict[Use, Counter[str]] = {"own": Counter(), "dial": Counter(), "probe": Counter()}
"""The number of running lookups for each peer id. Any peer may name hosts or ask for a probe, so each use has its own
places."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A peer, and the multiaddress at which it answers. The address has an IP address and no peer id."""

    peer_id: str
    address: str


async def find_listener(
    endpoints: Sequence[Endpoint], timeout_s: float, peer_id: str = "", own_hosts: Collection[str] = ()
) -> Listener | None:
    """Return the first listener that answers. With `peer_id`, only this peer counts. Returns None after `timeout_s`.

    `own_hosts` are names in this node's own settings. Without `peer_id`, all names are.
    """

    def use(endpoint: Endpoint) -> Use:
        return "own" if not peer_id or endpoint.host in own_hosts else "dial"

    try:
        async with asyncio.timeout(timeout_s):
            return await _first([_probe_endpoint(one, timeout_s, peer_id, use(one)) for one in endpoints])
    except TimeoutError:
        return None


async def _probe_endpoint(endpoint: Endpoint, timeout_s: float, peer_id: str, use: Use) -> Listener | None:
    ips = [ip for ip in sorted(await resolve(endpoint, timeout_s, peer_id, use)) if "%" not in ip]
    return await _first([_probe_ip(ip, endpoint.port, timeout_s, peer_id) for ip in ips[:MAX_IPS]])


async def _probe_ip(ip: str, port: int, timeout_s: float, peer_id: str) -> Listener | None:
    try:
        found = await peer_at(ip, port, timeout_s)
    except PeerError:
        return None
    return Listener(found, direct_address(ip, port)) if peer_id in ("", found) else None


async def _first(probes: Sequence[Coroutine[None, None, Listener | None]]) -> Listener | None:
    """Return the first listener that a probe finds, and cancel the other probes."""
    tasks = [asyncio.create_task(probe) for probe in probes]
    try:
        for done in asyncio.as_completed(tasks):
            if found := await done:
                return found
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def resolve(endpoint: Endpoint, timeout_s: float, peer_id: str = "", use: Use = "dial") -> frozenset[str]:
    """The IP addresses of an endpoint; empty if its name does not resolve in time, or too many lookups are running.

    Args:
        peer_id: the peer at the endpoint, to whose limit the lookup counts; empty if it is unknown.
    """
    if endpoint.ip is not None:
        return frozenset({str(endpoint.ip)})
    with _lock:
        running = _lookups[use]
        if running.total() >= MAX_LOOKUPS or (peer_id and running[peer_id] >= MAX_LOOKUPS_PER_PEER):
            return frozenset()
        running[peer_id] += 1
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[frozenset[str]] = loop.create_future()
    # A lookup cannot be cancelled. Pool threads would be joined at exit, so each lookup gets a daemon thread.
    arguments = endpoint, peer_id, running, loop, answer
    try:
        threading.Thread(target=_look_up, args=arguments, name="resolve", daemon=True).start()
    except RuntimeError as exc:  # The system allows no more threads.
        logger.warning("The name %s was not resolved: %s", endpoint.host, exc)
        _release(running, peer_id)
        return frozenset()
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        logger.debug("The name %s was not resolved within %.0f s.", endpoint.host, timeout_s)
        return frozenset()


def _release(running: Counter[str], peer_id: str) -> None:
    with _lock:
        running[peer_id] -= 1
        if not running[peer_id]:
            del running[peer_id]


def _look_up(
    endpoint: Endpoint,
    peer_id: str,
    running: Counter[str],
    loop: asyncio.AbstractEventLoop,
    answer: asyncio.Future[frozenset[str]],
) -> None:
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, _FAMILIES[endpoint.kind], socket.SOCK_STREAM)
        ips = frozenset(str(address[4][0]) for address in found)
    except (OSError, UnicodeError) as exc:
        logger.debug("The name %s could not be resolved: %s", endpoint.host, exc)
        ips = frozenset()
    finally:
        _release(running, peer_id)

    def deliver() -> None:
        if not answer.done():
            answer.set_result(ips)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:
        logger.debug("The event loop that looked up %s has ended.", endpoint.host)

"""Which of several addresses leads to a peer from here: names are resolved, and a handshake proves who listens.

libp2p remembers addresses that did not answer and refuses to dial them again for 5 s, then longer and longer, up to
5 min (go-libp2p, `swarm_dial.go`). After a partition nobody could wait for that, so libp2p is handed only an address at
which the peer has just answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from node.errors import PeerError
from node.swarm.libp2p_tls import peer_at
from node.swarm.places import Place, direct_address
from node.swarm.resolve import resolve

MAX_IPS = 8
"""Addresses of one name that are tried."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A peer, and a multiaddress with an IP address and without a peer id at which it listens."""

    peer_id: str
    address: str


async def find_listener(places: Sequence[Place], timeout_s: float, peer_id: str = "") -> Listener | None:
    """The first listener that answers at these places, with `peer_id` the first that is this peer.

    Returns as soon as it has answered, None where nobody does within the time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _first([_at_place(place, timeout_s, peer_id) for place in places])
    except TimeoutError:
        return None


async def _at_place(place: Place, timeout_s: float, peer_id: str) -> Listener | None:
    ips = [ip for ip in sorted(await resolve(place, timeout_s, peer_id)) if "%" not in ip]
    return await _first([_at_ip(ip, place.port, timeout_s, peer_id) for ip in ips[:MAX_IPS]])


async def _at_ip(ip: str, port: int, timeout_s: float, peer_id: str) -> Listener | None:
    try:
        found = await peer_at(ip, port, timeout_s)
    except PeerError:
        return None
    return Listener(found, direct_address(ip, port)) if peer_id in ("", found) else None


async def _first(tries: Sequence[Coroutine[None, None, Listener | None]]) -> Listener | None:
    """The first of these that finds somebody; the others end with it."""
    tasks = [asyncio.create_task(one) for one in tries]
    try:
        for done in asyncio.as_completed(tasks):
            if found := await done:
                return found
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""The IP addresses behind a name that a peer tells, looked up in bounded time and by few threads at once."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter

from node.swarm.places import Place

logger = logging.getLogger(__name__)

MAX_LOOKUPS = 16
"""At the same time; a name server of a peer's own may keep each of them waiting for a minute."""
MAX_OF_ONE = 4
"""Of them for one peer, so that a peer with many such names does not take the turn of others."""
_lock = threading.Lock()
_lookups: Counter[str] = Counter()
"""Under way, for each peer."""
_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


async def resolve(place: Place, timeout_s: float, peer_id: str = "") -> frozenset[str]:
    """Empty where the name leads nowhere, the answer takes too long, or too many lookups are under way.

    `peer_id`: whose name it is; those of nobody in particular share the bound of one peer.
    """
    if place.ip is not None:
        return frozenset({str(place.ip)})
    with _lock:
        if _lookups[peer_id] >= MAX_OF_ONE or _lookups.total() >= MAX_LOOKUPS:
            return frozenset()
        _lookups[peer_id] += 1
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[frozenset[str]] = loop.create_future()
    # A daemon thread of its own, as nothing can end a lookup: threads of a pool would be waited for at exit.
    threading.Thread(target=_look_up, args=(place, peer_id, loop, answer), name="resolve", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        logger.debug("%s was not resolved within %.0f s", place.host, timeout_s)
        return frozenset()


def _look_up(
    place: Place, peer_id: str, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[frozenset[str]]
) -> None:
    try:
        found = socket.getaddrinfo(place.host, place.port, _FAMILIES[place.kind], socket.SOCK_STREAM)
        ips = frozenset(str(address[4][0]) for address in found)
    except (OSError, UnicodeError) as exc:
        logger.debug("%s is not resolved: %s", place.host, exc)
        ips = frozenset()
    finally:
        with _lock:
            _lookups[peer_id] -= 1
            if not _lookups[peer_id]:
                del _lookups[peer_id]

    def tell() -> None:
        if not answer.done():
            answer.set_result(ips)

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:
        logger.debug("the loop that asked for %s has ended", place.host)

"""Whether anything accepts TCP connections at an address. Knows no libp2p.

libp2p remembers addresses that did not answer and refuses to dial them again for 5 s, then longer and longer, up to
5 min (go-libp2p, `swarm_dial.go`). After a partition nobody could wait for that, so only addresses that accept a
connection are handed to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from node.swarm.places import place_of


async def accepts_connections(addresses: Sequence[str]) -> bool:
    """Whether at least one of these multiaddresses accepts a TCP connection. The caller sets the time limit.

    The answer comes with the first connection that opens. An address that is not understood counts as accepting, so
    that libp2p decides.
    """
    places = [place_of(address) for address in addresses]
    if not all(places):
        return True
    tries = [asyncio.create_task(_accepts(place.host, place.port)) for place in places if place is not None]
    try:
        for answer in asyncio.as_completed(tries):
            if await answer:
                return True
        return False
    finally:
        for task in tries:
            task.cancel()
        await asyncio.gather(*tries, return_exceptions=True)


async def _accepts(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
    return True

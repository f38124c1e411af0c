"""Calls that end when the peer does. Knows the directory.

A peer that hangs keeps its connections: nothing comes, and nothing fails. Its record fades all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from node.errors import PeerError
from node.swarm.directory import Directory

T = TypeVar("T")
LOOK_S = 0.25


def always() -> bool:
    return True


async def while_live(
    directory: Directory, peer_id: str, call: Coroutine[Any, Any, T], is_wanted: Callable[[], bool] = always
) -> T:
    """What this call to a peer returns or raises; PeerError `unreachable` as soon as the peer is no longer live.

    PeerError `round_failed` as soon as the call is no longer wanted.
    """
    running = asyncio.ensure_future(call)
    try:
        while not running.done():
            await asyncio.wait((running,), timeout=LOOK_S)
            if not running.done() and directory.is_gone(peer_id):
                raise PeerError(f"peer {peer_id[-6:]} is silent", code="unreachable")
            if not running.done() and not is_wanted():
                raise PeerError("this call is no longer wanted", code="round_failed")
        return running.result()
    finally:
        running.add_done_callback(_look)
        running.cancel()


def _look(call: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more; what it ends with is nobody's error."""
    if not call.cancelled():
        call.exception()

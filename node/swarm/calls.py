"""Calls that end when the peer does, or the relay that carries them. Knows the directory.

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


class Gone(ConnectionError):
    """Who the call depends on is no longer there."""


def always() -> bool:
    return True


async def while_there(is_gone: Callable[[], bool], call: Coroutine[Any, Any, T]) -> T:
    """What this call returns or raises; Gone as soon as `is_gone`."""
    running = asyncio.ensure_future(call)
    try:
        while not running.done():
            await asyncio.wait((running,), timeout=LOOK_S)
            if not running.done() and is_gone():
                raise Gone
        return running.result()
    finally:
        running.add_done_callback(_look)
        running.cancel()


async def while_live(
    directory: Directory, peer_id: str, call: Coroutine[Any, Any, T], is_wanted: Callable[[], bool] = always
) -> T:
    """What this call to a peer returns or raises; PeerError `unreachable` as soon as the peer is no longer live.

    PeerError `round_failed` as soon as the call is no longer wanted.
    """
    try:
        return await while_there(lambda: directory.is_gone(peer_id) or not is_wanted(), call)
    except Gone as exc:
        if directory.is_gone(peer_id):
            raise PeerError(f"peer {peer_id[-6:]} is silent", code="unreachable") from exc
        raise PeerError("this call is no longer wanted", code="round_failed") from exc


def _look(call: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned call so that asyncio does not log it."""
    if not call.cancelled():
        call.exception()

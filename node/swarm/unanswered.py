"""Whether the connection to a peer still leads anywhere, by the calls that it answers. Knows no wire.

When a peer changes its address, its old connection stays open for about 40 s, and libp2p may prefer it to the new one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from node.errors import PeerError

MAX_TIMEOUTS = 2
"""Calls in a row: a connection on which they were not answered is closed."""
TIMER_RATIO = 0.95
"""A call that is cancelled after this part of its time has timed out."""


class Unanswered:
    """Counts calls in a row that a peer did not answer in time. One loop."""

    def __init__(self, clock: Callable[[], float], drop: Callable[[str], None]) -> None:
        """`drop` closes the connection to a peer, and does not wait for that."""
        self._clock, self._drop = clock, drop
        self._timeouts: dict[str, tuple[int, float]] = {}
        """For each peer: how many, and when the last one was counted."""
        self._bulk: Counter[str] = Counter()

    @contextmanager
    def bulk(self, peer_id: str) -> Iterator[None]:
        """While bulk is on its way to or from a peer, its connection is not dropped: it may be no more than slow."""
        self._bulk[peer_id] += 1
        try:
            yield
        finally:
            self._bulk[peer_id] -= 1
            if not self._bulk[peer_id]:
                del self._bulk[peer_id]

    @contextmanager
    def watch(self, peer_id: str, began_s: float, *, timeout_s: float, is_bulk: bool) -> Iterator[None]:
        """A step of a call over the connection to a peer; `timeout_s` counts from `began_s`.

        A refusal is an answer, too. Bulk that takes too long says nothing.
        """
        try:
            with self.bulk(peer_id) if is_bulk else nullcontext():
                yield
        except PeerError:
            self.answered(peer_id)
            raise
        except asyncio.CancelledError:
            if not is_bulk and self._clock() - began_s >= TIMER_RATIO * timeout_s:
                self._timed_out(peer_id, began_s)
            raise

    def answered(self, peer_id: str) -> None:
        self._timeouts.pop(peer_id, None)

    def _timed_out(self, peer_id: str, began_s: float) -> None:
        count, counted_at_s = self._timeouts.get(peer_id, (0, began_s))
        if began_s < counted_at_s:
            return  # It was under way together with the last one, so both say the same.
        self._timeouts[peer_id] = (count + 1, self._clock())
        if count + 1 >= MAX_TIMEOUTS and not self._bulk[peer_id]:
            del self._timeouts[peer_id]
            self._drop(peer_id)

"""Failure detection for connections: half-open ones, and peers to avoid for a while after a failure.

When a peer changes its address, its old connection stays open for about 40 s, and libp2p may prefer it to a new one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from node.errors import PeerError

MAX_TIMEOUTS = 2
"""Calls that time out in a row before the connection is closed."""
TIMER_RATIO = 0.95
"""A call that is cancelled after this share of its timeout counts as timed out."""
BACKOFF_S = 30.0


class BackoffSet:
    """Peers that failed within the last BACKOFF_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s: dict[str, float] = {}

    def __contains__(self, peer_id: str) -> bool:
        return self._until_s.get(peer_id, 0.0) > self._clock()

    def add(self, peer_id: str) -> None:
        now_s = self._clock()
        self._until_s = {peer: until_s for peer, until_s in self._until_s.items() if until_s > now_s}
        self._until_s[peer_id] = now_s + BACKOFF_S

    def discard(self, peer_id: str) -> None:
        self._until_s.pop(peer_id, None)


class HalfOpenDetector:
    """Drops the connection to a peer that lets several calls in a row time out."""

    def __init__(self, clock: Callable[[], float], drop: Callable[[str], None]) -> None:
        """`drop` starts closing the connection to a peer and returns at once."""
        self._clock, self._drop = clock, drop
        self._timeouts: dict[str, tuple[int, float]] = {}
        """For each peer: the count, and when the last timeout was counted."""
        self._bulk: Counter[str] = Counter()

    @contextmanager
    def bulk(self, peer_id: str) -> Iterator[None]:
        """Keep the connection while bulk moves to or from a peer: it may only be slow."""
        self._bulk[peer_id] += 1
        try:
            yield
        finally:
            self._bulk[peer_id] -= 1
            if not self._bulk[peer_id]:
                del self._bulk[peer_id]

    @contextmanager
    def watch(self, peer_id: str, began_s: float, *, timeout_s: float, is_bulk: bool) -> Iterator[None]:
        """Watch one step of a call; `timeout_s` counts from `began_s`.

        A refusal is an answer. A timeout of bulk is not counted.
        """
        try:
            with self.bulk(peer_id) if is_bulk else nullcontext():
                yield
        except PeerError:
            self.answered(peer_id)
            raise
        except asyncio.CancelledError:
            if not is_bulk and self._clock() - began_s >= TIMER_RATIO * timeout_s:
                self._count_timeout(peer_id, began_s)
            raise

    def answered(self, peer_id: str) -> None:
        """Reset the count of a peer."""
        self._timeouts.pop(peer_id, None)

    def _count_timeout(self, peer_id: str, began_s: float) -> None:
        count, counted_at_s = self._timeouts.get(peer_id, (0, began_s))
        if began_s < counted_at_s:
            return  # It ran concurrently with the last counted call, so it is no new evidence.
        self._timeouts[peer_id] = (count + 1, self._clock())
        if count + 1 >= MAX_TIMEOUTS and not self._bulk[peer_id]:
            del self._timeouts[peer_id]
            self._drop(peer_id)

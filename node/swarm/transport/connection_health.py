"""Failure detection for connections: finds half-open connections, and remembers peers that failed recently.

When a peer changes its address, its old connection stays open for about 40 s, and libp2p may prefer the old connection
to a new one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from node.errors import PeerError

MAX_TIMEOUTS = 2
"""A connection is closed after this many calls in a row have timed out."""
TIMER_RATIO = 0.95
"""A call that is cancelled after this share of its timeout counts as timed out."""
BACKOFF_S = 30.0
FORGET_S = 600.0
"""Failures are forgotten this long after their pause, and timeouts this long after the last one."""


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


class GrowingPauses:
    """Peers that are not dialed again yet. The pause doubles with each failed dial in a row, up to BACKOFF_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}
        """For each peer: the number of failures in a row, and the end of the pause."""

    def __contains__(self, peer_id: str) -> bool:
        return self._failures.get(peer_id, (0, 0.0))[1] > self._clock()

    def failed(self, peer_id: str) -> None:
        now_s = self._clock()
        self._failures = {p: known for p, known in self._failures.items() if now_s - known[1] < FORGET_S}
        count = self._failures.get(peer_id, (0, 0.0))[0] + 1
        self._failures[peer_id] = count, now_s + min(BACKOFF_S, 2.0 ** min(count, 10))

    def succeeded(self, peer_id: str) -> None:
        self._failures.pop(peer_id, None)


class HalfOpenDetector:
    """Drops the connection to a peer after MAX_TIMEOUTS calls in a row have timed out."""

    def __init__(self, clock: Callable[[], float], drop: Callable[[str], None]) -> None:
        """`drop` starts closing the connection to a peer and returns at once."""
        self._clock, self._drop = clock, drop
        self._timeouts: dict[str, tuple[int, float]] = {}
        """For each peer: the number of timeouts in a row, and when the last one was counted."""
        self._bulk: Counter[str] = Counter()

    @contextmanager
    def bulk(self, peer_id: str) -> Iterator[None]:
        """Keep the connection open while bulk data moves to or from a peer, because the peer may only be slow."""
        self._bulk[peer_id] += 1
        try:
            yield
        finally:
            self._bulk[peer_id] -= 1
            if not self._bulk[peer_id]:
                del self._bulk[peer_id]

    @contextmanager
    def watch(self, peer_id: str, began_s: float, *, timeout_s: float, is_bulk: bool) -> Iterator[None]:
        """Watch one step of a call, whose `timeout_s` counts from `began_s`.

        A refusal counts as an answer. A timeout of a bulk call does not count.
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
        """Reset a peer's count of timeouts, because the peer has answered."""
        self._timeouts.pop(peer_id, None)

    def _count_timeout(self, peer_id: str, began_s: float) -> None:
        now_s = self._clock()
        self._timeouts = {p: known for p, known in self._timeouts.items() if now_s - known[1] < FORGET_S}
        count, counted_at_s = self._timeouts.get(peer_id, (0, began_s))
        if began_s < counted_at_s:
            return  # This call ran concurrently with the last counted call, so its timeout is no new evidence.
        self._timeouts[peer_id] = (count + 1, now_s)
        if count + 1 >= MAX_TIMEOUTS and not self._bulk[peer_id]:
            del self._timeouts[peer_id]
            self._drop(peer_id)

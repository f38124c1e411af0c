"""Estimates this node's upload bandwidth from the sends of recent rounds.

Concurrent sends to several reducers share the uplink, so their rates are added. A send lasts until the reducer answers,
because bytes in a socket buffer are not sent yet. The best of the last rounds counts, because a busy processor at
either end only makes the link look slower than it is.
"""

from __future__ import annotations

from collections import deque

MIN_BYTES = 256 * 1024
"""Rounds that sent fewer bytes do not count, because they measure the latency of answers rather than the link."""
MIN_SEND_BYTES = 16 * 1024
KEPT_ROUNDS = 5
NEEDED_ROUNDS = 3


class UplinkEstimator:
    """This node's upload bandwidth, from its recent sends. Used on the swarm's loop only."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[str, int, float]] = deque(maxlen=KEPT_ROUNDS)
        """For each round: batch, sum of bytes, sum of rates in bytes/s."""

    def record_send(self, batch: str, size_bytes: int, seconds: float) -> None:
        """Record an answered send. The sends of one `batch` (an attempt or a deposit) ran concurrently."""
        if size_bytes < MIN_SEND_BYTES or seconds <= 0:
            return
        is_same = bool(self._rounds) and self._rounds[-1][0] == batch
        _, size, rate = self._rounds.pop() if is_same else (batch, 0, 0.0)
        self._rounds.append((batch, size + size_bytes, rate + size_bytes / seconds))

    @property
    def _rates(self) -> list[float]:
        """The rates in bytes/s of the last rounds that sent at least MIN_BYTES, oldest first."""
        return [rate for _, size, rate in self._rounds if size >= MIN_BYTES]

    @property
    def bytes_s(self) -> float:
        """The best rate of the last rounds; 0 until NEEDED_ROUNDS rounds are known."""
        return max(self._rates) if len(self._rates) >= NEEDED_ROUNDS else 0.0

    @property
    def newest_bytes_s(self) -> float:
        """The rate of the newest round; 0 while unknown."""
        return self._rates[-1] if self._rates else 0.0

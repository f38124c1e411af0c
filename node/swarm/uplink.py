"""How fast this node can send, as seen in the rounds themselves. Knows no wire and no clock.

A round's sends to several reducers run side by side and share the uplink, so their rates are added up. The time of a
send runs until the reducer has answered: what a socket's buffer has taken is not sent yet. The best of the last rounds
counts, as a busy processor, here or there, only ever makes a line look slower than it is.
"""

from __future__ import annotations

from collections import deque

MIN_BYTES = 256 * 1024
"""Of one round's sends: with less, they measure the answers' delays rather than the line."""
MIN_SEND_BYTES = 16 * 1024
"""Of one of them."""
KEPT_ROUNDS = 5
NEEDED_ROUNDS = 3


class Uplink:
    """One writer: the swarm's loop."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[str, int, float]] = deque(maxlen=KEPT_ROUNDS)
        """The batch, and the sum of its sends' bytes and of their rates, bytes/s."""

    def sent(self, batch: str, size_bytes: int, seconds: float) -> None:
        """One send has been answered. The sends of one `batch`, an attempt's or a deposit, run side by side."""
        if size_bytes < MIN_SEND_BYTES or seconds <= 0:
            return
        is_same = bool(self._rounds) and self._rounds[-1][0] == batch
        _, size, rate = self._rounds.pop() if is_same else (batch, 0, 0.0)
        self._rounds.append((batch, size + size_bytes, rate + size_bytes / seconds))

    @property
    def _rates(self) -> list[float]:
        """Of the last rounds in which enough was sent, the newest last."""
        return [rate for _, size, rate in self._rounds if size >= MIN_BYTES]

    @property
    def bytes_s(self) -> float:
        """The best of the last rounds; 0 while unknown."""
        return max(self._rates) if len(self._rates) >= NEEDED_ROUNDS else 0.0

    @property
    def newest_bytes_s(self) -> float:
        """Of the newest round alone; 0 while unknown."""
        return self._rates[-1] if self._rates else 0.0

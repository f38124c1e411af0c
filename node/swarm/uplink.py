"""How fast this node can send, as seen in the rounds themselves. Knows no wire and no clock.

A round's sends to several reducers run side by side and share the uplink, so their rates are added up. The time of a
send runs until the reducer has answered: what a socket's buffer has taken is not sent yet. The best of the last rounds
counts, as a busy processor, here or there, only ever makes a line look slower than it is.
"""

from __future__ import annotations

from collections import deque

MIN_BYTES = 256 * 1024
"""Below it, a send measures the answer's delay rather than the line."""
KEPT_ROUNDS = 5
NEEDED_ROUNDS = 3


class Uplink:
    """One writer: the swarm's loop."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[str, float]] = deque(maxlen=KEPT_ROUNDS)
        """The round's parent, and the sum of its sends' rates, bytes/s."""

    def sent(self, parent: str, size_bytes: int, seconds: float) -> None:
        """One send of the round after `parent` has been answered."""
        if size_bytes < MIN_BYTES or seconds <= 0:
            return
        before = self._rounds.pop()[1] if self._rounds and self._rounds[-1][0] == parent else 0.0
        self._rounds.append((parent, before + size_bytes / seconds))

    @property
    def bytes_s(self) -> float:
        """0 while unknown."""
        return max(rate for _, rate in self._rounds) if len(self._rounds) >= NEEDED_ROUNDS else 0.0

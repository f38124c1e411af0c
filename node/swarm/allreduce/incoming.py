"""Contributions that are on their way to this reducer, so that it does not wait for a member that sends nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

START_S = 30.0
"""A member sends to all reducers at once, as soon as it has the plan, or its depositary does. A reducer stops
waiting for a sender that has sent nothing for this time."""


class Incoming:
    """Counts the bodies of contributions that each peer is sending to this node."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._ended_at_s: dict[str, float] = {}

    @contextmanager
    def receive(self, peer: str) -> Iterator[None]:
        """Count a body of this peer, from before it is read until it is taken or has failed."""
        self._running[peer] += 1
        try:
            yield
        finally:
            self._running[peer] -= 1
            if not self._running[peer]:
                del self._running[peer]
            now_s = self._clock()
            self._ended_at_s = {p: at for p, at in self._ended_at_s.items() if at > now_s - START_S} | {peer: now_s}

    def is_silent(self, sender: str, since_s: float, missing: Collection[str]) -> bool:
        """Whether nothing of the sender has been on its way for START_S, or since `since_s`.

        A depositary may forward the contribution, and only the header that comes with it says whose it is. So the body
        of any peer may be that of the sender, except those of members whose own contribution is still `missing` here.
        """

        def may_send_it(peer: str) -> bool:
            return peer == sender or peer not in missing

        if any(map(may_send_it, self._running)):
            return False
        ended_at_s = max((at for peer, at in self._ended_at_s.items() if may_send_it(peer)), default=-math.inf)
        return self._clock() - max(since_s, ended_at_s) >= START_S

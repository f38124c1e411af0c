"""What a node has done and is in no record yet: tokens by fragment, and the contribution in flight. Knows no model.

Included: local := new anchor, merged with the steps since it was sent. Left out: local += new anchor - old anchor, and
the tokens are kept, for at most MAX_CARRIED rounds of the fragment; then they are given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch import Tensor

from node.diloco.outer import carry
from node.diloco.overlap import correct, mix

MAX_CARRIED = 2
"""Rounds for which a contribution that was left out is kept."""


@dataclass(frozen=True, slots=True)
class Owed:
    """What this node has done for one fragment."""

    tokens: int = 0
    """That stand behind its next contribution, carried ones included."""
    carried: int = 0
    """Rounds in a row whose result did not include this node's contribution."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A contribution on its way: handed to the swarm, and not in a committed round yet."""

    steps: int
    tokens: int
    at_s: float
    """Monotonic."""
    sent: Tensor | None
    """The fragment's local parameters then, fp32 [P_f]; None where the merge does not need them."""


@dataclass(frozen=True, slots=True)
class Landing:
    """A round is over: what becomes of its fragment's local parameters."""

    flight: Flight | None
    is_carried: bool
    is_merged: bool
    """There were steps since it was sent."""
    counted_tokens: int = 0
    """That are in the record now."""
    discarded_tokens: int = 0
    """That never will be."""

    def moved(self, local: Tensor, at: slice, old: Tensor, new: Tensor, mix_alpha: float) -> Tensor:
        """A part of the fragment from now on, and its place; all fp32 [n] on one device: local, old and new anchor."""
        if self.is_carried:
            return carry(local, old, new)
        if not self.is_merged or self.flight is None:
            return new
        sent = self.flight.sent
        return mix(local, new, mix_alpha) if sent is None else correct(local, sent[at].to(local.device), new)


class Accounts:
    """One writer: the trainer. Rounds of the fragments take turns; one contribution at most is in flight."""

    def __init__(self, fragments: int, saved: Sequence[Sequence[int]] = ()) -> None:
        self._owed = [Owed(*owed) for owed in saved] or [Owed()] * fragments
        self.flight: Flight | None = None

    def earn(self, tokens: int) -> None:
        """An inner step is for all fragments."""
        self._owed = [Owed(one.tokens + tokens, one.carried) for one in self._owed]

    def tokens(self, fragment: int) -> int:
        return self._owed[fragment].tokens

    def send(self, fragment: int, steps: int, at_s: float, sent: Tensor | None) -> None:
        """A contribution leaves, with all that is owed for its fragment."""
        owed = self._owed[fragment]
        self.flight = Flight(steps, owed.tokens, at_s, sent)
        self._owed[fragment] = replace(owed, tokens=0)

    def land(self, fragment: int, included: bool, steps: int, *, is_newest: bool = True) -> Landing:
        """The fragment's round is over. `steps`: inner steps since the contribution was sent.

        Not `is_newest`: more rounds are over already, within one inner step of this node. To be left out of several
        that it had no chance to be in counts once.
        """
        flight, self.flight = self.flight, None
        owed = self._owed[fragment]
        tokens = owed.tokens + (flight.tokens if flight is not None else 0)
        is_carried = not included and tokens > 0 and owed.carried < MAX_CARRIED
        is_merged = included and flight is not None and steps > 0
        if is_carried:
            self._owed[fragment] = Owed(tokens, owed.carried + is_newest)
            return Landing(flight, is_carried, is_merged)
        left = owed.tokens if is_merged else 0
        self._owed[fragment] = Owed(left)
        counted, discarded = (tokens - left, 0) if included else (0, tokens)
        return Landing(flight, is_carried, is_merged, counted, discarded)

    def give_up(self) -> int:
        """All of it is lost; what is in flight may count still, but can not be carried. Returns the tokens lost."""
        lost = sum(one.tokens for one in self._owed)
        self._owed = [Owed()] * len(self._owed)
        if self.flight is not None:
            self.flight = replace(self.flight, steps=0, tokens=0)
        return lost

    def for_checkpoint(self, fragment: int) -> tuple[int, list[Any]]:
        """Steps and tokens in flight for this fragment, put back: whoever starts from there offers them once more."""
        owed, steps = list(self._owed), 0
        if self.flight is not None:
            steps = self.flight.steps
            owed[fragment] = replace(owed[fragment], tokens=owed[fragment].tokens + self.flight.tokens)
        return steps, [astuple(one) for one in owed]

"""A node's contributions: tokens that are pending for each fragment, the contribution in flight, and applied rounds.

Included in a round: local = new anchor, merged with the steps since the contribution was sent. Excluded: local += new
anchor - old anchor, and the tokens stay pending for at most MAX_CARRIED rounds of the fragment, then are discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch import Tensor

from node.diloco.outer import carry, correct, mix

MAX_CARRIED = 2


@dataclass(frozen=True, slots=True)
class Pending:
    """What this node has done for one fragment since its newest contribution."""

    tokens: int = 0
    """Including carried tokens."""
    carried: int = 0
    """Rounds in a row that excluded this node's contribution."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A contribution that was handed to the swarm and is in no committed round yet."""

    steps: int
    tokens: int
    sent_at: float
    """Monotonic."""
    sent: Tensor | None
    """The fragment's local parameters at that moment, fp32 [P_f]; None if the merge does not need them."""


@dataclass(frozen=True, slots=True)
class FragmentUpdate:
    """What a committed round does to this node's parameters and tokens of the round's fragment."""

    contribution: InFlight | None
    is_carried: bool
    is_merged: bool
    """Whether steps were made since the contribution was sent."""
    counted_tokens: int = 0
    """Tokens that are now in the round's record."""
    discarded_tokens: int = 0
    """Tokens that will never be in a record."""

    def merge(self, local: Tensor, at: slice, old: Tensor, new: Tensor, mix_alpha: float) -> Tensor:
        """New values of the part `at` of the fragment.

        Local parameters, old anchor and new anchor are fp32 [n] on one device.
        """
        if self.is_carried:
            return carry(local, old, new)
        if not self.is_merged or self.contribution is None:
            return new
        sent = self.contribution.sent
        return mix(local, new, mix_alpha) if sent is None else correct(local, sent[at].to(local.device), new)


class ContributionTracker:
    """Tracks what this node has trained but no round has included yet, for each fragment. Main thread only.

    Each round contributes one fragment, in turn. At most one contribution is in flight.
    """

    def __init__(self, fragments: int, saved: Sequence[Sequence[int]] = ()) -> None:
        """`saved`: as from `for_checkpoint`."""
        self._pending = [Pending(*values) for values in saved] or [Pending()] * fragments
        self.in_flight: InFlight | None = None

    def add_tokens(self, tokens: int) -> None:
        """Count an inner step, which works for all fragments."""
        self._pending = [replace(pending, tokens=pending.tokens + tokens) for pending in self._pending]

    def pending_tokens(self, fragment: int) -> int:
        return self._pending[fragment].tokens

    def send(self, fragment: int, steps: int, sent_at: float, sent: Tensor | None) -> None:
        """Send a contribution with all pending tokens of its fragment."""
        pending = self._pending[fragment]
        self.in_flight = InFlight(steps, pending.tokens, sent_at, sent)
        self._pending[fragment] = replace(pending, tokens=0)

    def round_over(self, fragment: int, included: bool, steps: int, *, is_newest: bool = True) -> FragmentUpdate:
        """The fragment's round is committed. `steps`: inner steps since the contribution was sent.

        `is_newest` is False if later rounds are committed already, all within one inner step of this node. Such rounds
        do not count towards MAX_CARRIED, as this node had no chance to contribute to them.
        """
        contribution, self.in_flight = self.in_flight, None
        pending = self._pending[fragment]
        tokens = pending.tokens + (contribution.tokens if contribution is not None else 0)
        is_carried = not included and tokens > 0 and pending.carried < MAX_CARRIED
        is_merged = included and contribution is not None and steps > 0
        if is_carried:
            self._pending[fragment] = Pending(tokens, pending.carried + is_newest)
            return FragmentUpdate(contribution, is_carried, is_merged)
        left = pending.tokens if is_merged else 0
        self._pending[fragment] = Pending(left)
        counted, discarded = (tokens - left, 0) if included else (0, tokens)
        return FragmentUpdate(contribution, is_carried, is_merged, counted, discarded)

    def discard_pending(self) -> int:
        """Discard all pending tokens and return their number. A contribution in flight may still count."""
        discarded = sum(pending.tokens for pending in self._pending)
        self._pending = [Pending()] * len(self._pending)
        if self.in_flight is not None:
            self.in_flight = replace(self.in_flight, steps=0, tokens=0)
        return discarded

    def for_checkpoint(self, fragment: int) -> tuple[int, list[Any]]:
        """(steps in flight, pending tokens with those in flight for `fragment`): a restart sends them again."""
        pending, steps = list(self._pending), 0
        if self.in_flight is not None:
            steps = self.in_flight.steps
            pending[fragment] = replace(pending[fragment], tokens=pending[fragment].tokens + self.in_flight.tokens)
        return steps, [astuple(one) for one in pending]

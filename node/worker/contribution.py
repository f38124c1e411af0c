"""A node's contributions: the tokens that are pending for each fragment, and the contribution in flight.

After a round that includes the contribution: local = new anchor, merged with the steps since the contribution was sent.
After a round that excludes it: local += new anchor - old anchor. The tokens of an excluded contribution stay pending
for at most MAX_CARRIED rounds of the fragment; then they are discarded.
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
    """This node's work on one fragment that is neither in flight nor in a committed round."""

    tokens: int = 0
    """Tokens trained on, including those of excluded contributions."""
    carried: int = 0
    """Number of rounds in a row that excluded this node's contribution."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A contribution that was handed to the swarm and is in no committed round yet."""

    steps: int
    tokens: int
    sent_at: float
    """In monotonic seconds."""
    sent: Tensor | None
    """The fragment's local parameters from which later steps count, fp32 [P_f]: those at `sent_at`, or those after a
    reset since. None if the merge does not need them."""
    is_lost: bool = False
    """Whether this node has reset its parameters since. The tokens count if a round includes the contribution, and are
    discarded otherwise."""


@dataclass(frozen=True, slots=True)
class FragmentUpdate:
    """How a committed round changes this node's parameters and tokens of the round's fragment."""

    contribution: InFlight | None
    is_carried: bool
    is_merged: bool
    """Whether the steps since the contribution was sent are merged into the new anchor."""
    counted_tokens: int = 0
    """Tokens of this node that the round's record counts."""
    discarded_tokens: int = 0
    """Tokens of this node that no record will ever count."""

    def merge(self, local: Tensor, at: slice, old: Tensor, new: Tensor, mix_alpha: float) -> Tensor:
        """Return the new values of the fragment's slice `at`.

        `local`, `old` and `new` are that slice of the local parameters and of both anchors, fp32 [n] on one device.
        """
        if self.is_carried:
            return carry(local, old, new)
        if not self.is_merged or self.contribution is None:
            return new
        sent = self.contribution.sent
        return mix(local, new, mix_alpha) if sent is None else correct(local, sent[at].to(local.device), new)


class ContributionTracker:
    """Tracks what this node has trained but no round has included yet, for each fragment. Main thread only.

    Each round is for one fragment, and the fragments take turns. At most one contribution is in flight.
    """

    def __init__(self, fragments: int, saved: Sequence[Sequence[int]] = ()) -> None:
        """`saved` is the list that `for_checkpoint` returned."""
        self._pending = [Pending(*values) for values in saved] or [Pending()] * fragments
        self.in_flight: InFlight | None = None

    def add_tokens(self, tokens: int) -> None:
        """Add the tokens of an inner step to every fragment, as a step trains all of them."""
        self._pending = [replace(pending, tokens=pending.tokens + tokens) for pending in self._pending]

    def pending_tokens(self, fragment: int) -> int:
        return self._pending[fragment].tokens

    def send(self, fragment: int, steps: int, sent_at: float, sent: Tensor | None) -> None:
        """Record that a contribution with all pending tokens of its fragment is sent."""
        pending = self._pending[fragment]
        self.in_flight = InFlight(steps, pending.tokens, sent_at, sent)
        self._pending[fragment] = replace(pending, tokens=0)

    def round_over(self, fragment: int, recorded: int | None, steps: int, *, is_newest: bool = True) -> FragmentUpdate:
        """Record that the fragment's round is committed, `steps` inner steps after the contribution was sent.

        `recorded` is the number of this node's tokens in the round's record; None if it excludes this node. It differs
        from what is in flight or pending if an earlier process has sent the contribution.

        `is_newest` is False if later rounds were committed during the same inner step of this node. The round then does
        not count towards MAX_CARRIED, as this node had no chance to contribute to it.
        """
        contribution, self.in_flight = self.in_flight, None
        included = recorded is not None
        pending = self._pending[fragment]
        tokens, lost = pending.tokens + (contribution.tokens if contribution is not None else 0), 0
        if contribution is not None and contribution.is_lost and not included:
            lost = contribution.tokens
        is_carried = not included and tokens > lost and pending.carried < MAX_CARRIED
        is_merged = included and contribution is not None and steps > 0
        if is_carried:
            self._pending[fragment] = Pending(tokens - lost, pending.carried + is_newest)
            return FragmentUpdate(contribution, is_carried, is_merged, discarded_tokens=lost)
        left = pending.tokens if is_merged else 0
        self._pending[fragment] = Pending(left)
        counted = recorded or 0
        discarded = max(0, tokens - left - counted)
        return FragmentUpdate(contribution, is_carried, is_merged, counted, discarded)

    def discard_pending(self, local: Tensor | None = None) -> int:
        """Discard all pending tokens and return their number. One in flight is lost unless it is included.

        `local` is the fragment in flight, fp32 [P_f], after this node has reset its parameters. It may be None if no
        round can include what is in flight.
        """
        discarded = sum(pending.tokens for pending in self._pending)
        self._pending = [Pending()] * len(self._pending)
        if self.in_flight is not None:
            sent = None if self.in_flight.sent is None else local
            self.in_flight = replace(self.in_flight, steps=0, sent=sent, is_lost=True)
        return discarded

    def for_checkpoint(self, fragment: int) -> tuple[int, list[Any]]:
        """Return (steps in flight, pending tokens). Tokens in flight are pending again, so a restart sends them."""
        pending, steps = list(self._pending), 0
        if self.in_flight is not None and not self.in_flight.is_lost:
            steps = self.in_flight.steps
            pending[fragment] = replace(pending[fragment], tokens=pending[fragment].tokens + self.in_flight.tokens)
        return steps, [astuple(one) for one in pending]

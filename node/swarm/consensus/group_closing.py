"""Decides when a leader closes its group, and how long the leader waits for late members.

The result of each function depends only on its arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from node.swarm.consensus.quorum import Electorate

GRACE_RATIO = 0.1
PATIENCE_RATIO = 3.0

WAITED_RATIO, WAITED_EVERY = 0.25, 3
"""Every third round waits up to a quarter of T_r for members that were left out recently. The other members lose at
most a twelfth of their time."""
LATELY = 12
"""A member was left out recently if it contributed or joined within this many rounds, but is not in the last two
records."""

FEW_NEWCOMERS = 4
"""So many newcomers fit into the plan of a round's first attempt, however few known members there are."""

WAITING_CODES = ("waiting_for_peers", "waiting_for_quorum", "waiting_for_slow", "grace", "late", "complete", "behind")
"""The reasons why a leader keeps its group open, or closes it."""


@dataclass(frozen=True, slots=True)
class ClosingRule:
    """The manifest's settings for when a group closes."""

    policy: Literal["time", "steps"]
    min_peers: int
    quorum_ratio: float
    least_grace_s: float = 2.0
    patience_s: float = 30.0

    def grace_s(self, round_s: float | None) -> float:
        """Seconds for which the group stays open for late members after the quorum is ready. `round_s` is T_r."""
        return max(self.least_grace_s, GRACE_RATIO * (round_s or 0.0))

    def longest_wait_s(self, round_s: float | None) -> float:
        """Longest wait of a round in seconds: for slow live members with policy `steps`, for the quorum with `time`.

        Before the first record the wait for the quorum has no limit, because only the quorum prevents two groups.
        """
        return PATIENCE_RATIO * (round_s or 0.0) + self.patience_s

    def is_overdue(self, age_s: float, round_s: float | None) -> bool:
        """Whether a round of this age has exceeded T_r and the longest wait."""
        return age_s > (round_s or 0.0) + self.longest_wait_s(round_s)


@dataclass(frozen=True, slots=True)
class Gathering:
    """What a leader sees while members become ready. Times are seconds of one monotonic clock."""

    ready: Mapping[str, int]
    """Tokens by peer id of the joined members."""
    live: Sequence[str]
    """Live members in this round, ready or not."""
    last_weights: Mapping[str, int]
    """Tokens of the contributors to the last record; empty before the first."""
    joined: Collection[str]
    """Members that have joined this leader's attempt, whether or not the leader plans with them."""
    electorate: Electorate
    """Who decides about this round."""
    opened_at_s: float
    """When the first member became ready."""
    quorum_at_s: float | None
    """When the leader first saw the quorum; None before."""
    round_s: float | None
    """T_r; None while unknown."""
    left_out: Collection[str] = ()
    """Members for which the group stays open longer (`left_out`)."""
    known: Collection[str] = ()
    """Contributors to the last two records (`Tip.known`); empty before the first, when all members count as known.
    Others weigh nothing until they are ready."""


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    close: bool
    has_quorum: bool
    reason: str
    code: str


def judge(rule: ClosingRule, seen: Gathering, now_s: float) -> GroupVerdict:
    """Decide whether to close the group now. The verdict has a reason: one sentence and one of WAITING_CODES."""
    waited_for = [peer for peer in seen.live if peer not in seen.ready]
    ready, live = len(seen.ready), len(seen.live)
    count = f"{ready} of {live} member{'' if live == 1 else 's'} {'is' if ready == 1 else 'are'} ready"
    if len(seen.ready) < rule.min_peers:
        return GroupVerdict(False, False, f"{count}; the run needs {rule.min_peers}.", "waiting_for_peers")
    if not seen.electorate.is_quorum(seen.joined):
        whose = "the last round's" if seen.last_weights else "all"
        return GroupVerdict(
            False, False, f"{count}; more than half of {whose} members are needed.", "waiting_for_peers"
        )
    if not waited_for:
        return GroupVerdict(True, True, f"{count}.", "complete")
    late = now_s - seen.opened_at_s > rule.longest_wait_s(seen.round_s)
    if rule.policy == "steps":
        return GroupVerdict(late, True, f"{count}.", "late" if late else "waiting_for_slow")
    if late and seen.last_weights:
        return GroupVerdict(True, True, f"{count}; the others took too long.", "late")
    if not _holds_quorum(rule, seen):
        return GroupVerdict(False, False, f"{count}; that is less than the quorum.", "waiting_for_quorum")
    grace_s = rule.grace_s(seen.round_s)
    if any(peer in seen.left_out for peer in waited_for):
        grace_s = max(grace_s, WAITED_RATIO * (seen.round_s or 0.0))
    over = seen.quorum_at_s is not None and now_s - seen.quorum_at_s >= grace_s
    return GroupVerdict(over, True, f"{count}; late members have {grace_s:.0f} s.", "late" if over else "grace")


def admitted(joined: Collection[str], known: Collection[str], number: int, min_peers: int, lot: bytes) -> set[str]:
    """The members of a plan: all known members that have joined, and some of the newcomers, by lot.

    Identities cost nothing. If most of a plan's members send nothing, its outcome has too few contributions
    (`messages.least_included`). So there are at most as many newcomers as known members, or FEW_NEWCOMERS. If the first
    attempt has failed, there are half as many as known members, but at least one.

    Args:
        known: contributors to the last two records (`Tip.known`); empty before the first.
        number: of the attempt.
        lot: a secret of the leader. Otherwise, strangers could choose identities that are always drawn.
    """
    here = set(joined).intersection(known)
    newcomers = set(joined) - here
    if not here:
        return newcomers
    most = max(1, len(here) // 2) if number else max(FEW_NEWCOMERS, len(here))
    most = max(most, min_peers - len(here))
    drawn = sorted(newcomers, key=lambda peer: sha256(lot + peer.encode()).digest())
    return here.union(drawn[:most])


def left_out(round_: int, recent: Sequence[Collection[str]], joined: Collection[str]) -> frozenset[str]:
    """Members for which this round waits longer, up to WAITED_RATIO x T_r, if they are live.

    These members are in neither of the last two records. Within LATELY rounds, they have contributed or have sent a
    join, perhaps too late.

    Args:
        recent: contributors to each of the last records, newest last.
        joined: members that sent a join within LATELY rounds.
    """
    if round_ % WAITED_EVERY or len(recent) < 2:
        return frozenset()
    lately = {peer for members in recent[-LATELY:] for peer in members}
    return frozenset((lately | set(joined)) - set(recent[-1]) - set(recent[-2]))


def _holds_quorum(rule: ClosingRule, seen: Gathering) -> bool:
    """Whether the ready members hold `quorum_ratio` of the live weight. A new member weighs as much as the mean."""
    last = [seen.last_weights[peer] for peer in seen.live if peer in seen.last_weights]
    mean = sum(last) / len(last) if last else 1.0
    weighing = [peer for peer in seen.live if peer in seen.ready or peer in seen.known or not seen.known]
    weight = {peer: float(seen.last_weights.get(peer, mean)) for peer in weighing}
    ready = sum(weight.get(peer, 0.0) for peer in seen.ready)
    return ready >= rule.quorum_ratio * sum(weight.values())

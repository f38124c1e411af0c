"""Who leads a round, when its group is closed, and who reduces what: pure rules. Knows no network and no clock.

All functions are deterministic in their arguments, so that any node can compute what any other would.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

GRACE_S = 2.0
GRACE_RATIO = 0.1
FASTEST_BYTES_S = 125e6
"""1 Gbit/s: whoever claims more gets no more."""
SLOWEST_HALVINGS = 10
PATIENCE_RATIO, PATIENCE_S = 3.0, 30.0
"""A round waits for at most so many usual rounds, and so long: under `steps` for a live member that is slow, under
`time` for the quorum, which one that has signed much may withhold. Not before the first record, when nothing else keeps
two groups apart. A round that is older than this by one usual round is overdue."""

WAITED_RATIO, WAITED_EVERY = 0.25, 3
"""Members that were left out lately are waited for up to so much of a usual round, in every third round: this costs the
others at most a twelfth of their time."""
LATELY = 12
"""Rounds: who has contributed or joined within so many is waited for, if the last two records are without it."""
FASTER = 4.0
"""So many times as fast as a slow member's is the usual uplink, and that of a member that sends for it."""

WAITING_CODES = ("waiting_for_peers", "waiting_for_quorum", "waiting_for_slow", "grace", "late", "complete", "behind")
"""What a leader may say that it waits for."""


def leader_order(parent: str, peer_ids: Sequence[str]) -> list[str]:
    """The peers in the order in which they lead the attempts of the round after `parent`."""
    return sorted(peer_ids, key=lambda peer: hashlib.sha256(f"{parent} {peer}".encode()).digest())


def leader_of(parent: str, peer_ids: Sequence[str], attempt: int, slow: Collection[str] = ()) -> str:
    """Who leads an attempt. Those that are `slow` come last: all wait for what a leader asks and answers."""
    order = sorted(leader_order(parent, peer_ids), key=lambda peer: peer in slow)
    return order[attempt % len(order)]


def slow_uplinks(uplinks_bytes_s: Mapping[str, float]) -> frozenset[str]:
    """Members whose uplink is several times slower than the usual one, by what they have signed (0: not known).

    The usual one is the lower median of the known: a minority that claims fast lines makes nobody slow.
    """
    known = {peer: rate for peer, rate in uplinks_bytes_s.items() if rate > 0}
    if not known:
        return frozenset()
    usual = statistics.median_low(known.values())
    return frozenset(peer for peer, rate in known.items() if FASTER * rate <= usual)


def role_of(peer_id: str, parent: str, peer_ids: Sequence[str]) -> str:
    """`leader` of the first attempt, `other` for who leads the second; empty for the rest."""
    place = leader_order(parent, peer_ids).index(peer_id) if peer_id in peer_ids else len(peer_ids)
    return {0: "leader", 1: "other"}.get(place, "")


def chunk_owners(chunks: int, capacities: Sequence[float]) -> tuple[int, ...]:
    """For each chunk the index of its reducer: contiguous runs, as long as each reducer's share of the capacity."""
    total = sum(capacities)
    if not capacities or total <= 0:
        raise ValueError("Chunks need at least one reducer with capacity above 0.")
    ends, done = [], 0.0
    for capacity in capacities:
        done += capacity
        ends.append(round(chunks * done / total))
    owners: list[int] = []
    for index, end in enumerate(ends):
        owners += [index] * (end - len(owners))
    return tuple(owners)


def capacities(declared_bytes_s: Sequence[float]) -> list[float]:
    """Shares of the reducing, relative to the fastest's 1.0, from what each says it can upload (0: not known yet).

    Who does not know counts as the median of those that do. In powers of two below the fastest: what equal machines
    measure differs by less, so they get equal shares.
    """
    known = [min(rate, FASTEST_BYTES_S) for rate in declared_bytes_s if rate > 0]
    if not known:
        return [1.0] * len(declared_bytes_s)
    fastest, usual = max(1.0, *known), statistics.median(known)
    rates = [min(rate, FASTEST_BYTES_S) if rate > 0 else usual for rate in declared_bytes_s]
    return [2.0 ** -min(SLOWEST_HALVINGS, math.floor(math.log2(fastest / max(rate, 1.0)))) for rate in rates]


@dataclass(frozen=True, slots=True)
class Quorum:
    """The manifest's rule for closing a group."""

    policy: Literal["time", "steps"]
    min_peers: int
    quorum_ratio: float


@dataclass(frozen=True, slots=True)
class Gathering:
    """What a leader sees while members become ready. Times are seconds of one monotonic clock."""

    ready: Mapping[str, int]
    """Peer id to tokens of those that have joined."""
    live: Sequence[str]
    """Members that are there, ready or not."""
    last_weights: Mapping[str, int]
    """Tokens of the contributors to the last record; empty before the first."""
    joined: Collection[str]
    """Members that have joined this leader's attempt, whether or not the leader plans with them."""
    living: Collection[str]
    """All live members, whichever round they are in."""
    is_overdue: bool
    """Whether the round has lasted so long that the dead do not count any more (`is_quorum`)."""
    opened_at_s: float
    """When the first member became ready."""
    quorum_at_s: float | None
    """When the quorum was first seen; None before."""
    round_s: float | None
    """T_r; None while unknown."""
    left_out: Collection[str] = ()
    """Members that are waited for longer (`left_out`)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    close: bool
    has_quorum: bool
    reason: str
    code: str


def grace_seconds(round_s: float | None) -> float:
    """For how long the late are waited for once the quorum is ready, in a round that lasts `round_s` (T_r)."""
    return max(GRACE_S, GRACE_RATIO * (round_s or 0.0))


def judge(rule: Quorum, seen: Gathering, now_s: float) -> Verdict:
    """Whether the group can be closed now, and if not, what is waited for (one sentence, one word)."""
    waited_for = [peer for peer in seen.live if peer not in seen.ready]
    ready, live = len(seen.ready), len(seen.live)
    count = f"{ready} of {live} member{'' if live == 1 else 's'} {'is' if ready == 1 else 'are'} ready"
    if len(seen.ready) < rule.min_peers:
        return Verdict(False, False, f"{count}; the run needs {rule.min_peers}.", "waiting_for_peers")
    if not _holds_majority(seen):
        return Verdict(False, False, f"{count}; more than half of the last round's are needed.", "waiting_for_peers")
    if not waited_for:
        return Verdict(True, True, f"{count}.", "complete")
    late = now_s - seen.opened_at_s > PATIENCE_RATIO * (seen.round_s or 0.0) + PATIENCE_S
    if rule.policy == "steps":
        return Verdict(late, True, f"{count}.", "late" if late else "waiting_for_slow")
    if late and seen.last_weights:
        return Verdict(True, True, f"{count}; the others have had their time.", "late")
    if not _holds_quorum(rule, seen):
        return Verdict(False, False, f"{count}; that is less than the quorum.", "waiting_for_quorum")
    grace_s = grace_seconds(seen.round_s)
    if any(peer in seen.left_out for peer in waited_for):
        grace_s = max(grace_s, WAITED_RATIO * (seen.round_s or 0.0))
    over = seen.quorum_at_s is not None and now_s - seen.quorum_at_s >= grace_s
    return Verdict(over, True, f"{count}; the late have {grace_s:.0f} s.", "late" if over else "grace")


def left_out(round_: int, recent: Sequence[Collection[str]], joined: Collection[str]) -> frozenset[str]:
    """The members for which the group of this round waits longer, if they live: up to WAITED_RATIO x T_r.

    `recent`: the contributors to each of the last records, newest last. Who is in neither of the last two, though in
    one of the last LATELY, or among those that have `joined` a round as long ago, too late perhaps.
    """
    if round_ % WAITED_EVERY or len(recent) < 2:
        return frozenset()
    lately = {peer for members in recent[-LATELY:] for peer in members}
    return frozenset((lately | set(joined)) - set(recent[-1]) - set(recent[-2]))


def depositaries(me: str, parent: str, own_bytes_s: float, uplinks_bytes_s: Mapping[str, float]) -> list[str]:
    """Members to which one on a slow uplink may hand its contribution for this round, in the order to try them.

    Those with an uplink at least FASTER times as fast: handed to another slow one, it would cross two slow lines. None
    where this node's uplink is not slow beside the usual one (the lower median of the others'): a minority that claims
    fast lines does not become the one through which all others send. Each member has an order of its own, so that
    several do not choose the same.
    """
    others = [rate for peer, rate in uplinks_bytes_s.items() if peer != me]
    if not others or FASTER * own_bytes_s > statistics.median_low(others):
        return []
    fast = [peer for peer, rate in uplinks_bytes_s.items() if peer != me and rate >= FASTER * own_bytes_s > 0]
    return leader_order(f"deposit {me} {parent}", fast)


def _holds_majority(seen: Gathering) -> bool:
    return is_quorum(seen.joined, seen.last_weights, seen.living, is_overdue=seen.is_overdue)


def is_quorum(members: Collection[str], last: Collection[str], living: Collection[str], *, is_overdue: bool) -> bool:
    """Whether these members decide for the contributors to the last record. Groups and votes both need a quorum.

    A quorum is more than half of all contributors, dead or alive, or all that live. Any two quorums share a member, so
    one of them knows what the other has accepted (Lamport, "Paxos Made Simple", 2001). That holds whatever each leader
    believes about who lives, as long as it does not take half of the contributors for dead.

    Once the round is overdue, more than half of the living contributors is enough, so that one member that is alive but
    takes no part does not stop the others after half of them have left.

    Args:
        last: contributors to the last record; empty before the first, when any members are a quorum.
        living: live members, also those that have moved on to a later round: they can join no other group.
    """
    alive = set(last).intersection(living)
    present = len(alive.intersection(members))
    if 2 * len(set(last).intersection(members)) > len(last) or present == len(alive):
        return True
    return is_overdue and 2 * present > len(alive)


def overdue(age_s: float, round_s: float | None) -> bool:
    """Whether a round that began so long ago has kept all of the others waiting for too long."""
    return age_s > (1 + PATIENCE_RATIO) * (round_s or 0.0) + PATIENCE_S


def supported(votes: Collection[str], last: Collection[str], stands: Mapping[str, bool]) -> bool:
    """Whether a committed outcome speaks for the contributors to the last record.

    The votes of more than half of all contributors are enough, whoever lives. So are those of more than half of the
    contributors that live. Without either, an outcome is refused while more than half of the living contributors are
    still at this node's head, because they would have to know of it. A survivor that went on alone is believed.

    Args:
        stands: live members, and whether they are still at this node's head.
    """
    if 2 * sum(peer in votes for peer in last) > len(last):
        return True
    living = [peer for peer in last if peer in stands]
    if 2 * sum(peer in votes for peer in living) > len(living):
        return True
    return 2 * sum(stands[peer] for peer in living) <= len(living)


def _holds_quorum(rule: Quorum, seen: Gathering) -> bool:
    """The ready hold `quorum_ratio` of the live weight; a newcomer counts as the mean of the known."""
    known = [seen.last_weights[peer] for peer in seen.live if peer in seen.last_weights]
    mean = sum(known) / len(known) if known else 1.0
    weight = {peer: float(seen.last_weights.get(peer, mean)) for peer in seen.live}
    ready = sum(weight.get(peer, 0.0) for peer in seen.ready)
    return ready >= rule.quorum_ratio * sum(weight.values())

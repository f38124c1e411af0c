"""Chooses the member that leads an attempt.

The result of each function depends only on its arguments, so every node computes the same result.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

FASTER = 4.0
"""An uplink is slow if the usual uplink is this many times as fast. A depositary must be faster by the same factor."""


def leader_order(parent: str, peer_ids: Sequence[str]) -> list[str]:
    """The peers in the order in which they lead the attempts of the round after `parent`."""
    return sorted(peer_ids, key=lambda peer: hashlib.sha256(f"{parent} {peer}".encode()).digest())


def leaders_of(
    parent: str, contributors: Sequence[str], others: Sequence[str], attempts: Iterable[int], *last: Collection[str]
) -> Iterator[str]:
    """The leader of each of these attempts; empty without members.

    First all contributors to the last record lead in turn, dead or alive, then one of the other members, then the
    contributors again, and so on. Identities without work are free, so any number of others may come. But all
    contributors may have failed.

    Members in the first collection of `last` lead after their equals, and likewise in each part for the next ones.
    """

    def in_order(peers: Sequence[str]) -> list[str]:
        return sorted(leader_order(parent, peers), key=lambda peer: [peer in late for late in last])

    first, second = in_order(contributors), in_order(others)
    for attempt in attempts:
        if first and second:
            turn, place = divmod(attempt, len(first) + 1)
            yield first[place] if place < len(first) else second[turn % len(second)]
        else:
            order = first or second or [""]
            yield order[attempt % len(order)]


def leader_of(
    parent: str, contributors: Sequence[str], others: Sequence[str], attempt: int, *last: Collection[str]
) -> str:
    """The leader of one attempt (`leaders_of`)."""
    return next(leaders_of(parent, contributors, others, [attempt], *last))


def slow_uplinks(uplinks_bytes_s: Mapping[str, float]) -> frozenset[str]:
    """Members on slow uplinks, by the signed rates; 0 is an unknown rate, which does not count.

    The usual rate is the lower median of the known rates, so a minority that claims fast uplinks makes nobody slow.
    """
    known = {peer: rate for peer, rate in uplinks_bytes_s.items() if rate > 0}
    if not known:
        return frozenset()
    usual = statistics.median_low(known.values())
    return frozenset(peer for peer, rate in known.items() if FASTER * rate <= usual)


def role_of(peer_id: str, parent: str, peer_ids: Sequence[str], last_leader: str) -> str:
    """`leader` for the leader of the first attempt if no member is slow, `other` for that of the second. For faults."""
    if peer_id not in peer_ids:
        return ""
    leaders = {leader_of(parent, peer_ids, [], attempt, [last_leader]): attempt for attempt in (1, 0)}
    return {0: "leader", 1: "other"}.get(leaders.get(peer_id, 2), "")

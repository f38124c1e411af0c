"""The quorums of a round, as pure functions of the last record and the peer table (PROTOCOL.md, Quorums)."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def is_quorum(members: Collection[str], last: Collection[str], all_live: Collection[str], *, is_overdue: bool) -> bool:
    """Whether these members are a quorum of the contributors to the last record. Groups and votes both need a quorum.

    A quorum is more than half of all contributors, dead or alive, or all live contributors. Any two quorums share a
    member, which knows what it has accepted (Lamport, "Paxos Made Simple", 2001). This holds as long as no leader
    believes that half of the contributors are dead while they live.

    Once the round is overdue, more than half of the live contributors are enough. Otherwise one live member that takes
    no part would stop the others after half of them have left.

    Args:
        last: contributors to the last record; empty before the first, when any members are a quorum.
        all_live: live members, including those in a later round, which can join no other group.
    """
    alive = set(last).intersection(all_live)
    present = len(alive.intersection(members))
    if 2 * len(set(last).intersection(members)) > len(last) or present == len(alive):
        return True
    return is_overdue and 2 * present > len(alive)


def supported(votes: Collection[str], last: Collection[str], stands: Mapping[str, bool]) -> bool:
    """Whether a node that did not vote may adopt a committed outcome.

    The votes of more than half of all contributors to the last record are enough, and so are those of more than half of
    the live contributors. Without either, the outcome is refused while more than half of the live contributors are
    still at this node's head, because they would know of it. A survivor that went on alone is thus believed.

    Args:
        stands: live members, and whether they are still at this node's head.
    """
    if 2 * sum(peer in votes for peer in last) > len(last):
        return True
    all_live = [peer for peer in last if peer in stands]
    if 2 * sum(peer in votes for peer in all_live) > len(all_live):
        return True
    return 2 * sum(stands[peer] for peer in all_live) <= len(all_live)

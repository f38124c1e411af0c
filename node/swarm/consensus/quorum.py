"""The quorum of a round: the one rule for closing a group, committing an outcome, and believing a certificate.

PROTOCOL.md explains it in the section Quorum.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Electorate:
    """The peers that decide about a round, as one node sees them."""

    contributors: frozenset[str]
    """Contributors to the last record, dead or alive; empty before the first."""
    present: frozenset[str]
    """Peers that count as living (`PeerTable.present`)."""
    members: frozenset[str]
    """Live members. They decide if no contributor is living."""
    is_overdue: bool = False
    """Whether the round has lasted so long that living contributors that take no part are no longer needed."""

    @property
    def voters(self) -> frozenset[str]:
        """All contributors, or all members before the first record."""
        return self.contributors or self.members

    @property
    def deciding(self) -> frozenset[str]:
        """Whoever may have a say: all contributors, dead or alive, and all members if no contributor is living."""
        return self.contributors | self.living

    def suffice(self, members: Collection[str]) -> bool:
        """Whether these members of a plan are at least as many as half of the living contributors.

        Otherwise, a hostile leader could make a round without the others, and decide about the next one alone.
        """
        return 2 * len(self.deciding.intersection(members)) >= len(self.living)

    @property
    def living(self) -> frozenset[str]:
        """The living contributors, or all members if there is none."""
        return self.contributors & self.present or self.members

    def is_quorum(self, votes: Collection[str]) -> bool:
        """Whether these peers are a quorum.

        A quorum is more than half of all contributors, dead or alive, or else all living contributors. Any two quorums
        share a living member, which knows what it has accepted (Lamport, "Paxos Made Simple", 2001). This holds as long
        as no node takes a living contributor for dead.

        Without living contributors, a quorum is more than half of the members. If the round is overdue, more than half
        of the living contributors are enough. Otherwise, after half of the contributors have left, one living
        contributor that takes no part would stop the others.
        """
        agreeing = self.living.intersection(votes)
        if 2 * len(self.contributors.intersection(votes)) > len(self.contributors) or agreeing == self.living:
            return True
        return (self.is_overdue or not self.contributors & self.present) and 2 * len(agreeing) > len(self.living)

    def believes(self, votes: Collection[str], gone_on: Collection[str]) -> bool:
        """Whether a node that did not vote may adopt a certificate with these votes.

        A forged certificate has few votes, and most other contributors are still at this node's head. So a certificate
        is believed with the votes of more than half of all contributors, or of the living ones, or if half of the
        living contributors have gone on. Without living contributors, any votes are enough.

        Args:
            gone_on: living peers that have left this node's head, except those at another outcome of the same round. A
                node that was away counts itself.
        """
        if 2 * len(self.contributors.intersection(votes)) > len(self.contributors):
            return True
        living = self.contributors & self.present
        return 2 * len(living.intersection(votes)) > len(living) or 2 * len(living.intersection(gone_on)) >= len(living)

"""What may replace an outcome that members have accepted in an earlier attempt, because it may be committed.

A join names the outcome that its member has accepted (`Join.accepted`). So the joins in a plan show which members had
not accepted some earlier outcome. If they are most of the contributors, that outcome has no majority of votes.

Nothing here depends on anything but the arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from node.swarm.messages import AcceptedOutcome, RoundOutcome, parse, read_join

MAX_CLAIM_BYTES = 4 * 2**20
"""Limit on the claim that goes with a join: an accepted outcome as JSON. Nobody votes for an outcome that may exceed
it, because a member that could not claim its vote could not join again."""


@dataclass(frozen=True, slots=True)
class Made:
    """How an outcome was made."""

    attempt: int
    joined: Mapping[str, str]
    """The members of its plan, and the hash of what each had accepted before; empty if nothing."""

    def lack(self, outcome: str) -> set[str]:
        """The members of the plan that had not accepted this outcome when they joined."""
        return {peer for peer, accepted in self.joined.items() if accepted != outcome}

    def replaces(self, outcome: str, accepted_in: int, contributors: Collection[str]) -> bool:
        """Whether a member that has accepted `outcome` in an earlier attempt may vote for this one instead."""
        return self.attempt > accepted_in and _are_most(self.lack(outcome), contributors)


def made(outcome: RoundOutcome) -> Made:
    plan = outcome.plan
    return Made(plan.attempt, {join.signer: read_join(join).accepted for join in plan.joins})


@dataclass(frozen=True, slots=True)
class Claim:
    """An outcome that at least one joined member has accepted."""

    outcome: str
    """Its hash."""
    accepted_in: int
    """The last attempt in which a claimant accepted it."""
    claimants: frozenset[str]
    made: Made

    @property
    def supporters(self) -> frozenset[str]:
        """The members of its plan, and those that have accepted it."""
        return self.claimants.union(self.made.joined)


@dataclass(frozen=True, slots=True)
class Claims:
    """All claims of an attempt."""

    claims: Sequence[Claim]
    joined: Collection[str]
    """All members that have joined. Those without a claim have accepted nothing."""
    contributors: Collection[str]
    """Those who decide about the round."""

    def may_have_majority(self, one: Claim) -> bool:
        """Whether an outcome may have the votes of most contributors, by what the joined members say."""
        refuted = set(self.joined) - one.claimants
        for other in self.claims:
            if other.made.attempt > one.accepted_in:
                refuted |= other.made.lack(one.outcome)
        return _are_most(set(self.contributors) - refuted, self.contributors)

    def by_precedence(self) -> list[Claim]:
        """The claims in the order in which a leader tries to propose them again.

        First come those that may have the votes of a majority, then those that were accepted last (Lamport, "Paxos Made
        Simple", 2001). But an outcome does not precede an earlier one that may have a majority, unless its plan shows
        that it has none: its leader may have been hostile.
        """

        def is_doubtful(one: Claim) -> bool:
            earlier = [other for other in self.claims if other.accepted_in < one.made.attempt]
            return any(
                self.may_have_majority(other) and not _are_most(one.made.lack(other.outcome), self.contributors)
                for other in earlier
            )

        def rank(one: Claim) -> tuple[bool, bool, int, int, str]:
            # Two outcomes of one attempt exist only if its leader has signed both.
            return self.may_have_majority(one), not is_doubtful(one), one.accepted_in, len(one.claimants), one.outcome

        return sorted(self.claims, key=rank, reverse=True)


def gather(claims: Mapping[str, AcceptedOutcome]) -> list[Claim]:
    """What members claim to have accepted, by outcome. Slow for large groups."""
    found: dict[str, Claim] = {}
    for member, claim in claims.items():
        head = claim.outcome.hash
        known = found.get(head)
        found[head] = Claim(
            outcome=head,
            accepted_in=max(claim.attempt, known.accepted_in if known is not None else 0),
            claimants=frozenset({member}) | (known.claimants if known is not None else frozenset()),
            made=known.made if known is not None else made(parse(RoundOutcome, claim.outcome.text)),
        )
    return list(found.values())


def _are_most(members: Collection[str], contributors: Collection[str]) -> bool:
    return 2 * len(set(members).intersection(contributors)) > len(contributors)

"""Which outcome a leader proposes again, and which one a member may vote for after it has accepted another."""

from __future__ import annotations

import pytest

from node.swarm.consensus.claims import Claim, Claims, Made

FOUR, FIVE = "abcd", "abcde"


def made(attempt: int, members: str, **accepted: str) -> Made:
    """Made by members of which the named ones had accepted an outcome."""
    return Made(attempt, {member: accepted.get(member, "") for member in members})


def claim(outcome: str, accepted_in: int, claimants: str, by: Made) -> Claim:
    return Claim(outcome, accepted_in, frozenset(claimants), by)


def first(claims: list[Claim], joined: str, contributors: str) -> str:
    return Claims(claims, joined, contributors).by_precedence()[0].outcome


X = made(0, "abcd")


def test_of_two_outcomes_that_may_be_committed_the_one_accepted_last_comes_first() -> None:
    later = made(1, "bcd")
    assert first([claim("X", 0, "a", X), claim("Y", 1, "b", later)], "ab", FOUR) == "Y"
    assert first([claim("X", 2, "a", X), claim("Y", 1, "b", later)], "ab", FOUR) == "X"


def test_the_outcome_of_a_hostile_leader_does_not_precede_one_that_may_be_committed() -> None:
    """d has made Y in attempt 1, although a and c had accepted X. b has committed X, and is away."""
    x = claim("X", 0, "ac", X)
    for joins in (made(1, "d"), made(1, "ad", a="X"), made(1, "acd", a="X", c="X")):
        assert first([x, claim("Y", 1, "d", joins)], "acd", FOUR) == "X"
    more = claim("Y", 1, "de", made(1, "de"))
    assert first([claim("X", 0, "a", made(0, "abc")), more], "ade", FIVE) == "X", "b and c may have voted for X, too"


def test_an_outcome_whose_plan_shows_that_no_other_is_committed_comes_first() -> None:
    x = claim("X", 0, "a", made(0, FIVE))
    assert first([x, claim("Y", 1, "b", made(1, "bcd"))], "ab", FIVE) == "Y"
    assert first([x, claim("Y", 1, "b", made(1, "bcd", c="X"))], "ab", FIVE) == "X"


def test_the_newer_outcome_comes_first_if_the_older_one_has_no_majority() -> None:
    """a and b had accepted X, and were dead while c and d made Y. d is dead now, and knows that Y is committed."""
    claims = [claim("X", 0, "ab", made(0, FIVE)), claim("Y", 1, "c", made(1, "cd"))]
    assert first(claims, "abce", FIVE) == "Y"


@pytest.mark.parametrize(
    ("by", "allowed"),
    [
        (made(2, "bcd"), True),
        (made(2, "cd"), False),  # Half of the contributors do not show that X has no majority.
        (made(2, "bcd", b="X"), False),
        (made(2, "bcd", b="Z"), True),
        (made(1, "bcd"), False),  # Made before this member accepted X.
    ],
)
def test_a_member_that_has_accepted_an_outcome_votes_for_another_only_if_its_plan_shows_that_it_may(
    by: Made, allowed: bool
) -> None:
    assert by.replaces("X", 1, FOUR) == allowed

"""Which round of the swarm a node reports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from node.swarm.member import claimed_round


@pytest.mark.parametrize(
    ("claims", "own", "expected"),
    [
        ((), 7, 7),
        ((100, 101, 101), 100, 101),
        ((100, 100, 2**62), 100, 100),
        ((100, 2**62), 100, 100),
        ((3, 3, 3), 9, 9),
        ((100, 101), -1, 100),
    ],
)
def test_a_round_that_only_one_member_claims_does_not_count(claims: Sequence[int], own: int, expected: int) -> None:
    assert claimed_round(claims, own) == expected

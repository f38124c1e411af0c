"""No schedule of the exhaustive model violates safety, unless the model lacks a rule."""

from __future__ import annotations

import pytest

from tests.simulation.model import SIZES, Model, explore

SMALL = (3, 2)


@pytest.mark.timeout(120)
def test_no_schedule_of_three_modelled_nodes_commits_two_outcomes() -> None:
    states, what = explore(Model(*SMALL))
    assert not what and states > 10_000


MUTANTS = {
    "a majority of the group decides": Model(*SMALL, has_quorum=lambda _, alive, votes, group: _most(votes, group)),
    "neither does a leader propose again nor a member keep its vote": Model(
        *SMALL, proposes_again=False, keeps_votes=False
    ),
    "a member breaks its promise": Model(*SMALL, keeps_promises=False),
    "a member does not keep its vote": Model(4, 2, hostile=1, are_mortal=False, keeps_votes=False),
}


def _most(votes: int, of: int) -> bool:
    return 2 * (votes & of).bit_count() > of.bit_count()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hostile", [1, 3])
def test_no_schedule_of_four_modelled_nodes_with_a_hostile_one_commits_two_outcomes(hostile: int) -> None:
    """Node 1 leads attempt 1, and node 3 leads none. Of five nodes, two majorities may share only the hostile one."""
    states, what = explore(Model(4, 2, hostile=hostile, are_mortal=False))
    assert not what and states > 50_000


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", MUTANTS)
def test_some_schedule_violates_safety_if_the_model_lacks_a_rule(what: str) -> None:
    assert explore(MUTANTS[what])[1]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("nodes", "attempts"), SIZES[2:3])
def test_no_schedule_of_more_modelled_nodes_or_attempts_commits_two_outcomes(nodes: int, attempts: int) -> None:
    states, what = explore(Model(nodes, attempts))
    assert not what and states > 100_000

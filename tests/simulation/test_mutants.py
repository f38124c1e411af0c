"""The simulation finds each mutant of the protocol, and a mutant follows the code that it changes."""

from __future__ import annotations

import pytest

from node.swarm.consensus.commit import Committer
from node.swarm.consensus.quorum import Electorate
from tests.simulation.mutants import MUTANTS, MissingRule, Mutant, Patches, find

SEEDS = 2000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["group_decides", "failed_call_means_death"])
def test_the_simulation_finds_a_mutant_of_the_protocol(name: str) -> None:
    """These mutants are found quickly. `make mutants` runs all mutants."""
    found = find(MUTANTS[name], range(SEEDS))
    assert found.violation, f"no seed below {SEEDS} finds that {found.mutant.rule}"


@pytest.mark.parametrize("one", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_changes_code_that_exists_and_restores_it_afterwards(one: Mutant) -> None:
    with one.applied() as patches:
        before = {(owner, name): function for owner, name, function in reversed(patches.replaced)}
        assert before and all(vars(owner)[name] is not function for (owner, name), function in before.items())
    assert all(vars(owner)[name] is function for (owner, name), function in before.items())


def test_a_mutant_of_code_that_no_longer_exists_or_has_changed_raises_an_error() -> None:
    patches = Patches()
    with pytest.raises(MissingRule, match="is_majority does not exist"):
        patches.replace(Electorate, "is_majority", lambda _: lambda self, votes: True)
    with pytest.raises(MissingRule, match="has the parameters"):
        patches.replace(Electorate, "is_quorum", lambda _: lambda self: True)
    with pytest.raises(MissingRule, match="coroutine"):
        patches.replace(Committer, "replay_next", lambda _: lambda self: False)

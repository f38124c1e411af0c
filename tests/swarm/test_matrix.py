"""A sample of the fault matrix with real nodes, in one swarm of three. `python -m tests.swarm.matrix` runs more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.swarm.matrix import Case, Team

STOP_S = 10.0
SAMPLE = (
    Case("commit", "kill", "leader", 3),
    Case("inner", "nan", "other", 3),
    Case("average", "garbage", "leader", 3),
    Case("reduce", "stop", "other", 3),
)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with Team(tmp_path_factory.mktemp("team"), 3) as made:
        yield made


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_fault_in_one_member_does_not_stop_the_others(team: Team, case: Case) -> None:
    team.play(case, STOP_S)

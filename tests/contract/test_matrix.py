"""A sample of the fault matrix over the local transport, in which every stage meets every kind of fault.

The cases mostly wait, so all run at once in separate processes. `python -m tests.contract.matrix` runs the whole
matrix.
"""

from __future__ import annotations

import pytest

from tests.contract.matrix import KINDS, PEERS, ROLES, STAGES, Case, all_cases, run_all, sample

JOBS = 4


@pytest.fixture(scope="module")
def played() -> dict[Case, str]:
    """The error of each case. It is empty if the case has passed."""
    return {case: problem for case, _, problem in run_all(sample(), JOBS)}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", sample(), ids=str)
def test_a_fault_of_one_member_does_not_stop_the_other_members(played: dict[Case, str], case: Case) -> None:
    assert played[case] == ""


def test_sample_of_the_fault_matrix_covers_every_pair_of_stage_and_fault() -> None:
    """Every stage occurs with every kind, and every stage and every kind with every role and size."""
    cases = sample()
    assert len(all_cases()) == len(STAGES) * len(KINDS) * len(ROLES) * len(PEERS) == 180
    assert {(c.stage, c.kind) for c in cases} == {(s, k) for s in STAGES for k in KINDS}
    for one, values in (("stage", STAGES), ("kind", KINDS)):
        for other, others in (("role", ROLES), ("peers", PEERS)):
            pairs = {(getattr(c, one), getattr(c, other)) for c in cases}
            assert pairs == {(a, b) for a in values for b in others}, (one, other)

"""When a node's owner is told that its work is left out, and in which words."""

from __future__ import annotations

import pytest

from node.manifest import SyncConfig
from node.worker.left_out import ROUNDS, LeftOut, Needs, explain

SLOW_LINE = Needs(round_s=22.0, up_s=14.0, down_s=14.0, step_s=3.0)


def test_it_is_told_from_the_third_round_on_and_until_it_contributes_again() -> None:
    left_out = LeftOut(SyncConfig())
    for _ in range(ROUNDS - 1):
        assert left_out.round_over(worked=True, included=False, needs=SLOW_LINE) is None
    for _ in range(2):
        text = left_out.round_over(worked=True, included=False, needs=SLOW_LINE)
        assert text is not None and "too slow" in text
    assert left_out.round_over(worked=False, included=False, needs=SLOW_LINE) is None, "what was said still holds"
    assert left_out.round_over(worked=True, included=True, needs=SLOW_LINE) == ""
    assert left_out.round_over(worked=True, included=True, needs=SLOW_LINE) is None
    assert left_out.round_over(worked=True, included=False, needs=SLOW_LINE) is None, "it counts anew"


def test_who_did_nothing_for_a_round_was_not_left_out_of_it() -> None:
    left_out = LeftOut(SyncConfig())
    assert [left_out.round_over(worked=False, included=False, needs=SLOW_LINE) for _ in range(9)] == [None] * 9


LINE = (
    "Your line is too slow for this run's rounds: a round lasts 22 s and your contribution needs 31 s (up 14 s, down "
    "14 s, one inner step 3 s). The last 3 rounds are without this node's work. "
)
MACHINE = (
    "Your machine is too slow for this run's rounds: a round lasts 22 s and your contribution needs 61 s (up 0 s, down "
    "0 s, one inner step 60 s). The last 3 rounds are without this node's work. Longer rounds would help; the founder "
    "chooses them."
)
NEITHER = (
    "The last 3 rounds are without this node's work. Yet a round lasts 22 s and your contribution needs 6 s (up 1 s, "
    "down 2 s, one inner step 3 s): something else may keep the line or the machine busy; the log says more."
)
ALL_HELP = "An int4 codec, overlapped sync or longer rounds would help; the founder chooses them."
LAST_HELP = "Longer rounds would help; the founder chooses them."


@pytest.mark.parametrize(
    ("needs", "sync", "expected"),
    [
        (SLOW_LINE, SyncConfig(), LINE + ALL_HELP),
        (SLOW_LINE, SyncConfig(codec="int4", mode="overlapped"), LINE + LAST_HELP),
        (Needs(22.0, 0.4, 0.4, 60.0), SyncConfig(), MACHINE),
        (Needs(22.0, 1.0, 2.0, 3.0), SyncConfig(), NEITHER),
    ],
    ids=["line", "line, int4 overlapped", "machine", "neither"],
)
def test_the_numbers_and_what_would_help(needs: Needs, sync: SyncConfig, expected: str) -> None:
    assert explain(3, needs, sync) == expected

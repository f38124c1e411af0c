"""What the trainer stood still for is told by stage, and no second of it twice."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.manifest import SyncConfig
    from node.swarm.member import View
    from node.worker.books import Books, stages_of
    from node.worker.left_out import ROUNDS, LeftOut

STAGES = {"rendezvous": 1.0, "reduce": 60.0, "commit": 2.0, "apply": 0.5}


@pytest.mark.parametrize(
    ("blocked_s", "stood"),
    [
        (0.0, {"rendezvous": 0.0, "reduce": 0.0, "commit": 0.0, "apply": 0.25}),
        (0.3, {"rendezvous": 0.0, "reduce": 0.0, "commit": 0.0, "apply": 0.55}),
        (4.5, {"rendezvous": 0.0, "reduce": 2.0, "commit": 2.0, "apply": 0.75}),
        (63.5, {"rendezvous": 1.0, "reduce": 60.0, "commit": 2.0, "apply": 0.75}),
        (99.0, {"rendezvous": 1.0, "reduce": 60.0, "commit": 2.0, "apply": 0.75}),
    ],
)
def test_what_was_waited_for_is_the_end_of_the_round(blocked_s: float, stood: dict[str, float]) -> None:
    told = stages_of(STAGES, blocked_s=blocked_s, apply_s=0.25)
    assert {stage: seconds for stage, (seconds, _) in told.items()} == STAGES | {"apply": 0.75}
    assert {stage: seconds for stage, (_, seconds) in told.items()} == pytest.approx(stood)


def test_a_round_that_others_made_has_no_stages() -> None:
    assert stages_of({}, blocked_s=0.0, apply_s=0.25) == {}


def test_a_node_that_rejoins_is_still_left_out_until_it_is_included() -> None:
    told: list[str] = []
    session: Any = SimpleNamespace(swarm=SimpleNamespace(view=View()))
    teller: Any = SimpleNamespace(notice=lambda _code, text: told.append(text))
    ledger: Any = None
    left_out = LeftOut(SyncConfig())

    def over(included: bool) -> None:
        """A round's end in the books of a new trainer."""
        done: Any = SimpleNamespace(included=included, fetch_s=1.0)
        Books(session, teller, ledger, left_out).look_if_left_out(done, worked=True, round_s=9.0, step_s=1.0)

    for _ in range(ROUNDS):
        over(included=False)
    assert len(told) == 1 and f"The last {ROUNDS} rounds" in told[0]
    over(included=True)
    assert told[1:] == [""]

"""The round log divides blocked time by stage, and keeps the exclusion notice over several trainers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.config.manifest import SyncConfig
from node.status import Channel
from node.swarm.member import MemberSnapshot
from node.worker.round_diagnostics import NOTICE_ROUNDS, ExclusionNotice
from node.worker.round_log import RoundLog, split_by_stage

STAGES = {"rendezvous": 1.0, "reduce": 60.0, "commit": 2.0, "apply": 0.5}


@pytest.mark.parametrize(
    ("blocked_s", "blocked"),
    [
        (0.0, {"rendezvous": 0.0, "reduce": 0.0, "commit": 0.0, "apply": 0.25}),
        (0.3, {"rendezvous": 0.0, "reduce": 0.0, "commit": 0.0, "apply": 0.55}),
        (4.5, {"rendezvous": 0.0, "reduce": 2.0, "commit": 2.0, "apply": 0.75}),
        (63.5, {"rendezvous": 1.0, "reduce": 60.0, "commit": 2.0, "apply": 0.75}),
        (99.0, {"rendezvous": 1.0, "reduce": 60.0, "commit": 2.0, "apply": 0.75}),
    ],
)
def test_blocked_time_is_assigned_to_the_last_stages_of_a_round(blocked_s: float, blocked: dict[str, float]) -> None:
    split = split_by_stage(STAGES, blocked_s=blocked_s, apply_s=0.25)
    assert {stage: total_s for stage, (total_s, _) in split.items()} == STAGES | {"apply": 0.75}
    assert {stage: seconds for stage, (_, seconds) in split.items()} == pytest.approx(blocked)


def test_round_in_which_the_node_took_no_part_has_no_stages() -> None:
    assert split_by_stage({}, blocked_s=0.0, apply_s=0.25) == {}


def test_exclusions_are_counted_over_a_rejoin_until_the_node_is_included() -> None:
    notices: list[str] = []
    terms = SimpleNamespace(run=SimpleNamespace(sync=SyncConfig()))
    session: Any = SimpleNamespace(swarm=SimpleNamespace(view=MemberSnapshot()), terms_after=lambda _tip: terms)
    reporter: Any = SimpleNamespace(notice=lambda _code, text: notices.append(text))
    counters: Any = None
    exclusion = ExclusionNotice()

    def end_round(included: bool) -> None:
        """End a round with a log of its own, as after a restart of the trainer."""
        done: Any = SimpleNamespace(included=included, fetch_s=1.0, tip=None)
        log = RoundLog(session, reporter, counters, exclusion)
        log.update_exclusion_notice(done, worked=True, round_s=9.0, step_s=1.0)

    for _ in range(NOTICE_ROUNDS):
        end_round(included=False)
    assert len(notices) == 1 and f"The last {NOTICE_ROUNDS} rounds" in notices[0]
    end_round(included=True)
    assert notices[1:] == [""]


def test_the_first_round_of_a_new_log_counts_only_its_own_traffic() -> None:
    """An amendment makes a new trainer, and the counters of the process go on."""
    view = MemberSnapshot(sent_bytes={Channel.REDUCE: 7000}, received_bytes={Channel.REDUCE: 9000})
    log = RoundLog(cast(Any, SimpleNamespace(swarm=SimpleNamespace(view=view))), *cast(Any, (None, None, None)))
    assert log._bytes_since_last_round(7500, 9200) == (500, 200)

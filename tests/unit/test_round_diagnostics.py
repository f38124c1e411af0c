"""The expected utilization, and the notice to the owner of a node whose contributions are excluded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from node.config.manifest import RunConfig, SyncConfig
from node.status import Member, Outcome, RoundRecord, Seconds
from node.worker.round_diagnostics import (
    NOTICE_ROUNDS,
    ExclusionNotice,
    Needs,
    expected_utilization,
    explain_exclusion,
)

SLOW_UPLINK = Needs(round_s=22.0, up_s=14.0, down_s=14.0, step_s=3.0)


def record_with(members: int, *, outcome: Outcome = Outcome.COMPLETE) -> RoundRecord:
    who = tuple(Member(peer_id=str(i), name="", weight=1, included=True) for i in range(members))
    return RoundRecord(round=3, outcome=outcome, members=who, seconds=Seconds(apply=1.0))


def session(mode: str, policy: str, upload_bytes_s: float) -> Any:
    run = RunConfig.model_validate({"sync": {"mode": mode}, "round": {"policy": policy}})
    layout = SimpleNamespace(encoded_bytes=lambda: 10_000_000)
    return SimpleNamespace(
        terms_after=lambda _: SimpleNamespace(run=run),
        rules=SimpleNamespace(
            at=lambda *_: SimpleNamespace(layout_at=lambda _: layout, result_layout_at=lambda _: layout)
        ),
        swarm=SimpleNamespace(view=SimpleNamespace(upload_bytes_s=upload_bytes_s)),
    )


@pytest.mark.parametrize(
    ("mode", "policy", "upload_bytes_s", "round_s", "step_s", "members", "expected"),
    [
        # Two members send one payload each way, 10 MB at 1 MB/s; 100 steps of 0.29 s; 1 s to apply.
        ("blocking", "steps", 1e6, None, 0.29, 2, 29 / 40),
        ("overlapped", "steps", 1e6, None, 0.29, 2, 29 / 30),
        ("blocking", "time", 1e6, 89.0, 0.29, 2, 0.89),
        ("blocking", "steps", 0.0, None, 0.09, 1, 0.9),
    ],
    ids=["blocking", "overlapped", "by the clock", "a lone node needs no uplink"],
)
def test_expected_utilization_is_computed_from_step_time_uplink_and_sync_mode(
    mode: str, policy: str, upload_bytes_s: float, round_s: float | None, step_s: float, members: int, expected: float
) -> None:
    tip: Any = SimpleNamespace(round=3, inner_steps=100, round_s=round_s, state=SimpleNamespace(amendments=b""))
    found = expected_utilization(session(mode, policy, upload_bytes_s), tip, step_s, record_with(members))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("step_s", "upload_bytes_s", "record"),
    [
        (None, 1e6, record_with(2)),
        (0.1, 0.0, record_with(2)),
        (0.1, 1e6, record_with(2, outcome=Outcome.SKIPPED)),
        (0.1, 1e6, record_with(0)),
    ],
)
def test_expected_utilization_is_unknown_without_measurements(
    step_s: float | None, upload_bytes_s: float, record: RoundRecord
) -> None:
    tip: Any = SimpleNamespace(round=3, inner_steps=100, round_s=None)
    assert expected_utilization(session("blocking", "steps", upload_bytes_s), tip, step_s, record) is None


def test_exclusion_notice_lasts_from_the_third_excluded_round_to_the_next_inclusion() -> None:
    notice = ExclusionNotice()
    for _ in range(NOTICE_ROUNDS - 1):
        assert notice.round_over(worked=True, included=False, needs=SLOW_UPLINK, sync=SyncConfig()) is None
    for _ in range(2):
        text = notice.round_over(worked=True, included=False, needs=SLOW_UPLINK, sync=SyncConfig())
        assert text is not None and "too slow" in text
    assert notice.round_over(worked=False, included=False, needs=SLOW_UPLINK, sync=SyncConfig()) is None
    assert notice.round_over(worked=True, included=True, needs=SLOW_UPLINK, sync=SyncConfig()) == ""
    assert notice.round_over(worked=True, included=True, needs=SLOW_UPLINK, sync=SyncConfig()) is None
    assert notice.round_over(worked=True, included=False, needs=SLOW_UPLINK, sync=SyncConfig()) is None


def test_exclusion_notice_names_what_helps_with_the_settings_of_now() -> None:
    notice = ExclusionNotice()
    for _ in range(NOTICE_ROUNDS - 1):
        notice.round_over(worked=True, included=False, needs=SLOW_UPLINK, sync=SyncConfig())
    amended = SyncConfig(codec="int4")
    text = notice.round_over(worked=True, included=False, needs=SLOW_UPLINK, sync=amended)
    assert text is not None and "int4" not in text


def test_rounds_for_which_a_node_did_not_work_cause_no_exclusion_notice() -> None:
    notice = ExclusionNotice()
    assert [
        notice.round_over(worked=False, included=False, needs=SLOW_UPLINK, sync=SyncConfig()) for _ in range(9)
    ] == [None] * 9


CONNECTION = (
    "Your connection is too slow for this run's rounds: a round lasts 22 s, and your contribution needs 31 s (upload "
    "14 s, download 14 s, one inner step 3 s). The last 3 rounds did not include this node's work. "
)
MACHINE = (
    "Your machine is too slow for this run's rounds: a round lasts 22 s, and your contribution needs 61 s (upload 0 s, "
    "download 0 s, one inner step 60 s). The last 3 rounds did not include this node's work. Longer rounds would help; "
    "the founder of the run chooses this."
)
NEITHER = (
    "The last 3 rounds did not include this node's work. Yet a round lasts 22 s, and your contribution needs 6 s "
    "(upload 1 s, download 2 s, one inner step 3 s). Other programs may use the connection or the machine, "
    "or many nodes may be new: a round includes at most as many new ones as others, and draws them by lot. See the log."
)
ALL_HELP = "An int4 codec, overlapped sync or longer rounds would help; the founder of the run chooses this."
LAST_HELP = "Longer rounds would help; the founder of the run chooses this."


@pytest.mark.parametrize(
    ("needs", "sync", "expected"),
    [
        (SLOW_UPLINK, SyncConfig(), CONNECTION + ALL_HELP),
        (SLOW_UPLINK, SyncConfig(codec="int4", mode="overlapped"), CONNECTION + LAST_HELP),
        (Needs(22.0, 0.4, 0.4, 60.0), SyncConfig(), MACHINE),
        (Needs(22.0, 1.0, 2.0, 3.0), SyncConfig(), NEITHER),
    ],
    ids=["connection", "connection, int4 overlapped", "machine", "neither"],
)
def test_exclusion_notice_gives_its_figures_and_a_remedy(needs: Needs, sync: SyncConfig, expected: str) -> None:
    assert explain_exclusion(3, needs, sync) == expected

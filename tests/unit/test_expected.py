"""The forecast that a node tells: from what it has measured, and only where it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from node.manifest import RunConfig
from node.status import Member, Outcome, RoundRecord, Seconds
from node.worker.expected import expected_utilization


def told(members: int, *, outcome: Outcome = Outcome.COMPLETE, apply_s: float = 1.0) -> RoundRecord:
    who = tuple(Member(peer_id=str(i), name="", weight=1, included=True) for i in range(members))
    return RoundRecord(round=3, outcome=outcome, members=who, seconds=Seconds(apply=apply_s))


def session(mode: str, policy: str, bytes_s: float) -> Any:
    run = RunConfig.model_validate({"sync": {"mode": mode}, "round": {"policy": policy}})
    grid = SimpleNamespace(encoded_bytes=lambda: 10_000_000)
    return SimpleNamespace(
        manifest=SimpleNamespace(run=run),
        rules=SimpleNamespace(grid_at=lambda _: grid),
        swarm=SimpleNamespace(view=SimpleNamespace(upload_bytes_s=bytes_s)),
    )


def tip(round_s: float | None = None) -> Any:
    return SimpleNamespace(round=3, inner_steps=100, round_s=round_s)


def test_blocking_and_overlapped_by_hand() -> None:
    # Two members: one payload each way, 10 MB at 1 MB/s; 100 steps of 0.29 s.
    assert expected_utilization(session("blocking", "steps", 1e6), tip(), 0.29, told(2)) == pytest.approx(29 / 40)
    assert expected_utilization(session("overlapped", "steps", 1e6), tip(), 0.29, told(2)) == pytest.approx(29 / 30)


def test_by_the_clock_a_round_is_as_long_as_the_members_say() -> None:
    assert expected_utilization(session("blocking", "time", 1e6), tip(89.0), 0.29, told(2)) == pytest.approx(0.89)


def test_alone_no_line_is_needed() -> None:
    assert expected_utilization(session("blocking", "steps", 0.0), tip(), 0.09, told(1)) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("step_s", "bytes_s", "record"),
    [(None, 1e6, told(2)), (0.1, 0.0, told(2)), (0.1, 1e6, told(2, outcome=Outcome.SKIPPED)), (0.1, 1e6, told(0))],
)
def test_what_was_not_measured_is_not_forecast(step_s: float | None, bytes_s: float, record: RoundRecord) -> None:
    assert expected_utilization(session("blocking", "steps", bytes_s), tip(), step_s, record) is None

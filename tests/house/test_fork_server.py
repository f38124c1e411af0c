"""Workers under test leave the processor to others after each inner step."""

from __future__ import annotations

import time

import pytest

from tests.swarm import fork_server


@pytest.mark.parametrize(("took_s", "rest_s"), [(0.1, 0.3), (1.0, fork_server.LONGEST_REST_S)])
def test_worker_rests_three_times_as_long_as_a_step_took_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, took_s: float, rest_s: float
) -> None:
    now_s, rests = [0.0], list[float]()
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", rests.append)

    def step(batch: int) -> int:
        now_s[0] += took_s
        return 2 * batch

    assert fork_server.rested(step)(21) == 42
    assert rests == [pytest.approx(rest_s)]

"""Workers under test leave the processor to others after each inner step."""

from __future__ import annotations

import time

import pytest

from tests.swarm import fork_server


@pytest.mark.parametrize(("waited_s", "rest_s"), [(0.0, 0.1), (0.05, 0.15), (1.0, fork_server.LONGEST_REST_S)])
def test_worker_rests_as_long_as_it_computed_and_longer_if_it_had_to_wait(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, rest_s: float
) -> None:
    used_s, now_s, rests = [0.0], [0.0], list[float]()
    monkeypatch.setattr(time, "thread_time", lambda: used_s[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", rests.append)

    def step(batch: int) -> int:
        used_s[0] += 0.1
        now_s[0] += 0.1 + waited_s
        return 2 * batch

    assert fork_server.rested(step)(21) == 42
    assert rests == [pytest.approx(rest_s)]

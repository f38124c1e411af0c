"""Time as a node lives it: what passes while it does not run does not count."""

from __future__ import annotations

import pytest

from node.swarm.awake import ASLEEP_S, DROWSY_S, AwakeClock


def test_it_counts_as_its_clock_while_somebody_looks() -> None:
    now_s = 100.0
    clock = AwakeClock(lambda: now_s)
    for _ in range(50):
        now_s += 0.9 * ASLEEP_S
        assert clock() == pytest.approx(now_s)


def test_time_asleep_does_not_count() -> None:
    now_s = 100.0
    clock = AwakeClock(lambda: now_s)
    began_s = clock()
    now_s += 3600
    assert clock() == began_s, "it has just woken up"
    now_s += 1.5
    assert clock() == pytest.approx(began_s + 1.5)
    now_s += 2 * ASLEEP_S
    assert clock() == pytest.approx(began_s + 1.5)


def test_it_is_drowsy_for_a_moment_after_it_slept() -> None:
    now_s = 100.0
    clock = AwakeClock(lambda: now_s)
    assert not clock.drowsy()
    now_s += 60
    assert clock.drowsy(), "also where this is the first look"
    now_s += 0.9 * DROWSY_S
    assert clock.drowsy()
    now_s += 0.2 * DROWSY_S
    assert not clock.drowsy()

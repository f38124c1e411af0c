"""The clock stops while the process is suspended."""

from __future__ import annotations

import pytest

from node.swarm.suspend_clock import JUST_RESUMED_S, SUSPENDED_S, SuspendClock


def test_suspend_clock_runs_normally_while_it_is_read_often() -> None:
    now_s = 100.0
    clock = SuspendClock(lambda: now_s)
    for _ in range(50):
        now_s += 0.9 * SUSPENDED_S
        assert clock() == pytest.approx(now_s)


def test_suspend_clock_does_not_count_suspended_time() -> None:
    now_s = 100.0
    clock = SuspendClock(lambda: now_s)
    began_s = clock()
    now_s += 3600
    assert clock() == began_s, "the process has just resumed"
    now_s += 1.5
    assert clock() == pytest.approx(began_s + 1.5)
    now_s += 2 * SUSPENDED_S
    assert clock() == pytest.approx(began_s + 1.5)


def test_suspend_clock_says_for_a_moment_that_the_process_has_just_resumed() -> None:
    now_s = 100.0
    clock = SuspendClock(lambda: now_s)
    assert not clock.just_resumed()
    now_s += 60
    assert clock.just_resumed(), "also on the first reading"
    now_s += 0.9 * JUST_RESUMED_S
    assert clock.just_resumed()
    now_s += 0.2 * JUST_RESUMED_S
    assert not clock.just_resumed()


def test_suspend_clock_notices_that_the_machine_has_slept() -> None:
    """The clock of an event loop stands still meanwhile."""
    awake_s, asleep_s = 100.0, 0.0
    clock = SuspendClock(lambda: awake_s, lambda: awake_s + asleep_s)
    began_s = clock()
    awake_s += 0.5
    asleep_s += 8 * 3600
    assert clock() == began_s and clock.suspensions == 1 and clock.just_resumed()
    awake_s += 1.0
    assert clock() == pytest.approx(began_s + 1.0)

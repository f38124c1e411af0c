"""What a node measures of its uplink: whole rounds, large sends, and the best of the last few."""

from __future__ import annotations

import pytest

from node.swarm.uplink import KEPT_ROUNDS, MIN_BYTES, NEEDED_ROUNDS, Uplink

MB = 1_000_000


def test_nothing_is_known_before_some_rounds_of_large_sends() -> None:
    uplink = Uplink()
    for number in range(NEEDED_ROUNDS):
        uplink.sent(f"head {number}", MIN_BYTES - 1, 0.001)
        uplink.sent(f"head {number}", MB, 0.0)
        assert uplink.bytes_s == 0.0
    for number in range(NEEDED_ROUNDS):
        assert uplink.bytes_s == 0.0
        uplink.sent(f"head {number}", MB, 1.0)
    assert uplink.bytes_s == MB


def test_sends_side_by_side_share_the_line() -> None:
    uplink = Uplink()
    for number in range(NEEDED_ROUNDS):
        for _ in range(3):
            uplink.sent(f"head {number}", MB, 3.0)
    assert uplink.bytes_s == pytest.approx(MB)


def test_sends_of_two_attempts_of_one_round_are_not_added_up() -> None:
    uplink = Uplink()
    for number in range(NEEDED_ROUNDS):
        for attempt in range(2):
            uplink.sent(f"head {number} {attempt}", MB, 1.0)
    assert uplink.bytes_s == pytest.approx(MB)


def test_busy_rounds_do_not_count_and_old_ones_are_forgotten() -> None:
    uplink = Uplink()
    for number, rate in enumerate([0.2, 1.0, 0.1]):
        uplink.sent(f"head {number}", MB, 1 / rate)
    assert uplink.bytes_s == pytest.approx(MB)
    for number in range(KEPT_ROUNDS):
        uplink.sent(f"later {number}", MB, 2.0)
    assert uplink.bytes_s == pytest.approx(MB / 2)


def test_many_small_sends_of_one_round_are_as_good_as_a_large_one() -> None:
    uplink = Uplink()
    for number in range(NEEDED_ROUNDS):
        for _ in range(16):
            uplink.sent(f"head {number}", 100_000, 3.2)
    assert uplink.bytes_s == pytest.approx(500_000)


def test_the_newest_round_alone_says_how_fast_the_line_is_now() -> None:
    uplink = Uplink()
    assert uplink.newest_bytes_s == 0.0
    uplink.sent("a", MB, 1.0)
    assert uplink.newest_bytes_s == MB
    uplink.sent("b", MB, 4.0)
    uplink.sent("c", 1000, 0.1)
    assert uplink.newest_bytes_s == pytest.approx(MB / 4)

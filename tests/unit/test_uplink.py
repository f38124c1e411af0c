"""What a node measures of its uplink: whole rounds, large sends, and the median of the last few."""

from __future__ import annotations

import pytest

from node.swarm.uplink import KEPT_ROUNDS, MIN_BYTES, Uplink

MB = 1_000_000


def test_nothing_is_known_before_a_large_send() -> None:
    uplink = Uplink()
    uplink.sent("a", MIN_BYTES - 1, 0.001)
    uplink.sent("a", MB, 0.0)
    assert uplink.bytes_s == 0.0


def test_sends_side_by_side_share_the_line() -> None:
    uplink = Uplink()
    for _ in range(3):
        uplink.sent("a", MB, 3.0)
    assert uplink.bytes_s == pytest.approx(MB)


def test_one_odd_round_does_not_count_and_old_ones_are_forgotten() -> None:
    uplink = Uplink()
    for number, rate in enumerate([1.0, 1.0, 50.0]):
        uplink.sent(f"head {number}", MB, 1 / rate)
    assert uplink.bytes_s == pytest.approx(MB)
    for number in range(KEPT_ROUNDS):
        uplink.sent(f"later {number}", MB, 0.5)
    assert uplink.bytes_s == pytest.approx(2 * MB)

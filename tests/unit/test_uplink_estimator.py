"""The estimate of the upload bandwidth."""

from __future__ import annotations

import pytest

from node.swarm.allreduce.uplink_estimator import KEPT_ROUNDS, MIN_BYTES, NEEDED_ROUNDS, UplinkEstimator

MB = 1_000_000


def test_uplink_estimate_needs_several_rounds_of_large_sends() -> None:
    uplink = UplinkEstimator()
    for number in range(NEEDED_ROUNDS):
        uplink.record_send(f"head {number}", MIN_BYTES - 1, 0.001)
        uplink.record_send(f"head {number}", MB, 0.0)
        assert uplink.bytes_s == 0.0
    for number in range(NEEDED_ROUNDS):
        assert uplink.bytes_s == 0.0
        uplink.record_send(f"head {number}", MB, 1.0)
    assert uplink.bytes_s == MB


def test_uplink_estimate_adds_the_rates_of_concurrent_sends() -> None:
    uplink = UplinkEstimator()
    for number in range(NEEDED_ROUNDS):
        for _ in range(3):
            uplink.record_send(f"head {number}", MB, 3.0)
    assert uplink.bytes_s == pytest.approx(MB)


def test_uplink_estimate_does_not_add_the_rates_of_different_batches() -> None:
    uplink = UplinkEstimator()
    for number in range(NEEDED_ROUNDS):
        for attempt in range(2):
            uplink.record_send(f"head {number} {attempt}", MB, 1.0)
    assert uplink.bytes_s == pytest.approx(MB)


def test_uplink_estimate_is_the_rate_of_the_best_recent_round() -> None:
    uplink = UplinkEstimator()
    for number, rate in enumerate([0.2, 1.0, 0.1]):
        uplink.record_send(f"head {number}", MB, 1 / rate)
    assert uplink.bytes_s == pytest.approx(MB)
    for number in range(KEPT_ROUNDS):
        uplink.record_send(f"later {number}", MB, 2.0)
    assert uplink.bytes_s == pytest.approx(MB / 2)


def test_uplink_estimate_counts_many_small_sends_as_a_large_one() -> None:
    uplink = UplinkEstimator()
    for number in range(NEEDED_ROUNDS):
        for _ in range(16):
            uplink.record_send(f"head {number}", 100_000, 3.2)
    assert uplink.bytes_s == pytest.approx(500_000)


def test_newest_uplink_rate_is_that_of_the_newest_round_with_large_sends() -> None:
    uplink = UplinkEstimator()
    assert uplink.newest_bytes_s == 0.0
    uplink.record_send("a", MB, 1.0)
    assert uplink.newest_bytes_s == MB
    uplink.record_send("b", MB, 4.0)
    uplink.record_send("c", 1000, 0.1)
    assert uplink.newest_bytes_s == pytest.approx(MB / 4)

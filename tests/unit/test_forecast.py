"""The forecast of a round's cost on a link, compared with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.diloco.forecast import required_link_mbit_s, round_bytes, transfer_seconds, utilization

positive = st.floats(1e-3, 1e6)


@pytest.mark.parametrize(("members", "share"), [(1, 0.0), (2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_butterfly_all_reduce_sends_twice_the_share_that_the_other_members_reduce(members: int, share: float) -> None:
    assert round_bytes(30e6, members) == pytest.approx(share * 30e6)


def test_a_megabyte_takes_eight_seconds_at_one_megabit_per_second() -> None:
    assert transfer_seconds(1e6, 1.0) == pytest.approx(8.0)
    assert transfer_seconds(45e6, 20.0) == pytest.approx(18.0)


def test_overlapped_sync_hides_a_transfer_that_is_shorter_than_the_inner_steps() -> None:
    assert utilization(30, 18, overlapped=False) == pytest.approx(30 / 48)
    assert utilization(30, 18, overlapped=True) == 1.0
    assert utilization(30, 60, overlapped=True) == pytest.approx(0.5)
    assert utilization(30, 18, overlapped=True, stall_s=0.3) == pytest.approx(30 / 30.3)
    assert utilization(30, 18, overlapped=False, stall_s=2) == pytest.approx(0.6)


@given(positive, positive, st.floats(0, 1e3))
def test_utilization_is_between_0_and_1_and_overlap_never_lowers_it(
    inner_s: float, transfer_s: float, stall_s: float
) -> None:
    waiting = utilization(inner_s, transfer_s, overlapped=False, stall_s=stall_s)
    overlapped = utilization(inner_s, transfer_s, overlapped=True, stall_s=stall_s)
    assert 0 < waiting <= overlapped <= 1


def test_forecast_refuses_zero_members_and_a_rate_of_zero() -> None:
    with pytest.raises(ValueError, match="at least one member"):
        round_bytes(1.0, 0)
    with pytest.raises(ValueError, match="a rate above 0"):
        transfer_seconds(1.0, 0.0)


def test_required_link_carries_a_payload_each_way_within_one_round() -> None:
    """A round lasts 22 s. After one step of 1 s, 21 s are left to send and to receive 1.8 MB (28.8 Mbit in all)."""
    required = required_link_mbit_s(1.8e6, inner_steps=22, step_s=1.0, overlapped=False)
    assert required == pytest.approx(28.8 / 21)
    assert 2 * transfer_seconds(1.8e6, required) + 1.0 == pytest.approx(22.0)
    assert required_link_mbit_s(1.8e6, inner_steps=22, step_s=1.0, overlapped=True) == pytest.approx(28.8 / 22)
    assert required_link_mbit_s(1.8e6, inner_steps=1, step_s=1.0, overlapped=False) == math.inf

"""Tests of the learning rate, the round length and the progress of a round."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest

from node.config import manifest
from node.config.manifest import RunConfig
from node.diloco import schedule
from node.diloco.schedule import (
    Schedule,
    fitting_steps,
    is_time_up,
    learning_rate,
    progress,
    published_outer_lr,
    round_seconds,
    swarm_tokens_at,
)
from node.swarm.messages import LEAST_STEP_S, MOST_STEP_S
from node.training.algorithm import inner_learning_rate

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


def rate(
    tokens: int,
    name: Schedule = "cosine",
    *,
    warmup: int = 100,
    total: int = 1100,
    ratio: float = 0.1,
    decay_ratio: float = 0.1,
    cycles: int = 4,
) -> float:
    return learning_rate(
        tokens,
        peak=4e-4,
        warmup_tokens=warmup,
        total_tokens=total,
        min_ratio=ratio,
        schedule=name,
        decay_ratio=decay_ratio,
        cycles=cycles,
    )


def test_learning_rate_without_warmup_starts_at_the_peak() -> None:
    assert rate(0, warmup=0) == 4e-4
    assert rate(0, warmup=50, total=10) == 0.0
    assert rate(60, warmup=50, total=10) == pytest.approx(4e-5)
    assert rate(5, warmup=0, total=1) == pytest.approx(4e-5)
    assert rate(-5, warmup=0) == 4e-4, "a run may have taken back more tokens than it has"


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("cosine", {25: 0.25, 99: 0.99, 100: 1.0, 600: 0.55, 1100: 0.1, 1101: 0.1, 10**15: 0.1}),
        ("linear", {100: 1.0, 350: 0.775, 600: 0.55, 1099: 0.1009, 1100: 0.1, 10**15: 0.1}),
        ("constant", {100: 1.0, 600: 1.0, 1100: 1.0, 10**15: 1.0}),
        ("inverse-sqrt", {100: 1.0, 400: 0.5, 1600: 0.25, 10_000: 0.1, 10**15: 0.1}),
        # The decay covers the last 110 of all 1,100 tokens.
        ("wsd", {100: 1.0, 989: 1.0, 990: 1.0, 1045: 1 - 0.9 * math.sqrt(0.5), 1100: 0.1, 10**15: 0.1}),
        # Cycles begin at 100, 350, 600 and 850.
        ("restarts", {100: 1.0, 225: 0.55, 350: 1.0, 475: 0.55, 600: 1.0, 850: 1.0, 1100: 0.1, 10**15: 0.1}),
    ],
)
def test_each_schedule_has_the_values_of_its_paper(name: Schedule, shares: dict[int, float]) -> None:
    assert rate(0, name) == rate(-5, name) == 0.0
    assert rate(50, name) == 2e-4
    for tokens, share in shares.items():
        assert rate(tokens, name) == pytest.approx(4e-4 * share, rel=1e-9), tokens


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_stays_between_its_lowest_rate_and_the_peak(name: Schedule) -> None:
    rates = [rate(tokens, name) for tokens in range(100, 1300)]
    assert max(rates) == rates[0] == 4e-4
    assert min(rates) >= 4e-5 * (1 - 1e-12)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "restarts"])
def test_every_schedule_but_restarts_never_rises_or_jumps_after_the_warm_up(name: Schedule) -> None:
    """The steepest step is that of the square root at the start of the decay: 0.9 x sqrt(1e-5) of the peak."""
    scale = 1000
    rates = [rate(t, name, warmup=100 * scale, total=1100 * scale) for t in range(95 * scale, 1105 * scale)]
    steps = [b - a for a, b in itertools.pairwise(rates)]
    assert all(step <= 0 for step in steps[5 * scale :])
    assert max(map(abs, steps)) <= 4e-4 * 0.9 * math.sqrt(1 / (110 * scale)) * 1.001


def test_restarts_rise_to_the_peak_only_where_a_cycle_begins() -> None:
    rates = [rate(tokens, "restarts", total=1099, cycles=7) for tokens in range(100, 1099)]
    rises = [101 + at for at, (a, b) in enumerate(itertools.pairwise(rates)) if b > a]
    assert rises == [100 + math.ceil(999 * cycle / 7) for cycle in range(1, 7)]
    one = [rate(tokens, "restarts", cycles=1) for tokens in range(1200)]
    assert one == [rate(tokens) for tokens in range(1200)], "one cycle is the cosine, bit for bit"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 1000), (50, 10), (2**40, 2**41)])
def test_schedules_take_any_lengths(name: Schedule, warmup: int, total: int) -> None:
    for tokens in (0, 1, warmup, warmup + 1, total - 1, total, total + 1, 2**47):
        for decay_ratio in (1e-18, 1e-9, 1.0):
            found = rate(tokens, name, warmup=warmup, total=total, decay_ratio=decay_ratio)
            assert 0 <= found <= 4e-4


def test_the_manifest_names_the_schedules_that_exist() -> None:
    assert get_args(manifest.Schedule) == get_args(schedule.Schedule)


def run_of(**changes: object) -> RunConfig:
    inner = {"lr": 1.0, "warmup_tokens": 100, "min_lr_ratio": 0.1}
    return RunConfig.model_validate({"total_tokens": 1100, "inner": inner} | changes)


def test_a_run_without_phases_follows_its_schedule_bit_for_bit() -> None:
    run = run_of()
    for tokens in range(0, 1300, 7):
        expected = learning_rate(tokens, peak=1.0, warmup_tokens=100, total_tokens=1100, min_ratio=0.1)
        assert inner_learning_rate(run, tokens) == expected


def test_a_phase_scales_the_schedule_of_the_run_or_has_its_own() -> None:
    phases = [
        {"from_tokens": 200, "lr_ratio": 0.5},
        {"from_tokens": 600, "schedule": "linear", "lr_ratio": 2.0, "warmup_tokens": 100},
        {"from_tokens": 900, "weights": [3.0, 1.0]},
    ]
    run, plain = run_of(phases=phases, data={"sources": ["text:a", "text:b"]}), run_of()
    assert [run.phase_at(tokens) for tokens in (0, 199, 200, 599, 600, 899, 900, 10**9)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert inner_learning_rate(run, 199) == inner_learning_rate(plain, 199)
    assert inner_learning_rate(run, 200) == 0.5 * inner_learning_rate(plain, 200)
    assert [inner_learning_rate(run, tokens) for tokens in (600, 650, 700, 800)] == pytest.approx([0, 1, 2, 1.1])
    assert inner_learning_rate(run, 899) == pytest.approx(0.2 + 1.8 / 200)
    assert inner_learning_rate(run, 900) == inner_learning_rate(plain, 900), "the run's schedule goes on"
    assert [run.weights_at(tokens) for tokens in (0, 899, 900)] == [(1.0, 1.0), (1.0, 1.0), (3.0, 1.0)]


def test_swarm_tokens_within_a_round_are_interpolated_up_to_its_end() -> None:
    assert swarm_tokens_at(1000, 0.0, 400) == 1000
    assert swarm_tokens_at(1000, 0.25, 400) == 1100
    assert swarm_tokens_at(1000, 1.0, 400) == swarm_tokens_at(1000, 7.5, 400) == 1400
    assert swarm_tokens_at(1000, -1.0, 400) == 1000
    assert isinstance(swarm_tokens_at(0, 1 / 3, 100), int)


def test_a_late_joiner_trains_at_the_learning_rate_of_the_others() -> None:

    def rate_after(steps: int, of: int) -> float:
        done = progress("steps", inner_step=steps, inner_steps=of, elapsed_s=0.0, round_s=None)
        return rate(swarm_tokens_at(500, done, 300))

    assert rate_after(50, of=100) == rate_after(10, of=20)


@pytest.mark.parametrize(
    ("seconds", "median"), [([2.0], 2.0), ([1.0, 9e5], 1.0), ([3.0, 1.0, 2.0], 2.0), ([1.0, 2.0, 3.0, 4.0], 2.0)]
)
def test_a_round_lasts_as_long_as_the_inner_steps_of_the_median_member(seconds: list[float], median: float) -> None:
    assert round_seconds(seconds, 500) == 500 * median
    assert round_seconds(seconds[::-1], 500) == 500 * median


@pytest.mark.parametrize("false", [LEAST_STEP_S, MOST_STEP_S, 9e5, 1e-300])
def test_a_minority_cannot_move_the_round_length_beyond_the_step_times_of_the_others(false: float) -> None:
    assert 10.0 <= round_seconds([1.0, 1.1, false], 10) <= 11.0
    assert 10.0 <= round_seconds([1.0, 1.1, 1.05, false, false], 10) <= 11.0


def test_round_length_changes_by_at_most_a_factor_of_four_from_round_to_round() -> None:
    assert [round_seconds([s], 10, 20.0) for s in (1e-300, 0.6, 7.9, 9e5)] == [5.0, 6.0, 79.0, 80.0]
    assert round_seconds([9e5], 500) == 4.5e8, "where no length is known yet"


def test_time_to_fetch_and_apply_a_result_is_part_of_the_round_length() -> None:
    """The round is longer by this time, so a typical member still makes all of its H inner steps."""
    assert round_seconds([1.0, 1.0], 10, None, [9.0, 8.0]) == 18.0
    assert round_seconds([1.0, 1.0, 1.0], 10, None, [0.1, 8.0, 0.2]) == 10.2, "one slow link does not change it"
    assert round_seconds([1.0, 1.0], 10, None, [0.0, 9e5]) == 10.0, "one of two cannot stretch it"
    assert round_seconds([1.0], 10, 10.0, [9e5]) == 40.0, "by at most the usual change"


@pytest.mark.parametrize("settle", [-1.0, float("nan"), float("inf")])
def test_round_length_refuses_invalid_settle_times(settle: float) -> None:
    with pytest.raises(ValueError, match="Settle"):
        round_seconds([1.0], 10, None, [settle])


@pytest.mark.parametrize(
    ("elapsed_s", "step_s", "lead_s", "due"),
    [
        # many small steps: until the end of the round, give or take half a step
        (99.0, 0.1, 0.0, False),
        (99.94, 0.1, 0.0, False),
        (99.96, 0.1, 0.0, True),
        # the last of H equal steps is started although steps vary a little
        (90.0, 10.0, 0.0, False),
        (94.0, 10.0, 0.0, False),
        # a step that would end after half of the grace is not
        (96.0, 10.0, 0.0, True),
        (84.0, 20.0, 0.0, False),
        (86.0, 20.0, 0.0, True),
        # a step longer than a round
        (0.0, 160.0, 0.0, True),
        # a slow uplink: earlier
        (60.0, 1.0, 40.0, True),
        (58.0, 1.0, 40.0, False),
    ],
)
def test_member_starts_no_inner_step_that_would_end_too_late_for_its_round(
    elapsed_s: float, step_s: float, lead_s: float, due: bool
) -> None:
    assert is_time_up(elapsed_s, round_s=100.0, step_s=step_s, grace_s=10.0, lead_s=lead_s) is due


@pytest.mark.parametrize("seconds", [[], [0.0], [float("nan")], [float("inf")], [1.0, -1.0]])
def test_round_length_refuses_invalid_step_times(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"median"):
        round_seconds(seconds, 10)


def test_progress_of_a_round_is_measured_in_steps_or_in_time_by_its_policy() -> None:
    assert progress("steps", inner_step=5, inner_steps=20, elapsed_s=99.0, round_s=10.0) == 0.25
    assert progress("time", inner_step=5, inner_steps=20, elapsed_s=5.0, round_s=10.0) == 0.5
    assert progress("time", inner_step=5, inner_steps=20, elapsed_s=99.0, round_s=None) == 0.25
    assert progress("time", inner_step=0, inner_steps=20, elapsed_s=20.0, round_s=10.0) == 2.0


@pytest.mark.parametrize(
    ("transfers", "expected"),
    [([0.0, 0.0], 100), ([5.0, 8.0], 100), ([5.0, 16.0], 200), ([0.0, 16.1], 202), ([1e5, 1.0], 400)],
)
def test_number_of_inner_steps_grows_until_the_slowest_transfer_fits(transfers: list[float], expected: int) -> None:
    """A typical step takes 0.1 s; a transfer may take 80 % of the inner phase."""
    assert fitting_steps([0.1, 0.3], transfers, least=100, most=400) == expected


@pytest.mark.parametrize("step_s", [5e-324, 1e-300, LEAST_STEP_S, MOST_STEP_S, 1.7e308])
@pytest.mark.parametrize("transfer_s", [0.0, 5e-324, 1e6, 1.7e308])
def test_number_of_inner_steps_stays_within_its_bounds_for_any_claimed_times(step_s: float, transfer_s: float) -> None:
    assert 100 <= fitting_steps([step_s], [transfer_s], least=100, most=400) <= 400


def test_outer_learning_rate_follows_the_number_of_contributors_as_published() -> None:
    assert [published_outer_lr(n) for n in (1, 2, 4, 8)] == pytest.approx([0.4, 0.6, 0.6, 0.8])
    assert published_outer_lr(0.5) == published_outer_lr(1)
    assert published_outer_lr(64) == 0.8
    rates = [published_outer_lr(n / 4) for n in range(4, 40)]
    assert rates == sorted(rates)
    assert 0.4 < published_outer_lr(1.5) < 0.6 and 0.6 < published_outer_lr(5) < 0.8

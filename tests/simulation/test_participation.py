"""A live member within the stated bounds is in at least every second round."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

import pytest

from tests.simulation.network import Line
from tests.simulation.participation import (
    BYTES_PER_MBIT,
    CONTRIBUTION_BYTES,
    MESSAGES,
    SLOWEST_MBIT_S,
    draw,
    judge,
    misses,
    run_rounds,
    run_seed,
    transfer_s,
)
from tests.simulation.run import simulate

SLOWEST_BYTES_S = SLOWEST_MBIT_S * BYTES_PER_MBIT


def test_every_simulated_member_is_in_at_least_every_second_round() -> None:
    results = [run_seed(seed) for seed in range(8)]
    assert {result.seed: result.violations for result in results if result.violations} == {}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_member_is_in_at_least_every_second_round_for_more_seeds() -> None:
    """`make participation` runs thousands."""
    failed = [seed for seed in range(1000, 1020) if run_seed(seed).violations]
    assert failed == [], "python -m tests.simulation.participation --seed N shows the messages"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_members_on_the_slowest_lines_commit_rounds_with_all_of_them() -> None:
    """Each plan has the joins of all, so a leader uploads 2 MB of plans, which takes 8 s."""
    members, rounds = 44, 2
    slowest = Line(0.02, 0.01, up_bytes_s=SLOWEST_BYTES_S, down_bytes_s=SLOWEST_BYTES_S)
    crowd = replace(
        draw(0),
        step_s=(0.6,) * members,
        lines=(slowest,) * members,
        length_s=300.0,
        min_peers=2,
        quorum_ratio=0.5,
        join_at_s=tuple(0.01 * member for member in range(members)),
        inner_steps=50,
        chunk_bytes=8 * 1024,
        founders=members,
        first_round_s=30.0,
    )
    report, world = simulate(crowd, run=partial(run_rounds, rounds=rounds + 1))
    assert report.violations == []
    tip = max((node.chain.tip for node in world.nodes), key=lambda tip: tip.round)
    assert [len(link.members) for link in tip.links[:rounds]] == [members] * rounds


def test_participation_check_finds_a_member_whose_line_is_below_the_bounds() -> None:
    scenario = draw(2)
    slow = replace(scenario.lines[0], up_bytes_s=25_000.0)
    result = judge(replace(scenario, lines=(slow, *scenario.lines[1:])))
    assert any(violation.startswith("n0 is in neither") for violation in result.violations)
    assert result.worst.startswith("n0")


def test_participation_check_names_the_second_of_two_missed_rounds() -> None:
    assert misses(["ab", "a", "ab", "a"], "b") == []
    assert misses(["ab", "a", "a", "a", "b"], "b") == [2, 3]


def test_drawn_members_are_within_the_bounds() -> None:
    for scenario in map(draw, range(300)):
        round_s = scenario.inner_steps * statistics.median_low(scenario.step_s)
        latencies_s = [line.latency_s + line.jitter_s for line in scenario.lines]
        for line, step_s, latency_s in zip(scenario.lines, scenario.step_s, latencies_s, strict=True):
            messages_s = MESSAGES * (latency_s + max(latencies_s))
            assert transfer_s(line) + step_s + messages_s <= round_s + 1e-9, scenario.seed


def test_lines_drawn_for_simulated_members_cover_all_speeds() -> None:
    lines = [line for seed in range(2000) for line in draw(seed).lines]
    uplinks = [line.up_bytes_s for line in lines]
    assert min(uplinks) == 250_000 and max(uplinks) > 100e6
    assert max(map(transfer_s, lines)) > 3 * CONTRIBUTION_BYTES / 1e6

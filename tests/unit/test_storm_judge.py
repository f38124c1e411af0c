"""Tests of the judge of a storm test, on observations that are made up by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from node.swarm.faults import parse_faults
from tests.swarm.storm import ARMS
from tests.swarm.storm_judge import (
    RETURN_S,
    ExpectedSettings,
    Judge,
    NodeObservations,
    ObservedAmendment,
    ObservedCommit,
    ObservedFault,
    ObservedMix,
    ObservedTable,
    ProcessSamples,
    StatusSample,
    SteeringStep,
    StormObservations,
    grown,
    load,
    percentile,
    shares_a_table,
)
from tests.swarm.storm_report import comparisons, growth_lines, promises, report

LENGTH_S = 10.0
ROUNDS = 12
NAMES = ("a", "b", "c", "d")
EXPECTED = ExpectedSettings(rates=(0.2, 0.1), weights=((1.0, 1.0), (1.0, 3.0)))
STEERING = (
    SteeringStep("rate", 1, "inner.lr = 0.1", 3, 2, "a"),
    SteeringStep("weights", 2, "data.weights = [1.0, 3.0]", 4, 3, "a"),
    SteeringStep("pause", 3, "pause", 6, 5, "a"),
    SteeringStep("resume", 4, "resume", 8, 6, "a"),
)


def calm_storm() -> StormObservations:
    """Four nodes commit round r at 10 (r + 1) s. The storm lasts from 20 s to 100 s."""
    seen = StormObservations({"nodes": 4, "minutes": 80 / 60, "fault_every_s": 80.0, "seed": 1, "cores": 2})
    seen.began_s, seen.calm_s, seen.ended_s = 20.0, 100.0, 120.0
    for name in NAMES:
        node = NodeObservations(name, name, rounds_joined=10, rounds_attempted=10, failures={"timeout": 2})
        node.looks = [
            StatusSample(float(t), "training", t // 10 - 1, f"h{t // 10 - 1}", f"d{t // 10 - 1}") for t in range(121)
        ]
        node.commits = [
            ObservedCommit(LENGTH_S * (r + 1), r, f"h{r}", f"d{r}", "complete", included=True) for r in range(ROUNDS)
        ]
        seen.nodes[name] = node
        seen.hurts.append(ObservedFault(name, "start", 0.0, 0.0))
        seen.at_end[name] = node.looks[-1]
    return seen


def steered_storm() -> StormObservations:
    """The calm storm with amendments: rounds 3, 4, 6 and 8 are the first ones with a new rate, new weights, a pause and
    its end. Each node gives 5 tokens a round, but not in rounds 6 and 7. Node `e` joins in the last minute."""
    seen = calm_storm()
    seen.expected, seen.steering, seen.late_joiner = EXPECTED, [replace(step) for step in STEERING], "e"
    seen.settings["late_join"] = True
    given = [0 if r in (6, 7) else 5 for r in range(ROUNDS)]
    source = seen.nodes["a"]
    seen.nodes["e"] = NodeObservations(
        "e",
        "e",
        looks=[look for look in source.looks if look.at_s >= 62],
        commits=[replace(c, outcome="skipped", included=False) for c in source.commits if c.at_s >= 60],
    )
    seen.hurts.append(ObservedFault("e", "start", 0.0, 62.0))
    seen.at_end["e"] = seen.nodes["e"].looks[-1]
    for node in seen.nodes.values():
        node.looks = [replace(k, learning_rate=0.1 if k.round + 1 >= 3 else 0.2) for k in node.looks]
        node.commits = [
            replace(
                c,
                tokens=4 * sum(given[: c.round + 1]),
                learning_rate=0.1 if c.round + 1 >= 3 else 0.2,
                weights=dict.fromkeys(NAMES, given[c.round]),
            )
            for c in node.commits
        ]
        node.amendments = [ObservedAmendment(s.number, s.change, s.from_round, s.accepted_round) for s in STEERING]
        rounds = [c.round for c in node.commits]
        node.tables = [
            ObservedTable(r, 4 * sum(given[: r + 1]), f"t{r}", dict.fromkeys(NAMES, sum(given[: r + 1])))
            for r in rounds
        ]
        node.mixes = [
            ObservedMix(r, (1.0, 3.0), (5 * r, 15 * r)) if r >= 3 else ObservedMix(r, (1.0, 1.0), (r, r))
            for r in rounds
        ]
    return seen


def away(seen: StormObservations, name: str, from_s: float, to_s: float) -> None:
    """Let a node be in the phase `starting` all this time, and commit nothing."""
    node = seen.nodes[name]
    node.looks = [replace(k, phase="starting") if from_s <= k.at_s < to_s else k for k in node.looks]
    node.commits = [c for c in node.commits if not from_s <= c.at_s < to_s]


def test_storm_without_faults_keeps_every_promise() -> None:
    judge = Judge(calm_storm())
    pairs = judge.pairs()
    assert [r.number for r in judge.rounds] == list(range(2, 10))
    assert len(pairs) == 8 * 4 and all(pair.committed and pair.included for pair in pairs)
    assert judge.usual_s() == LENGTH_S and judge.forks() == {} and judge.damaged() == [] and judge.agree_at_end()


def test_judge_of_a_storm_counts_a_round_that_a_live_node_misses() -> None:
    seen = calm_storm()
    seen.nodes["b"].commits = [c for c in seen.nodes["b"].commits if c.round != 5]
    missed = [pair for pair in Judge(seen).pairs() if not pair.committed]
    assert [(pair.node, pair.round) for pair in missed] == [("b", 5)]


def test_replayed_round_counts_as_committed_only_within_the_next_round() -> None:
    seen = calm_storm()
    commits = seen.nodes["b"].commits
    commits[5] = ObservedCommit(69.0, 5, "h5", "d5", "skipped", included=False)
    commits[6] = ObservedCommit(93.0, 6, "h6", "d6", "skipped", included=False)
    pairs = {(pair.node, pair.round): pair for pair in Judge(seen).pairs()}
    assert pairs["b", 5].committed and not pairs["b", 5].included
    assert not pairs["b", 6].committed


def test_hurt_node_counts_as_live_again_when_it_is_at_most_one_round_behind() -> None:
    seen = calm_storm()
    seen.hurts.append(ObservedFault("c", "kill worker", 33.0, 33.0))
    away(seen, "c", 33.0, 52.0)
    live = {pair.round for pair in Judge(seen).pairs() if pair.node == "c"}
    assert live == {2, 6, 7, 8, 9}, "rounds 3 to 5 saw it hurt"
    assert all(pair.committed for pair in Judge(seen).pairs())


def test_old_status_of_a_dead_worker_does_not_count_as_a_return_of_its_node() -> None:
    seen = calm_storm()
    seen.hurts.append(ObservedFault("c", "kill p2pd", 33.0, 33.0))
    away(seen, "c", 43.0, 52.0)
    (down,) = [down for down in Judge(seen).downs if down.kind == "kill p2pd"]
    assert (down.from_s, down.to_s) == (33.0, 52.0), "it says that it trains until 43 s"


def test_hurt_node_that_does_not_return_in_time_counts_as_live_again() -> None:
    seen = calm_storm()
    seen.hurts.append(ObservedFault("c", "kill worker", 21.0, 21.0))
    away(seen, "c", 21.0, 200.0)
    judge = Judge(seen)
    (down,) = [down for down in judge.downs if down.kind == "kill worker"]
    assert down.late and down.to_s == 21.0 + RETURN_S
    assert [pair.round for pair in judge.pairs() if not pair.committed] == [9]


def test_recovery_from_a_kill_is_timed_to_the_commit_of_the_last_survivor() -> None:
    seen = calm_storm()
    seen.hurts.append(ObservedFault("d", "kill supervisor", 36.0, None))
    seen.nodes["d"].commits = seen.nodes["d"].commits[:3]
    seen.nodes["b"].commits[3] = ObservedCommit(44.0, 3, "h3", "d3", "complete", included=True)
    assert Judge(seen).kills() == [(8.0, LENGTH_S)]


def test_judge_of_a_storm_distinguishes_forks_planned_damage_and_other_damage() -> None:
    seen = calm_storm()
    seen.nodes["a"].commits[4] = ObservedCommit(50.0, 4, "other", "dx", "complete", included=True)
    seen.nodes["b"].commits[6] = ObservedCommit(70.0, 6, "h6", "damaged", "complete", included=True)
    seen.nodes["c"].commits[7] = ObservedCommit(80.0, 7, "h7", "damaged", "complete", included=True)
    seen.hurts.append(ObservedFault("b", "corrupt at apply", 60.0, 60.0, after_round=5))
    judge = Judge(seen)
    assert judge.forks() == {4: {"h4", "other"}}
    assert sorted(judge.damaged()) == [("b", 6, True), ("c", 7, False)]
    failed = [line.name for line in promises(judge, judge.pairs()) if line.passed is False]
    assert "rounds with more than one head, ever" in failed
    assert "digests that differ without planned damage" in failed


def test_planned_damage_may_affect_a_burst_of_replayed_rounds_but_may_not_last() -> None:
    for seconds, planned in (
        ((88.0, 88.1, 88.2, 88.3), [True] * 4),
        ((50.0, 60.0, 70.0, 80.0), [True, True, False, False]),
    ):
        seen = calm_storm()
        for round_, at_s in zip(range(4, 8), seconds, strict=True):
            seen.nodes["b"].commits[round_] = ObservedCommit(
                at_s, round_, f"h{round_}", "damaged", "skipped", included=False
            )
        seen.hurts.append(ObservedFault("b", "corrupt at apply", 40.0, 40.0, after_round=3))
        assert [is_planned for *_, is_planned in Judge(seen).damaged()] == planned


def test_nodes_with_different_digests_at_the_end_of_a_storm_do_not_agree() -> None:
    seen = calm_storm()
    look = seen.at_end["d"]
    seen.at_end["d"] = StatusSample(look.at_s, "training", look.round, look.head, "another")
    assert not Judge(seen).agree_at_end()


@pytest.mark.parametrize(("per_minute", "passes"), [(0.0, True), (0.004, False)])
def test_memory_growth_above_five_percent_fails_the_storm(per_minute: float, passes: bool) -> None:
    base = 100_000_000
    samples = [(5.0 * i, round(base * (1 + per_minute * i / 12)), 40) for i in range(240)]
    growth = grown(ProcessSamples("a", "worker", 1, samples))
    assert growth is not None
    assert growth.memory_fit_ratio == pytest.approx(20 * per_minute, rel=0.05, abs=1e-6)
    (memory,) = [line for line in growth_lines([growth]) if "memory growth of a worker" in line.name]
    assert memory.passed is passes
    assert grown(ProcessSamples("a", "worker", 1, samples[:50])) is None, "too short a life"


def test_growing_number_of_open_handles_fails_the_storm() -> None:
    samples = [(5.0 * i, 100, 40 + i // 4) for i in range(120)]
    growth = grown(ProcessSamples("a", "worker", 1, samples))
    assert growth is not None
    (handles,) = [line for line in growth_lines([growth]) if "open handles of a worker" in line.name]
    assert handles.passed is False


def test_storm_observations_are_reloaded_from_their_file_and_reported(tmp_path: Path) -> None:
    seen = calm_storm()
    seen.hurts.append(ObservedFault("d", "kill p2pd", 36.0, 36.0))
    seen.save(tmp_path / "seen.json")
    again = load(tmp_path / "seen.json")
    assert again == seen
    assert report(again, tmp_path) == 0
    seen.oddities.append("a ended by itself")
    assert report(seen, tmp_path) == 1


def test_members_before_their_start_and_after_they_left_do_not_count_as_absent() -> None:
    seen = calm_storm()
    seen.nodes["e"] = NodeObservations("e", looks=[replace(k) for k in seen.nodes["a"].looks if k.at_s > 95])
    seen.hurts += [ObservedFault("e", "start", 0.0, 90.0), ObservedFault("d", "stall at reduce", 33.0, 35.0)]
    seen.hurts.append(ObservedFault("d", "leave for good", 38.0, None))
    away(seen, "d", 33.0, 200.0)
    judge = Judge(seen)
    assert judge.usual_s() == LENGTH_S
    assert not any(down.late for down in judge.downs)
    assert {pair.round for pair in judge.pairs() if pair.node == "d"} == {2}


def test_steered_storm_keeps_every_promise(tmp_path: Path) -> None:
    seen = steered_storm()
    judge = Judge(seen)
    assert len(comparisons(judge)) == 6
    for name, found in comparisons(judge):
        assert found.holds, (name, found)
        assert found.nodes == {"a", "b", "c", "d", "e"}
    assert judge.usual_s() == LENGTH_S
    assert judge.adopted() == 7, "all rounds of the late node"
    assert judge.seen_mixes() == (4 * 6, 4 * 6), "rounds 4, 5 and 8 to 11"
    seen.hurts.append(ObservedFault("d", "kill p2pd", 36.0, 36.0))
    seen.save(tmp_path / "seen.json")
    again = load(tmp_path / "seen.json")
    assert again == seen
    assert report(again, tmp_path) == 0


def nothing_adopted(seen: StormObservations) -> None:
    for node in seen.nodes.values():
        node.commits = [replace(c, outcome="complete") for c in node.commits]


def wrong_rate(seen: StormObservations) -> None:
    commits = seen.nodes["e"].commits
    commits[2] = replace(commits[2], learning_rate=0.2)


def wrong_step(seen: StormObservations) -> None:
    looks = seen.nodes["b"].looks
    looks[75] = replace(looks[75], learning_rate=0.2)


def early_rate(seen: StormObservations) -> None:
    commits = seen.nodes["b"].commits
    commits[1] = replace(commits[1], learning_rate=0.1)


def late_rate(seen: StormObservations) -> None:
    """The rate of round 3 is in the record of round 2."""
    commits = seen.nodes["b"].commits
    commits[2] = replace(commits[2], learning_rate=0.2)


def unknown_rate(seen: StormObservations) -> None:
    commits = seen.nodes["b"].commits
    commits[9] = replace(commits[9], learning_rate=None)


def no_records(seen: StormObservations) -> None:
    seen.nodes["e"].commits, seen.nodes["e"].looks = [], []


def old_weights(seen: StormObservations) -> None:
    seen.nodes["c"].mixes[3] = ObservedMix(3, (1.0, 1.0), (3, 3))


def early_weights(seen: StormObservations) -> None:
    seen.nodes["c"].mixes[2] = ObservedMix(2, (1.0, 3.0), (1, 3))


def other_rows(seen: StormObservations) -> None:
    seen.nodes["c"].mixes[8] = ObservedMix(8, (1.0, 3.0), (50, 50))


def no_checkpoints(seen: StormObservations) -> None:
    seen.nodes["e"].mixes = []


def work_in_the_pause(seen: StormObservations) -> None:
    commits = seen.nodes["d"].commits
    commits[6] = replace(commits[6], weights={"a": 1})


def tokens_in_the_pause(seen: StormObservations) -> None:
    commits = seen.nodes["d"].commits
    commits[7] = replace(commits[7], tokens=commits[7].tokens + 1)


def no_paused_round(seen: StormObservations) -> None:
    seen.steering[3].from_round = 6


def no_work_after_the_pause(seen: StormObservations) -> None:
    for node in seen.nodes.values():
        node.commits = [replace(c, weights={}) if c.round >= 8 else c for c in node.commits]


def missing_resume(seen: StormObservations) -> None:
    del seen.steering[3]


def other_list(seen: StormObservations) -> None:
    del seen.nodes["e"].amendments[3]


def other_round(seen: StormObservations) -> None:
    one = seen.nodes["b"].amendments[0]
    seen.nodes["b"].amendments[0] = replace(one, from_round=one.from_round + 1)


def nothing_amended(seen: StormObservations) -> None:
    seen.steering.clear()


@pytest.mark.parametrize(
    ("violate", "promise"),
    [
        (wrong_rate, "without the amended learning rate"),
        (nothing_adopted, "that a node has replayed"),
        (wrong_step, "without the amended learning rate"),
        (early_rate, "without the amended learning rate"),
        (late_rate, "without the amended learning rate"),
        (unknown_rate, "without the amended learning rate"),
        (no_records, "without the amended learning rate"),
        (old_weights, "weights of the sources"),
        (early_weights, "weights of the sources"),
        (other_rows, "weights of the sources"),
        (no_checkpoints, "weights of the sources"),
        (work_in_the_pause, "paused rounds"),
        (tokens_in_the_pause, "paused rounds"),
        (no_paused_round, "paused rounds"),
        (no_work_after_the_pause, "paused rounds"),
        (missing_resume, "list of amendments"),
        (other_list, "list of amendments"),
        (other_round, "list of amendments"),
        *(
            (nothing_amended, name)
            for name in (
                "without the amended learning rate",
                "replayed",
                "weights of the",
                "paused rounds",
                "list of amendments",
            )
        ),
    ],
)
def test_steered_storm_fails_if_amended_settings_are_not_used_or_not_seen(
    violate: Callable[[StormObservations], None], promise: str
) -> None:
    seen = steered_storm()
    violate(seen)
    judge = Judge(seen)
    (line,) = [line for line in promises(judge, judge.pairs()) if promise in line.name]
    assert line.passed is False


def other_table(seen: StormObservations) -> None:
    seen.nodes["e"].tables[-1] = replace(seen.nodes["e"].tables[-1], digest="another")


def other_sum(seen: StormObservations) -> None:
    for node in seen.nodes.values():
        table = node.tables[-1]
        node.tables[-1] = replace(table, entries={**table.entries, "a": table.entries["a"] - 1})


def other_tokens(seen: StormObservations) -> None:
    seen.nodes["c"].tables[4] = replace(seen.nodes["c"].tables[4], tokens=1)


def no_common_round(seen: StormObservations) -> None:
    seen.nodes["e"].tables = []


def early_joiner(seen: StormObservations) -> None:
    seen.late_joiner = "a"


def no_late_joiner(seen: StormObservations) -> None:
    seen.late_joiner = ""


def no_tables(seen: StormObservations) -> None:
    for node in seen.nodes.values():
        node.tables = []


@pytest.mark.parametrize(
    "violate",
    [other_table, other_sum, other_tokens, no_common_round, early_joiner, no_late_joiner, no_tables],
)
def test_storm_fails_if_tables_of_credit_differ_or_cannot_be_compared(
    violate: Callable[[StormObservations], None],
) -> None:
    seen = steered_storm()
    violate(seen)
    judge = Judge(seen)
    (line,) = [line for line in promises(judge, judge.pairs()) if "tables of credit that differ" in line.name]
    assert line.passed is False


def lost_in_all_tables(seen: StormObservations) -> None:
    """One round's record includes more than the tables and the tokens of the swarm."""
    for node in seen.nodes.values():
        node.commits = [replace(c, weights={**c.weights, "a": 6}) if c.round == 5 else c for c in node.commits]


def moved_to_another_member(seen: StormObservations) -> None:
    table = seen.nodes["b"].tables[8]
    entries = {**table.entries, "a": table.entries["a"] + 1, "c": table.entries["c"] - 1}
    seen.nodes["b"].tables[8] = replace(table, entries=entries)


def missing_round(seen: StormObservations) -> None:
    for node in seen.nodes.values():
        node.commits = [c for c in node.commits if c.round != 1]


@pytest.mark.parametrize("violate", [lost_in_all_tables, moved_to_another_member, missing_round, no_tables])
def test_storm_fails_if_tokens_of_the_records_are_not_in_the_tables(
    violate: Callable[[StormObservations], None],
) -> None:
    seen = steered_storm()
    violate(seen)
    judge = Judge(seen)
    (line,) = [line for line in promises(judge, judge.pairs()) if "lack tokens" in line.name]
    assert line.passed is False


def test_kill_in_a_paused_round_is_not_timed() -> None:
    seen = steered_storm()
    seen.hurts += [ObservedFault("d", "kill worker", at_s, at_s) for at_s in (65.0, 93.0)]
    assert len(Judge(seen).kills()) == 1
    seen.steering.clear()
    assert len(Judge(seen).kills()) == 2


def test_node_without_a_table_after_a_round_of_another_node_is_waited_for() -> None:
    seen = steered_storm()
    assert shares_a_table(seen, "e")
    seen.nodes["e"].tables = [ObservedTable(99, 0, "t", {})]
    assert not shares_a_table(seen, "e") and not shares_a_table(seen, "nobody")


def test_percentile_is_an_observed_value_or_nan_if_there_are_no_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([1.0, 2.0], 1.0) == 2.0
    assert math.isnan(percentile([], 0.5))


@pytest.mark.parametrize("arm", [arm for some in ARMS.values() for arm in some])
def test_every_fault_that_a_storm_plans_is_known_to_nodes(arm: str) -> None:
    assert parse_faults(arm.format(3)).plan[0].round == 3

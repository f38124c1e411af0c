"""No simulated seed violates an invariant, and a seed gives the same messages each time."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.simulation.adversary import ADVERSARIES, ForgedClaim
from tests.simulation.chart import chart
from tests.simulation.invariants import joined_spans, separates
from tests.simulation.network import Line
from tests.simulation.run import simulate
from tests.simulation.scenario import QUIET_S, Fault, Scenario, draw
from tests.simulation.shrink import shrink

SEEDS, PER_TEST = 240, 30


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_no_simulated_seed_violates_an_invariant(first: int) -> None:
    reports = [simulate(draw(seed))[0] for seed in range(first, first + PER_TEST)]
    assert {report.seed: report.violations for report in reports if report.violations} == {}
    assert sum(report.rounds for report in reports) > 2 * PER_TEST


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1444, id="a leader did not find the chunks of its own vote after a crash"),
        pytest.param(1003395, id="a node came back to a round and voted again"),
        pytest.param(2005102, id="a node replayed a round again and joined an attempt before its last one"),
        pytest.param(2002489, id="a member that was not in the plan ended the attempt"),
        pytest.param(10008263, id="a leader did not find the chunks of its own vote right after its start"),
        pytest.param(10062632, id="two nodes took each other for dead after a failed call"),
        pytest.param(20019049, id="contributors that were too few for a round refused the rounds of the others"),
        pytest.param(20027059, id="a member that was cut off had more tokens than the others, who could not follow"),
        pytest.param(20038148, id="the others gave up their chain for that of one member, again and again"),
        pytest.param(20063164, id="a leader made two plans in one attempt"),
        pytest.param(90000373, id="a founder that lost a fork waited for a newer state than the others had"),
        pytest.param(320000745, id="a hostile member made each of two others leave their chain while the other did"),
        pytest.param(380031678, id="a node that was no member looked for a later attempt"),
        pytest.param(330002150, id="a leader waited for members that had gone to a later attempt"),
        pytest.param(91051677, id="a node that was away waited for a state that a hostile member only claimed to have"),
        pytest.param(20067418, id="a lone voter came back to a round and committed another result"),
        pytest.param(50001745, id="a founder left, and a hostile member showed another first round"),
        pytest.param(
            95011099, id="members went over to another chain in turn, and one had judged that chain too early"
        ),
        pytest.param(96001893, id="a hostile member showed a chain of its own, and the nodes refused all states"),
        pytest.param(96000466, id="a node believed a certificate although half of the contributors had another result"),
        pytest.param(98002769, id="a node refused a state before the fork, because it was on neither list of rounds"),
        pytest.param(200000725, id="a joiner waited two minutes for a lost answer with the table of credit"),
        pytest.param(610051285, id="a joiner waited two minutes for a part that its only server no longer had"),
        pytest.param(650002297, id="a fast founder waited for no newcomer, and left all others behind"),
        pytest.param(660034764, id="a hostile member led two of three known members on, who needed a newcomer"),
        pytest.param(670013294, id="a hostile member won a fork of three founders and served only false states"),
        pytest.param(680003511, id="a node that had contributed to the chain that won a fork doubted itself"),
        pytest.param(650020060, id="a node committed rounds while it asked the others, and did not judge their chain"),
        pytest.param(20072170, id="a lone voter came back to a round and voted for another result"),
    ],
)
def test_a_seed_that_found_a_defect_violates_no_invariant(seed: int) -> None:
    assert simulate(draw(seed))[0].violations == []


def test_faults_of_a_node_that_follow_each_other_count_as_one() -> None:
    """In seed 120002958, a node had no power for 2.8 s, and was cut off before anybody heard of it again."""
    faults = [Fault(29.7, "split", 0, 4.0), Fault(28.0, "power", 1, 2.8), Fault(40.0, "stall", 1, 1.0)]
    assert joined_spans(faults) == [(28.0, pytest.approx(33.7)), (40.0, 41.0)]
    assert joined_spans([*faults, Fault(36.6, "cut", 1, 0.5, other=0)]) == [(28.0, 41.0)]
    assert separates(faults[0], 1, 0) and not separates(faults[0], 1, 2) and not separates(faults[1], 0, 1)
    assert simulate(draw(120002958))[0].violations == []


def test_progress_is_not_promised_if_half_of_the_living_contributors_are_hostile() -> None:
    """In seed 390004051, one of three contributors crashed, and another one claimed to be in other attempts."""
    scenario = draw(390004051)
    assert simulate(scenario)[0].violations == []
    assert simulate(replace(scenario, hostile=""))[0].violations == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_none_of_many_simulated_seeds_violates_an_invariant() -> None:
    """`make simulate` runs thousands."""
    failed = [seed for seed in range(1450, 1550) if simulate(draw(seed))[0].violations]
    assert failed == [], "python -m tests.simulation --seed N shows the messages"


@pytest.mark.parametrize("hostile", [name for name in ADVERSARIES if name != "ForgedCommit"])
def test_one_hostile_node_neither_forks_nor_stops_the_others(hostile: str) -> None:
    reports = [simulate(replace(draw(seed), hostile=hostile))[0] for seed in range(5)]
    assert {report.seed: report.violations for report in reports if report.violations} == {}


def test_no_member_dictates_the_mean_by_claiming_a_forged_outcome_of_a_true_plan() -> None:
    """A leader that had got the plan itself proposed the outcome, and all members that had got it voted for it."""
    nodes = 7
    calm = Scenario(
        seed=3, step_s=(0.2,) * nodes, lines=(Line(),) * nodes, join_at_s=(0.0,) * nodes, founders=nodes, faults=(),
        hostile="ForgedClaim", length_s=QUIET_S + 60.0, min_peers=2, quorum_ratio=0.5, policy="time", disk_s=0.001,
        inner_steps=15,
    )  # fmt: skip
    report, world = simulate(calm)
    *honest, hostile = world.nodes
    forged = cast("ForgedClaim", hostile.wire.adversary).forged
    assert report.violations == [] and forged
    committed = {link.head for node in honest for link in node.chain.tip.links}
    assert len(committed) >= 5 and not committed & forged


def test_a_leader_that_signs_its_certificates_with_several_keys_does_not_stop_the_run() -> None:
    """The order of leaders depends on the last one, and members with other orders would not find each other."""
    nodes = 4
    calm = Scenario(
        seed=1, step_s=(0.1,) * nodes, lines=(Line(),) * nodes, join_at_s=(0.0, 0.1, 0.2, 0.3), founders=nodes,
        faults=(), hostile="OtherSigner", length_s=QUIET_S + 120.0, min_peers=2, quorum_ratio=0.5, policy="time",
        disk_s=0.001,
    )  # fmt: skip
    report, world = simulate(calm)
    *honest, _ = world.nodes
    assert report.violations == []
    assert min(node.chain.tip.round for node in honest) > 40


@pytest.mark.parametrize("seed", [pytest.param(3049, id="an outcome is proposed again")])
def test_a_simulated_seed_gives_the_same_messages_in_two_processes_with_other_string_hashes(seed: int) -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed)]
    shown = [
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": hashes}, capture_output=True, check=True, text=True)
        for hashes in ("0", "1")
    ]
    assert "digest of all messages" in shown[0].stdout
    assert shown[0].stdout == shown[1].stdout


def tasks_with_hashes(rng: random.Random) -> type[asyncio.Task[object]]:
    """A class of tasks with random hashes."""

    class Hashed(asyncio.Task[object]):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.hash = rng.getrandbits(32)
            super().__init__(*args, **options)

        def __hash__(self) -> int:
            return self.hash

    return Hashed


@pytest.mark.parametrize("seed", [pytest.param(640064800, id="two parts of a state arrive at once")])
def test_a_simulated_seed_gives_the_same_messages_in_any_order_of_a_set_of_tasks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash of a task is its address in memory, so a set of tasks has another order in each run."""
    digests = set()
    for number in range(6):
        monkeypatch.setattr(asyncio, "Task", tasks_with_hashes(random.Random(number)))
        digests.add(simulate(draw(seed))[0].digest)
    assert len(digests) == 1


@pytest.mark.parametrize("seed", [1, 5, 21])
def test_a_simulated_seed_gives_the_same_messages_byte_for_byte(seed: int) -> None:
    first, second = simulate(draw(seed))[0], simulate(draw(seed))[0]
    assert (first.digest, first.messages, first.events) == (second.digest, second.messages, second.events)
    assert first.messages > 100
    assert simulate(draw(seed + 1))[0].digest != first.digest


def test_simulation_finds_lost_disk_writes_and_shrinks_the_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation finds this defect: without results on the disk, a blackout loses rounds."""
    monkeypatch.setattr("node.swarm.allreduce.result_store.ResultStore.put", lambda *_: None)
    calm = replace(draw(3), faults=(), hostile="")
    faults = (Fault(5.0, "clock", 0, 1.0), Fault(22.0, "blackout", 0, 1.0), Fault(23.0, "clock", 1, 1.0))
    report, _ = simulate(replace(calm, faults=faults))
    assert any("had committed round" in violation for violation in report.violations)
    smaller = shrink(replace(calm, faults=faults))
    assert [fault.kind for fault in smaller.faults] == ["blackout"]
    shown, world = simulate(smaller, keep_trace=True)
    assert shown.violations
    assert "attend" in chart(world) and "n0" in chart(world)

"""Real nodes whose inner steps fail, or whose inner steps are shared by several rank processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, assert_agreed, tiny, wait_for


def helpers(node: Node) -> list[psutil.Process]:
    """The node's rank processes other than the worker."""
    return node.with_word("node.worker.rank_processes")


@pytest.mark.timeout(240)
def test_node_recovers_after_one_of_its_rank_processes_was_killed(tmp_path: Path) -> None:
    """The node with two ranks counts as one member of the swarm, before and after the kill."""
    with Swarm(tmp_path, tiny(round={"inner_steps": 5})) as swarm:
        kill_a_rank(swarm)


def kill_a_rank(swarm: Swarm) -> None:
    founder = swarm.found("--devices.ranks=2", "--checkpoint.every_s=0.5")
    founder.until_training(2 * START_S)
    (second,) = swarm.join("second")
    for node in swarm.nodes:
        node.until(lambda s: s["contribution"]["rounds_joined"] >= 3, 2 * START_S)
    before = founder.status()
    assert founder.peers() and before["peers"]["training"] == 2, "one member a node"
    (helper,) = helpers(founder)
    os.kill(helper.pid, signal.SIGKILL)
    after = founder.until(
        lambda s: s["contribution"]["rounds_joined"] >= before["contribution"]["rounds_joined"] + 2, 3 * START_S
    )
    (new,) = helpers(founder)
    assert new.pid != helper.pid
    assert after["node"]["peer_id"] == before["node"]["peer_id"]
    assert after["contribution"]["tokens_total"] >= before["contribution"]["tokens_total"]
    assert "ended with code -9" in founder.said()
    assert_agreed((founder, second))
    assert founder.act("leave").status_code == 202
    assert founder.wait_end(10 * PATIENCE) == 0
    founder.assert_ended()


def test_inner_step_that_overflows_is_skipped_and_counted(swarm: Swarm) -> None:
    node = swarm.found("--devices.precision=fp16", env={"DILOCO_FAULTS": "inner@1=overflow:3"})
    status = node.until_round(3, 2 * START_S)
    assert status["training"]["loss"] < 5.0, "of a model that knows nothing it is 5.55"
    assert node.metrics()["skipped_steps_total"] >= 3
    assert node.said().count("An inner step was skipped") >= 3


def test_node_whose_inner_steps_all_overflow_ends_and_contributes_nothing(swarm: Swarm) -> None:
    node = swarm.found(env={"DILOCO_FAULTS": "inner@0=overflow:1000000"})
    assert node.wait_end(2 * START_S) == 70, node.said()
    lines = [line for line in node.said().splitlines() if "The worker gave up" in line]
    assert len(lines) == 1 and "Training diverged" in lines[0] and "run.inner.lr" in lines[0]
    assert "Round 0" not in node.said()


@pytest.mark.nightly
def test_node_halves_its_micro_batch_when_memory_runs_out(swarm: Swarm) -> None:
    node = swarm.found(env={"DILOCO_FAULTS": "inner@*=memory:1"})
    node.until_round(1, START_S)
    assert "Out of memory with 4 sequences at once. Training continues with 2 at once." in node.said()
    assert "Out of memory with 2 sequences at once. Training continues with 1 at once." in node.said()


@pytest.mark.nightly
def test_node_stops_training_and_names_the_remedy_if_memory_is_too_small_for_one_sequence(swarm: Swarm) -> None:
    """The node stays, because its memory may come back. It trains again on `resume`."""
    node = swarm.found(env={"DILOCO_FAULTS": "inner@*=memory:0"})
    status = node.until(lambda s: s["phase"] == "error", 2 * START_S)
    assert status["code"] == "worker_crashes"
    assert "devices.activation_checkpointing" in status["reason"] and "`resume`" in status["reason"]


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_node_with_sharded_ranks_restarts_with_a_smaller_micro_batch_if_memory_runs_out(swarm: Swarm) -> None:
    """Memory runs out in round 0, before the node has saved anything. The supervisor restarts all ranks."""
    flags = ("--devices.ranks=2", "--devices.sharding=fsdp", "--devices.micro_batch=2")
    node = swarm.found(*flags, env={"DILOCO_FAULTS": "inner@*=memory:1"})
    node.until_round(1, 3 * START_S)
    said = node.said()
    assert "Out of memory with 2 sequences at once" in said and "Set devices.micro_batch to 1" in said
    assert "Traceback" not in said
    assert len(helpers(node)) == 1


def test_loss_evaluated_by_one_member_reaches_all_members(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tiny(round={"min_peers": 2}, evaluation={"batches": 1, "members": 1})
    with Swarm(tmp_path_factory.mktemp("evaluation"), run) as swarm:
        swarm.found()
        swarm.join("second", "third")
        for node in swarm.nodes:
            node.until(lambda s: s["contribution"]["rounds_joined"] >= 5, 2 * START_S)

        def told() -> list[set[float | None]]:
            """The different losses that the nodes report, for each common round."""
            records = [{r["round"]: r["evaluation_loss"] for r in node.rounds()} for node in swarm.nodes]
            common = set.intersection(*(set(by_round) for by_round in records))
            return [{by_round[number] for by_round in records} for number in sorted(common)]

        rounds = wait_for(lambda: [losses for losses in told() if losses != {None}], START_S, "no rank reports a loss")
        assert all(len(losses) == 1 for losses in rounds), "the record is the same for all"
        for node in swarm.nodes:
            node.until(lambda s: s["training"]["evaluation_loss"], START_S)

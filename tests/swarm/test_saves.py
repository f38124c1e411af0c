"""Real nodes that were stopped or killed at bad moments find their work on the disk."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from node.daemon.worker_watchdog import SupervisorTimings
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, checkpoint_meta, checkpoint_round, tiny, wait_for

BUDGET_S = 120.0
"""Length of an evaluation. It is longer than a test waits for the end of a node."""


def evaluation_s(node: Node) -> float:
    """The seconds that the node has spent on evaluations."""
    return node.activity_s().get("evaluate", 0.0)


def until_evaluating(node: Node) -> int:
    """Wait for the middle of an evaluation. Returns the round whose anchor is evaluated."""
    before_s = evaluation_s(node)
    wait_for(lambda: evaluation_s(node) > before_s + 1.5, PATIENCE * START_S, "no evaluation")
    return int(node.status()["run"]["round"]) + 1


@pytest.mark.timeout(300)
def test_node_stopped_during_an_evaluation_saves_the_round_that_it_evaluates(tmp_path: Path) -> None:
    run = tiny(round={"inner_steps": 5}, evaluation={"batches": 60_000, "budget_s": BUDGET_S})
    with Swarm(tmp_path / "swarm", run) as swarm:
        node = swarm.found("--checkpoint.every_s=3600")
        evaluated = until_evaluating(node)
        assert node.act("pause").status_code == 202
        status = node.until(lambda s: s["phase"] == "paused", PATIENCE * SupervisorTimings().stop_s)
        assert "lost" not in status["reason"]
        assert checkpoint_round(node.checkpoints()[0]) == evaluated
        assert node.act("resume").status_code == 202
        evaluated = until_evaluating(node)
        node.running.send_signal(signal.SIGTERM)
        assert node.wait_end(PATIENCE * SupervisorTimings().stop_s) == 0
        assert checkpoint_round(node.checkpoints()[0]) == evaluated
        assert "did not end within" not in node.said()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("stage", "saved"), [("inner", 2), ("merge", 3)])
def test_leaving_node_can_finish_a_long_operation_before_it_saves(tmp_path: Path, stage: str, saved: int) -> None:
    """The node's main thread is busy with an inner step, or applies a round, when the node must leave."""
    busy_s = SupervisorTimings().stop_s + 4
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 5})) as swarm:
        node = swarm.found("--checkpoint.every_s=3600", env={"DILOCO_FAULTS": f"{stage}@3=stall:{busy_s}"})
        wait_for(lambda: f"Injected fault at {stage} of round 3" in node.said(), PATIENCE * START_S, "it is not busy")
        assert node.act("leave").status_code == 202
        assert node.wait_end(PATIENCE * busy_s) == 0
        assert checkpoint_round(node.checkpoints()[0]) == saved
        assert "did not end within" not in node.said()


@pytest.mark.timeout(240)
def test_node_stopped_before_its_first_inner_step_writes_no_checkpoint(tmp_path: Path) -> None:
    """The checkpoint that the node has just read already contains all its work."""
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 5})) as swarm:
        node = swarm.found("--checkpoint.every_s=3600")
        node.until_round(1)
        assert node.stop() == 0
        saved = node.checkpoints()[0]
        before = (saved / "meta.json").stat().st_ino
        number = checkpoint_round(saved) + 1
        node.start("--checkpoint.every_s=3600", env={"DILOCO_FAULTS": f"inner@{number}=stall:4"})
        wait_for(lambda: f"Injected fault at inner of round {number}" in node.said(), START_S, "it does not train")
        assert node.act("leave").status_code == 202
        assert node.wait_end(PATIENCE * 10) == 0
        assert (saved / "meta.json").stat().st_ino == before and node.checkpoints()[0] == saved


@pytest.mark.timeout(240)
def test_stopping_node_abandons_an_unfinished_checkpoint_and_saves_the_newest_state(tmp_path: Path) -> None:
    """A stop must not take the time of two checkpoints, because only the newer one is needed."""
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 5})) as swarm:
        node = swarm.found("--checkpoint.every_s=3600", env={"DILOCO_FAULTS": "save@3=stall:8"})
        wait_for(lambda: "Injected fault at save of round 3" in node.said(), PATIENCE * START_S, "it does not save")
        node.until_round(4)
        assert node.act("leave").status_code == 202
        assert node.wait_end(PATIENCE * 10) == 0
        newest, *older = map(checkpoint_round, node.checkpoints())
        assert newest >= 4 and older == [-1]


@pytest.mark.timeout(240)
def test_node_killed_in_a_long_round_keeps_the_inner_steps_of_its_newest_checkpoint(tmp_path: Path) -> None:
    """`checkpoint.every_s` limits what a crash costs, even if a round takes an hour."""
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 1_000_000})) as swarm:
        node = swarm.node("founder")
        node.start("--checkpoint.every_s=1")
        wait_for(lambda: saved_steps(node) > 20, PATIENCE * START_S, "no checkpoint within the round")
        node.end_by_force()
        saved = saved_steps(node)
        node.start("--checkpoint.every_s=3600")
        first = node.until(lambda s: s["phase"] == "training" and s["training"]["inner_step"], PATIENCE * START_S)
        assert first["training"]["inner_step"] >= saved, "it begins the round anew"


@pytest.mark.timeout(300)
def test_node_whose_processes_all_get_the_signals_of_a_session_that_ends_saves_its_work(tmp_path: Path) -> None:
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 1_000_000})) as swarm:
        node = swarm.found("--checkpoint.every_s=3600", "--devices.ranks=2")
        done = node.until(lambda s: s["training"]["inner_step"] > 20, PATIENCE * START_S)["training"]["inner_step"]
        processes = node.processes()
        assert len(processes) >= 4, "supervisor, worker, p2pd and the other rank"
        for process in processes:
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
        assert node.wait_end(PATIENCE * SupervisorTimings().stop_s) == 0
        assert saved_steps(node) >= done
        node.assert_ended()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("sharding", ["data-parallel", "fsdp"])
def test_node_with_two_ranks_that_leaves_in_a_long_step_ends_the_step(tmp_path: Path, sharding: str) -> None:
    """The step would take longer than the supervisor waits for the end of its worker."""
    with Swarm(tmp_path / "swarm", tiny(inner={"batch_size": 200_000})) as swarm:
        node = swarm.node("founder")
        node.start("--devices.ranks=2", "--devices.micro_batch=1", f"--devices.sharding={sharding}")
        wait_for(lambda: node.activity_s().get("compute", 0.0) > 2, PATIENCE * START_S, "it does not train")
        assert node.act("leave").status_code == 202
        assert node.wait_end(PATIENCE * SupervisorTimings().stop_s) == 0
        assert "did not end within" not in node.said() and "Traceback" not in node.said()
        node.assert_ended()


def saved_steps(node: Node) -> int:
    """Inner steps of the round in the newest checkpoint; 0 while there is none, or while the node replaces it."""
    try:
        return int(checkpoint_meta(node.checkpoints()[0])["inner_step"])
    except (IndexError, FileNotFoundError):
        return 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("mode", "number", "saved"), [("blocking", 5, 3), ("streaming", 2, -1)])
def test_node_that_trains_alone_recovers_all_its_rounds_after_being_killed(
    tmp_path: Path, mode: str, number: int, saved: int
) -> None:
    """All processes are killed in the middle of a round. `saved` is the round of the newest checkpoint."""
    run = tiny(round={"inner_steps": 10}, sync={"mode": mode, "fragments": 2})
    with Swarm(tmp_path / "swarm", run) as swarm:
        node = swarm.node("founder")
        before = start_until(node, number)
        node.end_by_force()
        assert checkpoint_round(node.checkpoints()[0]) == saved
        if mode == "streaming":
            (node.folder / "totals.json").unlink()  # The file may be lost in a power cut.
        after = start_until(node, number)
        assert f"Replayed rounds {saved + 1} to {number} from the disk" in node.said()
        for name in ("round", "state_digest", "swarm_tokens"):
            assert after["run"][name] == before["run"][name], name
        assert [record["round"] for record in node.rounds()] == list(range(number, -1, -1)), "each is told once"
        assert node.metrics()['sync_rounds_total{result="alone"}'] == number + 1, "each is counted once"


def start_until(node: Node, number: int) -> dict[str, Any]:
    """Start the node and wait for this round. Returns the status. A fault keeps the next round from ending."""
    env = {"DILOCO_FAULTS": f"rendezvous@{number + 1}=stall:600"}
    said = f"Injected fault at rendezvous of round {number + 1}"
    before = node.said().count(said)
    node.start("--checkpoint.every_s=3600", env=env)
    wait_for(lambda: node.said().count(said) > before, PATIENCE * START_S, f"no round {number}")
    return node.until(lambda s: s["run"]["round"] == number, PATIENCE * START_S)


@pytest.mark.timeout(200)
def test_only_the_owner_can_read_what_a_node_and_its_worker_write(tmp_path: Path) -> None:
    with Swarm(tmp_path / "swarm") as swarm:
        node = swarm.node("founder")
        node.program = "node.cli"  # A forked worker would have the umask of the fork server.
        node.start("--checkpoint.every_s=0.5").until_round(1, PATIENCE * START_S)
        assert node.stop() == 0 and node.checkpoints()
        open_to_others = [
            str(path.relative_to(node.folder))
            for path in (node.folder, *node.folder.rglob("*"))
            if not path.is_symlink() and path.stat().st_mode & 0o077
        ]
        assert open_to_others == []

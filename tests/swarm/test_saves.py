"""Real nodes, stopped and killed at bad moments, find their work on the disk."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from node.daemon.worker_watchdog import SupervisorTimings
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, checkpoint_round, tiny, wait_for

BUDGET_S = 120.0
"""Length of an evaluation, longer than a test waits for a node to end."""


def evaluation_s(node: Node) -> float:
    """Seconds that the node has spent on evaluations."""
    found = re.search(r'activity_seconds_total{activity="evaluate"} (\S+)', node.http.get("/metrics").text)
    return float(found[1]) if found else 0.0


def until_evaluating(node: Node) -> int:
    """Wait for the middle of an evaluation. Returns the round of the evaluated anchor."""
    before_s = evaluation_s(node)
    wait_for(lambda: evaluation_s(node) > before_s + 1.5, PATIENCE * START_S, "no evaluation")
    return int(node.status()["run"]["round"]) + 1


@pytest.mark.timeout(300)
def test_a_stop_in_an_evaluation_saves_the_round_that_is_evaluated(tmp_path: Path) -> None:
    run = tiny(round={"inner_steps": 20}, evaluation={"batches": 60_000, "budget_s": BUDGET_S})
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
def test_what_must_end_before_saving_may_take_longer_than_a_goodbye(tmp_path: Path) -> None:
    """The main thread is in a long operation when the node must leave."""
    busy_s = SupervisorTimings().stop_s + 4
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 20})) as swarm:
        node = swarm.found("--checkpoint.every_s=3600", env={"DILOCO_FAULTS": f"inner@3=stall:{busy_s}"})
        wait_for(lambda: "Injected fault at inner of round 3" in node.said(), PATIENCE * START_S, "it is not busy")
        assert node.act("leave").status_code == 202
        assert node.wait_end(PATIENCE * busy_s) == 0
        assert checkpoint_round(node.checkpoints()[0]) == 2
        assert "did not end within" not in node.said()


@pytest.mark.timeout(240)
def test_a_stop_before_the_first_step_writes_nothing(tmp_path: Path) -> None:
    """The checkpoint that the node has just read holds everything."""
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 20})) as swarm:
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
def test_a_stop_drops_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    """A stop must not take the time of two checkpoints, as only the newer one counts."""
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 20})) as swarm:
        node = swarm.found("--checkpoint.every_s=3600", env={"DILOCO_FAULTS": "save@3=stall:8"})
        wait_for(lambda: "Injected fault at save of round 3" in node.said(), PATIENCE * START_S, "it does not save")
        node.until_round(4)
        assert node.act("leave").status_code == 202
        assert node.wait_end(PATIENCE * 10) == 0
        newest, *older = map(checkpoint_round, node.checkpoints())
        assert newest >= 4 and older == [-1]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("mode", "number", "saved"), [("blocking", 5, 3), ("streaming", 2, -1)])
def test_rounds_outlive_the_death_of_the_only_node(tmp_path: Path, mode: str, number: int, saved: int) -> None:
    """All processes are killed in the middle of a round. `saved`: the round of the newest checkpoint."""
    run = tiny(round={"inner_steps": 40}, sync={"mode": mode, "fragments": 2})
    with Swarm(tmp_path / "swarm", run) as swarm:
        node = swarm.node("founder")
        before = start_until(node, number)
        node.end_by_force()
        assert checkpoint_round(node.checkpoints()[0]) == saved
        if mode == "streaming":
            (node.folder / "totals.json").unlink()  # A power cut may do this.
        after = start_until(node, number)
        assert f"Replayed rounds {saved + 1} to {number} from the disk" in node.said()
        for name in ("round", "state_digest", "swarm_tokens"):
            assert after["run"][name] == before["run"][name], name
        assert [record["round"] for record in node.rounds()] == list(range(number, -1, -1)), "each is told once"
        found = re.search(r'sync_rounds_total{result="alone"} (\S+)', node.http.get("/metrics").text)
        assert found is not None and float(found[1]) == number + 1, "each is counted once"


def start_until(node: Node, number: int) -> dict[str, Any]:
    """Start and return the status after this round. The next round does not end."""
    env = {"DILOCO_FAULTS": f"rendezvous@{number + 1}=stall:600"}
    said = f"Injected fault at rendezvous of round {number + 1}"
    before = node.said().count(said)
    node.start("--checkpoint.every_s=3600", env=env)
    wait_for(lambda: node.said().count(said) > before, PATIENCE * START_S, f"no round {number}")
    return node.until(lambda s: s["run"]["round"] == number, PATIENCE * START_S)

"""A node that was killed, stopped or paused leaves no orphans and returns with its identity, work and text position."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from tests.swarm.conftest import Figures
from tests.swarm.harness import (
    PATIENCE,
    START_S,
    Node,
    Swarm,
    assert_agreed,
    checkpoint_meta,
    checkpoint_round,
    tiny,
    wait_for,
)

FIRST_LOSS = math.log(258)
"""The loss of an untrained model in nats per token."""
COMPARED = 9
"""Rounds before and after an interruption whose losses are compared. Medians of fewer vary too much."""


def test_restarted_node_continues_in_the_middle_of_its_round(swarm: Swarm) -> None:
    """A node alone, whose round does not end, restores its inner step and its position in the text."""
    swarm.preset.write_text(swarm.preset.read_text().replace("inner_steps = 10", "inner_steps = 1000000"))
    node = swarm.found()
    node.until(lambda s: s["training"]["inner_step"] > 60, START_S)
    loss = stop(node)
    first = checkpoint_meta(node.checkpoints()[0])
    assert first["inner_step"] > 60 and first["text"]["position"] == first["inner_step"] * 4 * 64
    again = node.start().until_training()
    assert again["training"]["inner_step"] > first["inner_step"]
    assert again["training"]["tokens_total"] == again["training"]["inner_step"] * 4 * 64
    assert again["training"]["loss"] < (loss + FIRST_LOSS) / 2
    stop(node)
    second = checkpoint_meta(node.checkpoints()[0])
    assert second["text"]["round"] == first["text"]["round"]
    assert second["text"]["position"] == second["inner_step"] * 4 * 64


def stop(node: Node) -> float:
    loss: float = node.status()["training"]["loss"]
    node.running.terminate()
    assert node.wait_end(10 * PATIENCE) == 0
    return loss


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with Swarm(tmp_path_factory.mktemp("pair"), tiny(round={"inner_steps": 25})) as swarm:
        swarm.found().until_training()
        swarm.join("second")
        for node in swarm.nodes:
            node.until(lambda s: s["contribution"]["rounds_joined"] >= 8, 2 * START_S)
        yield swarm.nodes


class Before:
    """The state of a node before an interruption. The node must have it afterwards."""

    def __init__(self, node: Node) -> None:
        status = node.until_training()
        self.peer_id = status["node"]["peer_id"]
        self.losses = round_losses(node)
        self.round = checkpoint_round(node.checkpoints()[0])
        # Totals are saved at the end of each round, independently of checkpoints.
        self.tokens = status["contribution"]["tokens_total"]
        self.rounds_joined = status["contribution"]["rounds_joined"]
        node.until(lambda s: s["contribution"]["rounds_joined"] >= self.rounds_joined + 2, START_S)
        assert self.tokens > 0 and median(self.losses[-COMPARED:]) < FIRST_LOSS - 1, self.losses

    def check(self, node: Node) -> float:
        """Compare this state with the node's state when it trains again. Returns the moment of its third round."""
        first = node.until(lambda s: s["contribution"]["tokens_total"], START_S)
        assert first["contribution"]["tokens_total"] >= self.tokens
        assert first["contribution"]["rounds_joined"] > self.rounds_joined
        status = node.until_training()
        assert status["node"]["peer_id"] == self.peer_id
        assert status["run"]["round"] >= self.round
        known = status["run"]["round"]
        node.until(lambda s: s["run"]["round"] > known + 2 and s["peers"]["training"] == 2, START_S)
        returned_s = time.monotonic()
        node.until(lambda s: s["run"]["round"] > known + COMPARED, START_S)
        after = round_losses(node)[len(self.losses) :]
        assert median(after[:COMPARED]) < median(self.losses[-COMPARED:]) + 0.5, (self.losses, after)
        return returned_s


def round_losses(node: Node) -> list[float]:
    """The loss of the last inner step of each round in all starts of the node, nats per token.

    Each is the loss of one batch of 256 tokens. In one run they vary by more than 0.5.
    """
    return [float(loss) for loss in re.findall(r"Round \d+ is committed.* loss is (\d+\.\d+)", node.said())]


@pytest.mark.parametrize("what", ["worker", "p2pd"])
def test_killed_worker_or_p2pd_daemon_is_replaced(pair: list[Node], what: str, figures: Figures) -> None:
    node = pair[1]
    before = Before(node)
    old = [node.find("worker"), node.find("p2pd")]
    began_s = time.monotonic()
    node.find(what).kill()
    wait_for(lambda: not any(process.is_running() for process in old), 10 * PATIENCE, "the old ones still run")
    figures.hold(f"{what} killed, until nothing of the old worker is left", time.monotonic() - began_s, 10)
    node.until(lambda s: s["phase"] != "training", START_S)
    figures.hold(f"{what} killed, until a round later", before.check(node) - began_s, 40)
    assert len(node.processes()) == 3
    assert "Traceback" not in node.said(), "a dead process is told in one sentence"


def test_killed_supervisor_leaves_no_process_and_can_be_started_again(pair: list[Node], figures: Figures) -> None:
    node = pair[1]
    before = Before(node)
    began_s = time.monotonic()
    node.find("supervisor").kill()
    wait_for(lambda: node.processes() == [], 10 * PATIENCE, "orphans")
    figures.hold("supervisor killed, until no process is left", time.monotonic() - began_s, 10)
    assert node.wait_end(5) == -9
    node.start()
    before.check(node)
    assert_agreed(pair)


def test_pause_frees_memory_and_resume_continues_the_training(pair: list[Node], figures: Figures) -> None:
    founder, node = pair
    before = Before(node)
    worker = node.find("worker")
    training_bytes = worker.memory_info().rss
    began_s = time.monotonic()
    assert node.act("pause").status_code == 202
    wait_for(lambda: not worker.is_running(), 10 * PATIENCE, "the worker that trains")
    figures.hold("pause until the worker that trains is gone", time.monotonic() - began_s, 10)
    paused = node.until(serving, START_S)
    assert paused["run"]["round"] >= before.round
    assert paused["training"]["tokens_total"] >= before.tokens
    serves = node.find("worker")
    assert serves.memory_info().rss < 0.8 * training_bytes
    assert founder.until(lambda s: s["peers"]["training"] == 1, 5 * PATIENCE)

    def seen_paused() -> bool:
        return [row["phase"] for row in founder.peers() if row["peer_id"] == before.peer_id] == ["paused"]

    wait_for(seen_paused, START_S, "the paused node is not seen as such")
    first = founder.status()["run"]["round"]
    founder.until_round(first + 2)
    assert all(len(record["members"]) == 1 for record in founder.rounds() if record["round"] > first + 1)

    # A paused node serves other nodes, so it still needs p2pd.
    node.find("p2pd").kill()
    wait_for(lambda: not serves.is_running(), 10 * PATIENCE, "the paused worker runs on without p2pd")
    node.find("p2pd")
    node.until(serving, START_S)

    assert node.act("resume").status_code == 202
    before.check(node)


def serving(status: dict[str, Any]) -> bool:
    """Whether the node is paused, and its worker without a device has found the other node."""
    return bool(status["phase"] == "paused" and status["devices"] == [] and status["peers"]["connected"] == 1)


def test_draining_node_finishes_its_round_and_then_stops(pair: list[Node]) -> None:
    founder, node = pair
    status = node.until_training()
    peer_id, number = status["node"]["peer_id"], status["run"]["round"]
    assert node.act("drain").status_code == 202
    assert node.wait_end(START_S) == 0
    last = checkpoint_round(node.checkpoints()[0])
    assert last > number
    record = next(r for r in founder.rounds() if r["round"] == last)
    assert peer_id in {m["peer_id"] for m in record["members"] if m["included"]}
    node.assert_ended()
    founder.until_round(last + 2)

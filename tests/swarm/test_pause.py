"""The owner takes the machine back and lends it again: pause, resume, drain."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.swarm.conftest import Figures
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, checkpoint_round, tiny, wait_for


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with Swarm(tmp_path_factory.mktemp("pair"), tiny(round={"inner_steps": 60})) as swarm:
        swarm.found().until_training()
        swarm.join("second")
        for node in swarm.nodes:
            node.until(lambda s: s["contribution"]["rounds_joined"] >= 2, 2 * START_S)
        yield swarm.nodes


def test_pause_frees_the_machine_and_resume_goes_on(pair: list[Node], figures: Figures) -> None:
    founder, node = pair
    before = node.status()
    peer_id = before["node"]["peer_id"]
    worker = node.find("worker")
    began_s = time.monotonic()
    assert node.act("pause").status_code == 202
    wait_for(lambda: not worker.is_running(), 10 * PATIENCE, "the worker that trains")
    figures.hold("pause until the worker that trains is gone", time.monotonic() - began_s, 10)
    # A report without devices is that of the worker that holds none.
    paused = node.until(
        lambda s: s["phase"] == "paused" and s["devices"] == [] and s["peers"]["connected"] == 1, START_S
    )
    assert paused["run"]["round"] >= before["run"]["round"]
    assert paused["training"]["tokens_total"] >= before["training"]["tokens_total"]
    now = node.find("worker")
    assert not any("libtransformers" in m.path or "safetensors_rust" in m.path for m in now.memory_maps())
    cpu_before = sum(now.cpu_times()[:2])
    rows = wait_for(lambda: row_of(founder, peer_id, "paused"), 5 * PATIENCE, "the founder knows of the pause")
    assert rows and founder.until(lambda s: s["peers"]["training"] == 1, 5 * PATIENCE)
    first = founder.status()["run"]["round"]
    founder.until_round(first + 2)
    assert all(len(r["members"]) == 1 for r in founder.rounds() if r["round"] > first + 1)
    assert sum(now.cpu_times()[:2]) - cpu_before < 2.5

    assert node.act("resume").status_code == 202
    back = node.until_training()
    assert back["node"]["peer_id"] == peer_id
    assert back["training"]["tokens_total"] >= before["training"]["tokens_total"]
    assert back["contribution"]["rounds_joined"] >= before["contribution"]["rounds_joined"]
    joined = back["contribution"]["rounds_joined"]
    node.until(lambda s: s["contribution"]["rounds_joined"] > joined, START_S)
    assert founder.until(lambda s: s["peers"]["training"] == 2, START_S)


def row_of(node: Node, peer_id: str, phase: str) -> bool:
    return any(row["peer_id"] == peer_id and row["phase"] == phase for row in node.peers())


def test_drain_takes_part_in_its_round_then_ends(pair: list[Node]) -> None:
    founder, node = pair
    status = node.until_training()
    peer_id, number = status["node"]["peer_id"], status["run"]["round"]
    assert node.act("drain").status_code == 202
    assert node.wait_end(START_S) == 0
    last = checkpoint_round(node.checkpoints()[0])
    assert last > number
    record = next(r for r in founder.rounds() if r["round"] == last)
    assert peer_id in {m["peer_id"] for m in record["members"] if m["included"]}
    assert node.processes() == []
    founder.until_round(last + 2)

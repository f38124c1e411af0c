"""Real nodes write the curves of their run. All nodes write the same values for the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, tiny


def start(node: Node) -> Node:
    node.program = "node.cli"  # A supervisor that is forked can start workers only.
    return node.start("--metrics.sinks=jsonl")


def curves(node: Node) -> dict[int, dict[str, Any]]:
    """The values of all curves of the run by round, as the sink `jsonl` has written them."""
    (file,) = node.folder.glob("metrics/*/rounds.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        row["round"]: {name: row[name] for name in row if name.startswith("run/") or name == "tokens"} for row in rows
    }


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_two_nodes_write_the_same_curves_of_their_run(tmp_path: Path) -> None:
    run = tiny(round={"min_peers": 2, "inner_steps": 12}, evaluation={"batches": 2, "every_rounds": 2})
    with Swarm(tmp_path / "swarm", run) as swarm:
        founder = start(swarm.node("founder"))
        second = start(swarm.node("second", join=founder.invite()))
        joined = second.until_training(PATIENCE * START_S)["run"]["round"]
        for node in (founder, second):
            node.until_round(joined + 6, PATIENCE * START_S)
        assert [node.stop() for node in (founder, second)] == [0, 0]
        first, other = curves(founder), curves(second)
    common = first.keys() & other.keys()
    assert len(common) >= 5
    assert {number: first[number] for number in common} == {number: other[number] for number in common}
    names = {name for values in first.values() for name in values}
    assert names == {
        "tokens", "run/training_loss", "run/evaluation_loss", "run/learning_rate", "run/pseudo_gradient_norm",
        "run/contribution_cosine", "run/members", "run/round_tokens",
    }  # fmt: skip

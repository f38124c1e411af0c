"""A node whose GPU memory another program takes during training saves its work and trains again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.harness import PATIENCE, START_S, Swarm, checkpoint_meta, tiny


@pytest.mark.timeout(240)
def test_node_without_memory_for_one_sequence_saves_its_work_and_trains_again(tmp_path: Path) -> None:
    """Before, the node ended with exit code 3, after which no service starts it again."""
    plan = tmp_path / "faults"
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 5, "min_peers": 1})) as swarm:
        node = swarm.found(env={"DILOCO_FAULTS": f"file:{plan}"})
        before = node.until_round(2, PATIENCE * START_S)
        plan.write_text("inner@*=memory:0")
        crashed = node.until(lambda s: s["code"] == "worker_crashed", PATIENCE * START_S)
        assert "memory does not suffice for a single sequence" in crashed["reason"]
        tokens = checkpoint_meta(node.checkpoints()[0])["extra"]["ledger"]["counters"]["tokens_processed"]
        assert tokens >= before["training"]["tokens_total"]
        plan.unlink()
        node.until_round(crashed["run"]["round"] + 2, PATIENCE * START_S)

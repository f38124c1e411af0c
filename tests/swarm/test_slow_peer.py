"""Rounds of the policy `time` with a peer that is several times slower: no round waits for all its inner steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.harness import Swarm, tiny

SLOWER = 8
STEPS = 40


@pytest.mark.timeout(180)
def test_first_round_ends_before_a_slow_peer_has_done_all_its_inner_steps(tmp_path: Path) -> None:
    run = tiny(round={"policy": "time", "inner_steps": STEPS, "min_peers": 2})
    with Swarm(tmp_path / "swarm", run) as swarm:
        fast = swarm.found()
        (slow,) = swarm.join("slow", env={"DILOCO_FAULTS": f"inner@*=slow:{SLOWER}"})
        slow.until_round(0, 120)
        record = next(one for one in slow.rounds() if one["round"] == 0)
        weights = {member["name"]: member["weight"] for member in record["members"] if member["included"]}
        assert set(weights) == {"founder", "slow"}, record
        # Under the policy `steps` both nodes would contribute the same number of inner steps.
        assert weights["slow"] < 0.4 * weights["founder"], record
        fast.until_round(0, 30)

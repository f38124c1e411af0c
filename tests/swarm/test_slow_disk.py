"""A worker that reads or writes its state on a slow disk does not count as hung."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from node.daemon.worker_watchdog import SupervisorTimings
from tests.swarm.harness import PATIENCE, START_S, Swarm, checkpoint_meta, checkpoint_round, tiny
from tests.swarm.node_main import PROGRAM, TIMINGS

SAVE_S = SupervisorTimings().stop_s + 3
HUNG_S = 5.0


@pytest.mark.timeout(240)
def test_stopping_node_is_not_killed_while_a_slow_disk_saves_its_state(tmp_path: Path) -> None:
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 5, "min_peers": 1})) as swarm:
        node = swarm.found(env={"DILOCO_FAULTS": f"save@*=stall:{SAVE_S}"})
        before = node.until_round(2, PATIENCE * START_S)
        began_s = time.monotonic()
        node.running.send_signal(signal.SIGTERM)
        assert node.wait_end(PATIENCE * 2 * SAVE_S) == 0
        took_s = time.monotonic() - began_s
        newest = node.checkpoints()[0]
        tokens = checkpoint_meta(newest)["extra"]["ledger"]["counters"]["tokens_processed"]
        print(f"ended {took_s:.1f} s after the signal, with a disk that takes {SAVE_S:.0f} s")
        assert took_s >= SAVE_S
        assert checkpoint_round(newest) >= before["run"]["round"]
        assert tokens >= before["training"]["tokens_total"]
        assert "is killed" not in node.said()
        node.assert_ended()


@pytest.mark.timeout(240)
def test_starting_node_does_not_count_as_hung_while_a_slow_disk_reads_its_state(tmp_path: Path) -> None:
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 5, "min_peers": 1})) as swarm:
        node = swarm.found()
        node.until_round(2, PATIENCE * START_S)
        node.running.send_signal(signal.SIGTERM)
        assert node.wait_end(PATIENCE * SupervisorTimings().stop_s) == 0
        saved = checkpoint_round(node.checkpoints()[0])
        node.program = PROGRAM
        timings = json.dumps({"grace_s": HUNG_S, "stale_s": HUNG_S, "hung_s": HUNG_S})
        node.start(env={"DILOCO_FAULTS": f"load@*=stall:{3 * HUNG_S}", TIMINGS: timings})
        node.until_round(saved + 1, PATIENCE * START_S)
        assert f"Resuming from the checkpoint of round {saved}" in node.said()
        assert "Injected fault at load" in node.said() and "hung" not in node.said()

"""A disk that takes longer for the last state than an end usually has: the node waits for it, and says so."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from node.daemon.shift import Timings
from tests.swarm.harness import PATIENCE, START_S, Swarm, checkpoint_meta, checkpoint_round, tiny

SAVE_S = Timings().stop_s + 3


@pytest.mark.timeout(240)
def test_the_last_state_is_saved_however_long_it_takes(tmp_path: Path) -> None:
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 20, "min_peers": 1})) as swarm:
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
        assert "is killed" not in node.said() and node.processes() == []

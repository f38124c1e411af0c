"""Compute and sync times in /metrics agree with an external clock. Faults give steps and rounds a known length."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, tiny

STEP_S, STEPS, HELD_S = 0.4, 10, 2.0
ROUNDS = 6
ALLOWED_RATIO = 0.02
LOOK_S = 0.02


@pytest.mark.timeout(240)
def test_reported_compute_and_sync_times_agree_with_an_external_clock(tmp_path: Path) -> None:
    run = tiny(round={"inner_steps": STEPS})
    with Swarm(tmp_path / "swarm", run) as swarm:
        node = swarm.found(env={"DILOCO_FAULTS": f"inner@*=rest:{STEP_S}, rendezvous@*=stall:{HELD_S}"})
        node.until_round(0, PATIENCE * START_S)
        before, began_s = at_round_end(node)
        after, ended_s = before, began_s
        for _ in range(ROUNDS):
            after, ended_s = at_round_end(node)
        wall_s = ended_s - began_s

    def grown(name: str) -> float:
        return sum(after[key] - before.get(key, 0.0) for key in after if key.startswith(name))

    steps, rounds = grown("inner_steps_total"), grown("sync_rounds_total")
    assert (steps, rounds) == (ROUNDS * STEPS, ROUNDS)
    told_s = {
        "compute": grown('activity_seconds_total{activity="compute"}'),
        "sync_wait": grown('activity_seconds_total{activity="sync_wait"}'),
        "all activities": grown("activity_seconds_total"),
        "sync by stage": grown("sync_duration_seconds_sum"),
        "blocked by stage": grown("sync_blocked_seconds_sum"),
    }
    compute_s = steps * STEP_S
    clock_s = {
        "compute": compute_s,
        "sync_wait": wall_s - compute_s,
        "all activities": wall_s,
        "sync by stage": wall_s - compute_s,
        "blocked by stage": wall_s - compute_s,
    }
    off = {name: (told_s[name] - clock_s[name]) / wall_s for name in clock_s}
    off["utilisation"] = told_s["compute"] / told_s["all activities"] - compute_s / wall_s
    print({name: f"{ratio:+.2%}" for name, ratio in off.items()}, f"of {wall_s:.1f} s")
    assert all(abs(ratio) <= PATIENCE * ALLOWED_RATIO for ratio in off.values()), off
    assert told_s["sync_wait"] >= ROUNDS * HELD_S


def at_round_end(node: Node) -> tuple[dict[str, float], float]:
    """Wait for one more round. Returns all series and the time of the first scrape that shows the round."""
    first = node.metrics()["local_round"]
    end_s = time.monotonic() + PATIENCE * START_S
    while (found := node.metrics())["local_round"] == first:
        assert time.monotonic() < end_s, "no round ended"
        time.sleep(LOOK_S)
    return found, time.monotonic()

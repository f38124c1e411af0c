"""Real nodes that train while a round is averaged agree with each other and do not wait for the averaging."""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, assert_agreed, common_rounds, tiny, wait_for

SLOW_S = 1.0
"""Seconds by which a fault delays each member's sending."""
ROUNDS = 5


def run_of(mode: str) -> dict[str, Any]:
    """A run in this mode. Twice the inner steps make a round with two fragments as long as one without fragments."""
    steps = {"overlapped": 100, "streaming": 200}[mode]
    return tiny(
        round={"policy": "time", "inner_steps": steps, "min_peers": 2},
        sync={"mode": mode, "fragments": 2, "codec": "int4", "feedback": "loco"},
    )


def landed(node: Node) -> list[dict[str, Any]]:
    """The rounds that include this node's contribution, without round 0, which is always blocking."""
    me = node.status()["node"]["peer_id"]
    return [
        r for r in node.rounds() if r["round"] > 0 and any(m["peer_id"] == me and m["included"] for m in r["members"])
    ]


def has_landed(node: Node, rounds: int) -> bool:
    return len(landed(node)) >= rounds


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["streaming", pytest.param("overlapped", marks=pytest.mark.nightly)])
def test_nodes_keep_training_during_overlapped_rounds_and_agree(mode: str, tmp_path: Path) -> None:
    with Swarm(tmp_path, run_of(mode)) as swarm:
        env = {"DILOCO_FAULTS": f"reduce@*=stall:{SLOW_S}"}
        founder = swarm.found(env=env)
        founder.calm()
        (other,) = swarm.join("other", env=env)
        other.calm()
        for node in swarm.nodes:
            wait_for(partial(has_landed, node, ROUNDS), 2 * START_S, "no rounds")
        for node in swarm.nodes:
            seconds = [r["seconds"] for r in landed(node)]
            assert statistics.median(s["reduce"] for s in seconds) >= SLOW_S
            assert statistics.median(s["blocked"] for s in seconds) < 0.1 * SLOW_S
        shared = common_rounds(swarm.nodes)
        assert len(shared) >= ROUNDS and all(len(digests) == 1 for digests in shared.values())


@pytest.mark.timeout(240)
def test_node_killed_while_it_sends_a_contribution_returns_to_the_rounds(tmp_path: Path) -> None:
    with Swarm(tmp_path, run_of("streaming")) as swarm:
        founder = swarm.found()
        founder.calm()
        swarm.join("second")
        (third,) = swarm.join("third", env={"DILOCO_FAULTS": "reduce@4=die"})
        for node in swarm.nodes[1:]:
            node.calm()
        founder.until_round(5, 2 * START_S)
        third.until(lambda s: s["run"]["round"] >= 5, 30 * PATIENCE)
        before = len(landed(third))
        wait_for(lambda: len(landed(third)) > before, START_S, "it is in no round any more")
        assert_agreed(swarm.nodes)


@pytest.mark.timeout(240)
def test_automatic_sync_lengthens_rounds_until_the_transfers_fit(tmp_path: Path) -> None:
    """The inner steps of a round take 0.4 s at first, and its transfer takes 2 s."""
    run = tiny(
        round={"policy": "time", "inner_steps": 20, "most_inner_steps": 400, "min_peers": 2},
        sync={"mode": "overlapped", "auto": True},
    )
    with Swarm(tmp_path, run) as swarm:
        env = {"DILOCO_FAULTS": f"inner@*=rest:0.02,reduce@*=stall:{2 * SLOW_S}"}
        founder = swarm.found(env=env)
        swarm.join("other", env=env)
        told: dict[int, set[int]] = {}
        for _ in range(400):
            for node in swarm.nodes:
                status = node.status()
                told.setdefault(status["run"]["round"], set()).add(status["training"]["inner_steps"])
            if max(told) >= ROUNDS + 2:
                break
            time.sleep(0.1)
        late = {number: steps for number, steps in told.items() if number >= 3}
        assert late and all(len(steps) == 1 for steps in late.values()), f"one decision on all nodes: {told}"
        (steps,) = late[max(late)]
        assert 2 * SLOW_S / 0.02 <= steps <= 400, "the transfer takes place meanwhile"
        blocked = [r["seconds"]["blocked"] for r in landed(founder) if r["round"] >= 4]
        assert statistics.median(blocked) < 0.1 * SLOW_S
        assert_agreed(swarm.nodes)

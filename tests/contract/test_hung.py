"""Peers that hang: nothing comes from them and nothing fails, as with SIGSTOP. The others go on, and they come back."""

from __future__ import annotations

import time

import pytest

from node.swarm.directory import DEAD_S
from node.swarm.faults import parse_faults
from tests.contract.harness import Node, Swarm, Trap, assert_same, offer_all, round_of, wait_until

PARAMETERS = 50_000
HANG_S = DEAD_S + 6.0
SOON_S = DEAD_S + 8.0
"""Until it is known as gone, then a new attempt and its grace; on a loaded machine."""


def hang(node: Node, stage: str, round_: int) -> Trap:
    trap = Trap(parse_faults(f"{stage}@{round_}=hang:{HANG_S}").plan)
    node.rounds.faults = trap
    return trap


@pytest.fixture(autouse=True)
def only_over_p2p(swarm: Swarm) -> None:
    if swarm.transport == "local":
        pytest.skip("the matrix has it")


@pytest.mark.parametrize(("stage", "who", "count"), [("average", "leader", 3), ("commit", "member", 4)])
def test_the_others_commit_without_a_hung_one_and_it_comes_back(swarm: Swarm, stage: str, who: str, count: int) -> None:
    nodes = swarm.nodes(count, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    hung = nodes[0 if who == "leader" else -1]
    others = [node for node in nodes if node is not hung]
    trap = hang(hung, stage, 0)
    offer_all(nodes, 0)
    assert trap.sprung.wait(10)
    began_s = time.monotonic()
    done = [node.committed(SOON_S) for node in others]
    assert_same(done)
    assert time.monotonic() - began_s < SOON_S
    assert {node.peer_id for node in others} <= set(done[0].outcome.included)
    wait_until(lambda: hung.tip.head == others[0].tip.head, HANG_S + 10)
    assert hung.tip.digest == others[0].tip.digest
    assert not hung.lost.is_set() and not any(task.done() for task in hung._tasks)
    wait_until(lambda: all(node.directory.is_member(hung.peer_id) for node in others))
    hung.committed()
    round_of(nodes, 1)


def test_one_that_slept_does_not_wake_up_alone(swarm: Swarm) -> None:
    """It heard nothing while it slept; were the others dead for that, it would close a round all by itself."""
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16", min_peers=1))
    round_of(nodes, 0)
    sleeper, other = nodes
    sleeper.seat.loop.call_soon_threadsafe(time.sleep, HANG_S)
    time.sleep(HANG_S - 0.5)
    offer_all([sleeper], 1)
    time.sleep(1.5)
    assert sleeper.tip.round == 0
    assert sleeper.directory.is_member(other.peer_id)
    offer_all([other], 1)
    assert_same([node.committed(SOON_S) for node in nodes])

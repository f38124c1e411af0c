"""Peers that hang, as after SIGSTOP, send nothing, and calls to them do not fail. The others continue without them."""

from __future__ import annotations

import time

import pytest

from node.swarm.faults import parse_faults
from node.swarm.membership.timings import MemberTimings
from tests.contract.harness import Node, Swarm, Trap, assert_same, offer_all, round_of, wait_until

pytestmark = pytest.mark.only_over("p2p", "the fault matrix covers the local transport")

PARAMETERS = 50_000
HANG_S = MemberTimings().dead_s + 6.0
SOON_S = MemberTimings().dead_s + 8.0
"""The time of failure detection and of a new attempt with its grace period, on a loaded machine."""


def hang(node: Node, stage: str, round_: int) -> Trap:
    trap = Trap(parse_faults(f"{stage}@{round_}=hang:{HANG_S}").plan)
    node.participant.ctx.hooks._faults = trap
    return trap


@pytest.mark.parametrize(("stage", "who", "count"), [("average", "leader", 3), ("commit", "member", 4)])
def test_others_commit_without_a_hung_member_that_takes_part_again_later(
    swarm: Swarm, stage: str, who: str, count: int
) -> None:
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
    wait_until(lambda: all(node.peer_table.is_member(hung.peer_id) for node in others))
    hung.committed()
    round_of(nodes, 1)


def test_a_member_does_not_commit_alone_after_its_machine_was_suspended(swarm: Swarm) -> None:
    """The node heard nothing while suspended. If it took the others for dead, it would close a round alone."""
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16", min_peers=1))
    round_of(nodes, 0)
    sleeper, other = nodes
    sleeper.host.loop.call_soon_threadsafe(time.sleep, HANG_S)
    time.sleep(HANG_S - 0.5)
    offer_all([sleeper], 1)
    time.sleep(1.5)
    assert sleeper.tip.round == 0
    assert sleeper.peer_table.is_member(other.peer_id)
    offer_all([other], 1)
    assert_same([node.committed(SOON_S) for node in nodes])

"""Real nodes in homes keep one table of credit through a split, a pause and a rollback that the founder orders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import pytest

from tests.homes.home import Home
from tests.homes.namespace import inside
from tests.homes.nodes import START_S, Pace, found, join
from tests.homes.world import world
from tests.swarm.harness import Node, Swarm, assert_agreed, checkpoint_round, command, wait_for
from tests.swarm.test_credit import credit, tables_at_one_round

pytestmark = pytest.mark.skipif(not os.environ.get("DILOCO_TEST_HOMES"), reason="real nodes: set DILOCO_TEST_HOMES=1")

PACE = Pace(step_s=0.2, inner_steps=40)
PAUSED_ROUNDS = 10
KEEP = ("--checkpoint.keep=32", "--checkpoint.every_s=1")


def tip_round(node: Node) -> int:
    return int(node.status()["run"]["round"])


def steer(node: Node, *words: str) -> None:
    with inside(node.namespace):
        code, _, problem = command("steer", *words, "--data-dir", str(node.folder))
    assert code == 0, problem


def was_taken_back(node: Node) -> bool:
    return any("taken the run back" in line["message"] for line in node.logs(1000))


def assert_one_table(nodes: Sequence[Node], what: str) -> None:
    first, *others = tables_at_one_round(nodes, max(map(tip_round, nodes)) + 1)
    assert all(table == first for table in others), f"after {what}"
    for node in nodes:
        record = credit(node)
        assert sum(entry.tokens for entry in record.table) == record.evidence.tokens, f"after {what}"
    print(f"after {what}: one table, {sum(entry.tokens for entry in first):,} tokens by {len(first)} members")


def until_one_line(nodes: Sequence[Node]) -> None:
    def agree() -> bool:
        states = [node.status()["run"] for node in nodes]
        return len({(state["round"], state["state_digest"]) for state in states}) == 1

    wait_for(agree, START_S, "the nodes do not agree on one state")


@pytest.mark.timeout(1500)
def test_credit_stays_one_table_through_a_split_a_pause_of_ten_rounds_and_a_rollback(swarm: Swarm) -> None:
    with world([Home("published"), Home("forwarded"), Home("forwarded"), Home("cone")]) as homes:
        rules = ("--run.governance=founder", "--run.round.min_peers=2")
        founder = found(swarm, homes[0], *rules, *KEEP, pace=PACE)
        invite = founder.invite()
        nodes = [founder, *(join(swarm, home, invite, *KEEP, pace=PACE) for home in homes[1:])]
        for node in nodes:
            node.until(lambda status: status["peers"]["training"] == len(nodes), START_S)
        assert_one_table(nodes, "the start")

        homes.cut_off(homes[2:])
        sides = (nodes[:2], nodes[2:])
        since = [max(map(tip_round, side)) for side in sides]
        for side, last in zip(sides, since, strict=True):
            for node in side:
                node.until_round(last + 3, START_S)
        newest = min(tip_round(side[0]) for side in sides)
        assert sides[0][0].digests()[newest] != sides[1][0].digests()[newest], "the homes were not cut off"
        homes.reconnect(homes[2:])
        until_one_line(nodes)
        for node in nodes:
            node.until(lambda status: status["peers"]["training"] == len(nodes), START_S)
        assert_one_table(nodes, "the split")

        away = nodes[-1]
        away.act("pause")
        away.until(lambda status: status["phase"] == "paused", START_S)
        founder.until_round(tip_round(founder) + PAUSED_ROUNDS, START_S)
        away.act("resume")
        away.until_training(START_S)
        assert_one_table(nodes, "the pause")

        shared = set.intersection(*({checkpoint_round(path) for path in node.checkpoints()} for node in nodes))
        steer(founder, "rollback", str(sorted(shared)[-2]))
        for node in nodes:
            wait_for(partial(was_taken_back, node), START_S, f"{node.name} does not take the run back")
        assert_one_table(nodes, "the rollback")
        assert_agreed(nodes)
        assert [node.stop() for node in nodes] == [0] * len(nodes)

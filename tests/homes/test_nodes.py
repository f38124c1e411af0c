"""Real nodes in homes take part in every round. The tests are slow and run only with DILOCO_TEST_HOMES=1.

They check the records of the rounds and the digests of all nodes, rather than a node's own status.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tests.homes.home import Home, line_text
from tests.homes.nodes import START_S, Pace, found, included, join
from tests.homes.world import World, world
from tests.swarm.harness import Node, Swarm, common_rounds

pytestmark = pytest.mark.skipif(not os.environ.get("DILOCO_TEST_HOMES"), reason="real nodes: set DILOCO_TEST_HOMES=1")

ROUNDS = 6
GETTING_IN = 2
"""Number of rounds that are not checked after all nodes have started to train."""
PATIENCE = 4.0
"""Factor by which a round may take longer than planned on a busy machine."""


def start_all(homes: World, swarm: Swarm, pace: Pace, *, announce: bool) -> list[Node]:
    """Start a founder in the first home and a node that joins it in each other home.

    The founder announces its outer address. If `announce` is true, the other nodes announce theirs.
    """
    nodes = [found(swarm, homes[0], pace=pace)]
    invite = nodes[0].invite()
    nodes += [join(swarm, home, invite, pace=pace, announce=announce) for home in homes[1:]]
    for node in nodes:
        node.until_training(START_S)
    return nodes


def assert_all_are_in_all_rounds(homes: World, nodes: Sequence[Node], pace: Pace) -> None:
    """Assert that each of ROUNDS rounds includes the nodes of all homes. The first GETTING_IN rounds do not count."""
    since = max(node.status()["run"]["round"] for node in nodes) + GETTING_IN
    wanted = range(since + 1, since + ROUNDS + 1)
    for node in nodes:
        node.until_round(wanted[-1], PATIENCE * pace.round_s * (GETTING_IN + ROUNDS))
    records = nodes[0].rounds()
    missed = {}
    for home, node in zip(homes, nodes, strict=True):
        was_in = included(records, node.peer_id())
        missed[home.name] = [number for number in wanted if not was_in.get(number)]
        status = node.status()
        print(
            f"{home.name} {line_text(home.lines)}: included in {ROUNDS - len(missed[home.name])} of {ROUNDS}; "
            f"{status['reachability']}: {status['reachability_reason']}"
        )
    assert missed == {home.name: [] for home in homes}, (
        f"rounds without a home's contribution, as the founder tells: {missed}"
    )
    digests = {number: told for number, told in common_rounds(nodes).items() if number in wanted}
    assert len(digests) == ROUNDS and all(len(told) == 1 for told in digests.values()), digests


@pytest.mark.timeout(1200)
def test_nodes_whose_owners_announce_an_address_take_part_in_every_round(swarm: Swarm) -> None:
    pace = Pace()
    with world([Home("published")] * 3) as homes:
        nodes = start_all(homes, swarm, pace, announce=True)
        assert_all_are_in_all_rounds(homes, nodes, pace)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "kinds",
    [("published", "published", "published"), ("published", "forwarded", "forwarded", "cone")],
    ids=["three published", "published, forwarded, forwarded, cone"],
)
def test_nodes_that_find_their_own_address_take_part_in_every_round(swarm: Swarm, kinds: Sequence[str]) -> None:
    pace = Pace()
    with world([Home(kind) for kind in kinds]) as homes:  # type: ignore[arg-type]
        nodes = start_all(homes, swarm, pace, announce=False)
        assert_all_are_in_all_rounds(homes, nodes, pace)


FULL_LINE_ROUNDS = 3


@pytest.mark.timeout(1200)
def test_members_hear_each_other_while_their_lines_are_full(swarm: Swarm) -> None:
    """Contributions, and then results, fill all lines for longer than `dead_s`. No attempt fails."""
    pace = Pace(inner_steps=50)
    flags = ("--run.sync.mode=blocking", "--run.sync.codec=fp16", "--run.model.hidden_size=448")
    with world([Home("public", lines=None)] * 4) as homes:
        nodes = [found(swarm, homes[0], *flags, pace=pace)]
        nodes += [join(swarm, home, nodes[0].invite(), pace=pace) for home in homes[1:]]
        for node in nodes:
            node.until_training(START_S)
        for home in homes:
            home.limit((4.0, 4.0))
        since = max(node.status()["run"]["round"] for node in nodes) + GETTING_IN
        for node in nodes:
            node.until_round(since + FULL_LINE_ROUNDS, 600.0)
        records = [r for r in nodes[0].rounds() if since < r["round"] <= since + FULL_LINE_ROUNDS]
        seconds = [round(r["seconds"]["reduce"] + r["seconds"]["commit"], 1) for r in records]
        assert [r["outcome"] for r in records] == ["complete"] * FULL_LINE_ROUNDS
        assert min(seconds) > 20, "the transfers are too short for this test"

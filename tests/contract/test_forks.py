"""A swarm that was split: both parts go on, and when they meet one line holds, on all nodes, with equal digests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from node.errors import TransferFailed
from node.status import Phase
from node.swarm.offers import Target
from tests.contract.harness import Node, Swarm, assert_same, offer_all, round_of, wait_until
from tests.contract.test_state import Memory, new_download, restart_at, serve

PARAMETERS = 20_000


def cut(swarm: Swarm, one: Sequence[Node], other: Sequence[Node], is_cut: bool) -> None:
    for a in one:
        for b in other:
            swarm.hub.cut(a.peer_id, b.peer_id, cut=is_cut)


@pytest.fixture
def four(swarm: Swarm) -> list[Node]:
    if swarm.transport == "p2p":
        pytest.skip("only the local transport can cut a path; tests/swarm cuts real ones")
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    round_of(nodes, 0)
    return nodes


def rejoin(node: Node, source: Node) -> None:
    """What a trainer does when it is told that its line does not hold."""
    assert node.lost.wait(15) and node.loss is not None
    target = Target(PARAMETERS, node.loss.avoid)
    deadline_s = time.monotonic() + 15
    while True:
        try:
            tip = node.seat.do(new_download(node).run(target, lambda ratio: None))
            break
        except TransferFailed:  # Its source has not heard of it yet, say: a trainer tries on, too.
            assert time.monotonic() < deadline_s, "nobody serves a state"
            time.sleep(0.5)
    restart_at(node, tip)
    node.directory.say(phase=Phase.TRAINING)


@pytest.mark.parametrize(("lesser_rounds", "greater_rounds"), [(1, 1), (3, 1), (1, 2)])
def test_the_line_with_more_tokens_holds(
    swarm: Swarm, four: list[Node], lesser_rounds: int, greater_rounds: int
) -> None:
    lesser, greater = four[:2], four[2:]
    for node in greater:
        serve(node, Memory(node.tip))
    cut(swarm, lesser, greater, True)
    for round_ in range(1, 1 + lesser_rounds):
        round_of(lesser, round_)
    for round_ in range(1, 1 + greater_rounds):
        round_of(greater, round_, extra_tokens=5000)
    assert lesser[0].tip.head != greater[0].tip.head
    dropped = lesser[0].tip.line[-lesser_rounds:]
    cut(swarm, lesser, greater, False)
    for node in lesser:
        rejoin(node, greater[0])
        assert node.loss is not None and node.loss.code == "fork"
        assert [link.head for link in node.loss.dropped] == [link.head for link in dropped]
    assert not any(node.lost.is_set() for node in greater)
    wait_until(lambda: len({node.tip.head for node in four}) == 1)
    wait_until(lambda: all(len(node.directory.members()) == 4 for node in four))
    for node in lesser:
        replayed = [node.committed().tip.round for _ in range(greater_rounds)]
        assert replayed == list(range(1, 1 + greater_rounds))
    done = round_of(four, 1 + greater_rounds, timeout_s=20)
    assert len(done[0].outcome.included) == 4


def test_one_that_comes_from_a_download_shows_the_line_that_led_there(swarm: Swarm, four: list[Node]) -> None:
    lesser, greater = four[:2], four[2:]
    cut(swarm, lesser, greater, True)
    round_of(lesser, 1)
    for round_ in (1, 2, 3):
        round_of(greater, round_, extra_tokens=5000)
    serve(greater[0], Memory(greater[0].tip))
    cut(swarm, lesser, greater, False)
    first, second = lesser
    second.stop()
    rejoin(first, greater[0])
    assert first.tip.line == greater[0].tip.line and first.tip.line[0].round == 0


@pytest.mark.parametrize("shown", [1, 2])
def test_a_peer_that_shows_only_the_end_of_its_line_hides_no_other(swarm: Swarm, four: list[Node], shown: int) -> None:
    """Without the round at which they parted, both lines are weighed from the first round on that both show."""
    lesser, greater = four[:2], four[2:]
    cut(swarm, lesser, greater, True)
    for round_ in (1, 2):
        round_of(lesser, round_, extra_tokens=1000)
    for round_ in (1, 2):
        round_of(greater, round_, extra_tokens=5000)
    for node in greater:
        node.chain.tip = replace(node.tip, line=node.tip.line[-shown:])
    cut(swarm, lesser, greater, False)
    for node in lesser:
        assert node.lost.wait(15)
        assert node.loss is not None and node.loss.code == "fork"
        assert [link.round for link in node.loss.dropped] == [1, 2][-shown:]
    time.sleep(2)
    for node in greater:
        assert not node.lost.is_set()
        assert node.seat.wire.traffic.rejected["bad_weight"] == 0, "nobody has claimed anything false"


def test_of_as_many_tokens_the_smaller_head_holds(swarm: Swarm, four: list[Node]) -> None:
    halves = (four[:2], four[2:])
    cut(swarm, *halves, True)
    for half in halves:
        offer_all(half, 1)
        assert_same([node.committed() for node in half])
    assert halves[0][0].tip.state.tokens == halves[1][0].tip.state.tokens
    winner, loser = sorted(halves, key=lambda half: half[0].tip.head)
    cut(swarm, *halves, False)
    for node in loser:
        assert node.lost.wait(15)
        assert node.loss is not None and node.loss.code == "fork" and len(node.loss.dropped) == 1
    assert not any(node.lost.is_set() for node in winner)


def test_one_that_slept_through_its_partners_rounds_follows_them(swarm: Swarm) -> None:
    """Two members, one asleep: the other goes on alone, and is believed when the sleeper wakes."""
    if swarm.transport == "p2p":
        pytest.skip("only the local transport can cut a path")
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16", min_peers=1))
    round_of(nodes, 0)
    awake, asleep = nodes
    cut(swarm, [awake], [asleep], True)
    for round_ in (1, 2):
        offer_all([awake], round_)
        awake.committed()
    cut(swarm, [awake], [asleep], False)
    wait_until(lambda: asleep.tip.head == awake.tip.head)
    assert asleep.tip.digest == awake.tip.digest and not asleep.lost.is_set()
    assert [asleep.committed().tip.round for _ in range(2)] == [1, 2]
    round_of(nodes, 3)

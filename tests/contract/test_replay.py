"""What a node has committed is on its disk: after a crash it takes its rounds again from there, without the swarm."""

from __future__ import annotations

import pytest

from node.swarm.records import Proof
from node.swarm.results import ResultStore
from tests.contract.harness import Node, Swarm, round_of, start_tip

PARAMETERS, ROUNDS = 30_000, 4


def crash(swarm: Swarm, node: Node) -> Node:
    """Another process on the same disk, whose newest checkpoint is the initial state; it knows nobody yet."""
    node.stop()
    node.seat.clear()
    return swarm.node(node.rules, start_tip(node.rules), seat=node.seat)


def replay(node: Node) -> list[int]:
    """The rounds that it takes again."""
    taken = []
    while node.seat.do(node.rounds.adoption.replay_next()):
        done = node.committed()
        assert done.is_replayed and not done.offered
        taken.append(done.tip.round)
    return taken


@pytest.mark.parametrize("fragments", [1, 3])
def test_nodes_that_lose_power_together_go_on_from_their_newest_round(swarm: Swarm, fragments: int) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2, fragments=fragments))
    for round_ in range(ROUNDS):
        included = round_of(nodes, round_)[0].outcome.included
    assert set(included) <= {node.peer_id for node in nodes}
    tip = nodes[0].tip
    again = [crash(swarm, node) for node in nodes]
    for node in again:
        assert replay(node) == list(range(ROUNDS))
        assert (node.tip.head, node.tip.digest) == (tip.head, tip.digest)
        assert node.tip.line == tip.line and node.tip.last_weights == tip.last_weights
        assert node.directory.me.head == tip.head
    for node in again:
        node.meet(again)
        node.start_gossip()
    assert len(round_of(again, ROUNDS)[0].outcome.included) == 3


def test_a_node_alone_goes_on_from_its_newest_round(swarm: Swarm) -> None:
    node = swarm.node(swarm.rules(PARAMETERS, "int4"))
    for round_ in range(ROUNDS):
        round_of([node], round_)
    tip = node.tip
    again = crash(swarm, node)
    assert replay(again) == list(range(ROUNDS))
    assert (again.tip.head, again.tip.digest) == (tip.head, tip.digest)
    round_of([again], ROUNDS)


def test_a_damaged_round_and_what_follows_it_comes_from_the_others(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, min_peers=2))
    tips = [nodes[0].tip]
    for round_ in range(ROUNDS):
        tips.append(round_of(nodes, round_)[0].tip)
    helper, hurt = nodes
    store = ResultStore(hurt.seat.cache)
    file = store._path(tips[3].head)
    file.write_bytes(file.read_bytes()[:-4] + bytes(4))
    again = crash(swarm, hurt)
    assert replay(again) == [0, 1]
    assert again.tip.head == tips[2].head
    assert {one.head for one in ResultStore(hurt.seat.cache).stored} == {tips[1].head, tips[2].head}
    again.meet([helper])
    again.start_gossip()
    assert [again.committed().tip.round for _ in range(2)] == [2, 3]
    assert (again.tip.head, again.tip.digest) == (helper.tip.head, helper.tip.digest)


def test_rounds_that_cannot_be_read_now_stay_on_the_disk(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    node = swarm.node(swarm.rules(PARAMETERS))
    for round_ in range(ROUNDS):
        round_of([node], round_)

    def fail(_store: ResultStore, _proof: Proof) -> list[bytes]:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(ResultStore, "load", fail)
        assert replay(crash(swarm, node)) == []
    assert replay(crash(swarm, node)) == list(range(ROUNDS))


def test_rounds_of_another_line_are_not_taken_again(swarm: Swarm) -> None:
    node = swarm.node(swarm.rules(PARAMETERS))
    round_of([node], 0)
    own = node.tip
    again = crash(swarm, node)
    round_of([again], 0, extra_tokens=1)
    assert again.tip.head != own.head
    node.stop()
    store = ResultStore(node.seat.cache)
    assert {one.head for one in store.stored} >= {again.tip.head}
    later = Node(node.seat, node.rules, own, again.rounds.faults)
    try:
        assert replay(later) == []
        assert {one.head for one in ResultStore(node.seat.cache).stored} == {own.head}
    finally:
        later.stop()


def test_a_round_is_on_the_disk_before_the_node_shows_it(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    node = swarm.node(swarm.rules(PARAMETERS))
    before, shown, put = node.tip.head, [], node.chain.store.put

    def slow_put(*args: object) -> None:
        put(*args)  # type: ignore[arg-type]
        shown.append((node.tip.head, node.directory.me.head))

    monkeypatch.setattr(node.chain.store, "put", slow_put)
    round_of([node], 0)
    assert shown == [(before, before)] and node.directory.me.head == node.tip.head != before

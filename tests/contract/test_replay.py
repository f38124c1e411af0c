"""After a crash a node replays its committed rounds from its own disk, without the swarm."""

from __future__ import annotations

import pytest

from node.swarm.allreduce.result_store import ResultStore
from node.swarm.messages import Proof
from tests.contract.harness import Node, Swarm, offer_all, round_of, start_tip, wait_until

PARAMETERS, ROUNDS = 30_000, 4


def crash(swarm: Swarm, node: Node) -> Node:
    """Start a new process on the same disk, whose newest checkpoint is the initial state. It has no peers."""
    node.stop()
    node.host.clear()
    return swarm.node(node.rules, start_tip(node.rules), host=node.host)


def replay(node: Node) -> list[int]:
    """Replay all stored rounds, and return their numbers."""
    replayed = []
    while node.host.do(node.participant.committer.replay_next()):
        done = node.committed()
        assert done.is_replayed and not done.offered
        replayed.append(done.tip.round)
    return replayed


def stored_heads(node: Node) -> set[str]:
    return {proof.outcome.hash for _, proof in ResultStore(node.host.cache).take_stored()}


def one_node(swarm: Swarm, codec: str = "fp32") -> Node:
    node = swarm.node(swarm.rules(PARAMETERS, codec))
    for round_ in range(ROUNDS):
        round_of([node], round_)
    return node


@pytest.mark.parametrize("fragments", [1, 3])
def test_nodes_that_lose_power_together_continue_from_their_newest_round(swarm: Swarm, fragments: int) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2, fragments=fragments))
    for round_ in range(ROUNDS):
        round_of(nodes, round_)
    tip = nodes[0].tip
    again = [crash(swarm, node) for node in nodes]
    for node in again:
        assert replay(node) == list(range(ROUNDS))
        assert (node.tip.head, node.tip.digest) == (tip.head, tip.digest)
        assert node.tip.links == tip.links and node.tip.last_weights == tip.last_weights
        assert node.peer_table.me.head == tip.head
    for node in again:
        node.meet(again)
        node.start_gossip()
    assert len(round_of(again, ROUNDS)[0].outcome.included) == 3


def test_a_single_node_continues_from_its_newest_round_after_a_crash(swarm: Swarm) -> None:
    node = one_node(swarm, "int4")
    again = crash(swarm, node)
    assert replay(again) == list(range(ROUNDS))
    assert (again.tip.head, again.tip.digest) == (node.tip.head, node.tip.digest)
    round_of([again], ROUNDS)


def test_a_damaged_stored_round_and_those_after_it_are_fetched_from_peers(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, min_peers=2))
    tips = [nodes[0].tip, *(round_of(nodes, round_)[0].tip for round_ in range(ROUNDS))]
    helper, damaged = nodes
    file = ResultStore(damaged.host.cache)._path(tips[3].head)
    file.write_bytes(file.read_bytes()[:-4] + bytes(4))
    again = crash(swarm, damaged)
    assert replay(again) == [0, 1]
    assert again.tip.head == tips[2].head
    assert stored_heads(damaged) == {tips[1].head, tips[2].head, tips[4].head}
    again.meet([helper])
    again.start_gossip()
    assert [again.committed().tip.round for _ in range(2)] == [2, 3]
    assert (again.tip.head, again.tip.digest) == (helper.tip.head, helper.tip.digest)


def test_stored_rounds_are_kept_after_a_temporary_read_error(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    node = one_node(swarm)

    def fail(_store: ResultStore, _proof: Proof) -> list[bytes]:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(ResultStore, "load", fail)
        assert replay(crash(swarm, node)) == []
    assert replay(crash(swarm, node)) == list(range(ROUNDS))


def go_back_to_the_start(node: Node) -> None:
    """Continue from the initial state, as after a lost fork if peers serve no newer state."""
    node.host.loop.call_soon_threadsafe(node.participant.restart_at, start_tip(node.rules))
    wait_until(lambda: node.tip.round == -1)
    node.host.do(node.participant.committer.set_aside())


@pytest.mark.parametrize("restarts", [False, True])
def test_a_node_that_comes_back_to_a_round_does_not_commit_another_result_of_it(swarm: Swarm, restarts: bool) -> None:
    node = one_node(swarm)
    heads = [link.head for link in node.tip.links]
    go_back_to_the_start(node)
    if restarts:
        node = crash(swarm, node)
        assert replay(node) == [], "the rounds are set aside"
    offer_all([node], 0, extra_tokens=1)
    done = [node.committed() for _ in range(ROUNDS)]
    assert [one.tip.head for one in done] == heads
    assert [one.offered for one in done] == [True] + [False] * (ROUNDS - 1)
    assert not any(one.included for one in done), "the rounds include earlier contributions of this node"
    assert round_of([node], ROUNDS)[0].tip.head not in heads


def test_a_node_that_comes_back_to_a_round_claims_the_outcome_that_it_has_accepted(swarm: Swarm) -> None:
    """A vote may have committed a round before the node heard of the commit."""
    node = swarm.node(swarm.rules(PARAMETERS))
    head = round_of([node], 0)[0].tip.head
    node.chain.store._proof_path(head).unlink()  # As if the certificate had not reached this node.
    node.chain._proofs.clear()
    round_of([node], 1)
    go_back_to_the_start(node)
    assert round_of([node], 0, extra_tokens=1)[0].tip.head == head


def test_a_committed_round_is_on_the_disk_before_a_peer_sees_it(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    node = swarm.node(swarm.rules(PARAMETERS))
    before, seen, put = node.tip.head, [], node.chain.store.put

    def observed_put(*args: object) -> None:
        put(*args)  # type: ignore[arg-type]
        seen.append((node.tip.head, node.peer_table.me.head))

    monkeypatch.setattr(node.chain.store, "put", observed_put)
    round_of([node], 0)
    assert seen == [(before, before)] and node.peer_table.me.head == node.tip.head != before

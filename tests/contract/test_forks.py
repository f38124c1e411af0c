"""After a network split both sides have committed rounds; when they meet, all nodes take one of the chains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from node.errors import TransferFailed
from node.status import Phase
from node.swarm.state_sync.providers import Target
from node.swarm.transport.wire import Message
from tests.contract.harness import Node, Swarm, offer_all, round_of, start_tip, wait_until
from tests.contract.test_malformed_replies import reply_with
from tests.contract.test_state import Memory, new_download, restart_at, serve

pytestmark = pytest.mark.only_over("local", "only the local transport can cut a path; tests/swarm cuts real ones")

PARAMETERS = 20_000
Sides = tuple[list[Node], list[Node]]


def cut(swarm: Swarm, one: Sequence[Node], other: Sequence[Node], *, is_cut: bool = True) -> None:
    for a in one:
        for b in other:
            swarm.hub.cut(a.peer_id, b.peer_id, cut=is_cut)


@pytest.fixture
def sides(swarm: Swarm) -> Sides:
    """Two nodes on each side of a split, after one common round. The tests let the second side get more tokens."""
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2, least_grace_s=2.0))
    round_of(nodes, 0)
    cut(swarm, nodes[:2], nodes[2:])
    return nodes[:2], nodes[2:]


def commit_rounds(nodes: Sequence[Node], count: int, extra_tokens: int) -> None:
    for round_ in range(1, 1 + count):
        round_of(nodes, round_, extra_tokens=extra_tokens)


def rejoin(node: Node) -> None:
    """Download a state, as a trainer does when its chain lost the fork."""
    assert node.lost.wait(15) and node.cause is not None
    target = Target(PARAMETERS, avoid=node.cause.avoid)
    deadline_s = time.monotonic() + 15
    while True:
        try:
            tip = node.host.do(new_download(node).run(target, lambda ratio: None))
            break
        except TransferFailed:  # The source may not be known yet. A trainer retries as well.
            assert time.monotonic() < deadline_s
            time.sleep(0.5)
    restart_at(node, tip)
    node.peer_table.update_own(phase=Phase.TRAINING)


def dropped_rounds(node: Node) -> list[int]:
    """The rounds that a node loses by a fork."""
    assert node.lost.wait(15)
    assert node.cause is not None and node.cause.code == "fork"
    return [link.round for link in node.cause.dropped]


@pytest.mark.parametrize(("lighter_rounds", "heavier_rounds"), [(1, 1), (3, 1), (1, 2)])
def test_nodes_follow_the_chain_with_more_tokens_after_a_network_split(
    swarm: Swarm, sides: Sides, lighter_rounds: int, heavier_rounds: int
) -> None:
    lighter, heavier = sides
    nodes = [*lighter, *heavier]
    for node in heavier:
        serve(node, Memory(node.tip))
    commit_rounds(lighter, lighter_rounds, 0)
    commit_rounds(heavier, heavier_rounds, 5000)
    assert lighter[0].tip.head != heavier[0].tip.head
    cut(swarm, lighter, heavier, is_cut=False)
    for node in lighter:
        assert dropped_rounds(node) == list(range(1, 1 + lighter_rounds))
        rejoin(node)
    assert not any(node.lost.is_set() for node in heavier)
    wait_until(lambda: len({node.tip.head for node in nodes}) == 1)
    wait_until(lambda: all(len(node.peer_table.members()) == 4 for node in nodes))
    for node in lighter:
        replayed = [node.committed().tip.round for _ in range(heavier_rounds)]
        assert replayed == list(range(1, 1 + heavier_rounds))
    done = round_of(nodes, 1 + heavier_rounds, timeout_s=20)
    assert len(done[0].outcome.included) == 4


def test_a_downloaded_state_includes_the_links_of_its_chain(swarm: Swarm, sides: Sides) -> None:
    (joiner, stopped), heavier = sides
    commit_rounds([joiner, stopped], 1, 0)
    commit_rounds(heavier, 3, 5000)
    serve(heavier[0], Memory(heavier[0].tip))
    cut(swarm, sides[0], heavier, is_cut=False)
    stopped.stop()
    rejoin(joiner)
    assert joiner.tip.links == heavier[0].tip.links and joiner.tip.links[0].round == 0


@pytest.mark.parametrize("shown", [1, 2])
def test_nodes_compare_the_newest_links_if_they_know_no_fork_point(swarm: Swarm, sides: Sides, shown: int) -> None:
    """The winning nodes have kept only the newest of their links."""
    lighter, heavier = sides
    commit_rounds(lighter, 2, 1000)
    commit_rounds(heavier, 2, 5000)
    for node in heavier:
        node.chain.tip = replace(node.tip, links=node.tip.links[-shown:])
    cut(swarm, lighter, heavier, is_cut=False)
    for node in lighter:
        assert dropped_rounds(node) == [1, 2][-shown:]
    time.sleep(2)
    for node in heavier:
        assert not node.lost.is_set()
        assert node.host.wire.traffic.rejected["bad_weight"] == 0


def test_nodes_follow_the_smaller_head_between_chains_with_equal_tokens(swarm: Swarm, sides: Sides) -> None:
    for side in sides:
        commit_rounds(side, 1, 0)
    assert sides[0][0].tip.state.tokens == sides[1][0].tip.state.tokens
    winner, loser = sorted(sides, key=lambda side: side[0].tip.head)
    cut(swarm, *sides, is_cut=False)
    for node in loser:
        assert dropped_rounds(node) == [1]
    assert not any(node.lost.is_set() for node in winner)


@pytest.mark.parametrize("hidden", ["", "an unknown head", "the caller's head"])
def test_a_node_that_was_cut_off_gives_up_a_chain_that_it_made_alone(swarm: Swarm, hidden: str) -> None:
    """Its chain has more tokens, but the others would not believe its certificates.

    A hostile member may answer first, with nothing, to hide that the others have another chain.
    """
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=1))
    round_of(nodes, 0)
    alone, *others = nodes
    cut(swarm, [alone], others)
    round_of(others, 1)
    for round_ in (1, 2):
        offer_all([alone], round_, extra_tokens=5000)
        alone.committed()
    assert alone.tip.state.tokens > others[0].tip.state.tokens
    if hidden:
        bad = others.pop()
        head = "cd" * 32 if hidden == "an unknown head" else alone.tip.head
        reply_with(bad, "chain", [Message({"head": head, "age_s": 0.0, "light": False})])
        tokens = alone.tip.state.tokens

        async def claim() -> None:
            bad.peer_table.update_own(head="ef" * 32, swarm_tokens=tokens)

        bad.host.do(claim())
    cut(swarm, [alone], nodes[1:], is_cut=False)
    assert dropped_rounds(alone) == [1, 2]
    assert not any(node.lost.is_set() for node in others)


def test_a_node_that_lost_a_fork_does_not_take_its_chain_again_from_another_loser(swarm: Swarm, sides: Sides) -> None:
    """Both give up the same chain. The slower one still offers it."""
    (loser, friend), winners = sides
    commit_rounds([loser, friend], 1, 0)
    lost = loser.tip.proof
    commit_rounds(winners, 1, 5000)
    won = winners[0].tip.proof
    assert lost is not None and won is not None
    cut(swarm, *sides, is_cut=False)
    assert dropped_rounds(loser) == [1]
    restart_at(loser, replace(start_tip(loser.rules), anchor_at_s=loser.participant.ctx.clock()))
    committer = loser.participant.committer
    assert not committer.is_supported(lost) and committer.is_supported(won)
    loser.chain.set_anchor(-1e6)
    assert committer.is_supported(lost), "the round is overdue, so the winners may have left"


def test_a_node_that_was_cut_off_follows_the_partner_that_continued_alone(swarm: Swarm) -> None:
    """The partner continued alone. Its proofs are accepted when the path is back."""
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16", min_peers=1))
    round_of(nodes, 0)
    partner, cut_off = nodes
    cut(swarm, [partner], [cut_off])
    for round_ in (1, 2):
        offer_all([partner], round_)
        partner.committed()
    cut(swarm, [partner], [cut_off], is_cut=False)
    wait_until(lambda: cut_off.tip.head == partner.tip.head)
    assert cut_off.tip.digest == partner.tip.digest and not cut_off.lost.is_set()
    assert [cut_off.committed().tip.round for _ in range(2)] == [1, 2]
    round_of(nodes, 3)

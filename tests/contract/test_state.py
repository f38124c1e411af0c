"""A late node downloads a state from several servers, replays the rounds after it, or reports that it cannot."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.diloco.credit import EMPTY
from node.diloco.digest import LEAF_ELEMENTS
from node.diloco.outer import OuterOptimizer, OuterState
from node.errors import TransferFailed
from node.status import Channel, Phase
from node.swarm.allreduce.result_store import KEPT_ROUNDS
from node.swarm.chain.chain import Tip
from node.swarm.member_thread import MOST_REPLAYED
from node.swarm.state_sync import downloader as download_module
from node.swarm.state_sync import server as server_module
from node.swarm.state_sync.downloader import Downloader
from node.swarm.state_sync.partial_download import remove_partial_downloads
from node.swarm.state_sync.providers import MAX_ASKED, Target
from node.swarm.state_sync.server import Snapshot, StateServer, verified_tip
from node.swarm.transport.wire import Message, Service
from tests.contract.harness import WAIT_S, Node, Swarm, assert_same, round_of, wait_until
from tests.unit.swarm_data import leaf_of

PARAMETERS = LEAF_ELEMENTS + 1000
"""Each of the two vectors has two leaves."""


@pytest.fixture(autouse=True)
def one_leaf_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise all four leaves go to the first server.
    monkeypatch.setattr(download_module, "STREAMS_PER_PEER", 1)


class Memory:
    """A StateSource that keeps one state in memory; `damage` changes what it sends."""

    def __init__(self, tip: Tip | None, *, damage: str = "", delay_s: float = 0.0, find_delay_s: float = 0.0) -> None:
        self.tip, self.damage, self.delay_s, self.find_delay_s = tip, damage, delay_s, find_delay_s
        self.served: list[int] = []

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        time.sleep(self.find_delay_s)
        t = self.tip
        if t is None or not (name == t.head or t.digest.startswith(name)):
            return None
        leaves = list(t.leaves)
        if self.damage == "offer":
            leaves[0] = bytes(32)
        if self.damage == "fewer":
            leaves.pop()
        return Snapshot(t.round, t.head, t.state.tokens, t.digest, leaves, t.proof, t.state.credit.root)

    def oldest_needed_round(self) -> int | None:
        return None

    def leaf(self, digest: str, index: int) -> bytes:
        time.sleep(self.delay_s)
        assert self.tip is not None
        if digest != self.tip.digest or self.damage == "forgets":
            raise LookupError(digest)
        self.served.append(index)
        data = leaf_of(self.tip.state, index)
        if index == len(self.tip.leaves):
            other = EMPTY.after(0, {"12D3KooWBYQzsJpfV1iHgfYN18QvNLLRkVxsGh37WyrMmkjmM4UD": 5}).encode()
            return {"credit": other, "credit form": data[:-1], "credit size": bytes(2**21)}.get(self.damage, data)
        return {"leaves": bytes(len(data)), "short": data[:-4]}.get(self.damage, data)


def serve(node: Node, source: Memory) -> Memory:
    StateServer(node.host.wire, source)
    return source


def download(node: Node) -> Tip:
    parameters = node.tip.state.anchor.numel()
    return node.host.do(new_download(node).run(Target(parameters), lambda ratio: None))


def new_download(node: Node) -> Downloader:
    folder = node.host.cache
    remove_partial_downloads(folder)
    return Downloader(node.host.wire, node.peer_table, node.rules, folder, random.Random(0))


def joiner(swarm: Swarm, others: Sequence[Node]) -> Node:
    node = swarm.node(others[0].rules)
    node.peer_table.update_own(phase=Phase.DOWNLOADING)
    node.meet(others)
    return node


def restart_at(node: Node, tip: Tip) -> None:
    """Let the node continue at a tip. The rounds that it has replayed before are no result of a later one."""

    async def restart() -> None:
        node.participant.restart_at(tip)
        node.mail.clear()

    node.host.do(restart())


def after_rounds(swarm: Swarm, rounds: int, parameters: int = 64) -> list[Node]:
    """Two nodes that have committed this number of rounds."""
    nodes = swarm.nodes(2, swarm.rules(parameters, "fp16", min_peers=2))
    for round_ in range(rounds):
        round_of(nodes, round_)
    return nodes


@pytest.fixture
def pair(swarm: Swarm) -> list[Node]:
    """Two nodes after one round."""
    return after_rounds(swarm, 1, PARAMETERS)


def assert_same_state(one: OuterState, other: OuterState) -> None:
    assert torch.equal(one.anchor, other.anchor) and torch.equal(one.momentum, other.momentum)
    assert (one.round, one.tokens) == (other.round, other.tokens)


def assert_same_tip(one: Node, other: Node) -> None:
    assert (one.tip.head, one.tip.digest) == (other.tip.head, other.tip.digest)


# download


def test_a_state_is_downloaded_from_two_servers_at_once(
    swarm: Swarm, pair: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "ENDGAME_S", 60.0)  # No part is asked for twice.
    sources = [serve(node, Memory(node.tip, delay_s=0.05)) for node in pair]
    tip, expected = download(joiner(swarm, pair)), pair[0].tip
    assert_same_state(tip.state, expected.state)
    assert (tip.head, tip.digest, tip.last_weights) == (expected.head, expected.digest, expected.last_weights)
    assert (tip.round_s, tip.last_round_tokens) == (expected.round_s, expected.last_round_tokens)
    assert sorted(sources[0].served + sources[1].served) == [0, 1, 2, 3, 4], "the last part is the table of credit"
    assert sources[0].served and sources[1].served


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_joiner_gets_both_moments_of_adam_and_takes_part(swarm: Swarm, fragments: int) -> None:
    rules = swarm.rules(PARAMETERS, min_peers=2, fragments=fragments, optimizer=OuterOptimizer("adam"))
    nodes = swarm.nodes(2, rules)
    for round_ in range(3):
        round_of(nodes, round_)
    serve(nodes[0], Memory(nodes[0].tip))
    late = joiner(swarm, nodes)
    target = Target(PARAMETERS, moments=2)
    tip = late.host.do(new_download(late).run(target, lambda ratio: None))
    assert_same_state(tip.state, nodes[0].tip.state)
    assert tip.state.momentum.numel() == 2 * PARAMETERS and bool(tip.state.momentum[PARAMETERS:].all())
    restart_at(late, tip)
    while not late.mail.empty():  # It may have replayed rounds while it downloaded the state.
        late.mail.get()
    late.peer_table.update_own(phase=Phase.TRAINING)
    round_of([*nodes, late], 3)
    assert_same_tip(late, nodes[0])


def test_a_peer_answers_many_concurrent_questions_about_states(swarm: Swarm, pair: list[Node]) -> None:
    """A refused question would be a lost vote."""
    asker, asked = pair
    serve(asked, Memory(asked.tip, find_delay_s=0.1))

    async def ask() -> list[Message]:
        question = Message({"digest": asked.tip.digest, "brief": True})
        calls = [asker.host.wire.call(asked.peer_id, "state", question, timeout_s=20) for _ in range(3 * MAX_ASKED)]
        return await asyncio.gather(*calls)

    assert [reply.header["digest"] for reply in asker.host.do(ask())] == 3 * MAX_ASKED * [asked.tip.digest]


def test_a_download_succeeds_although_one_server_sends_wrong_bytes(swarm: Swarm, pair: list[Node]) -> None:
    good, bad = pair
    serve(good, Memory(good.tip))
    late = joiner(swarm, pair)
    for damage in ("leaves", "short", "forgets", "offer", "fewer"):
        # The bad server is slow, so that it still has requests when the good one has none left.
        serve(bad, Memory(bad.tip, damage=damage, delay_s=0.2))
        assert_same_state(download(late).state, good.tip.state)


@pytest.mark.parametrize("damage", ["credit", "credit form", "credit size"])
def test_a_false_table_of_credit_is_refused_and_another_server_is_asked(
    swarm: Swarm, pair: list[Node], damage: str
) -> None:
    serve(pair[0], Memory(pair[0].tip, damage=damage))
    serve(pair[1], Memory(pair[1].tip))
    late = joiner(swarm, pair)
    for _ in range(3):  # The server with the false table is not always the first.
        tip = download(late)
        assert tip.state.credit == pair[0].tip.state.credit
    serve(pair[1], Memory(pair[1].tip, damage=damage))
    with pytest.raises(TransferFailed):
        download(joiner(swarm, pair))


def test_a_download_succeeds_when_a_server_dies(swarm: Swarm, pair: list[Node]) -> None:
    good, dying = pair
    serve(good, Memory(good.tip))
    serve(dying, Memory(dying.tip, delay_s=1.0))
    late = joiner(swarm, pair)
    work = new_download(late).run(Target(PARAMETERS), lambda ratio: None)
    running = asyncio.run_coroutine_threadsafe(work, late.host.loop)
    time.sleep(0.3)
    dying.vanish()
    assert_same_state(running.result(20).state, good.tip.state)


def test_a_download_without_a_server_of_a_valid_state_fails(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(100, "fp32"))
    late = joiner(swarm, nodes)
    with pytest.raises(TransferFailed, match="No peer serves"):
        download(late)
    serve(nodes[0], Memory(None))
    with pytest.raises(TransferFailed, match="No peer serves"):
        download(late)
    serve(nodes[0], Memory(nodes[0].tip, damage="leaves"))
    with pytest.raises(TransferFailed, match="parts of the state"):
        download(late)


@pytest.mark.parametrize("difference", [0.5, -0.5])
def test_a_false_state_loses_the_vote_while_all_honest_peers_are_downloading(swarm: Swarm, difference: float) -> None:
    """The liar has signed 64 times as many tokens, and only its phase says that it serves a state."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    *honest, liar = nodes
    for node in nodes:
        node.offer(torch.ones(PARAMETERS), tokens=6400 if node is liar else 100)
    assert_same([node.committed() for node in nodes])
    true = honest[0].tip
    state = replace(true.state, anchor=true.state.anchor + difference)
    serve(liar, Memory(verified_tip(state, true.head, true.proof, liar.rules, 0.0)))
    for node in honest:
        node.peer_table.update_own(phase=Phase.DOWNLOADING)
    late = joiner(swarm, nodes)
    for node in honest:
        StateServer(node.host.wire, Memory(None))
    with pytest.raises(TransferFailed, match="none that the others share"):
        download(late)
    for node in honest:
        StateServer(node.host.wire, Memory(node.tip))
    for node in (late, *honest):
        assert download(node).digest == true.digest


# replay


def test_a_node_that_missed_rounds_replays_them_and_takes_part(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(5000, "fp16", min_peers=2))
    serve(nodes[0], Memory(nodes[0].tip))
    late = joiner(swarm, nodes)
    assert download(late).round == -1
    for round_ in range(3):
        round_of(nodes, round_)
    late.start_gossip()
    wait_until(lambda: late.tip.head == nodes[0].tip.head)
    assert late.tip.digest == nodes[0].tip.digest
    replayed = [late.committed() for _ in range(3)]
    assert [(d.tip.round, d.included, d.offered) for d in replayed] == [(i, False, False) for i in range(3)]
    late.peer_table.update_own(phase=Phase.TRAINING)
    wait_until(lambda: all(node.peer_table.is_member(late.peer_id) for node in nodes))
    assert len(round_of([*nodes, late], 3)[0].outcome.included) == 3
    assert not late.lost.is_set()


def test_a_node_that_missed_rounds_replays_only_two_ahead_of_its_trainer(swarm: Swarm) -> None:
    """Each round that waits for the trainer holds a whole state in memory."""
    nodes = after_rounds(swarm, 5, 5000)
    late = joiner(swarm, nodes)
    late.most_waiting = MOST_REPLAYED
    aligning = asyncio.run_coroutine_threadsafe(late.catch_up.align(), late.host.loop)
    wait_until(lambda: late.tip.round == 1)
    with pytest.raises(TimeoutError):
        aligning.result(1.0)
    assert late.tip.round == 1 and late.mail.waiting_rounds == 2
    replayed = [late.committed() for _ in range(5)]
    aligning.result(WAIT_S)
    assert [(d.tip.round, d.is_behind) for d in replayed] == [(0, True), (1, True), (2, True), (3, True), (4, False)]
    assert_same_tip(late, nodes[0])


def test_a_contributor_without_proofs_does_not_keep_a_node_from_one_that_has_them(swarm: Swarm) -> None:
    """The contributor that is asked first has restarted and keeps no proofs. That is no reason to download."""
    forgetful, knowing = nodes = after_rounds(swarm, 1, 5000)
    before = forgetful.tip
    for round_ in range(1, 4):
        round_of(nodes, round_)
    late = joiner(swarm, nodes)
    restart_at(late, before)
    forgetful.chain._proofs.clear()
    assert late.host.do(late.catch_up.replay([forgetful.peer_table.me, knowing.peer_table.me]))
    assert_same_tip(late, knowing)
    assert not late.lost.is_set()


def test_proofs_that_exceed_one_reply_come_in_several_replies(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PROOFS_BYTES", 10_000)
    nodes = after_rounds(swarm, KEPT_ROUNDS, 5000)
    late = joiner(swarm, nodes)
    ask = late.host.wire.call(nodes[0].peer_id, "chain", Message({"heads": [swarm.run]}), timeout_s=5)
    reply = late.host.do(ask)
    assert 1 < len(reply.blobs) < KEPT_ROUNDS and reply.blob_bytes <= 10_000
    late.host.do(late.catch_up.align())
    assert_same_tip(late, nodes[0])
    monkeypatch.setattr(server_module, "PROOFS_BYTES", 1)
    slow = joiner(swarm, nodes)
    slow.host.do(slow.catch_up.align())
    assert_same_tip(slow, nodes[0])


def test_a_node_that_missed_more_rounds_than_are_kept_must_download(swarm: Swarm) -> None:
    nodes = after_rounds(swarm, KEPT_ROUNDS + 1)
    late = joiner(swarm, nodes)
    late.start_gossip()
    assert late.lost.wait(10)
    assert late.tip.round == -1 and late.cause is not None and late.cause.code == "far_behind"
    serve(nodes[0], Memory(nodes[0].tip))
    restart_at(late, download(late))
    late.lost.clear()
    late.peer_table.update_own(phase=Phase.TRAINING)
    wait_until(lambda: all(node.peer_table.is_member(late.peer_id) for node in nodes))
    assert len(round_of([*nodes, late], KEPT_ROUNDS + 1)[0].outcome.included) == 3
    assert not late.lost.is_set()


def lie_about_proofs(node: Node, head: str, age_s: float) -> None:
    async def lie(caller: str, message: Message) -> Message:
        return Message({"light": False, "head": head, "age_s": age_s})

    node.host.wire.serve({"chain": Service(lie, Channel.STATE)})


@pytest.mark.parametrize("head", [None, "cd" * 32], ids=["the caller's head", "an unknown head"])
def test_a_false_claim_to_be_ahead_does_not_keep_a_node_from_honest_peers(swarm: Swarm, head: str | None) -> None:
    """Peers declare their own tokens, so the liar is asked first."""
    nodes = swarm.nodes(3, swarm.rules(64, "fp32", min_peers=2))
    *honest, liar = nodes
    lie_about_proofs(liar, head or swarm.run, 0.0)
    liar.peer_table.update_own(phase=Phase.PAUSED)
    wait_until(lambda: all(not node.peer_table.is_member(liar.peer_id) for node in honest))
    round_of(honest, 0)
    wait_until(lambda: liar.tip.round == 0)
    liar.peer_table.update_own(swarm_tokens=2**62, head="cd" * 32)
    late = joiner(swarm, nodes)
    late.start_gossip()
    wait_until(lambda: late.tip.head == honest[0].tip.head)
    assert late.tip.digest == honest[0].tip.digest


def test_the_age_of_a_round_is_taken_only_from_a_peer_at_the_same_head(swarm: Swarm) -> None:
    """A false age would make the round overdue, and fewer votes would be enough."""
    node, liar = after_rounds(swarm, 1)
    head, began_at_s = node.tip.head, node.tip.anchor_at_s
    lie_about_proofs(liar, head, 9e5)
    (known,) = node.peer_table.others()
    node.host.do(node.catch_up.replay([known.model_copy(update={"head": "cd" * 32, "swarm_tokens": 2**62})]))
    assert node.tip.anchor_at_s == began_at_s
    node.host.do(node.catch_up.replay([known.model_copy(update={"head": head})]))
    assert node.participant.ctx.age_s < (node.tip.round_s or 0.0) + node.rules.closing.patience_s + 1.0


def test_a_node_that_replays_does_not_ask_for_the_time_of_a_commit(swarm: Swarm) -> None:
    """The node took no part in these rounds. A question about the time would ask for proofs after the new head."""
    nodes = after_rounds(swarm, 3)
    asked_after: list[object] = []
    for node in nodes:
        service = node.host.wire._services["chain"]  # type: ignore[attr-defined]

        async def observe(caller: str, message: Message, handler: Any = service.handler) -> Message:
            asked_after.append(message.header["heads"][0])
            return await handler(caller, message)  # type: ignore[no-any-return]

        node.host.wire.serve({"chain": replace(service, handler=observe)})
    late = joiner(swarm, nodes)
    late.participant.stages.stage, late.participant.stages._since_s = "rendezvous", late.participant.ctx.clock() - 5.0
    late.host.do(late.catch_up.align())
    assert late.tip.head == nodes[0].tip.head
    assert asked_after and nodes[0].tip.head not in asked_after


def test_a_late_node_agrees_with_the_others_about_the_age_of_the_round(swarm: Swarm) -> None:
    nodes = after_rounds(swarm, 1)
    time.sleep(1.0)
    late = joiner(swarm, nodes)
    began_s = time.monotonic()
    late.host.do(late.catch_up.align())
    took_s = time.monotonic() - began_s
    assert late.tip.head == nodes[0].tip.head
    difference_s = late.tip.anchor_at_s - nodes[0].tip.anchor_at_s  # All nodes here have the same clock.
    assert abs(difference_s) <= took_s
    round_of(nodes, 1)


def test_a_node_that_restarts_at_an_earlier_head_votes_in_a_later_attempt(pair: list[Node]) -> None:
    before = pair[0].tip
    round_of(pair, 1)
    restart_at(pair[0], before)
    assert pair[0].participant.ballot.number > 0
    wait_until(lambda: pair[0].tip.head == pair[1].tip.head)

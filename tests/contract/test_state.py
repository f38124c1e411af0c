"""Coming late: state from several servers, checked leaf by leaf; replay from there; told when only a download helps."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.diloco.digest import LEAF_ELEMENTS, leaf_bounds
from node.diloco.outer import OuterState
from node.errors import TransferFailed
from node.status import Channel, Phase
from node.swarm import catchup
from node.swarm import download as download_module
from node.swarm.base import Message, Service
from node.swarm.chain import Tip
from node.swarm.download import Download
from node.swarm.offers import MAX_ASKED, Target
from node.swarm.partial import forget
from node.swarm.rendezvous import PATIENCE_S
from node.swarm.results import KEPT_ROUNDS
from node.swarm.state import Snapshot, StateServer, tip_of
from tests.contract.harness import Node, Swarm, assert_same, offer_all, round_of, wait_until

PARAMETERS = LEAF_ELEMENTS + 1000
"""Two leaves a vector, four in all."""


@pytest.fixture(autouse=True)
def one_leaf_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Four leaves would all go to the first server that is asked.
    monkeypatch.setattr(download_module, "STREAMS_PER_PEER", 1)


class Memory:
    """A StateSource that keeps one state in memory; `damage` changes what it sends."""

    def __init__(self, tip: Tip | None, *, damage: str = "", delay_s: float = 0.0) -> None:
        self.tip, self.damage, self.delay_s = tip, damage, delay_s
        self.served: list[int] = []

    def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
        if self.tip is None or not (name == self.tip.head or self.tip.digest.startswith(name)):
            return None
        t = self.tip
        leaves = list(t.leaves)
        if self.damage == "offer":
            leaves[0] = bytes(32)
        if self.damage == "fewer":
            leaves.pop()
        return Snapshot(t.round, t.head, t.state.tokens, t.digest, leaves, t.proof)

    def wanted_since(self) -> int | None:
        return None

    def leaf(self, digest: str, index: int) -> bytes:
        time.sleep(self.delay_s)
        assert self.tip is not None
        if digest != self.tip.digest or self.damage == "forgets":
            raise LookupError(digest)
        self.served.append(index)
        bounds = leaf_bounds(self.tip.state.anchor.numel())
        which, place = divmod(index, len(bounds))
        start, end = bounds[place]
        data: bytes = (self.tip.state.anchor, self.tip.state.momentum)[which][start:end].numpy().tobytes()
        return {"leaves": bytes(len(data)), "short": data[:-4]}.get(self.damage, data)


def serve(node: Node, source: Memory) -> Memory:
    StateServer(node.seat.wire, source)
    return source


def download(node: Node) -> Tip:
    parameters = node.tip.state.anchor.numel()
    return node.seat.do(new_download(node).run(Target(parameters), lambda ratio: None))


def new_download(node: Node) -> Download:
    folder = node.seat.cache
    forget(folder)
    rng, digest_at = random.Random(0), node.chain.digest_at
    return Download(node.seat.wire, node.directory, node.rules, folder, rng, digest_at=digest_at)


def joiner(swarm: Swarm, others: Sequence[Node]) -> Node:
    node = swarm.node(others[0].rules)
    node.directory.say(phase=Phase.DOWNLOADING)
    node.meet(others)
    return node


def after_one_round(swarm: Swarm) -> list[Node]:
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    round_of(nodes, 0)
    return nodes


def assert_same_state(one: OuterState, other: OuterState) -> None:
    assert torch.equal(one.anchor, other.anchor) and torch.equal(one.momentum, other.momentum)
    assert (one.round, one.tokens) == (other.round, other.tokens)


def test_a_state_comes_from_two_servers_at_once(swarm: Swarm) -> None:
    nodes = after_one_round(swarm)
    sources = [serve(node, Memory(node.tip, delay_s=0.05)) for node in nodes]
    tip = download(joiner(swarm, nodes))
    assert_same_state(tip.state, nodes[0].tip.state)
    assert (tip.head, tip.digest, tip.last_weights) == (
        nodes[0].tip.head,
        nodes[0].tip.digest,
        nodes[0].tip.last_weights,
    )
    assert tip.round_s == nodes[0].tip.round_s and tip.last_round_tokens == nodes[0].tip.last_round_tokens
    assert sorted(sources[0].served + sources[1].served) == [0, 1, 2, 3]
    assert sources[0].served and sources[1].served


def test_whoever_is_offered_many_states_hears_of_all_of_them(swarm: Swarm) -> None:
    """One question for each of them, at once; a voice that is refused is a vote less."""
    asker, asked = after_one_round(swarm)
    true = asked.tip

    class Slow(Memory):
        def find(self, name: str = "", *, hold: bool = False) -> Snapshot | None:
            time.sleep(0.1)
            return super().find(name, hold=hold)

    serve(asked, Slow(true))

    async def ask() -> list[Message]:
        question = Message({"head": true.head})
        calls = [asker.seat.wire.call(asked.peer_id, "vouch", question, timeout_s=20) for _ in range(3 * MAX_ASKED)]
        return await asyncio.gather(*calls)

    assert [reply.header["digest"] for reply in asker.seat.do(ask())] == 3 * MAX_ASKED * [true.digest]


def test_a_server_that_sends_wrong_bytes_is_dropped(swarm: Swarm) -> None:
    nodes = after_one_round(swarm)
    serve(nodes[0], Memory(nodes[0].tip))
    late = joiner(swarm, nodes)
    for damage in ("leaves", "short", "forgets", "offer", "fewer"):
        # The bad one is the slow one: it still holds parts when the good one has nothing left to do.
        serve(nodes[1], Memory(nodes[1].tip, damage=damage, delay_s=0.2))
        assert_same_state(download(late).state, nodes[0].tip.state)


def test_a_server_that_dies_in_the_middle_is_dropped(swarm: Swarm) -> None:
    nodes = after_one_round(swarm)
    serve(nodes[0], Memory(nodes[0].tip))
    dying = serve(nodes[1], Memory(nodes[1].tip, delay_s=1.0))
    late = joiner(swarm, nodes)
    work = new_download(late).run(Target(PARAMETERS), lambda ratio: None)
    running = asyncio.run_coroutine_threadsafe(work, late.seat.loop)
    time.sleep(0.3)
    nodes[1].vanish()
    assert_same_state(running.result(20).state, nodes[0].tip.state)
    assert dying.damage == ""


def test_without_a_server_the_download_fails_with_a_sentence(swarm: Swarm) -> None:
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


@pytest.mark.parametrize("nudge", [0.5, -0.5])
def test_the_state_of_one_heavy_liar_is_taken_by_nobody_though_all_others_seek_one(swarm: Swarm, nudge: float) -> None:
    """It has signed 64 times as much as they, and is the only one whose phase says that it serves a state."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    *honest, liar = nodes
    for node in nodes:
        node.offer(torch.ones(PARAMETERS), tokens=6400 if node is liar else 100)
    assert_same([node.committed() for node in nodes])
    true = honest[0].tip
    state = replace(true.state, anchor=true.state.anchor + nudge)
    serve(liar, Memory(tip_of(state, true.head, true.proof, liar.rules, 0.0)))
    for node in honest:
        node.directory.say(phase=Phase.DOWNLOADING)
    late = joiner(swarm, nodes)
    for node in honest:
        StateServer(node.seat.wire, Memory(None), node.chain.digest_at)
    with pytest.raises(TransferFailed, match="none that the others share"):
        download(late)
    for node in honest:
        StateServer(node.seat.wire, Memory(node.tip), node.chain.digest_at)
    for node in (late, *honest):
        assert download(node).digest == true.digest


def test_a_state_whose_proof_is_of_another_head_is_refused(swarm: Swarm) -> None:
    nodes = after_one_round(swarm)
    tip = nodes[0].tip
    round_of(nodes, 1)
    late = joiner(swarm, nodes)
    forged = Tip(**{f: getattr(tip, f) for f in tip.__slots__} | {"proof": nodes[0].tip.proof})
    serve(nodes[0], Memory(forged))
    with pytest.raises(TransferFailed, match="No peer serves"):
        download(late)


def test_a_node_that_missed_rounds_replays_them_and_takes_part(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(5000, "fp16", min_peers=2))
    serve(nodes[0], Memory(nodes[0].tip))
    late = joiner(swarm, nodes)
    tip = download(late)
    assert tip.round == -1
    for round_ in range(3):
        round_of(nodes, round_)
    late.start_gossip()
    wait_until(lambda: late.tip.head == nodes[0].tip.head)
    assert late.tip.digest == nodes[0].tip.digest
    replayed = [late.committed() for _ in range(3)]
    assert [(d.tip.round, d.included, d.offered) for d in replayed] == [(i, False, False) for i in range(3)]
    late.directory.say(phase=Phase.TRAINING)
    wait_until(lambda: all(node.directory.is_member(late.peer_id) for node in nodes))
    done = round_of([*nodes, late], 3)
    assert len(done[0].outcome.included) == 3
    assert not late.lost.is_set()


def test_a_peer_that_keeps_no_rounds_does_not_hide_one_that_does(swarm: Swarm) -> None:
    """The one asked first has come back at the head without the way that leads there; that is no loss of the line."""
    nodes = swarm.nodes(2, swarm.rules(5000, "fp16", min_peers=2))
    late = joiner(swarm, nodes)
    for round_ in range(3):
        round_of(nodes, round_)
    forgetful, knowing = nodes
    forgetful.chain._proofs.clear()

    async def replay() -> bool:
        return await late.catch_up.replay([forgetful.directory.me, knowing.directory.me])

    assert late.seat.do(replay())
    assert (late.tip.head, late.tip.digest) == (knowing.tip.head, knowing.tip.digest)
    assert not late.lost.is_set()


def test_rounds_that_fit_into_no_one_answer_are_replayed_one_answer_after_the_other(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catchup, "PROOFS_BYTES", 10_000, raising=False)
    nodes = swarm.nodes(2, swarm.rules(5000, "fp16", min_peers=2))
    for round_ in range(KEPT_ROUNDS):
        round_of(nodes, round_)
    late = joiner(swarm, nodes)
    ask = late.seat.wire.call(nodes[0].peer_id, "proofs", Message({"after": swarm.run}), timeout_s=5)
    reply = late.seat.do(ask)
    assert 1 < len(reply.blobs) < KEPT_ROUNDS and reply.blob_bytes <= 10_000
    late.seat.do(late.catch_up.align())
    assert (late.tip.head, late.tip.digest) == (nodes[0].tip.head, nodes[0].tip.digest)
    monkeypatch.setattr(catchup, "PROOFS_BYTES", 1)
    slow = joiner(swarm, nodes)
    slow.seat.do(slow.catch_up.align())
    assert slow.tip.head == nodes[0].tip.head, "one at least is in each answer"


def test_a_node_that_missed_more_rounds_than_are_kept_is_told(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(64, "fp32", min_peers=2))
    for round_ in range(KEPT_ROUNDS + 1):
        round_of(nodes, round_)
    late = joiner(swarm, nodes)
    late.start_gossip()
    assert late.lost.wait(10)
    assert late.tip.round == -1
    serve(nodes[0], Memory(nodes[0].tip))
    tip = download(late)
    restart_at(late, tip)
    late.lost.clear()
    late.directory.say(phase=Phase.TRAINING)
    wait_until(lambda: all(node.directory.is_member(late.peer_id) for node in nodes))
    assert len(round_of([*nodes, late], 9)[0].outcome.included) == 3
    assert not late.lost.is_set(), "it is back: nothing is lost any more"


def restart_at(node: Node, tip: Tip) -> None:
    async def restart() -> None:
        node.rounds.restart_at(tip)

    node.seat.do(restart())


@pytest.mark.parametrize("head", [None, "cd" * 32], ids=["my own head", "a head of its own"])
def test_one_that_claims_to_be_ahead_does_not_keep_a_node_from_the_others(swarm: Swarm, head: str | None) -> None:
    """Tokens are self-declared: a liar is asked first, and must not be the only one asked."""
    nodes = swarm.nodes(3, swarm.rules(64, "fp32", min_peers=2))
    *honest, liar = nodes

    async def lie(caller: str, message: Message) -> Message:
        return Message({"status": "ok", "head": head or swarm.run, "age_s": 0.0})

    liar.seat.wire.serve({"proofs": Service(lie, Channel.STATE)})
    liar.directory.say(phase=Phase.PAUSED)
    wait_until(lambda: all(not node.directory.is_member(liar.peer_id) for node in honest))
    round_of(honest, 0)
    wait_until(lambda: liar.tip.round == 0)
    liar.directory.say(swarm_tokens=2**62, head="cd" * 32)
    late = joiner(swarm, nodes)
    late.start_gossip()
    wait_until(lambda: late.tip.head == honest[0].tip.head)
    assert late.tip.digest == honest[0].tip.digest


def test_a_stranger_does_not_say_how_old_the_round_is(swarm: Swarm) -> None:
    """A false age would make the round overdue, and fewer votes would be enough."""
    nodes = swarm.nodes(2, swarm.rules(64, "fp32", min_peers=2))
    round_of(nodes, 0)
    node, liar = nodes
    head, began_at_s = node.tip.head, node.tip.anchor_at_s

    async def lie(caller: str, message: Message) -> Message:
        return Message({"status": "ok", "head": head, "age_s": 9e5})

    liar.seat.wire.serve({"proofs": Service(lie, Channel.STATE)})
    (known,) = node.directory.others()
    node.seat.do(node.catch_up.replay([known.model_copy(update={"head": "cd" * 32, "swarm_tokens": 2**62})]))
    assert node.tip.anchor_at_s == began_at_s
    node.seat.do(node.catch_up.replay([known.model_copy(update={"head": head})]))
    assert node.rounds.age_s < (node.tip.round_s or 0.0) + PATIENCE_S + 1.0


def test_a_node_that_catches_up_asks_once(swarm: Swarm) -> None:
    """It was no member of the rounds that it takes over, so it needs no second word on when they were committed."""
    nodes = swarm.nodes(2, swarm.rules(64, "fp32", min_peers=2))
    for round_ in range(3):
        round_of(nodes, round_)
    asked: list[str] = []
    for node in nodes:
        service = node.seat.wire._services["proofs"]

        async def count(caller: str, message: Message, rightly: Any = service.handler) -> Message:
            asked.append(caller)
            return await rightly(caller, message)

        node.seat.wire.serve({"proofs": replace(service, handler=count)})
    late = joiner(swarm, nodes)
    late.rounds.stage, late.rounds._stage_at_s = "rendezvous", late.rounds.clock() - 5.0
    late.seat.do(late.catch_up.align())
    assert late.tip.head == nodes[0].tip.head
    assert asked == [late.peer_id]


def test_a_late_node_agrees_about_the_age_of_the_round(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(64, "fp32", min_peers=2))
    round_of(nodes, 0)
    time.sleep(0.5)
    late = joiner(swarm, nodes)
    late.seat.do(late.catch_up.align())
    assert late.tip.head == nodes[0].tip.head
    age_s = late.rounds.clock() - late.tip.anchor_at_s
    assert age_s == pytest.approx(nodes[0].rounds.clock() - nodes[0].tip.anchor_at_s, abs=0.3)
    offer_all([*nodes], 1)
    assert_same([node.committed() for node in nodes])

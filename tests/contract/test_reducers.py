"""One reducer that says what is false: it excludes nobody, and the round goes on with all contributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import pytest

from node.status import Channel
from node.swarm import leader
from node.swarm.attempt import Attempt, Contribution
from node.swarm.base import Message, Service
from node.swarm.records import Plan
from node.swarm.rounds import Committed
from node.swarm.uplink import NEEDED_ROUNDS
from tests.contract.harness import Node, Swarm, assert_same, offer_all, round_of, wait_until

PARAMETERS = 50_000
"""Thirteen chunks, so that every member reduces some."""
PEERS = 5
ROUNDS = 4
ALL = 0.95
"""Quorum ratio with which a group waits for all members, so that a busy machine leaves nobody out."""

Lie = Callable[[str, Message, dict[str, Any]], dict[str, Any]]
"""From this node's peer id, a question and the true answer's header to what is false in the answer."""


def false_squares(count: int, least: int) -> Lie:
    """Wrong sums for so many others at a time, while more than `least` are included."""

    def lie(me: str, message: Message, header: dict[str, Any]) -> dict[str, Any]:
        included = message.header["included"]
        others = [peer for peer in included if peer != me]
        wrong = others[:count] if len(included) > least else []
        return {"squares": [s + 1e6 * (p in wrong) for p, s in zip(included, header["squares"], strict=True)]}

    return lie


def arrived_with(others: int) -> Lie:
    """Only this node's contribution has arrived, and those of so many others."""

    def lie(me: str, message: Message, header: dict[str, Any]) -> dict[str, Any]:
        return {"arrived": sorted([me, *[peer for peer in header["arrived"] if peer != me][:others]])}

    return lie


LIES: dict[str, tuple[str, Lie, int]] = {
    "false squares of two at once": ("average", false_squares(2, 3), 2),
    "false squares one after another": ("average", false_squares(1, 2), 2),
    "only its own contribution arrived": ("collect", arrived_with(0), 1),
    "only its own contribution and one other arrived": ("collect", arrived_with(1), 2),
}


def deceive(node: Node, verb: str, lie: Lie) -> None:
    """This node answers leaders falsely. It leads as honestly as the others."""
    rightly = node.seat.wire._services[verb].handler  # type: ignore[attr-defined]

    async def answer(caller: str, message: Message) -> Message:
        header = dict((await rightly(caller, message)).header)
        return Message(header | lie(node.peer_id, message, header))

    node.seat.wire.serve({verb: Service(answer, Channel.REDUCE, 2**22)})


@pytest.mark.parametrize("what", LIES)
def test_a_hostile_reducer_excludes_nobody_unless_it_leads(swarm: Swarm, what: str) -> None:
    verb, lie, min_peers = LIES[what]
    nodes = swarm.nodes(PEERS, swarm.rules(PARAMETERS, "fp16", min_peers=min_peers, quorum_ratio=ALL))
    bad, *honest = nodes
    deceive(bad, verb, lie)
    everybody = {node.peer_id for node in nodes}
    led_by_bad = 0
    for round_ in range(ROUNDS):
        (done, *_) = round_of(nodes, round_)
        proof = done.tip.proof
        assert proof is not None
        if proof.outcome.signer == bad.peer_id:
            led_by_bad += 1
            assert 2 * len(done.outcome.included) >= PEERS, "a leader excludes fewer than half of its group"
        else:
            assert set(done.outcome.included) == everybody
    assert led_by_bad < ROUNDS
    for node in honest:
        assert node.seat.wire.traffic.rejected["bad_norm"] == 0, "an honest member was counted as dishonest"
        assert all(node.seat.do(_is_member(node, other)) for other in honest)


async def _is_member(node: Node, peer: Node) -> bool:
    return node.directory.is_member(peer.peer_id)


def test_of_two_members_a_hostile_reducer_does_not_exclude_the_other(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16", min_peers=1))
    bad = nodes[0]
    deceive(bad, "collect", arrived_with(0))
    for round_ in range(ROUNDS):
        (done, *_) = round_of(nodes, round_)
        proof = done.tip.proof
        assert proof is not None
        assert len(done.outcome.included) == 2 or proof.outcome.signer == bad.peer_id


def test_a_member_on_a_slow_line_reduces_alone_after_a_result_was_refused(swarm: Swarm) -> None:
    """The slow member leaves the reducing to the fast one, which is hostile, until its result is refused."""
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    bad, slow = nodes
    deceive(bad, "average", false_squares(1, 1))
    for number in range(NEEDED_ROUNDS):
        slow.rounds.uplink.sent(f"before {number}", 10**6, 1000.0)
        bad.rounds.uplink.sent(f"before {number}", 10**6, 0.01)
    slow.rounds.depositor._uplinks_bytes_s = {bad.peer_id: 1e8}
    assert slow.rounds.depositor.lead_s > 0, "it would deposit, and reduces nothing"
    (done, *_) = round_of(nodes, 0)
    assert set(done.outcome.included) == {node.peer_id for node in nodes}


def send_to_some(node: Node, sent: Callable[[], None]) -> None:
    """This node's contribution reaches the first half of the reducers; then `sent` is called, and it sends no more."""

    async def send(rounds: Any, attempt: Attempt, plan: Plan, mine: Contribution) -> None:
        for peer in plan.reducers[: len(plan.reducers) // 2]:
            chunks = plan.chunks_of(peer)
            message = Message(
                {"parent": attempt.parent, "attempt": attempt.number, "chunks": chunks},
                [mine.chunks[chunk] for chunk in chunks],
            )
            await rounds.wire.call(peer, "contribute", message, timeout_s=5)
        sent()

    node.rounds.send = MethodType(send, node.rounds)  # type: ignore[method-assign]


def test_a_sender_that_dies_while_it_sends_is_left_out_and_stops_nobody(swarm: Swarm) -> None:
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    *others, dying = nodes
    sent: list[bool] = []
    send_to_some(dying, lambda: sent.append(True))
    offer_all(nodes, 0)
    wait_until(lambda: bool(sent))
    dying.vanish()
    assert_included([node.committed() for node in others], others)
    round_of(others, 1)


def test_a_live_sender_that_sends_to_some_reducers_only_costs_one_attempt(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches no single reducer, so the second attempt is without it, after the time that a transfer may take."""
    monkeypatch.setattr("node.swarm.rounds.FIXED_S", 5.0)
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    *others, broken = nodes
    send_to_some(broken, lambda: None)
    offer_all(nodes, 0)
    done = [node.committed() for node in nodes]
    assert_included(done, others)
    assert done[0].outcome.plan.attempt == 1


def assert_included(done: Sequence[Committed], nodes: Sequence[Node]) -> None:
    assert_same(done)
    assert set(done[0].outcome.included) == {node.peer_id for node in nodes}


@pytest.mark.parametrize("count", [2, 3])
def test_an_outcome_that_includes_fewer_than_half_of_its_plan_is_accepted_by_nobody(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    nodes = swarm.nodes(PEERS, swarm.rules(PARAMETERS, "fp16", min_peers=2, quorum_ratio=ALL))
    bad = nodes[0]
    truly = leader._collect

    async def collect(rounds: Any, attempt: Attempt, plan: Plan) -> list[str]:
        arrived = await truly(rounds, attempt, plan)
        return arrived[:count] if rounds.me == bad.peer_id else arrived

    monkeypatch.setattr(leader, "_collect", collect)
    done = round_of(nodes, 0)
    proof = done[0].tip.proof
    assert proof is not None
    assert (proof.outcome.signer == bad.peer_id) == (2 * count >= PEERS)
    assert len(done[0].outcome.included) == (count if 2 * count >= PEERS else PEERS)

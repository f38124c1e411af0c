"""A reducer or sender that lies or partly fails excludes no other member, and the round commits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import pytest

from node.errors import PeerError, RoundFailed
from node.status import Channel
from node.swarm.allreduce.reducer import Reducer
from node.swarm.allreduce.uplink_estimator import NEEDED_ROUNDS
from node.swarm.consensus import leader
from node.swarm.consensus.ballot import Attempt, LocalContribution
from node.swarm.consensus.commit import Committed
from node.swarm.messages import Plan
from node.swarm.transport.wire import CallLimiter, Message, Service
from tests.contract.harness import Node, Swarm, assert_same, offer_all, round_of, wait_until

PARAMETERS = 50_000
"""These are thirteen chunks, so every member reduces some of them."""
PEERS = 5
LARGE_BYTES = 5000
"""Messages without chunks are shorter."""
ROUNDS = 4
ALL = 0.95
"""A quorum ratio that waits for all members, however slow the machine is."""

Lie = Callable[[str, Message, dict[str, Any]], dict[str, Any]]
"""Maps this node's peer id, a request and the true reply header to the false fields of the reply."""


def new_nodes(swarm: Swarm, count: int, *, min_peers: int = 2, quorum_ratio: float = 0.5) -> list[Node]:
    return swarm.nodes(count, swarm.rules(PARAMETERS, "fp16", min_peers=min_peers, quorum_ratio=quorum_ratio))


def false_squares(count: int, least: int) -> Lie:
    """Report wrong sums of squares for `count` other members while more than `least` are included."""

    def lie(me: str, message: Message, header: dict[str, Any]) -> dict[str, Any]:
        included = message.header["included"]
        others = [peer for peer in included if peer != me]
        wrong = others[:count] if len(included) > least else []
        return {"squares": [s + 1e6 * (p in wrong) for p, s in zip(included, header["squares"], strict=True)]}

    return lie


def arrived_with(others: int) -> Lie:
    """Report that only this node's contribution and those of `others` more members have arrived."""

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
    """Let a node reply falsely to leaders. It leads honestly."""
    handler = node.host.wire._services[verb].handler  # type: ignore[attr-defined]

    async def answer(caller: str, message: Message) -> Message:
        header = dict((await handler(caller, message)).header)
        return Message(header | lie(node.peer_id, message, header))

    node.host.wire.serve({verb: Service(answer, Channel.REDUCE, 2**22)})


def leader_of(done: Committed) -> str:
    assert done.tip.proof is not None
    return done.tip.proof.outcome.signer


def assert_included(done: Committed, nodes: Sequence[Node]) -> None:
    assert set(done.outcome.included) == {node.peer_id for node in nodes}


@pytest.mark.parametrize("what", LIES)
def test_a_hostile_reducer_excludes_no_member_unless_it_leads(swarm: Swarm, what: str) -> None:
    verb, lie, min_peers = LIES[what]
    nodes = new_nodes(swarm, PEERS, min_peers=min_peers, quorum_ratio=ALL)
    bad, *honest = nodes
    deceive(bad, verb, lie)
    leaders = []
    for round_ in range(ROUNDS):
        (done, *_) = round_of(nodes, round_)
        leaders.append(leader_of(done))
        if leaders[-1] == bad.peer_id:
            assert 2 * len(done.outcome.included) >= PEERS, "a leader excludes fewer than half of its group"
        else:
            assert_included(done, nodes)
    assert set(leaders) != {bad.peer_id}
    for node in honest:
        assert node.host.wire.traffic.rejected["bad_norm"] == 0
        assert all(node.host.do(_is_member(node, other)) for other in honest)


async def _is_member(node: Node, peer: Node) -> bool:
    return node.peer_table.is_member(peer.peer_id)


def test_a_hostile_reducer_does_not_exclude_the_only_other_member(swarm: Swarm) -> None:
    nodes = new_nodes(swarm, 2, min_peers=1)
    bad = nodes[0]
    deceive(bad, "collect", arrived_with(0))
    for round_ in range(ROUNDS):
        (done, *_) = round_of(nodes, round_)
        assert len(done.outcome.included) == 2 or leader_of(done) == bad.peer_id


def test_a_member_with_a_slow_uplink_reduces_alone_after_a_result_was_refused(swarm: Swarm) -> None:
    """The slow member leaves the reducing to the fast one, which is hostile, until the result is refused."""
    bad, slow = nodes = new_nodes(swarm, 2)
    deceive(bad, "average", false_squares(1, 1))
    for number in range(NEEDED_ROUNDS):
        slow.participant.ctx.uplink.record_send(f"before {number}", 10**6, 1000.0)
        bad.participant.ctx.uplink.record_send(f"before {number}", 10**6, 0.01)
    slow.participant.sender._uplinks_bytes_s = {bad.peer_id: 1e8}
    assert slow.participant.sender.lead_s > 0, "it would deposit and reduce nothing"
    assert_included(round_of(nodes, 0)[0], nodes)


def send_to_some(node: Node, sent: Callable[[], None]) -> None:
    """Let a node send its contribution to the first half of the reducers only, then call `sent`."""

    async def send(rounds: Any, attempt: Attempt, plan: Plan, mine: LocalContribution) -> None:
        for peer in plan.reducers[: len(plan.reducers) // 2]:
            chunks = plan.chunks_of(peer)
            message = Message(attempt.key | {"chunks": chunks}, [mine.chunks[chunk] for chunk in chunks])
            await rounds.ctx.wire.call(peer, "contribute", message, timeout_s=5)
        sent()

    node.participant.sender.send = MethodType(send, node.participant)  # type: ignore[method-assign]


def test_a_member_that_dies_while_it_sends_its_contribution_is_left_out(swarm: Swarm) -> None:
    nodes = new_nodes(swarm, 4)
    *others, dying = nodes
    sent: list[bool] = []
    send_to_some(dying, lambda: sent.append(True))
    offer_all(nodes, 0)
    wait_until(lambda: bool(sent))
    dying.vanish()
    done = [node.committed() for node in others]
    assert_same(done)
    assert_included(done[0], others)
    round_of(others, 1)


def test_a_live_member_that_sends_to_only_some_reducers_costs_one_attempt(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its contribution is missing at some reducers, so the second attempt omits it after a transfer's timeout."""
    monkeypatch.setattr("node.swarm.consensus.context.FIXED_S", 5.0)
    nodes = new_nodes(swarm, 4)
    *others, broken = nodes
    send_to_some(broken, lambda: None)
    (done, *_) = round_of(nodes, 0)
    assert_included(done, others)
    assert done.outcome.plan.attempt == 1


def test_a_member_that_attends_and_sends_nothing_costs_seconds_not_the_time_of_a_transfer(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.swarm.allreduce.incoming.START_S", 2.0)
    nodes = new_nodes(swarm, 4)
    *others, broken = nodes

    async def send(rounds: Any, attempt: Attempt, plan: Plan, mine: LocalContribution) -> None:
        pass

    broken.participant.sender.send = MethodType(send, broken.participant)  # type: ignore[method-assign]
    began_s = time.monotonic()
    (done, *_) = round_of(nodes, 0)
    assert_included(done, others)
    assert time.monotonic() - began_s < nodes[0].rules.bulk_s - 5.0


@pytest.mark.parametrize("count", [2, 3])
def test_outcome_is_accepted_only_if_it_includes_half_of_its_plan(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    nodes = new_nodes(swarm, PEERS, quorum_ratio=ALL)
    bad = nodes[0]
    original = leader.Leader._collect

    async def collect(leading: Any, attempt: Attempt, plan: Plan) -> list[str]:
        included = await original(leading, attempt, plan)
        return included[:count] if leading._ctx.me == bad.peer_id else included

    monkeypatch.setattr(leader.Leader, "_collect", collect)
    done = round_of(nodes, 0)[0]
    is_accepted = 2 * count >= PEERS
    assert (leader_of(done) == bad.peer_id) == is_accepted
    assert len(done.outcome.included) == (count if is_accepted else PEERS)


class FullAtFirst(CallLimiter):
    """Has no memory for the first contributions."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0

    @contextmanager
    def _hold(self, size: int) -> Iterator[None]:
        if size > LARGE_BYTES and self.refused < PEERS - 1:
            self.refused += 1
            raise PeerError("this node has no memory for another message now", code="busy")
        with super()._hold(size):
            yield


def test_members_send_their_chunks_again_to_a_reducer_that_had_no_memory_for_them(swarm: Swarm) -> None:
    nodes = new_nodes(swarm, PEERS, quorum_ratio=ALL)
    full = FullAtFirst()
    nodes[0].host.wire._call_limiter = full  # type: ignore[attr-defined]
    committed = round_of(nodes, 0)[0]
    assert full.refused, "this node reduces nothing"
    assert committed.outcome.plan.attempt == 0 and len(committed.outcome.included) == PEERS


def test_a_reducer_does_not_keep_the_contributions_of_an_attempt_that_is_over(swarm: Swarm) -> None:
    """A leader that waits for them may be gone."""
    nodes = new_nodes(swarm, 2)
    node, leader_id = nodes[0], nodes[1].peer_id

    async def ask() -> None:
        attempt = node.participant.ballot.joined(node.tip.head, 0)
        attempt.asked.add(leader_id)
        joins: dict[str, Any] = {leader_id: None, "absent": None}
        attempt.weights = joins
        attempt.reducer = Reducer(node.rules.layouts[0], [0], dict.fromkeys(joins, 1), dict.fromkeys(joins, 1.0))
        attempt.planned.set()
        handlers = node.participant._handlers
        handlers.incoming.receive("absent").__enter__()
        asking = asyncio.create_task(handlers._on_collect(leader_id, Message(attempt.key)))
        done, _ = await asyncio.wait([asking], timeout=1.0)
        assert not done
        attempt.fail(RoundFailed("the leader is gone"))
        assert (await asyncio.wait_for(asking, 2.0)).header == {"arrived": []}

    node.host.do(ask())


def test_a_plan_has_no_reducer_without_a_chunk(swarm: Swarm) -> None:
    """It would only be one more that may fail."""
    nodes = swarm.nodes(PEERS, swarm.rules(10_000, "fp16", min_peers=2, quorum_ratio=ALL))
    plan = round_of(nodes, 0)[0].outcome.plan
    assert len(plan.owners) < PEERS == len(plan.members)
    assert {plan.reducers[owner] for owner in plan.owners} == set(plan.reducers)

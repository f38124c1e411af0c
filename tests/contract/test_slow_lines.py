"""Members on slow uplinks deposit their contribution early, so no member waits for their uplink."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch

from node.errors import PeerError
from node.status import Channel
from node.swarm.allreduce.reducer import chunk_hash
from node.swarm.allreduce.uplink_estimator import NEEDED_ROUNDS
from node.swarm.consensus.ballot import Attempt, LocalContribution
from node.swarm.consensus.depositary import FIXED_S, Depositary
from node.swarm.faults import parse_faults
from node.swarm.messages import Deposit, Plan, results_root, sign
from node.swarm.transport.wire import Message, Service
from tests.contract.harness import OUTER, WAIT_S, Node, Swarm, assert_same, gradient, round_of, start_tip, wait_until

PARAMETERS = 250_000
"""These are 1 MB of fp32."""
MBIT_S = 4.0
UPLOAD_S = 2.1
"""Seconds that a contribution takes at MBIT_S."""
FAST_BYTES_S = 1e8


def swarm_of(swarm: Swarm, fast: int, faults: str = "", parameters: int = PARAMETERS) -> tuple[list[Node], Node]:
    """Members with fast uplinks and these faults, and one member that sends at MBIT_S.

    One round is over, so that all members know the uplinks of the others.
    """
    rules = swarm.rules(parameters, "fp32", min_peers=2)
    nodes = [swarm.node(rules, start_tip(rules), parse_faults(faults), host) for host in swarm.hosts(fast)]
    slow = swarm.node(rules)
    for node in (*nodes, slow):
        node.meet([*nodes, slow])
        node.start_gossip()
    for node in nodes:
        for number in range(3):
            node.host.loop.call_soon_threadsafe(
                node.participant.ctx.uplink.record_send, f"before {number}", 10**6, 1e6 / FAST_BYTES_S
            )
    slow.host.wire.upload_limiter.limit(MBIT_S)
    round_of([*nodes, slow], 0)
    return nodes, slow


def services_of(node: Node) -> dict[str, Service]:
    services: dict[str, Service] = vars(node.host.wire)["_services"]
    return services


@pytest.fixture
def open_lines(swarm: Swarm) -> Iterator[Swarm]:
    """Remove the rate limits at the end, because other tests use the same hosts."""
    yield swarm
    for host in swarm._hosts:
        for limiter in (host.wire.upload_limiter, host.wire.download_limiter):
            limiter.limit(0.0)


def deposited(node: Node) -> str:
    """Let a node offer before any other member is ready, and return its depositary."""
    number = node.tip.round + 1
    node.offer(gradient(7, number, PARAMETERS))
    wait_until(lambda: node.participant.sender._given is not None)
    given = node.participant.sender._given
    assert given is not None
    return given[1]


def commit_rest(nodes: Sequence[Node], slow: Node) -> tuple[str, ...]:
    """Let the others offer and the round end. Returns the included members."""
    number = nodes[0].tip.round + 1
    for place, node in enumerate(nodes):
        node.offer(gradient(place, number, PARAMETERS))
    done = [node.committed() for node in (*nodes, slow)]
    assert_same(done)
    return done[0].outcome.included


def test_a_member_on_a_slow_uplink_is_included_without_delay(open_lines: Swarm) -> None:
    nodes, slow = swarm_of(open_lines, 3)
    assert all(node.participant.sender.lead_s == 0.0 for node in nodes), "fast members deposit nothing"
    assert UPLOAD_S < slow.participant.sender.lead_s - FIXED_S < 3 * UPLOAD_S, "the rate is measured beside other tests"
    for _ in range(3):
        holder = deposited(slow)
        before = slow.host.wire.traffic.sent_bytes[Channel.REDUCE]
        included = commit_rest(nodes, slow)
        assert slow.peer_id in included
        sent = slow.host.wire.traffic.sent_bytes[Channel.REDUCE] - before
        assert sent < 0.1 * slow.rules.round_bytes, "the group does not wait for its uplink"
        by_id = {node.peer_id: node for node in nodes}
        assert by_id[holder].host.wire.traffic.forwarded_bytes > 0
    assert not slow.failures
    assert all(node.participant.depositary._held == {} for node in nodes), "deposits are dropped after their round"


def test_a_deposit_counts_as_the_members_contribution(open_lines: Swarm) -> None:
    """The mean equals that of a direct contribution with the member's signed tokens and norm."""
    nodes, slow = swarm_of(open_lines, 2)
    before = slow.tip.state.momentum
    deposited(slow)
    commit_rest(nodes, slow)
    weights = slow.tip.last_weights
    given = {nodes[0].peer_id: 0, nodes[1].peer_id: 1, slow.peer_id: 7}
    mean = sum(weights[peer] * gradient(place, 1, PARAMETERS) for peer, place in given.items()) / sum(weights.values())
    assert torch.allclose(slow.tip.state.momentum, OUTER.optimizer.momentum * before + mean, atol=1e-5)


@pytest.mark.parametrize("fault", ["forward@*=garbage", "forward@*=shape"])
def test_a_depositary_that_alters_chunks_is_refused(open_lines: Swarm, fault: str) -> None:
    nodes, slow = swarm_of(open_lines, 3, fault)
    holder = deposited(slow)
    included = commit_rest(nodes, slow)
    assert slow.peer_id in included
    refused = [node.host.wire.traffic.rejected for node in nodes if node.peer_id != holder]
    assert all(one["bad_signature"] == 1 for one in refused), refused
    assert not any(slow.peer_id in node.participant.ballot.omitted for node in nodes)
    assert holder in slow.participant.sender._distrusted
    assert deposited(slow) != holder, "the next deposit goes to another member"
    commit_rest(nodes, slow)


def test_a_member_is_included_although_its_depositary_dies(open_lines: Swarm) -> None:
    nodes, slow = swarm_of(open_lines, 3)
    holder = deposited(slow)
    (dead,) = (node for node in nodes if node.peer_id == holder)
    dead.vanish()
    rest = [node for node in nodes if node is not dead]
    included = commit_rest(rest, slow)
    assert slow.peer_id in included


def test_a_depositary_that_forwards_nothing_is_not_asked_again(open_lines: Swarm) -> None:
    nodes, slow = swarm_of(open_lines, 3, "forward@*=stall:60")
    holder = deposited(slow)
    included = commit_rest(nodes, slow)
    assert slow.peer_id in included
    assert holder in slow.participant.sender._distrusted


def test_an_unfinished_deposit_is_cancelled_when_its_round_ends(open_lines: Swarm) -> None:
    """A deposit that is still uploading when its round ends is cancelled."""
    nodes, slow = swarm_of(open_lines, 3)
    slow.host.wire.upload_limiter.limit(MBIT_S / 20)  # The uplink becomes slower.
    slow.offer(gradient(7, 1, PARAMETERS))
    wait_until(lambda: slow.participant.sender.is_depositing)
    included = commit_rest(nodes, slow)
    assert slow.peer_id not in included
    wait_until(lambda: not slow.participant.sender.is_depositing)
    assert slow.participant.sender._given is None


@pytest.mark.parametrize("others_wait", [True, False])
def test_a_slow_depositary_is_not_asked_again(open_lines: Swarm, others_wait: bool) -> None:
    nodes, slow = swarm_of(open_lines, 2)
    by_id = {node.peer_id: node for node in nodes}
    asked: list[str] = []

    async def never_done(_caller: str, _message: Message) -> Message:
        asked.append("")
        await asyncio.sleep(60)
        return Message()

    first = slow.participant.sender._candidates()[0]
    by_id[first].host.wire.serve({"deposit": Service(never_done, Channel.REDUCE, 2**23)})
    slow.offer(gradient(7, 1, PARAMETERS))
    began_s = time.monotonic()
    wait_until(lambda: bool(asked))
    if others_wait:
        wait_until(lambda: slow.participant.sender._given is not None, 30.0)
        assert slow.participant.sender._given is not None and slow.participant.sender._given[1] != first
    else:
        wait_until(lambda: time.monotonic() - began_s > 2 * UPLOAD_S)
    commit_rest(nodes, slow)
    wait_until(lambda: first in slow.participant.sender._distrusted)


def test_a_hung_reducer_does_not_discredit_the_depositary(open_lines: Swarm) -> None:
    nodes, slow = swarm_of(open_lines, 3)
    holder = deposited(slow)
    # After a contradiction, the leader of attempt 1 reduces alone. A hung leader would end that attempt, too.
    second_leader = slow.participant.ctx.leader_at(1)
    hung = next(node for node in nodes if node.peer_id not in (holder, second_leader))
    service = services_of(hung)["contribute"]

    async def hang(_caller: str, _message: Message) -> Message:
        await asyncio.sleep(20)
        return Message()

    hung.host.wire.serve({"contribute": replace(service, handler=hang)})
    before = slow.host.wire.traffic.sent_bytes[Channel.REDUCE]
    included = commit_rest(nodes, slow)
    assert slow.peer_id in included
    sent = slow.host.wire.traffic.sent_bytes[Channel.REDUCE] - before
    assert sent < 0.7 * slow.rules.round_bytes, "it sends only the hung reducer's chunks"
    assert holder not in slow.participant.sender._distrusted


def test_a_failed_deposit_lowers_the_uplink_estimate(open_lines: Swarm) -> None:
    nodes, slow = swarm_of(open_lines, 3)
    before_s, rate = slow.participant.sender.upload_s, slow.participant.ctx.uplink.newest_bytes_s
    for node in nodes:  # The limit is the network's, so the node does not know it.
        node.host.wire.download_limiter.limit(MBIT_S / 4)
    slow.offer(gradient(7, 1, PARAMETERS))
    wait_until(lambda: slow.participant.sender.is_depositing)
    time.sleep(1.5 * before_s)
    assert slow.peer_id not in commit_rest(nodes, slow)
    wait_until(lambda: slow.participant.ctx.uplink.newest_bytes_s < 0.8 * rate)


# refusals


def deposit_of(node: Node, chunks: Sequence[bytes], parent: str = "") -> Message:
    hashes = [chunk_hash(chunk) for chunk in chunks]
    content = Deposit(run=node.rules.run, parent=parent or node.tip.head, root=results_root(hashes))
    document = sign(node.host.identity, content)
    return Message({"deposit": document.model_dump(), "hashes": b"".join(hashes)}, chunks)


def refusal(caller: Node, other: Node, message: Message, verb: str = "deposit") -> str:
    with pytest.raises(PeerError) as caught:
        caller.host.do(caller.host.wire.call(other.peer_id, verb, message, timeout_s=WAIT_S))
    return caught.value.code


def test_only_valid_deposits_of_members_are_accepted(swarm: Swarm) -> None:
    rules = swarm.rules(1000, "fp32", min_peers=2)
    member, other = swarm.nodes(2, rules)
    chunks = member.encode(gradient(0, 0, 1000))
    member.host.do(member.host.wire.call(other.peer_id, "deposit", deposit_of(member, chunks), timeout_s=WAIT_S))
    assert set(other.participant.depositary._held) == {member.peer_id}

    stranger = swarm.node(rules)
    stranger.host.learn(other.peer_id, other.host.addresses())
    assert refusal(stranger, other, deposit_of(stranger, chunks)) == "stranger"
    assert refusal(member, other, deposit_of(member, [*chunks, bytes(2**20 + 10_000)])) == "bad_size"
    assert refusal(member, other, deposit_of(member, [*chunks[:-1], chunks[-1][:-4]])) == "bad_size"
    assert refusal(member, other, deposit_of(member, chunks, parent="ef" * 32)) == "bad_message"
    assert refusal(member, other, deposit_of(stranger, chunks)) == "bad_message"
    altered = Message(deposit_of(member, chunks).header, [bytes(len(chunk)) for chunk in chunks])
    assert refusal(member, other, altered) == "bad_signature"
    key = {"parent": member.tip.head, "attempt": 0, "wait_s": 1.0}
    assert refusal(other, member, Message({**key, "chunks": {member.peer_id: [0]}}), "forward") == "gone"
    for wrong in ([10**6], [0, 0]):
        assert refusal(member, other, Message({**key, "chunks": {other.peer_id: wrong}}), "forward") == "bad_message"
    forever = Message({**key, "wait_s": 1e9, "chunks": {other.peer_id: [0]}})
    assert refusal(member, other, forever, "forward") == "bad_message"
    fraction = Message({**key, "chunks": {other.peer_id: [0.0]}, "wait_s": 1.0})
    assert refusal(member, other, fraction, "forward") == "bad_message"


def test_a_deposit_that_is_forwarded_without_chunks_does_not_exclude_its_member(open_lines: Swarm) -> None:
    """Every reducer has the signed deposit, so any of them can forward it without chunks."""
    nodes, slow = swarm_of(open_lines, 3, "forward@*=stall:1")
    document = deposit_of(slow, slow.encode(gradient(7, 1, PARAMETERS)))
    bad = nodes[0]

    async def slander(rounds: Any, attempt: Attempt, plan: Plan, mine: LocalContribution) -> None:
        empty = Message({**attempt.key, **document.header, "chunks": []})
        for node in nodes:
            with suppress(PeerError):
                await rounds.ctx.wire.call(node.peer_id, "contribute", empty, timeout_s=WAIT_S)
        await type(rounds.sender).send(rounds.sender, attempt, plan, mine)

    bad.participant.sender.send = MethodType(slander, bad.participant)  # type: ignore[method-assign]
    deposited(slow)
    assert slow.peer_id in commit_rest(nodes, slow)


def test_unreachable_members_count_when_the_usual_uplink_is_computed(swarm: Swarm) -> None:
    """Otherwise the only reachable member could attract all deposits by claiming a fast uplink."""
    slow, liar, *others = nodes = swarm.nodes(4, swarm.rules(1000, "fp32", min_peers=2))
    for node in (slow, *others):
        node.peer_table.update_own(inbound=False)
    wait_until(lambda: slow.peer_table.callable_members() == [liar.peer_id])
    for number in range(NEEDED_ROUNDS):
        slow.participant.ctx.uplink.record_send(f"before {number}", 10**6, 1.0)
    slow.participant.sender._uplinks_bytes_s = {node.peer_id: 9e11 if node is liar else 1e6 for node in nodes[1:]}
    assert slow.participant.sender._candidates() == []


def test_a_deposit_is_forwarded_once_per_attempt(swarm: Swarm) -> None:
    rules = swarm.rules(1000, "fp32", min_peers=2)
    member, holder = swarm.nodes(2, rules)
    deposit = deposit_of(member, member.encode(gradient(0, 0, 1000)))
    order = Message({"parent": member.tip.head, "attempt": 0, "wait_s": 0.5, "chunks": {}})
    for _ in range(2):  # A newer deposit of the same round does not reset this.
        member.host.do(member.host.wire.call(holder.peer_id, "deposit", deposit, timeout_s=WAIT_S))
        if holder.participant.depositary._held[member.peer_id].attempts:
            assert refusal(member, holder, order, "forward") == "busy"
        else:
            member.host.do(member.host.wire.call(holder.peer_id, "forward", order, timeout_s=WAIT_S))


def test_the_number_of_deposits_is_bounded(swarm: Swarm) -> None:
    rules = swarm.rules(1000, "fp32", min_peers=2)
    *members, holder = swarm.nodes(4, rules)
    holder.participant.depositary._places = 2
    chunks = holder.encode(gradient(0, 0, 1000))
    for member in members[:2]:
        for _ in range(2):  # A newer deposit replaces the older one.
            member.host.do(
                member.host.wire.call(holder.peer_id, "deposit", deposit_of(member, chunks), timeout_s=WAIT_S)
            )
    assert refusal(members[2], holder, deposit_of(members[2], chunks)) == "busy"
    assert len(holder.participant.depositary._held) == 2
    assert isinstance(holder.participant.depositary, Depositary)


# the start of the round


def test_a_member_on_a_slow_link_counts_the_next_round_from_the_commit(open_lines: Swarm) -> None:
    nodes = open_lines.nodes(3, open_lines.rules(PARAMETERS, "fp32", min_peers=2))
    late = nodes[-1]
    late.host.wire.download_limiter.limit(MBIT_S / 2)
    done = round_of(nodes, 0)
    began_s = [one.tip.anchor_at_s for one in done]
    assert late.tip.head == nodes[0].tip.head
    assert abs(began_s[2] - began_s[0]) < 0.3, "all start the round at the same moment of their common clock"


def test_a_member_that_learns_late_of_a_commit_counts_the_next_round_from_it(open_lines: Swarm) -> None:
    """While the member fetches the mean, the answers to its questions are delayed by 2 s."""
    nodes = open_lines.nodes(3, open_lines.rules(PARAMETERS, "fp32", min_peers=2))
    leader = nodes[0].participant.ctx.leader_at(0)
    (late, *others) = sorted(nodes, key=lambda node: node.peer_id == leader)
    late.host.wire.download_limiter.limit(MBIT_S / 2)

    def delay(node: Node) -> None:
        service = services_of(node)["chain"]

        async def later(caller: str, message: Message) -> Message:
            answer = await service.handler(caller, message)
            if late.participant.committer._mean is None:
                await asyncio.sleep(2.0)
            return answer

        node.host.wire.serve({"chain": replace(service, handler=later)})

    for node in others:
        delay(node)
    done = {node.peer_id: one for node, one in zip(nodes, round_of(nodes, 0), strict=True)}
    began_s = [done[node.peer_id].tip.anchor_at_s for node in (late, *others)]
    assert max(began_s) - min(began_s) < 0.3, "all start the round at the same moment of their common clock"


def test_a_commit_that_is_forwarded_with_a_false_age_does_not_make_the_round_older(swarm: Swarm) -> None:
    """Any peer may forward a commit with any age. A commit is newer than this node's own contribution in it."""
    nodes = swarm.nodes(2, swarm.rules(64, "fp32", min_peers=2))
    before_s = time.monotonic()
    round_of(nodes, 0)
    for node in nodes:
        parent = node.chain.tip.proof
        assert parent is not None
        assert node.participant.committer.anchor_at_s("x", before_s - 1e5, is_included=False) == before_s - 1e5
        assert node.tip.anchor_at_s >= before_s

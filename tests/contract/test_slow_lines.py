"""Members on slow lines: ready with the others, and sent for by others, so that nobody waits for their uplink."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch

from node.errors import PeerError
from node.status import Channel
from node.swarm.attempt import Attempt, Contribution
from node.swarm.base import Message, Service
from node.swarm.deposits import FIXED_S, Depositary
from node.swarm.faults import parse_faults
from node.swarm.records import Deposit, Plan, results_root, sign
from node.swarm.reduce import chunk_hash
from node.swarm.uplink import NEEDED_ROUNDS
from tests.contract.harness import OUTER, WAIT_S, Node, Swarm, assert_same, gradient, round_of, start_tip, wait_until

PARAMETERS = 250_000
"""1 MB of fp32."""
MBIT_S = 4.0
UPLOAD_S = 2.1
"""For a contribution, at this rate."""
FAST_BYTES_S = 1e8


def swarm_of(swarm: Swarm, fast: int, faults: str = "", parameters: int = PARAMETERS) -> tuple[list[Node], Node]:
    """Members on fast lines, which have measured them, with these faults, and one that sends at MBIT_S.

    One round is over, so that all know what the others' uplinks are.
    """
    rules = swarm.rules(parameters, "fp32", min_peers=2)
    nodes = [swarm.node(rules, start_tip(rules), parse_faults(faults), seat) for seat in swarm.seats(fast)]
    slow = swarm.node(rules)
    for node in (*nodes, slow):
        node.meet([*nodes, slow])
        node.start_gossip()
    for node in nodes:
        for number in range(3):
            node.seat.loop.call_soon_threadsafe(node.rounds.uplink.sent, f"before {number}", 10**6, 1e6 / FAST_BYTES_S)
    slow.seat.wire.up.limit(MBIT_S)
    round_of([*nodes, slow], 0)
    return nodes, slow


@pytest.fixture
def open_lines(swarm: Swarm) -> Swarm:
    """Seats are lent to other tests afterwards."""
    yield swarm
    for seat in swarm._seats:
        for pace in (seat.wire.up, seat.wire.down):
            pace.limit(0.0)


def deposited(node: Node) -> str:
    """Offers, and returns the member that has this node's whole contribution, before anybody else is ready."""
    number = node.tip.round + 1
    node.offer(gradient(7, number, PARAMETERS))
    wait_until(lambda: node.rounds.depositor._given is not None)
    given = node.rounds.depositor._given
    assert given is not None
    return given[1]


def commit_rest(nodes: Sequence[Node], slow: Node) -> tuple[str, ...]:
    """The others become ready now, and the round ends. Returns who is included."""
    number = nodes[0].tip.round + 1
    for place, node in enumerate(nodes):
        node.offer(gradient(place, number, PARAMETERS))
    done = [node.committed() for node in (*nodes, slow)]
    assert_same(done)
    return done[0].outcome.included


def test_a_slow_uplink_is_included_and_nobody_waits_for_it(open_lines: Swarm) -> None:
    nodes, slow = swarm_of(open_lines, 3)
    assert all(node.rounds.lead_s == 0.0 for node in nodes), "fast members deposit nothing"
    assert UPLOAD_S < slow.rounds.lead_s - FIXED_S < 1.5 * UPLOAD_S
    for _ in range(3):
        holder = deposited(slow)
        before = slow.seat.wire.traffic.sent_bytes[Channel.REDUCE]
        included = commit_rest(nodes, slow)
        assert slow.peer_id in included
        sent = slow.seat.wire.traffic.sent_bytes[Channel.REDUCE] - before
        assert sent < 0.1 * slow.rules.round_bytes, "what the others wait for does not cross its line"
        by_id = {node.peer_id: node for node in nodes}
        assert by_id[holder].seat.wire.traffic.forwarded_bytes > 0
    assert not slow.failures
    assert all(node.rounds.depositary._held == {} for node in nodes), "nothing is kept after its round"


def test_what_a_depositary_is_given_counts_as_the_member_s_own(open_lines: Swarm) -> None:
    """The same mean as if it had been sent directly, under the tokens and the norm that the member has signed."""
    nodes, slow = swarm_of(open_lines, 2)
    before = slow.tip.state.momentum
    deposited(slow)
    commit_rest(nodes, slow)
    weights = slow.tip.last_weights
    given = {nodes[0].peer_id: 0, nodes[1].peer_id: 1, slow.peer_id: 7}
    mean = sum(weights[peer] * gradient(place, 1, PARAMETERS) for peer, place in given.items()) / sum(weights.values())
    assert torch.allclose(slow.tip.state.momentum, OUTER.momentum * before + mean, atol=1e-5)


@pytest.mark.parametrize("fault", ["forward@*=garbage", "forward@*=shape"])
def test_a_depositary_that_alters_chunks_is_refused_and_the_member_is_not_blamed(open_lines: Swarm, fault: str) -> None:
    nodes, slow = swarm_of(open_lines, 3, fault)
    holder = deposited(slow)
    included = commit_rest(nodes, slow)
    assert slow.peer_id in included
    refused = [node.seat.wire.traffic.rejected for node in nodes if node.peer_id != holder]
    assert all(one["bad_signature"] == 1 for one in refused), refused
    assert not any(slow.peer_id in node.rounds.shunned for node in nodes)
    assert holder in slow.rounds.depositor._distrusted
    assert deposited(slow) != holder, "another one is asked next"
    commit_rest(nodes, slow)


def test_a_depositary_that_dies_costs_the_member_nothing(open_lines: Swarm) -> None:
    nodes, slow = swarm_of(open_lines, 3)
    holder = deposited(slow)
    (dead,) = (node for node in nodes if node.peer_id == holder)
    dead.vanish()
    rest = [node for node in nodes if node is not dead]
    included = commit_rest(rest, slow)
    assert slow.peer_id in included


def test_a_depositary_that_forwards_nothing_is_not_waited_for_and_not_asked_again(open_lines: Swarm) -> None:
    nodes, slow = swarm_of(open_lines, 3, "forward@*=stall:60")
    holder = deposited(slow)
    included = commit_rest(nodes, slow)
    assert slow.peer_id in included
    assert holder in slow.rounds.depositor._distrusted


def test_a_round_that_closes_without_it_ends_a_deposit(open_lines: Swarm) -> None:
    """A contribution that is still on its way when the round is over keeps the line no longer."""
    nodes, slow = swarm_of(open_lines, 3)
    slow.seat.wire.up.limit(MBIT_S / 20)  # It became slower since.
    slow.offer(gradient(7, 1, PARAMETERS))
    wait_until(lambda: slow.rounds.depositor.is_sending)
    included = commit_rest(nodes, slow)
    assert slow.peer_id not in included
    wait_until(lambda: not slow.rounds.depositor.is_sending)
    assert slow.rounds.depositor._given is None


@pytest.mark.parametrize("others_wait", [True, False])
def test_a_depositary_that_takes_a_contribution_too_slowly_is_not_asked_again(
    open_lines: Swarm, others_wait: bool
) -> None:
    nodes, slow = swarm_of(open_lines, 2)
    by_id = {node.peer_id: node for node in nodes}
    asked: list[str] = []

    async def never_done(_caller: str, _message: Message) -> Message:
        asked.append("")
        await asyncio.sleep(60)
        return Message()

    first = slow.rounds.depositor._candidates()[0]
    by_id[first].seat.wire.serve({"deposit": Service(never_done, Channel.REDUCE, 2**23)})
    slow.offer(gradient(7, 1, PARAMETERS))
    began_s = time.monotonic()
    wait_until(lambda: bool(asked))
    if others_wait:
        wait_until(lambda: slow.rounds.depositor._given is not None, 30.0)
        assert slow.rounds.depositor._given is not None and slow.rounds.depositor._given[1] != first
    else:
        wait_until(lambda: time.monotonic() - began_s > 2 * UPLOAD_S)
    commit_rest(nodes, slow)
    wait_until(lambda: first in slow.rounds.depositor._distrusted)


def test_a_reducer_that_hangs_costs_a_member_neither_its_depositary_nor_a_second_upload(open_lines: Swarm) -> None:
    nodes, slow = swarm_of(open_lines, 3)
    holder = deposited(slow)
    hung = next(node for node in nodes if node.peer_id != holder)
    service = hung.seat.wire._services["contribute_for"]

    async def hang(_caller: str, _message: Message) -> Message:
        await asyncio.sleep(20)
        return Message()

    hung.seat.wire.serve({"contribute_for": replace(service, handler=hang)})
    before = slow.seat.wire.traffic.sent_bytes[Channel.REDUCE]
    included = commit_rest(nodes, slow)
    assert slow.peer_id in included
    sent = slow.seat.wire.traffic.sent_bytes[Channel.REDUCE] - before
    assert sent < 0.7 * slow.rules.round_bytes, "it sends what the hung one reduces, and no more"
    assert holder not in slow.rounds.depositor._distrusted


def test_a_line_that_became_slower_is_measured_by_the_deposit_that_fails(open_lines: Swarm) -> None:
    nodes, slow = swarm_of(open_lines, 3)
    before_s, rate = slow.rounds.depositor.upload_s, slow.rounds.uplink.newest_bytes_s
    for node in nodes:  # A limit of its own would be known to it.
        node.seat.wire.down.limit(MBIT_S / 4)
    slow.offer(gradient(7, 1, PARAMETERS))
    wait_until(lambda: slow.rounds.depositor.is_sending)
    time.sleep(1.5 * before_s)
    assert slow.peer_id not in commit_rest(nodes, slow)
    wait_until(lambda: slow.rounds.uplink.newest_bytes_s < 0.8 * rate)


# what is refused


def deposit_of(node: Node, chunks: Sequence[bytes], parent: str = "") -> Message:
    hashes = [chunk_hash(chunk) for chunk in chunks]
    content = Deposit(run=node.rules.run, parent=parent or node.tip.head, root=results_root(hashes))
    document = sign(node.seat.identity, content)
    return Message({"deposit": document.model_dump(), "hashes": b"".join(hashes)}, chunks)


def refusal(caller: Node, other: Node, message: Message, verb: str = "deposit") -> str:
    with pytest.raises(PeerError) as caught:
        caller.seat.do(caller.seat.wire.call(other.peer_id, verb, message, timeout_s=WAIT_S))
    return caught.value.code


def test_only_members_deposit_and_only_what_a_round_is_made_of(swarm: Swarm) -> None:
    rules = swarm.rules(1000, "fp32", min_peers=2)
    member, other = swarm.nodes(2, rules)
    chunks = member.encode(gradient(0, 0, 1000))
    member.seat.do(member.seat.wire.call(other.peer_id, "deposit", deposit_of(member, chunks), timeout_s=WAIT_S))
    assert set(other.rounds.depositary._held) == {member.peer_id}

    stranger = swarm.node(rules)
    stranger.seat.learn(other.peer_id, other.seat.addresses())
    assert refusal(stranger, other, deposit_of(stranger, chunks)) == "stranger"
    assert refusal(member, other, deposit_of(member, [*chunks, bytes(2**20 + 10_000)])) == "bad_size"
    assert refusal(member, other, deposit_of(member, [*chunks[:-1], chunks[-1][:-4]])) == "bad_size"
    assert refusal(member, other, deposit_of(member, chunks, parent="ef" * 32)) == "bad_message"
    assert refusal(member, other, deposit_of(stranger, chunks)) == "bad_message"
    altered = Message(deposit_of(member, chunks).header, [bytes(len(chunk)) for chunk in chunks])
    assert refusal(member, other, altered) == "bad_signature"
    key = {"parent": member.tip.head, "attempt": 0, "wait_s": 1.0}
    assert refusal(other, member, Message({**key, "chunks": {member.peer_id: [0]}}), "forward") == "gone"
    for chunks in ([10**6], [0, 0]):
        assert refusal(member, other, Message({**key, "chunks": {other.peer_id: chunks}}), "forward") == "bad_message"
    forever = Message({**key, "wait_s": 1e9, "chunks": {other.peer_id: [0]}})
    assert refusal(member, other, forever, "forward") == "bad_message"


def test_an_empty_message_in_the_name_of_a_member_does_not_exclude_it(open_lines: Swarm) -> None:
    """The signed deposit is known to every reducer, so any of them can send it on without its chunks."""
    nodes, slow = swarm_of(open_lines, 3, "forward@*=stall:1")
    document = deposit_of(slow, slow.encode(gradient(7, 1, PARAMETERS)))
    bad = nodes[0]

    async def slander(rounds: Any, attempt: Attempt, plan: Plan, mine: Contribution) -> None:
        empty = Message({**rounds._key(attempt), **document.header, "chunks": []})
        for node in nodes:
            with suppress(PeerError):
                await rounds.wire.call(node.peer_id, "contribute_for", empty, timeout_s=WAIT_S)
        await type(rounds).send(rounds, attempt, plan, mine)

    bad.rounds.send = MethodType(slander, bad.rounds)  # type: ignore[method-assign]
    deposited(slow)
    assert slow.peer_id in commit_rest(nodes, slow)


def test_members_that_cannot_be_called_count_where_a_member_judges_its_own_line(swarm: Swarm) -> None:
    """Else the one member with an open port would only have to claim a fast line to receive all contributions."""
    slow, liar, *others = nodes = swarm.nodes(4, swarm.rules(1000, "fp32", min_peers=2))
    for node in (slow, *others):
        node.directory.say(inbound=False)
    wait_until(lambda: slow.directory.callable_members() == [liar.peer_id])
    for number in range(NEEDED_ROUNDS):
        slow.rounds.uplink.sent(f"before {number}", 10**6, 1.0)
    slow.rounds.depositor._uplinks_bytes_s = {node.peer_id: 9e11 if node is liar else 1e6 for node in nodes[1:]}
    assert slow.rounds.depositor._candidates() == []


def test_a_deposit_is_sent_on_once_in_each_attempt(swarm: Swarm) -> None:
    rules = swarm.rules(1000, "fp32", min_peers=2)
    member, holder = swarm.nodes(2, rules)
    deposit = deposit_of(member, member.encode(gradient(0, 0, 1000)))
    order = Message({"parent": member.tip.head, "attempt": 0, "wait_s": 0.5, "chunks": {}})
    for _ in range(2):  # A newer deposit of the same round does not begin anew.
        member.seat.do(member.seat.wire.call(holder.peer_id, "deposit", deposit, timeout_s=WAIT_S))
        if holder.rounds.depositary._held[member.peer_id].attempts:
            assert refusal(member, holder, order, "forward") == "busy"
        else:
            member.seat.do(member.seat.wire.call(holder.peer_id, "forward", order, timeout_s=WAIT_S))


def test_what_others_deposit_is_bounded(swarm: Swarm) -> None:
    rules = swarm.rules(1000, "fp32", min_peers=2)
    *members, holder = swarm.nodes(4, rules)
    holder.rounds.depositary._places = 2
    chunks = holder.encode(gradient(0, 0, 1000))
    for member in members[:2]:
        for _ in range(2):  # Its newer one replaces it.
            member.seat.do(
                member.seat.wire.call(holder.peer_id, "deposit", deposit_of(member, chunks), timeout_s=WAIT_S)
            )
    assert refusal(members[2], holder, deposit_of(members[2], chunks)) == "busy"
    assert len(holder.rounds.depositary._held) == 2
    assert isinstance(holder.rounds.depositary, Depositary)


# the round's clock


@pytest.mark.parametrize("misses", [False, True], ids=["fetches for long", "misses the commit"])
def test_a_member_on_a_slow_line_counts_the_round_from_the_commit(open_lines: Swarm, misses: bool) -> None:
    nodes = open_lines.nodes(3, open_lines.rules(PARAMETERS, "fp32", min_peers=2))
    late = nodes[-1]
    late.seat.wire.down.limit(MBIT_S / 2)
    if misses:

        async def ignore(_caller: str, _message: Message) -> Message:
            return Message()

        late.seat.wire.serve({"commit": Service(ignore, Channel.REDUCE, 2**23)})
    done = round_of(nodes, 0)
    began_s = [one.tip.anchor_at_s for one in done]
    assert late.tip.head == nodes[0].tip.head
    assert abs(began_s[2] - began_s[0]) < 0.3, "all count from the same moment: they share a clock here"


def test_a_member_whose_news_of_the_commit_waits_behind_the_mean_counts_the_round_from_the_commit(
    open_lines: Swarm,
) -> None:
    """While it fetches the mean, everything else that is sent to it arrives 2 s later."""
    nodes = open_lines.nodes(3, open_lines.rules(PARAMETERS, "fp32", min_peers=2))
    leader = nodes[0].rounds.leader_at(0)
    (late, *others) = sorted(nodes, key=lambda node: node.peer_id == leader)
    late.seat.wire.down.limit(MBIT_S / 2)

    def delay(node: Node, verb: str) -> None:
        service = node.seat.wire._services[verb]

        async def later(caller: str, message: Message) -> Message:
            answer = service.handler(caller, message)
            if late.rounds.adoption._mean is not None:
                return await answer
            if verb == "proofs":
                told = await answer
                await asyncio.sleep(2.0)
                return told
            await asyncio.sleep(2.0)
            return await answer

        node.seat.wire.serve({verb: replace(service, handler=later)})

    delay(late, "commit")
    for node in others:
        delay(node, "proofs")
    done = {node.peer_id: one for node, one in zip(nodes, round_of(nodes, 0), strict=True)}
    began_s = [done[node.peer_id].tip.anchor_at_s for node in (late, *others)]
    assert max(began_s) - min(began_s) < 0.3, "all count from the same moment: they share a clock here"


def test_nobody_makes_a_round_older_than_it_is(swarm: Swarm) -> None:
    """Whoever sends a commit on may say any age; a contribution in it was ready before it."""
    nodes = swarm.nodes(2, swarm.rules(64, "fp32", min_peers=2))
    before_s = time.monotonic()
    round_of(nodes, 0)
    for node in nodes:
        parent = node.chain.tip.proof
        assert parent is not None
        assert node.rounds.anchor_at_s("x", before_s - 1e5, is_included=False) == before_s - 1e5
        assert node.tip.anchor_at_s >= before_s

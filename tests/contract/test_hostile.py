"""Every node refuses the messages of peers that break the rules, and excludes these peers."""

from __future__ import annotations

import asyncio
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch

from node.errors import PeerError, SwarmError
from node.status import Channel
from node.swarm.allreduce import result_store
from node.swarm.allreduce.chunk_assignment import chunk_owners
from node.swarm.allreduce.reducer import chunk_hash
from node.swarm.consensus import leader
from node.swarm.consensus.ballot import MAX_AHEAD, Attempt, LocalContribution
from node.swarm.identity import Identity
from node.swarm.messages import (
    AcceptedOutcome,
    Document,
    Join,
    Plan,
    Proof,
    RoundOutcome,
    accept,
    parse,
    read_join,
    results_root,
    sign,
    split_hashes,
)
from node.swarm.transport.wire import Message, Service
from tests.contract.harness import Node, Swarm, assert_same, in_leader_order, offer_all, round_of, wait_until
from tests.contract.test_malformed_replies import reply_with

PARAMETERS = 50_000
SOON_S = 10.0
NAN = struct.pack("<f", math.nan)

Sender = Callable[[Any, Attempt, Plan, LocalContribution], Any]


def wrong_parts(change: Callable[[list[int], list[bytes]], tuple[list[Any], list[bytes]]]) -> Sender:
    """A sender that changes chunk numbers and chunks for every reducer."""

    async def send(rounds: Any, attempt: Attempt, plan: Plan, mine: LocalContribution) -> None:
        for peer in plan.reducers:
            chunks, blobs = change(plan.chunks_of(peer), [mine.chunks[chunk] for chunk in plan.chunks_of(peer)])
            message = Message({"parent": attempt.parent, "attempt": attempt.number, "chunks": chunks}, blobs)
            try:
                await rounds.ctx.wire.call(peer, "contribute", message, timeout_s=5)
            except PeerError:
                continue

    return send


CHANGES: dict[str, Callable[[list[int], list[bytes]], tuple[list[Any], list[bytes]]]] = {
    "a chunk cut short": lambda chunks, blobs: (chunks, [blobs[0][:-4], *blobs[1:]]),
    "a chunk too long": lambda chunks, blobs: (chunks, [blobs[0] + bytes(4), *blobs[1:]]),
    "not a number": lambda chunks, blobs: (chunks, [*blobs[:-1], NAN + blobs[-1][4:]]),
    "a chunk left out": lambda chunks, blobs: (chunks[1:], blobs[1:]),
    "a foreign chunk": lambda chunks, blobs: ([*chunks[1:], 400], blobs),
    "a chunk twice": lambda chunks, blobs: ([chunks[0], *chunks[:-1]], blobs),
    "chunks named by text": lambda chunks, blobs: ([str(c) for c in chunks], blobs),
    "fewer names than chunks": lambda chunks, blobs: (chunks[1:], blobs),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_invalid_contribution_is_excluded_on_all_nodes(swarm: Swarm, what: str) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp32", min_peers=2))
    bad = nodes[1]
    bad.participant.sender.send = MethodType(wrong_parts(CHANGES[what]), bad.participant)  # type: ignore[method-assign]
    began_s = time.monotonic()
    done = round_of(nodes, 0)
    assert time.monotonic() - began_s < SOON_S, "no member waits for a refused contribution"
    for node, d in zip(nodes, done, strict=True):
        assert set(d.outcome.plan.members) - set(d.outcome.included) == {bad.peer_id}
        assert d.included == (node is not bad)
        assert d.offered
    assert done[0].tip.last_weights.keys() == set(done[0].outcome.included)


def test_a_contribution_from_outside_the_group_changes_nothing(swarm: Swarm) -> None:
    rules = swarm.rules(PARAMETERS, "fp32", min_peers=2)
    nodes = swarm.nodes(2, rules)
    outsider = swarm.node(rules)
    outsider.meet(nodes)
    chunks = outsider.encode(_ones())
    refused = []

    async def push() -> None:
        for node in nodes:
            for numbers in (range(len(chunks)), range(1)):
                header = {"parent": node.tip.head, "attempt": 0, "chunks": list(numbers)}
                try:
                    blobs = [chunks[i] for i in numbers]
                    await outsider.host.wire.call(node.peer_id, "contribute", Message(header, blobs), timeout_s=5)
                except PeerError as exc:
                    refused.append(exc.code)

    offer_all(nodes, 0)
    outsider.host.do(push())
    done = [node.committed() for node in nodes]
    assert_same(done)
    assert done[0].outcome.included == tuple(sorted(node.peer_id for node in nodes))
    assert len(refused) == 4


def _ones() -> torch.Tensor:
    return torch.ones(PARAMETERS)


def _call(node: Node, peer: Node, verb: str, message: Message) -> Message:
    return node.host.do(node.host.wire.call(peer.peer_id, verb, message, timeout_s=5))


def joined(first: Node, member: Node) -> None:
    """Let the member offer, and ask the leader of the first attempt to lead it."""
    offer_all([member], 0)
    wait_until(
        lambda: any(member.peer_id in attempt.joins for attempt in list(first.participant.ballot._attempts.values()))
    )


RUBBISH: dict[str, Sequence[Message]] = {
    "attend": [
        Message(),
        Message({"attempt": 0, "join": {}}),
        Message({"attempt": "0", "join": {"signer": "a", "text": "{}", "signature": "00" * 64}}),
        Message({"attempt": 0, "join": {"signer": 5}}),
    ],
    "contribute": [Message(), Message({"parent": "head", "attempt": -1, "chunks": []})],
    "collect": [Message({"parent": None, "attempt": None})],
    "average": [Message({"parent": 7, "attempt": 0, "included": [[]]})],
    "chain": [Message(), Message({"heads": "head"}), Message({"heads": [7]}), Message({"heads": ["00"] * 10_000})],
    "fetch": [Message(), Message({"hashes": [1]}), Message({"hashes": ["00"] * 10_000}), Message({"hashes": [[]]})],
    "gossip": [Message(), Message({"signatures": 3}), Message({"signatures": ["x"]}, [b"x"])],
}


def test_malformed_messages_of_every_verb_are_refused_and_stop_no_round(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    *honest, bad = nodes
    for verb, messages in RUBBISH.items():
        for message in messages:
            parent = honest[0].tip.head if message.header.get("parent") == "head" else message.header.get("parent")
            header = dict(message.header) | ({"parent": parent} if "parent" in message.header else {})
            for peer in honest:
                with pytest.raises(PeerError) as caught:
                    _call(bad, peer, verb, Message(header, message.blobs))
                assert caught.value.code not in ("unreachable", "internal"), (verb, header)
    round_of([*honest, bad], 0)


BAD_REPLIES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "hashes of no bytes": ("average", {"hashes": [10**9] * 5}),
    "arrived are lists": ("collect", {"arrived": [[]]}),
    "refuses contributions": ("contribute", None),
}


@pytest.mark.parametrize("what", BAD_REPLIES)
def test_a_member_with_malformed_answers_cannot_stop_the_round(swarm: Swarm, what: str) -> None:
    verb, header = BAD_REPLIES[what]
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    *honest, bad = nodes

    async def answer_badly(caller: str, message: Message) -> Message:
        if header is None:
            raise PeerError("no")
        return Message(header)

    bad.host.wire.serve({verb: Service(answer_badly, Channel.REDUCE, 2**22)})
    offer_all(nodes, 0)
    done = [node.committed(2 * SOON_S) for node in honest]
    assert_same(done)
    assert all(d.included for d in done)


ODD_REPLIES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "sums of squares below nothing": ("average", lambda reply: {"squares": [-1e30] * len(reply["squares"])}),
    "sums of squares beyond all numbers": ("average", lambda reply: {"squares": [math.inf] * len(reply["squares"])}),
}
ODD_VOTES: dict[str, Callable[[str], Any]] = {
    "in capitals": lambda vote: vote.upper(),
    "with a gap": lambda vote: f"{vote} ",
    "a number": lambda vote: 7,
    "a list": lambda vote: [vote],
}


@pytest.mark.parametrize("what", ODD_REPLIES)
def test_a_member_with_impossible_sums_of_squares_cannot_stop_the_round(swarm: Swarm, what: str) -> None:
    verb, change = ODD_REPLIES[what]
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    *honest, bad = nodes
    rightly = bad.host.wire._services[verb].handler  # type: ignore[attr-defined]

    async def answer_oddly(caller: str, message: Message) -> Message:
        header = (await rightly(caller, message)).header
        return Message(header | change(header))

    bad.host.wire.serve({verb: Service(answer_oddly, Channel.REDUCE, 2**22)})
    offer_all(nodes, 0)
    assert_same([node.committed(SOON_S) for node in honest])


@pytest.mark.parametrize("what", ODD_VOTES)
def test_a_member_with_a_wrong_vote_cannot_stop_the_round(swarm: Swarm, what: str) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    *honest, bad = nodes
    bad.participant.ctx.hooks.vote = ODD_VOTES[what]  # type: ignore[assignment]
    offer_all(nodes, 0)
    done = [node.committed(SOON_S) for node in honest]
    assert_same(done)
    assert done[0].tip.proof is not None and bad.peer_id not in done[0].tip.proof.accepts


@pytest.mark.parametrize("said", ["abc", None, math.inf, [], -1, 0, 2**31, 2**63])
def test_a_leader_that_names_an_impossible_attempt_number_stops_no_member(swarm: Swarm, said: Any) -> None:
    bad, *honest = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))

    async def answer_badly(caller: str, message: Message) -> Message:
        return Message({"status": "stale", "attempt": said})

    bad.host.wire.serve({"attend": Service(answer_badly, Channel.REDUCE, 2**22)})
    done = round_of(honest, 0, 2 * SOON_S)
    assert done[0].outcome.plan.attempt < 5


def test_members_reach_the_far_attempt_of_their_leader_in_several_steps(swarm: Swarm) -> None:
    """A record leads them on by at most MAX_AHEAD at a time."""
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    nodes[0].participant.ballot.number = 3 * MAX_AHEAD + 1
    done = round_of(nodes, 0)
    assert done[0].outcome.plan.attempt > 3 * MAX_AHEAD


def test_a_leader_with_an_internal_error_is_replaced(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    stumbled: list[int] = []

    def stumble(chunks: int, capacities: Sequence[float]) -> tuple[int, ...]:
        if not stumbled:
            stumbled.append(chunks)
            raise ZeroDivisionError
        return chunk_owners(chunks, capacities)

    monkeypatch.setattr(leader, "chunk_owners", stumble)
    done = round_of(nodes, 0, SOON_S)
    assert done[0].outcome.plan.attempt == 1
    assert all(node.failures for node in nodes), "all members are told"


@pytest.mark.parametrize("verb", ["attend", "average", "collect"])
def test_a_member_that_names_a_far_attempt_number_does_not_stop_the_round(swarm: Swarm, verb: str) -> None:
    rules = swarm.rules(PARAMETERS, "fp16", min_peers=2)
    nodes = swarm.nodes(2, rules)
    outsider = swarm.node(rules)
    outsider.meet(nodes)
    for number in (2**63, 2**31 - 1, 9999):
        join = forged_join(outsider, outsider.tip.head, attempt=min(number, 2**31 - 1)).model_dump()
        for peer in nodes:
            header = {"parent": outsider.tip.head, "attempt": number, "join": join}
            with pytest.raises(PeerError):
                _call(outsider, peer, verb, Message(header))
    outsider.leave()
    round_of(nodes, 0, SOON_S)


# ending attempts


def test_members_take_orders_only_from_the_leader_of_their_attempt(swarm: Swarm) -> None:
    """All know the number of the attempt, but members take orders only from a member that they asked to lead."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=3))
    first, other, bad = nodes
    for node in (first, other):
        joined(first, node)
    parent = bad.tip.head
    joins = [first.participant.ballot._attempts[0].joins[node.peer_id] for node in (first, other)]
    joins = sorted([*joins, forged_join(bad, parent)], key=lambda join: join.signer)
    reducers, owners = (bad.peer_id,), (0,) * len(bad.rules.layouts[0].bounds)
    plan = Plan(
        run=bad.rules.run,
        parent=parent,
        attempt=0,
        leader=bad.peer_id,
        joins=tuple(joins),
        reducers=reducers,
        owners=owners,
    )
    document = sign(bad.host.identity, plan)
    for peer in (first, other):
        peer.participant.ballot.current.leader = first.peer_id
        for verb in ("collect", "average"):
            with pytest.raises(PeerError, match="another leader"):
                _call(bad, peer, verb, Message({"parent": parent, "attempt": 0, "included": [bad.peer_id]}))
        with pytest.raises(PeerError, match="another leader"):
            give_plan(bad, peer, document)
    offer_all([bad], 0)
    done = [node.committed() for node in nodes]
    assert_same(done)
    assert done[0].outcome.plan.attempt == 0
    assert not first.failures and not other.failures


def test_text_from_a_leader_is_safe_for_log_and_page(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    bad, victim, other = nodes
    nasty = "one\x1b[2J\ntwo\u2028\u202ethree\x9b" + "x" * 500

    answer: dict[str, Any] = {"status": "wait", "reason": nasty, "code": "made up"}

    async def answer_badly(caller: str, message: Message) -> Message:
        return Message(answer)

    bad.host.wire.serve({"attend": Service(answer_badly, Channel.REDUCE, 2**22)})
    offer_all([victim], 0)
    wait_until(lambda: victim.participant.waiting()[0] != "")
    reason, code = victim.participant.waiting()
    assert reason.startswith("one [2J two  three x") and len(reason) == 200 and reason.isprintable()
    assert code == ""
    answer |= {"status": "stale", "attempt": 1}
    offer_all([other], 0)
    assert_same([victim.committed(), other.committed()])
    assert victim.failures[0].code == "round_failed" and str(victim.failures[0]) == reason
    assert not victim.participant.ballot.distrusts_reducers


def test_a_padded_join_does_not_stop_the_round(swarm: Swarm) -> None:
    """The padding would make the accepted outcome larger than a header allows."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    bad = nodes[1]

    def join(identity: Identity, content: Join) -> Document:
        text = content.model_dump_json() + "\n" * 300_000
        signature = identity.sign("diloco join", text.encode()).hex()
        return Document(signer=identity.peer_id, text=text, signature=signature)

    bad.participant.ctx.hooks.join = join  # type: ignore[assignment]
    for round_ in range(2):
        done = round_of(nodes, round_)
        assert set(done[0].outcome.included) == {node.peer_id for node in nodes} - {bad.peer_id}
        proof = done[0].tip.proof
        assert proof is not None and len(proof.model_dump_json()) < 10_000


# the length of the round


@pytest.mark.parametrize("step_s", [5e-324, 9e5])
def test_one_member_with_most_tokens_does_not_set_the_round_length(swarm: Swarm, step_s: float) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    bad = nodes[1]
    for node in nodes:
        node.offer(_ones(), *((6400, step_s) if node is bad else (100, 0.02)))
    done = [node.committed() for node in nodes]
    assert_same(done)
    assert [d.tip.round_s for d in done] == [pytest.approx(10 * 0.02)] * 3


@pytest.mark.parametrize("round_s", [None, 1e-6, 1e6])
def test_a_member_that_names_another_round_length_is_excluded(swarm: Swarm, round_s: float | None) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    round_of(nodes, 0)
    bad = nodes[1]
    true = bad.participant.ctx.hooks.join

    def join(identity: Identity, content: Join) -> Document:
        return true(identity, content.model_copy(update={"round_s": round_s}))

    bad.participant.ctx.hooks.join = join  # type: ignore[assignment]
    done = round_of(nodes, 1)
    assert set(done[0].outcome.included) == {node.peer_id for node in nodes} - {bad.peer_id}


def test_an_outcome_with_another_round_length_is_not_accepted(swarm: Swarm) -> None:
    """The leader and all included members collude."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    round_of(nodes, 0)
    bad, victim, other = in_leader_order(nodes)
    joined(bad, victim)
    parent, true_s = bad.tip.head, bad.tip.round_s
    for round_s in (1e6, true_s):
        for node in (bad, other):
            node.chain.tip = replace(node.tip, round_s=round_s)
        outcome, hashes = lone_outcome(bad, parent, 1.0, 1, others=[other])
        if round_s != true_s:
            with pytest.raises(PeerError, match="another length"):
                propose(bad, victim, outcome, hashes.hex())
        else:
            propose(bad, victim, outcome, hashes.hex())


# proofs


def forged_join(node: Node, parent: str, tokens: int = 100, attempt: int = 0, accepted: str = "") -> Document:
    fields = {"run": node.rules.run, "parent": parent, "tokens": tokens, "round_s": node.tip.round_s}
    fields |= {"state": node.tip.digest, "attempt": attempt, "accepted": accepted}
    return sign(node.host.identity, Join(**fields, step_s=0.01, norm=1e6))


def propose(leader: Node, member: Node, outcome: Document, hashes: str, number: int = 0) -> str:
    """Let a leader answer a member of an attempt with this outcome. Returns the vote; raises PeerError."""
    attendance, attempt = member.participant._attendance, member.participant.ballot.attempt(number)

    async def answer() -> str:
        attendance._lead_by(attempt, leader.peer_id, "proposal")
        return await attendance._voter.vote(attempt, leader.peer_id, outcome, hashes)

    return member.host.do(answer())


def give_plan(leader: Node, member: Node, document: Document) -> None:
    """Let a leader answer a member of the first attempt with this plan. Raises PeerError."""
    ballot = member.participant.ballot

    async def answer() -> None:
        assert ballot.mine is not None
        member.participant._attendance.take_plan(ballot.attempt(0), leader.peer_id, document, ballot.mine)

    member.host.do(answer())


def test_a_tampered_proof_is_not_adopted(swarm: Swarm) -> None:
    rules = swarm.rules(PARAMETERS, "fp16", min_peers=2)
    nodes = swarm.nodes(3, rules)
    watcher = swarm.node(rules)
    watcher.stop()  # The watcher gets proofs from this test only.
    round_of(nodes, 0)
    good = nodes[0].tip.proof
    assert good is not None
    text = good.outcome.text.replace('"round":0', '"round":7')
    forged = {
        "text changed": good.model_copy(update={"outcome": good.outcome.model_copy(update={"text": text})}),
        "no votes": good.model_copy(update={"accepts": {}}),
    }
    watcher.meet(nodes)
    for what, proof in forged.items():
        with pytest.raises(PeerError):
            watcher.host.do(watcher.participant.committer.adopt(proof))
        assert watcher.tip.round == -1, what
    assert watcher.host.do(watcher.participant.committer.adopt(good))
    assert watcher.tip.digest == nodes[0].tip.digest
    assert not watcher.host.do(watcher.participant.committer.adopt(good)), "a second adoption does nothing"


def test_a_result_chunk_with_a_wrong_hash_is_fetched_from_another_peer(swarm: Swarm) -> None:
    rules = swarm.rules(PARAMETERS, "fp16", min_peers=2)
    nodes = swarm.nodes(3, rules)
    round_of(nodes, 0)
    bad = next(node for node in nodes if node.peer_id == min(n.peer_id for n in nodes))

    results = bad.participant.ctx.results
    honestly = results.get_all

    def get_all(hashes: Sequence[bytes]) -> list[bytes] | None:
        found = honestly(hashes)
        return found and [bytes(len(data)) for data in found]

    results.get_all = get_all  # type: ignore[method-assign]
    late = swarm.node(rules)
    late.meet(nodes)
    proof = nodes[0].tip.proof
    assert proof is not None
    late.host.do(late.participant.committer.adopt(proof))  # Its gossip may have been faster.
    wait_until(lambda: late.tip.digest == nodes[0].tip.digest)


@pytest.fixture
def hanging(swarm: Swarm) -> Iterator[Callable[[Node], None]]:
    """Makes a node hang in each `fetch` until the test ends."""
    ends: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def hang(node: Node) -> None:
        end = asyncio.Event()
        ends.append((node.host.loop, end))

        async def never(_caller: str, _message: Message) -> Message:
            await end.wait()
            return Message()

        node.host.wire.serve({"fetch": Service(never, Channel.REDUCE)})

    yield hang
    for loop, end in ends:
        loop.call_soon_threadsafe(end.set)


def test_a_reducer_that_hangs_when_its_means_are_fetched_costs_seconds_not_the_time_of_a_transfer(
    swarm: Swarm, hanging: Callable[[Node], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_store, "FIRST_S", 1.0)
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    hanging(in_leader_order(nodes)[-1])
    began_s = time.monotonic()
    assert_same(round_of(nodes, 0))
    assert time.monotonic() - began_s < nodes[0].rules.bulk_s - 2.0


def test_a_round_that_nobody_serves_does_not_hold_up_other_changes_of_the_state(
    swarm: Swarm, hanging: Callable[[Node], None]
) -> None:
    rules = swarm.rules(PARAMETERS, "fp16", min_peers=2)
    nodes = swarm.nodes(2, rules)
    round_of(nodes, 0)
    for node in nodes:
        hanging(node)
    late = swarm.node(rules)
    late.meet(nodes)
    proof = nodes[0].tip.proof
    assert proof is not None
    adopting = asyncio.run_coroutine_threadsafe(late.participant.committer.adopt(proof), late.host.loop)
    wait_until(lambda: bool(late.participant.ctx.results._fetches))
    late.host.do(late.participant.committer.set_aside(), 3.0)
    assert not adopting.done()
    late.host.loop.call_soon_threadsafe(late.participant.ctx.results.close)


def test_a_mean_that_is_known_is_still_held_against_the_bound_of_another_outcome(swarm: Swarm) -> None:
    (node,) = swarm.nodes(1, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    document, hashes = lone_outcome(node, node.tip.head, 1e-3)
    outcome = parse(RoundOutcome, document.text)
    (join,) = (read_join(one) for one in outcome.plan.joins)
    wide, narrow = (join.model_copy(update={"norm": norm}) for norm in (1e3, 1e-9))
    mean_of = node.participant.committer.mean_of
    node.host.do(mean_of(outcome, {node.peer_id: wide}, split_hashes(hashes.hex())))
    with pytest.raises(PeerError) as caught:
        node.host.do(mean_of(outcome, {node.peer_id: narrow}, split_hashes(hashes.hex())))
    assert caught.value.code == "bad_norm"


def read_slowly(
    node: Node, chunk: bytes, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Semaphore, threading.Event]:
    """Let the node read `chunk` for every hash, once the event is set. The semaphore is released at each read."""
    reading, release = threading.Semaphore(0), threading.Event()

    def read(_digest: bytes) -> bytes:
        reading.release()
        release.wait(20)
        return chunk

    monkeypatch.setattr(node.participant.ctx.results._store, "get", read)
    monkeypatch.setattr(node.participant.ctx.results._store, "size_of", lambda _digest: len(chunk))
    return reading, release


def fetch(caller: Node, node: Node, chunks: int) -> Future[Message]:
    """Start to fetch this number of chunks from the node."""
    call = caller.host.wire.call(node.peer_id, "fetch", Message({"hashes": [bytes(32)] * chunks}), timeout_s=20)
    return asyncio.run_coroutine_threadsafe(call, caller.host.loop)


def test_chunks_are_read_in_threads_for_at_most_two_calls_per_caller(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, other = swarm.nodes(2, swarm.rules(64, "fp32", min_peers=2))
    (chunk, *_) = other.encode(torch.zeros(64))
    reading, release = read_slowly(other, chunk, monkeypatch)
    first, second = fetch(caller, other, 1), fetch(caller, other, 1)
    try:
        assert reading.acquire(timeout=10) and reading.acquire(timeout=10)
        with pytest.raises(PeerError) as caught:
            fetch(caller, other, 1).result(10)
        assert caught.value.code == "busy"
    finally:
        release.set()
    assert [list(call.result(10).blobs) for call in (first, second)] == [[chunk], [chunk]]


def test_strangers_together_hold_a_bounded_number_of_bytes_and_leave_room_for_members(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = swarm.rules(PARAMETERS, "fp32", min_peers=2)
    member, other = swarm.nodes(2, rules)
    strangers = [swarm.node(rules) for _ in range(3)]
    (chunk, _, *_) = other.encode(torch.zeros(PARAMETERS))
    monkeypatch.setattr(result_store, "REPLY_BYTES", len(chunk))
    monkeypatch.setattr(result_store, "SERVED_BYTES", 4 * len(chunk))
    reading, release = read_slowly(other, chunk, monkeypatch)
    for stranger in strangers:
        stranger.host.learn(other.peer_id, other.host.addresses())
    assert not any(other.peer_table.knows(stranger.peer_id) for stranger in strangers)
    held = [fetch(strangers[0], other, 2), fetch(strangers[1], other, 2)]
    try:
        assert reading.acquire(timeout=10) and reading.acquire(timeout=10)
        with pytest.raises(PeerError) as caught:
            fetch(strangers[2], other, 2).result(10)
        assert caught.value.code == "busy"
        held.append(fetch(member, other, 2))
        assert reading.acquire(timeout=10), "strangers leave room for members"
    finally:
        release.set()
    assert [list(call.result(10).blobs) for call in held] == 3 * [[chunk]], "one reply holds one chunk at a time"
    assert list(fetch(strangers[2], other, 2).result(10).blobs) == [chunk], "replies that were sent free their bytes"


def test_a_result_that_does_not_fit_into_one_reply_is_fetched_with_several(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = swarm.rules(PARAMETERS, "fp16", min_peers=2)
    nodes = swarm.nodes(3, rules)
    round_of(nodes, 0)
    monkeypatch.setattr(result_store, "REPLY_BYTES", 1)
    late = swarm.node(rules)
    late.stop()  # Otherwise it may fetch the result by itself first.
    late.meet(nodes)
    proof = nodes[0].tip.proof
    assert proof is not None and len(rules.layouts[0].bounds) > 1
    assert late.host.do(late.participant.committer.adopt(proof))
    assert late.tip.digest == nodes[0].tip.digest


def lone_outcome(
    node: Node, parent: str, value: float, round_: int = 0, attempt: int = 0, others: Sequence[Node] = ()
) -> tuple[Document, bytes]:
    """An invented outcome that includes only this node, whose chunks are in its results. The others are in its plan.

    Returns document and hashes.
    """
    chunks = node.encode(_ones() * value)
    hashes = [chunk_hash(chunk) for chunk in chunks]

    async def keep() -> None:
        node.participant.ctx.results.hold(hashes, chunks)

    node.host.do(keep())
    plan = Plan(
        run=node.rules.run,
        parent=parent,
        attempt=attempt,
        leader=node.peer_id,
        joins=tuple(
            forged_join(one, parent, attempt=attempt) for one in sorted((node, *others), key=lambda one: one.peer_id)
        ),
        reducers=(node.peer_id,),
        owners=(0,) * len(chunks),
    )
    outcome = RoundOutcome(round=round_, plan=plan, included=(node.peer_id,), results=results_root(hashes))
    return sign(node.host.identity, outcome), b"".join(hashes)


@pytest.mark.parametrize("what", ["another number", "hashes written otherwise"])
def test_an_outcome_that_cannot_be_adopted_is_not_accepted(swarm: Swarm, what: str) -> None:
    """If a member accepted it, every later leader would have to propose it again, and the run would stop for ever."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    bad, victim, other = nodes
    parent = bad.tip.head
    joined(bad, victim)
    outcome, hashes = lone_outcome(bad, parent, 1.0, round_=7 if what == "another number" else 0)
    text = hashes.hex() if what == "another number" else hashes.hex(" ")
    with pytest.raises(PeerError):
        propose(bad, victim, outcome, text)
    vote = accept(bad.host.identity, outcome.hash, 0)
    claim = AcceptedOutcome(attempt=0, outcome=outcome, hashes=text, vote=vote).model_dump_json().encode()
    join = {"attempt": 1, "join": forged_join(bad, parent, attempt=1, accepted=outcome.hash).model_dump()}
    with pytest.raises(PeerError):
        _call(bad, victim, "attend", Message(join, [claim]))
    done = round_of(nodes, 0)
    assert done[0].tip.round == 0 and done[0].tip.head != outcome.hash
    assert other.peer_id in done[0].outcome.included


def test_a_member_that_voted_does_not_adopt_a_certificate_with_the_leaders_vote_alone(swarm: Swarm) -> None:
    """Otherwise a hostile leader could leave out the votes of the others, and the round would lose each fork."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    round_of(nodes, 0)
    leader, victim, other = in_leader_order(nodes)
    joined(leader, victim)
    outcome, hashes = lone_outcome(leader, leader.tip.head, 1.0, round_=1, others=[other])
    votes = {victim.peer_id: propose(leader, victim, outcome, hashes.hex())}
    votes |= {leader.peer_id: accept(leader.host.identity, outcome.hash, 0)}
    weak, full = (
        Proof(outcome=outcome, attempt=0, group=group, accepts={one: votes[one] for one in group}, hashes=hashes.hex())
        for group in ((leader.peer_id,), (leader.peer_id, victim.peer_id))
    )
    with pytest.raises(PeerError) as caught:
        victim.host.do(victim.participant.committer.adopt(weak))
    assert caught.value.code == "unsupported" and victim.tip.round == 0
    assert victim.host.do(victim.participant.committer.adopt(full))
    assert other.tip.round == 0


def test_rounds_that_one_member_has_invented_do_not_count_as_rounds_that_this_node_has_missed(swarm: Swarm) -> None:
    """A node that believes them would give up its state and download another one."""
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    round_of(nodes, 0)
    bad, *honest = nodes
    outcome, _ = lone_outcome(bad, "cd" * 32, 1.0, round_=6)
    vote = accept(bad.host.identity, outcome.hash, 0)
    link = Proof(outcome=outcome, attempt=0, group=(bad.peer_id,), accepts={bad.peer_id: vote}, hashes="")
    header = {"head": outcome.hash, "age_s": 0.0, "light": True}
    given = reply_with(bad, "chain", [Message(header, [link.model_dump_json().encode()])])

    async def claim() -> None:
        bad.peer_table.update_own(round=6, swarm_tokens=10**9, head=outcome.hash)

    bad.host.do(claim())
    wait_until(lambda: len(given) >= len(honest))
    time.sleep(1.0)
    assert not any(node.lost.is_set() for node in honest)


def test_a_failed_attempt_of_a_round_frees_its_data(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=3))
    *honest, bad = nodes

    async def refuse(caller: str, message: Message) -> Message:
        raise PeerError("no")

    bad.host.wire.serve({"average": Service(refuse, Channel.REDUCE)})
    kept: list[bool] = []
    for node in honest:
        node.participant.ballot.give_up = _noting(kept, node.participant.ballot.give_up)  # type: ignore[method-assign]
    done = round_of(nodes, 0)
    assert done[0].outcome.plan.attempt == 1 and bad.peer_id not in done[0].outcome.plan.reducers
    assert kept and not any(kept)


def _noting(kept: list[bool], give_up: Callable[..., None]) -> Callable[..., None]:
    """Note whether a failed attempt that had a plan still holds contributions."""

    def noted(attempt: Attempt, error: SwarmError) -> None:
        give_up(attempt, error)
        if attempt.planned.is_set():
            kept.append(bool(attempt.reducer or attempt.joins or attempt.proposals))

    return noted

"""Peers that answer every question with rubbish: whoever asks goes on, and what should run for ever does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from node.diloco.digest import HASH_BYTES, root_digest
from node.errors import PeerError
from node.status import Channel, Phase
from node.swarm.base import MAX_DEPTH, Message, Service, unpack_header
from node.swarm.offers import Offers, Target, read_offer
from node.swarm.reachability import Reachability
from tests.contract.harness import Node, Swarm, assert_same, offer_all, round_of, wait_until

PARAMETERS = 20_000
KEYS = (
    *("status", "attempt", "reason", "code", "arrived", "hashes", "squares", "accept", "head", "age_s"),
    *("digest", "serves", "round", "tokens", "reached", "public", "signatures", "ages_ds", "error"),
)
"""All that anybody looks for in an answer."""
VALUES: dict[str, Any] = {
    "inf": math.inf,
    "nan": math.nan,
    "huge": 2**64 - 1,
    "negative": -(2**63),
    "text": "\x1b[2J\n",
    "bytes": b"\xff",
    "true": True,
    "lists": [[]],
    "numbers": [10**12],
    "a map": {"a": {}},
}
STATUSES = ("ahead", "unknown", "stale")


def rubbish() -> list[Message]:
    """Answers of every wrong kind."""
    made = [Message(), Message(blobs=[b"{}"] * 3)]
    for value in VALUES.values():
        header = dict.fromkeys(KEYS, value)
        made += [Message(header), Message(header, [b"\xff"])]
        made += [Message(header | {"status": status}, [b"{}"]) for status in STATUSES]
    return made


def answer_with(node: Node, verb: str, answers: list[Message]) -> list[int]:
    """This node answers `verb` with one after the other. Returns a list that grows with every answer."""
    given: list[int] = []

    async def answer_badly(caller: str, message: Message) -> Message:
        given.append(len(given))
        return answers[(len(given) - 1) % len(answers)]

    async def serve() -> None:
        node.seat.wire.serve({verb: Service(answer_badly, Channel.REDUCE, 2**24)})

    node.seat.do(serve())
    return given


def assert_alive(nodes: list[Node]) -> None:
    for node in nodes:
        for task in node._tasks:
            assert not task.done(), task


MEMBERS = ("attempt", "plan", "contribute", "collect", "average", "propose", "commit", "failed", "fetch")


@pytest.mark.parametrize("verb", MEMBERS)
def test_a_member_that_answers_rubbish_stops_no_round(swarm: Swarm, verb: str) -> None:
    """A leader shuns it after the first, so each round is another kind."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    *honest, bad = nodes
    rng = random.Random(verb)
    for number in range(3):
        answer_with(bad, verb, rng.sample(rubbish(), 5))
        offer_all(honest, number)
        assert_same([node.committed() for node in honest])
    assert_alive(honest)


def test_a_leader_that_answers_rubbish_stops_no_round(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    bad, *honest = nodes
    given = answer_with(bad, "join", rubbish())
    round_of(honest, 0)
    assert given
    assert_alive(honest)


def test_gossip_goes_on(swarm: Swarm) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    *honest, bad = nodes
    answers = rubbish()
    answers += [
        Message({"signatures": [s], "ages_ds": [0]}, [b"{}"]) for s in ("x", 10**12, [1], b"", None, b"\0" * 63)
    ]
    answer_with(bad, "gossip", answers)
    for node in honest:
        for _ in answers:
            assert node.seat.do(node.gossip.exchange(bad.peer_id)) is False
    assert_alive(honest)
    round_of(honest, 0)


def _more_than(given: list[int], before: int) -> bool:
    return len(given) > before


@pytest.mark.parametrize("verb", ["proofs", "line"])
def test_catching_up_goes_on(swarm: Swarm, verb: str) -> None:
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))
    *honest, bad = nodes
    bad.stop()
    if verb == "line":
        answer_with(bad, "proofs", [Message({"status": "unknown"})])
    given = answer_with(bad, verb, rubbish())
    bad.start_gossip()

    async def claim(number: int) -> None:
        bad.directory.say(round=5, swarm_tokens=10**9 + number, head=f"{number:064x}", phase=Phase.PAUSED)

    for number in range(6):
        before = len(given)
        bad.seat.do(claim(number))
        wait_until(partial(_more_than, given, before))
    assert_alive(honest)
    round_of(honest, 0)


def test_a_joiner_that_is_offered_rubbish_has_no_offer(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16"))
    joiner, bad = nodes
    offers = Offers(joiner.seat.wire, joiner.directory, joiner.rules, random.Random(1), lambda _: None)
    leaves = [bytes(HASH_BYTES)] * 2
    good = {"round": -1, "head": joiner.rules.run, "tokens": 0, "digest": root_digest(-1, 0, PARAMETERS, leaves)}
    assert read_offer(Message(good, [b"".join(leaves), b""]), Target(PARAMETERS)).round == -1
    answers = rubbish() + [Message(good | {key: v}, [b"".join(leaves), b""]) for key in good for v in VALUES.values()]
    answer_with(bad, "state", answers)
    for _ in answers:
        assert not joiner.seat.do(offers.find(Target(PARAMETERS), (), ()))

    answer_with(bad, "state", [Message(good, [b"".join(leaves), b""])])
    kinds = rubbish()
    answer_with(bad, "vouch", kinds)
    begin = Target(PARAMETERS, initial_digest=str(good["digest"]))
    for _ in kinds:
        (offer,) = joiner.seat.do(offers.find(begin, (), ()))
        assert offer.told.get(bad.peer_id, "") in ("", VALUES["text"])


def test_one_that_asks_whether_it_is_reached_hears_nothing_from_rubbish(swarm: Swarm) -> None:
    nodes = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16"))
    asker, bad = nodes
    found = {"seen": "127.0.0.1", "tried": [], "reached": [], "why": "refused"}
    told = [{"found": value} for value in VALUES.values()]
    told += [{"found": [found | {key: value}]} for key in ("tried", "reached", "why") for value in VALUES.values()]
    told += [{"found": [{"seen": value}]} for value in VALUES.values()]
    answers = rubbish() + [Message(header) for header in told]
    answer_with(bad, "probe", answers)

    async def ask() -> bool | None:
        async def seen() -> dict[str, tuple[str, ...]]:
            return {}

        asking = Reachability(
            asker.seat.wire, asker.directory, seen, {4: 1}, changed=lambda _: None, rng=random.Random(1)
        )
        for _ in answers:
            await asking.ask([bad.peer_id])
        return asking.is_inbound

    assert asker.seat.do(ask()) is not True


UNSENDABLE: dict[str, Callable[[], Any]] = {
    "a number of 65 bits": lambda: 2**64,
    "half a character": lambda: "\ud800",
    "an object": object,
}


@pytest.mark.parametrize("what", UNSENDABLE)
def test_what_cannot_be_sent_is_refused_at_once_on_both_ends(swarm: Swarm, what: str) -> None:
    caller, server = swarm.acquainted(2)

    async def answer(_caller: str, message: Message) -> Message:
        return Message({"a": UNSENDABLE[what]()}) if message.header else Message()

    server.wire.serve({"ask": Service(answer, Channel.STATE)})
    for header in ({"a": UNSENDABLE[what]()}, {"a": 1}):
        with pytest.raises(PeerError) as caught:
            caller.do(caller.wire.call(server.peer_id, "ask", Message(header), timeout_s=20), timeout_s=5)
        assert caught.value.code == "internal"
    assert not caller.do(caller.wire.call(server.peer_id, "ask", Message(), timeout_s=20)).header


def test_a_peer_id_that_is_none_is_unreachable_or_refused(swarm: Swarm) -> None:
    caller, _ = swarm.acquainted(2)
    for peer_id in ("", "x", "0OIl", "é", "\n", "12D3KooW" * 20):
        with pytest.raises(PeerError):
            caller.do(caller.wire.call(peer_id, "ask", Message(), timeout_s=5))


def test_a_header_is_not_nested_deeper_than_anybody_needs() -> None:
    def packed(depth: int) -> bytes:
        return b"\x93\xa1x\x81\xa1a" + b"\x91" * depth + b"\xc0" + b"\x90"

    assert unpack_header(packed(MAX_DEPTH - 1), lambda _: 0)[1]
    for depth in (MAX_DEPTH + 1, 500, 1000, 100_000):
        with pytest.raises(PeerError):
            unpack_header(packed(depth), lambda _: 0)

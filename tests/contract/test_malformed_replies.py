"""After malformed replies of a peer, the caller continues, and its background tasks stay alive."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgpack
import pytest

from node.diloco.digest import HASH_BYTES, root_digest
from node.errors import PeerError
from node.status import Channel, Phase
from node.swarm.connectivity.reachability import Reachability
from node.swarm.state_sync.providers import ProviderSearch, Target, read_snapshot
from node.swarm.transport.wire import MAX_DEPTH, MAX_ITEMS, Message, Service, at_most, unpack_header
from tests.contract.harness import Node, Swarm, round_of, wait_until

PARAMETERS = 20_000
KEYS = (
    *("status", "attempt", "reason", "code", "arrived", "hashes", "squares", "accept", "head", "age_s"),
    *("digest", "serves", "round", "tokens", "reached", "public", "signatures", "ages_ds", "error"),
)
"""All header fields that a caller reads."""
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
STATUSES = ("ahead", "unknown", "stale", "plan", "proposal", "wait")


def malformed() -> list[Message]:
    """Replies with wrong values in all fields."""
    replies = [Message(), Message(blobs=[b"{}"] * 3)]
    for value in VALUES.values():
        header = dict.fromkeys(KEYS, value)
        replies += [Message(header), Message(header, [b"\xff"])]
        replies += [Message(header | {"status": status}, [b"{}"]) for status in STATUSES]
    return replies


def reply_with(node: Node, verb: str, replies: Sequence[Message]) -> list[int]:
    """Let a node send these replies in turn. Returns a list that grows with every reply."""
    given: list[int] = []

    async def answer(caller: str, message: Message) -> Message:
        given.append(len(given))
        return replies[(len(given) - 1) % len(replies)]

    async def serve() -> None:
        node.host.wire.serve({verb: Service(answer, Channel.REDUCE, 2**24)})

    node.host.do(serve())
    return given


@pytest.fixture
def nodes(swarm: Swarm) -> list[Node]:
    """Three nodes, in the order in which they lead."""
    return swarm.nodes(3, swarm.rules(PARAMETERS, "fp16", min_peers=2))


def assert_alive(nodes: list[Node]) -> None:
    for node in nodes:
        for task in node._tasks:
            assert not task.done(), task


MEMBERS = ("contribute", "collect", "average", "fetch")


@pytest.mark.parametrize("verb", MEMBERS)
def test_malformed_replies_of_a_member_stop_no_round(nodes: list[Node], verb: str) -> None:
    """A leader omits the member after the first malformed reply, so each round uses other replies."""
    *honest, bad = nodes
    rng = random.Random(verb)
    for number in range(3):
        reply_with(bad, verb, rng.sample(malformed(), 5))
        round_of(honest, number)
    assert_alive(honest)


def test_malformed_replies_of_a_leader_stop_no_round(nodes: list[Node]) -> None:
    bad, *honest = nodes
    given = reply_with(bad, "attend", malformed())
    round_of(honest, 0)
    assert given
    assert_alive(honest)


def test_gossip_continues_after_malformed_replies(nodes: list[Node]) -> None:
    *honest, bad = nodes
    signatures = ("x", 10**12, [1], b"", None, b"\0" * 63)
    replies = malformed() + [Message({"signatures": [s], "ages_ds": [0]}, [b"{}"]) for s in signatures]
    reply_with(bad, "gossip", replies)
    for node in honest:
        for _ in replies:
            assert node.host.do(node.gossip.exchange(bad.peer_id)) is False
    assert_alive(honest)
    round_of(honest, 0)


def _is_longer(given: list[int], before: int) -> bool:
    return len(given) > before


@pytest.mark.parametrize("light", [False, True])
def test_catching_up_continues_after_malformed_replies(nodes: list[Node], light: bool) -> None:
    *honest, bad = nodes
    bad.stop()
    replies = [replace(reply, header=dict(reply.header) | {"light": light}) for reply in malformed()]
    _catch_up_with(bad, replies, times=6)
    assert_alive(honest)
    round_of(honest, 0)


def test_catching_up_continues_after_malformed_amendments(nodes: list[Node]) -> None:
    """The list of amendments in a reply is read before any signature is checked."""
    *honest, bad = nodes
    bad.stop()
    _catch_up_with(bad, [Message({"light": True, "amendments": text}) for text in amendment_lists()], times=4)
    assert_alive(honest)
    round_of(honest, 0)


def amendment_lists() -> list[Any]:
    """Lists of one amendment in canonical form, with numbers that no arithmetic can take; and other things."""
    content = {"run": "0" * 64, "number": 1, "from_round": 1, "action": "amend", "to_round": None, "state": ""}
    texts = [
        json.dumps(content | {"changes": {"inner.lr": number}}, sort_keys=True, separators=(",", ":"))
        for number in (10**400, 1e300)
    ]
    entries = [{"rewound_tokens": None, "round": 0, "signed": {"signatures": {}, "text": text}} for text in texts]
    return [*(json.dumps([entry], sort_keys=True, separators=(",", ":")).encode() for entry in entries), b"[1]", 10**12]


def _catch_up_with(bad: Node, replies: Sequence[Message], times: int) -> None:
    """Let a node claim newer rounds, and answer `chain` with these replies, as often as named."""
    given = reply_with(bad, "chain", replies)
    bad.start_gossip()

    async def claim(number: int) -> None:
        claims = {"round": 5, "swarm_tokens": 10**9 + number, "head": f"{number:064x}"}
        bad.peer_table.update_own(phase=Phase.PAUSED, **claims)

    for number in range(times):
        before = len(given)
        bad.host.do(claim(number))
        wait_until(partial(_is_longer, given, before))


def test_a_joiner_ignores_malformed_descriptions_of_states_and_malformed_votes(swarm: Swarm) -> None:
    joiner, bad = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16"))
    search = ProviderSearch(joiner.host.wire, joiner.peer_table, joiner.rules, random.Random(1))
    leaves = [bytes(HASH_BYTES)] * 2
    header = {"round": -1, "head": joiner.rules.run, "tokens": 0, "digest": root_digest(-1, 0, PARAMETERS, leaves)}
    good = Message(header, [b"".join(leaves), b"", bytes(HASH_BYTES), b""])
    assert read_snapshot(good, Target(PARAMETERS)).round == -1
    replies = malformed() + [Message(header | {key: v}, good.blobs) for key in header for v in VALUES.values()]
    for amendments in (b"[]", b"\xff", b'[{"round":0}]', b"x" * 2**20):
        digest = root_digest(-1, 0, PARAMETERS, leaves, amendments=amendments)
        replies.append(Message(header | {"digest": digest}, [*good.blobs[:3], amendments]))
    reply_with(bad, "state", replies)
    for _ in replies:
        assert not joiner.host.do(search.find(Target(PARAMETERS), (), ()))

    reply_with(bad, "state", [good])
    brief = malformed()
    reply_with(bad, "state", brief)
    for _ in brief:
        assert not joiner.host.do(search.servers(str(header["digest"]), ()))[0]


def test_malformed_probe_results_do_not_make_a_node_reachable(swarm: Swarm) -> None:
    asker, bad = swarm.nodes(2, swarm.rules(PARAMETERS, "fp16"))
    found = {"seen": "127.0.0.1", "tried": [], "reached": [], "why": "refused"}
    headers = [{"found": value} for value in VALUES.values()]
    headers += [{"found": [found | {key: value}]} for key in ("tried", "reached", "why") for value in VALUES.values()]
    headers += [{"found": [{"seen": value}]} for value in VALUES.values()]
    replies = malformed() + [Message(header) for header in headers]
    reply_with(bad, "probe", replies)

    async def ask() -> bool | None:
        async def seen() -> dict[str, tuple[str, ...]]:
            return {}

        asking = Reachability(
            asker.host.wire, asker.peer_table, seen, {4: 1}, on_change=lambda _: None, rng=random.Random(1)
        )
        for _ in replies:
            await asking.ask([bad.peer_id])
        return asking.is_inbound

    assert asker.host.do(ask()) is not True


UNSENDABLE: dict[str, Callable[[], Any]] = {
    "number of 65 bits": lambda: 2**64,
    "half a surrogate pair": lambda: "\ud800",
    "object": object,
}


@pytest.mark.parametrize("what", UNSENDABLE)
def test_a_value_that_cannot_be_serialised_is_refused_at_once_on_both_ends(swarm: Swarm, what: str) -> None:
    caller, server = swarm.introduced_hosts(2)

    async def answer(_caller: str, message: Message) -> Message:
        return Message({"a": UNSENDABLE[what]()}) if message.header else Message()

    server.wire.serve({"ask": Service(answer, Channel.STATE)})
    for header in ({"a": UNSENDABLE[what]()}, {"a": 1}):
        with pytest.raises(PeerError) as caught:
            caller.do(caller.wire.call(server.peer_id, "ask", Message(header), timeout_s=20), timeout_s=5)
        assert caught.value.code == "internal"
    assert not caller.do(caller.wire.call(server.peer_id, "ask", Message(), timeout_s=20)).header


def test_a_call_to_an_invalid_peer_id_fails(swarm: Swarm) -> None:
    caller, _ = swarm.introduced_hosts(2)
    for peer_id in ("", "x", "0OIl", "é", "\n", "12D3KooW" * 20):
        with pytest.raises(PeerError):
            caller.do(caller.wire.call(peer_id, "ask", Message(), timeout_s=5))


def test_nesting_depth_of_a_message_header_is_limited() -> None:
    def packed(depth: int) -> bytes:
        return b"\x93\xa1x\x81\xa1a" + b"\x91" * depth + b"\xc0" + b"\x90"

    assert unpack_header(packed(MAX_DEPTH - 1), at_most(0))[1]
    for depth in (MAX_DEPTH + 1, 500, 1000, 100_000):
        with pytest.raises(PeerError):
            unpack_header(packed(depth), at_most(0))


def test_number_of_items_in_a_message_header_is_limited() -> None:
    """Small items take 70 times their bytes as objects."""

    def packed(lists: int, items: int) -> bytes:
        return bytes(msgpack.packb(["x", {"a": [[{}] * items] * lists}, []]))

    assert unpack_header(packed(3, MAX_ITEMS), at_most(0))[1]
    for lists in (4, 127):
        with pytest.raises(PeerError, match="not readable"):
            unpack_header(packed(lists, MAX_ITEMS), at_most(0))

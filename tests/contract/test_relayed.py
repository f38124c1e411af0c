"""Calls over relays between two peers that cannot reach each other behave like direct calls."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from node.errors import PeerError
from node.status import Channel
from node.swarm.transport import libp2p as p2p
from node.swarm.transport.encrypted_stream import KEY_BYTES
from node.swarm.transport.libp2p import Libp2pWire
from node.swarm.transport.relay import _write_frame
from node.swarm.transport.wire import Message, NoRoutes, Service
from tests.contract.harness import Host, Swarm, wait_until
from tests.contract.test_calls import LIMIT_BYTES, ask, assert_answers, echo, refusal


class StaticRoutes:
    """Routes that the test sets."""

    def __init__(self, relays: Sequence[str]) -> None:
        self.relays = list(relays)
        self.strangers: set[str] = set()
        self.gone: set[str] = set()

    def relays_to(self, peer_id: str) -> Sequence[str]:
        return [relay for relay in self.relays if relay != peer_id]

    def check_carried(self, caller: str, target: str) -> None:
        if {caller, target} & self.strangers:
            raise PeerError("this node relays only between peers of its run", code="stranger")

    def is_gone(self, peer_id: str) -> bool:
        return peer_id in self.gone


class RelayedPair:
    """A caller and a server, each behind its own NAT, and relays that both have called."""

    def __init__(self, swarm: Swarm, relays: int = 1, **services: Any) -> None:
        self.swarm = swarm
        self.caller, self.server, *self.relays = swarm.introduced_hosts(2 + relays)
        self.table = StaticRoutes([relay.peer_id for relay in self.relays])
        offered = {verb: Service(handler, Channel.REDUCE, LIMIT_BYTES) for verb, handler in services.items()}
        offered["echo"] = Service(echo, Channel.REDUCE, 2 * LIMIT_BYTES, per_caller=50)
        for host in (self.caller, self.server, *self.relays):
            host.wire.routes = self.table
            host.wire.serve(offered)
        hidden = (self.caller, self.server)
        swarm.put_behind_nat(hidden, [*hidden, *self.relays])
        for host in hidden:
            for relay in self.relays:
                ask(host, relay.peer_id, "echo")

    @property
    def target_id(self) -> str:
        return self.server.peer_id

    def relayed_bytes(self, relay: int = 0) -> int:
        return self.relays[relay].wire.traffic.sent_bytes[Channel.RELAY]


def test_relayed_call_carries_header_and_blobs_both_ways(swarm: Swarm) -> None:
    pair = RelayedPair(swarm)
    blobs = [bytes([size % 251]) * size for size in (0, 1, 64 * 1024, 64 * 1024 + 1, 700_001)]
    header = {"text": "ä", "number": 2**40, "list": [1, 2.5, None], "bytes": b"\0\xff", "map": {"a": True}}
    reply = ask(pair.caller, pair.target_id, "echo", Message(header, blobs))
    assert reply.header == {"caller": pair.caller.peer_id, "header": header}, "the authenticated caller, not the relay"
    assert list(reply.blobs) == blobs
    bulk = 2 * sum(map(len, blobs))
    wait_until(lambda: bulk < pair.relayed_bytes() < 1.02 * bulk + 5_000)


def test_concurrent_relayed_calls_get_their_own_replies(swarm: Swarm) -> None:
    pair = RelayedPair(swarm)

    async def all_at_once() -> list[Message]:
        call = pair.caller.wire.call
        return await asyncio.gather(*(call(pair.target_id, "echo", Message({"i": i}), timeout_s=20) for i in range(40)))

    assert [reply.header["header"]["i"] for reply in pair.caller.do(all_at_once())] == list(range(40))


def test_relayed_call_is_refused_like_a_direct_one(swarm: Swarm) -> None:
    async def fail(caller: str, message: Message) -> Message:
        raise PeerError("not today", code="busy")

    pair = RelayedPair(swarm, fail=fail, small=echo)
    assert refusal(pair.caller, pair.target_id, "fail") == "busy"
    assert refusal(pair.caller, pair.target_id, "no such verb") == "bad_message"
    assert refusal(pair.caller, pair.target_id, "small", Message({}, [bytes(20 * LIMIT_BYTES)])) == "bad_size"
    assert_answers(pair.caller, pair.server)


def test_relayed_reply_that_is_too_long_is_refused(swarm: Swarm) -> None:
    pair = RelayedPair(swarm)
    message = Message({}, [bytes(10_000)])
    call = pair.caller.wire.call(pair.target_id, "echo", message, timeout_s=10, max_reply_bytes=9_999)
    with pytest.raises(PeerError) as caught:
        pair.caller.do(call)
    assert caught.value.code == "bad_size"


def test_relayed_call_to_a_hanging_peer_times_out(swarm: Swarm) -> None:
    calls = []

    async def hang(caller: str, message: Message) -> Message:
        calls.append(caller)
        await asyncio.sleep(60)
        return Message()

    pair = RelayedPair(swarm, relays=2, hang=hang)
    assert refusal(pair.caller, pair.target_id, "hang", timeout_s=4.0) == "timeout"
    assert calls == [pair.caller.peer_id], "it is not repeated over the other relay"


@pytest.mark.only_over("p2p", "the local transport has no streams")
@pytest.mark.parametrize("is_hidden", [True, False])
def test_peer_that_begins_no_answer_is_not_asked_again_over_its_relays(swarm: Swarm, *, is_hidden: bool) -> None:
    calls = []

    async def hang(caller: str, message: Message) -> Message:
        calls.append(caller)
        await asyncio.sleep(60)
        return Message()

    if is_hidden:
        pair = RelayedPair(swarm, relays=2, hang=hang)
        caller, server = pair.caller, pair.server
    else:
        caller, server, relay = swarm.introduced_hosts(3)
        for host in (caller, server, relay):
            host.wire.routes = StaticRoutes([relay.peer_id])
            host.wire.serve({"hang": Service(hang, Channel.REDUCE, LIMIT_BYTES)})
    began_s = time.monotonic()
    with pytest.raises(PeerError) as caught:
        caller.do(caller.wire.call(server.peer_id, "hang", Message(), timeout_s=20.0, first_s=1.0))
    assert (caught.value.code, len(calls)) == ("timeout", 1)
    assert time.monotonic() - began_s < 5.0


@pytest.mark.only_over("p2p", "the local transport has no streams")
def test_relay_that_invents_callers_has_no_more_circuits(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "MAX_CIRCUITS", 5)
    hostile, server = swarm.introduced_hosts(2)
    assert isinstance(hostile.wire, Libp2pWire) and isinstance(server.wire, Libp2pWire)
    wire, streams = hostile.wire, server.wire._streams

    async def open_circuits() -> list[asyncio.StreamWriter]:
        writers = []
        for number in range(12):
            _, writer = await wire._open(server.peer_id, p2p.RELAYED_PROTOCOL)
            _write_frame(writer, [f"peer {number}", os.urandom(KEY_BYTES)])
            writers.append(writer)
        return writers

    writers = hostile.do(open_circuits())
    wait_until(lambda: sum("peer" in label for label in streams.values()) >= 5)
    time.sleep(0.5)
    assert len(streams) <= 6
    for writer in writers:
        hostile.loop.call_soon_threadsafe(writer.transport.abort)


@pytest.mark.only_over("p2p", "peers in one process are not dialed")
def test_peer_that_could_not_be_dialed_is_dialed_again_if_no_relay_leads_to_it(swarm: Swarm) -> None:
    caller, server, relay = swarm.introduced_hosts(3)
    caller.wire.routes = relay.wire.routes = StaticRoutes([relay.peer_id])
    server.wire.serve({"echo": Service(echo, Channel.REDUCE, LIMIT_BYTES)})
    for host in (caller, relay):
        assert isinstance(host.wire, Libp2pWire)
        host.do(host.wire.drop(server.peer_id))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        caller.learn(server.peer_id, [f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}"])
        for _ in range(3):
            assert refusal(caller, server.peer_id, "echo") == "unreachable"
    caller.learn(server.peer_id, server.addresses())
    assert ask(caller, server.peer_id, "echo").header["caller"] == caller.peer_id


def test_peer_behind_nat_is_not_called_without_a_relay(swarm: Swarm) -> None:
    pair = RelayedPair(swarm)
    pair.table.relays = []
    assert refusal(pair.caller, pair.target_id, "echo") == "not_dialed"


def test_relay_that_is_not_connected_to_the_peer_is_skipped(swarm: Swarm) -> None:
    pair = RelayedPair(swarm)
    (stray,) = swarm.introduced_hosts(1)
    stray.wire.routes = pair.table
    stray.unseen.add(pair.target_id)
    pair.caller.learn(stray.peer_id, stray.addresses())
    pair.table.relays.insert(0, stray.peer_id)
    assert_answers(pair.caller, pair.server)
    pair.table.relays = [stray.peer_id]
    assert refusal(pair.caller, pair.target_id, "echo") == "unreachable"


@pytest.mark.only_over("p2p", "the local transport has no circuits")
def test_node_can_check_whether_a_relay_carries_calls_to_it(swarm: Swarm) -> None:
    pair = RelayedPair(swarm)
    wire, relay = pair.server.wire, pair.relays[0].peer_id
    assert isinstance(wire, Libp2pWire)
    assert pair.server.do(wire.is_carried_by(relay, "echo", 5.0))
    assert pair.relayed_bytes() > 0
    pair.table.strangers.add(pair.target_id)
    assert not pair.server.do(wire.is_carried_by(relay, "echo", 5.0))


def test_one_unconnected_relay_does_not_prove_that_the_peer_is_unreachable(swarm: Swarm) -> None:
    pair = RelayedPair(swarm, relays=2)
    (stray,) = swarm.introduced_hosts(1)
    stray.wire.routes = pair.table
    stray.unseen.add(pair.target_id)
    pair.caller.learn(stray.peer_id, stray.addresses())
    for relay in pair.relays:
        relay.close_wire()
    pair.table.relays.insert(0, stray.peer_id)
    assert refusal(pair.caller, pair.target_id, "echo") == "no_relay"


@pytest.mark.only_over("p2p", "the local transport has no addresses")
def test_restarted_relay_is_dialed_at_its_new_address(swarm: Swarm) -> None:
    pair = RelayedPair(swarm)
    (relay,) = pair.relays
    assert_answers(pair.caller, pair.server)
    relay.restart_wire()
    relay.wire.routes = pair.table
    relay.wire.serve({"echo": Service(echo, Channel.REDUCE)})
    pair.caller.learn(relay.peer_id, relay.addresses())
    pair.server.do(pair.server.wire.connect(relay.addresses()))  # type: ignore[attr-defined]
    assert_answers(pair.caller, pair.server)


@pytest.mark.parametrize("who", ["caller", "server"])
def test_stranger_gets_no_circuit_over_a_relay(swarm: Swarm, who: str) -> None:
    pair = RelayedPair(swarm)
    pair.table.strangers.add(getattr(pair, who).peer_id)
    with pytest.raises(PeerError, match="between peers of its run"):
        ask(pair.caller, pair.target_id, "echo")
    assert pair.relayed_bytes() == 0


def test_node_without_routes_relays_no_calls(swarm: Swarm) -> None:
    pair = RelayedPair(swarm)
    pair.relays[0].wire.routes = NoRoutes()
    with pytest.raises(PeerError, match="relays no calls"):
        ask(pair.caller, pair.target_id, "echo")


def start(host: Host, work: Coroutine[Any, Any, Message]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, host.loop)


def test_call_moves_to_another_relay_when_its_relay_ends(swarm: Swarm) -> None:
    asked, go_on = threading.Semaphore(0), threading.Event()

    async def slow(caller: str, message: Message) -> Message:
        asked.release()
        await asyncio.to_thread(go_on.wait, 30)
        return Message({}, message.blobs)

    pair = RelayedPair(swarm, relays=2, slow=slow)
    call = start(
        pair.caller, pair.caller.wire.call(pair.target_id, "slow", Message({}, [b"x" * 100_000]), timeout_s=30)
    )
    assert asked.acquire(timeout=10)
    pair.relays[0].close_wire()
    assert asked.acquire(timeout=10), "the call is repeated over the other relay"
    go_on.set()
    assert call.result(10).blob_bytes == 100_000
    assert_answers(pair.caller, pair.server)


@pytest.mark.only_over("p2p", "the local transport has no circuits")
def test_call_moves_to_another_relay_when_its_relay_counts_as_dead(swarm: Swarm) -> None:
    pair = RelayedPair(swarm, relays=2)
    wire = pair.relays[0].wire
    assert isinstance(wire, Libp2pWire)
    hung, over = threading.Event(), threading.Event()

    async def hang(*_: object) -> None:
        hung.set()
        await asyncio.to_thread(over.wait, 30)

    wire.relay._pipe = hang  # type: ignore[assignment]
    call = start(pair.caller, pair.caller.wire.call(pair.target_id, "echo", Message(), timeout_s=30))
    assert hung.wait(10)
    pair.table.gone.add(pair.relays[0].peer_id)
    try:
        assert call.result(10).header["caller"] == pair.caller.peer_id
    finally:
        del wire.relay._pipe
        over.set()


def test_connection_from_the_peer_is_preferred_to_a_relay(swarm: Swarm) -> None:
    pair = RelayedPair(swarm)
    swarm.hub.hide(pair.caller.peer_id, hidden=False)
    pair.caller.unseen.clear()
    if isinstance(pair.server.wire, Libp2pWire):
        pair.server.do(pair.server.wire.connect(pair.caller.addresses()))
    else:
        ask(pair.server, pair.caller.peer_id, "echo")
    before = pair.relayed_bytes()
    assert_answers(pair.caller, pair.server)
    assert pair.relayed_bytes() == before


@pytest.mark.only_over("p2p", "the local transport has no addresses")
def test_peer_that_cannot_be_dialed_is_called_over_its_relay(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = RelayedPair(swarm)
    wire = pair.caller.wire
    assert isinstance(wire, Libp2pWire)
    nowhere = [f"/ip4/127.0.0.1/tcp/9/p2p/{pair.target_id}"]
    pair.caller.loop.call_soon_threadsafe(lambda: wire.learn(pair.target_id, nowhere, inbound=True))
    dials: list[str] = []

    async def dial(addresses: Sequence[str]) -> str:
        dials.extend(addresses)
        raise PeerError(f"no answer at {addresses[0]}", code="unreachable")

    monkeypatch.setattr(wire, "_dial", dial)
    for _ in range(3):
        assert_answers(pair.caller, pair.server)
    assert pair.relayed_bytes() > 0
    assert dials == nowhere, "the peer is dialed once, not for each call"


# limits


MBIT_S = 8.0
BULK_BYTES = 2_000_000
"""These bytes take two seconds at MBIT_S, and 6 % more for headers."""


@pytest.mark.parametrize("which", ["up", "down", "relay"])
@pytest.mark.only_over("p2p", "the local transport has no links")
def test_relayed_bytes_keep_to_the_rate_limits_of_the_relay(swarm: Swarm, which: str) -> None:
    pair = RelayedPair(swarm)
    relay = pair.relays[0]
    assert isinstance(relay.wire, Libp2pWire)
    limiter = {"up": relay.wire.upload_limiter, "down": relay.wire.download_limiter, "relay": relay.wire.relay.limiter}[
        which
    ]

    async def limit(mbit_s: float) -> None:
        limiter.limit(mbit_s)

    async def bulk() -> float:
        began_s = time.monotonic()
        blobs = [bytes(BULK_BYTES // 8)] * 4
        await pair.caller.wire.call(pair.target_id, "echo", Message({}, blobs), timeout_s=30)
        return time.monotonic() - began_s

    async def both() -> tuple[float, list[float]]:
        running, small_s = asyncio.create_task(bulk()), []
        while not running.done():
            began_s = time.monotonic()
            await pair.caller.wire.call(pair.target_id, "echo", Message(), timeout_s=10)
            small_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.1)
        return await running, small_s

    relay.do(limit(MBIT_S))
    try:
        seconds, small_s = pair.caller.do(both())
    finally:
        relay.do(limit(0))
    assert 2.0 <= seconds < 4.0, "half of it in each direction"
    assert max(small_s) < 1.5, "heartbeats do not wait for bulk"
    assert pair.caller.do(bulk()) < 1.5, "without the limit it is quick"


@pytest.mark.only_over("p2p", "the local transport has no circuits")
def test_number_of_circuits_per_caller_over_a_relay_is_limited(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.swarm.transport.relay.PER_CALLER", 3)
    monkeypatch.setattr(p2p, "CIRCUIT_S", 10.0)
    go_on = threading.Event()

    async def slow(caller: str, message: Message) -> Message:
        await asyncio.to_thread(go_on.wait, 30)
        return Message()

    pair = RelayedPair(swarm, slow=slow)
    relay = pair.relays[0].wire
    assert isinstance(relay, Libp2pWire)
    calls = [
        start(pair.caller, pair.caller.wire.call(pair.target_id, "slow", Message(), timeout_s=30)) for _ in range(3)
    ]
    wait_until(lambda: relay.relay.count(pair.caller.peer_id) == 3)
    with pytest.raises(PeerError, match="as much as it can"):
        ask(pair.caller, pair.target_id, "echo")
    assert ask(pair.server, pair.caller.peer_id, "echo").header["caller"] == pair.target_id, (
        "another caller has its own"
    )
    go_on.set()
    for call in calls:
        call.result(10)
    wait_until(lambda: not relay.relay._circuits)

"""Calls between two peers that cannot reach each other, over relays: the same semantics as direct calls."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from node.errors import PeerError
from node.status import Channel
from node.swarm import p2p
from node.swarm.base import Message, Service
from node.swarm.p2p import P2PWire
from tests.contract.harness import Seat, Swarm, wait_until
from tests.contract.test_calls import LIMIT_BYTES, ask, echo, refusal


class Table:
    """Who relays for whom, as a test wants it."""

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


class Homes:
    """A caller and a server, each behind a NAT of its own, and relays that both have called."""

    def __init__(self, swarm: Swarm, relays: int = 1, **services: Any) -> None:
        self.swarm = swarm
        self.caller, self.server, *self.relays = swarm.acquainted(2 + relays)
        self.table = Table([relay.peer_id for relay in self.relays])
        offered = {verb: Service(handler, Channel.REDUCE, LIMIT_BYTES) for verb, handler in services.items()}
        offered["echo"] = Service(echo, Channel.REDUCE, 2 * LIMIT_BYTES, per_caller=50)
        for seat in (self.caller, self.server, *self.relays):
            seat.wire.routes = self.table
            seat.wire.serve(offered)
        hidden = (self.caller, self.server)
        swarm.put_behind_nat(hidden, [*hidden, *self.relays])
        for seat in hidden:
            for relay in self.relays:
                ask(seat, relay.peer_id, "echo")

    @property
    def there(self) -> str:
        return self.server.peer_id

    def relayed_bytes(self, relay: int = 0) -> int:
        return self.relays[relay].wire.traffic.sent_bytes[Channel.RELAY]


def test_a_relayed_call_brings_header_and_blobs_there_and_back(swarm: Swarm) -> None:
    homes = Homes(swarm)
    blobs = [bytes([size % 251]) * size for size in (0, 1, 64 * 1024, 64 * 1024 + 1, 700_001)]
    header = {"text": "ä", "number": 2**40, "list": [1, 2.5, None], "bytes": b"\0\xff", "map": {"a": True}}
    reply = ask(homes.caller, homes.there, "echo", Message(header, blobs))
    assert reply.header == {"caller": homes.caller.peer_id, "header": header}, "the caller is who it is, not the relay"
    assert list(reply.blobs) == blobs
    bulk = 2 * sum(map(len, blobs))
    wait_until(lambda: bulk < homes.relayed_bytes() < 1.02 * bulk + 5_000)


def test_many_relayed_calls_at_once_do_not_mix(swarm: Swarm) -> None:
    homes = Homes(swarm)

    async def all_at_once() -> list[Message]:
        call = homes.caller.wire.call
        return await asyncio.gather(*(call(homes.there, "echo", Message({"i": i}), timeout_s=20) for i in range(40)))

    assert [reply.header["header"]["i"] for reply in homes.caller.do(all_at_once())] == list(range(40))


def test_a_relayed_call_is_refused_as_a_direct_one_is(swarm: Swarm) -> None:
    async def fail(caller: str, message: Message) -> Message:
        raise PeerError("not today", code="busy")

    homes = Homes(swarm, fail=fail, small=echo)
    assert refusal(homes.caller, homes.there, "fail") == "busy"
    assert refusal(homes.caller, homes.there, "no such verb") == "bad_message"
    assert refusal(homes.caller, homes.there, "small", Message({}, [bytes(20 * LIMIT_BYTES)])) == "bad_size"
    assert ask(homes.caller, homes.there, "echo").header["caller"] == homes.caller.peer_id


def test_a_relayed_reply_that_is_too_long_is_refused(swarm: Swarm) -> None:
    homes = Homes(swarm)
    call = homes.caller.wire.call(
        homes.there, "echo", Message({}, [bytes(10_000)]), timeout_s=10, max_reply_bytes=9_999
    )
    with pytest.raises(PeerError) as caught:
        homes.caller.do(call)
    assert caught.value.code == "bad_size"


def test_a_relayed_call_that_is_not_answered_ends_with_a_timeout(swarm: Swarm) -> None:
    async def hang(caller: str, message: Message) -> Message:
        await asyncio.sleep(60)
        return Message()

    homes = Homes(swarm, relays=2, hang=hang)
    began_s = time.monotonic()
    assert refusal(homes.caller, homes.there, "hang", timeout_s=1.0) == "timeout"
    assert time.monotonic() - began_s < 3


def test_a_peer_is_dialed_again_as_soon_as_no_relay_leads_to_it(swarm: Swarm) -> None:
    if swarm.transport == "local":
        pytest.skip("peers in one process are not dialed")
    caller, server, relay = swarm.acquainted(3)
    caller.wire.routes = relay.wire.routes = Table([relay.peer_id])
    server.wire.serve({"echo": Service(echo, Channel.REDUCE, LIMIT_BYTES)})
    for seat in (caller, relay):
        seat.do(seat.wire.drop(server.peer_id))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        caller.learn(server.peer_id, [f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}"])
        for _ in range(3):
            assert refusal(caller, server.peer_id, "echo") == "unreachable"
    caller.learn(server.peer_id, server.addresses())
    assert ask(caller, server.peer_id, "echo").header["caller"] == caller.peer_id


def test_a_peer_without_a_relay_is_not_called(swarm: Swarm) -> None:
    homes = Homes(swarm)
    homes.table.relays = []
    assert refusal(homes.caller, homes.there, "echo") == "not_dialed"


def test_a_relay_that_is_not_connected_to_the_peer_is_passed_over(swarm: Swarm) -> None:
    homes = Homes(swarm)
    (stray,) = swarm.acquainted(1)
    stray.wire.routes = homes.table
    stray.unseen.add(homes.there)
    homes.caller.learn(stray.peer_id, stray.addresses())
    homes.table.relays.insert(0, stray.peer_id)
    assert ask(homes.caller, homes.there, "echo").header["caller"] == homes.caller.peer_id
    homes.table.relays = [stray.peer_id]
    assert refusal(homes.caller, homes.there, "echo") == "unreachable"


def test_a_node_finds_out_whether_a_relay_carries_calls_to_it(swarm: Swarm) -> None:
    if swarm.transport == "local":
        pytest.skip("the local transport has no circuits")
    homes = Homes(swarm)
    wire, relay = homes.server.wire, homes.relays[0].peer_id
    assert isinstance(wire, P2PWire)
    assert homes.server.do(wire.is_carried_by(relay, "echo", 5.0))
    assert homes.relayed_bytes() > 0
    homes.table.strangers.add(homes.there)
    assert not homes.server.do(wire.is_carried_by(relay, "echo", 5.0))


def test_one_relay_that_knows_no_way_does_not_tell_that_the_peer_is_away(swarm: Swarm) -> None:
    homes = Homes(swarm, relays=2)
    (stray,) = swarm.acquainted(1)
    stray.wire.routes = homes.table
    stray.unseen.add(homes.there)
    homes.caller.learn(stray.peer_id, stray.addresses())
    for relay in homes.relays:
        relay.close_wire()
    homes.table.relays.insert(0, stray.peer_id)
    assert refusal(homes.caller, homes.there, "echo") == "no_relay"


def test_a_relay_that_has_restarted_elsewhere_is_dialed_there(swarm: Swarm) -> None:
    if swarm.transport == "local":
        pytest.skip("the local transport has no addresses")
    homes = Homes(swarm)
    (relay,) = homes.relays
    assert ask(homes.caller, homes.there, "echo").header["caller"] == homes.caller.peer_id
    relay.restart_wire()
    relay.wire.routes = homes.table
    relay.wire.serve({"echo": Service(echo, Channel.REDUCE)})
    homes.caller.learn(relay.peer_id, relay.addresses())
    homes.server.do(homes.server.wire.connect(relay.addresses()))  # type: ignore[attr-defined]
    assert ask(homes.caller, homes.there, "echo").header["caller"] == homes.caller.peer_id


@pytest.mark.parametrize("who", ["caller", "server"])
def test_a_stranger_gets_no_circuit(swarm: Swarm, who: str) -> None:
    homes = Homes(swarm)
    homes.table.strangers.add(getattr(homes, who).peer_id)
    with pytest.raises(PeerError, match="between peers of its run"):
        ask(homes.caller, homes.there, "echo")
    assert homes.relayed_bytes() == 0


def test_a_node_that_was_not_asked_to_relay_relays_nothing(swarm: Swarm) -> None:
    from node.swarm.base import NoRoutes

    homes = Homes(swarm)
    homes.relays[0].wire.routes = NoRoutes()
    with pytest.raises(PeerError, match="relays no calls"):
        ask(homes.caller, homes.there, "echo")


def start(seat: Seat, work: Coroutine[Any, Any, Message]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, seat.loop)


def test_a_call_goes_on_over_another_relay_when_its_relay_ends(swarm: Swarm) -> None:
    asked, go_on = threading.Semaphore(0), threading.Event()

    async def slow(caller: str, message: Message) -> Message:
        asked.release()
        await asyncio.to_thread(go_on.wait, 30)
        return Message({}, message.blobs)

    homes = Homes(swarm, relays=2, slow=slow)
    call = start(homes.caller, homes.caller.wire.call(homes.there, "slow", Message({}, [b"x" * 100_000]), timeout_s=30))
    assert asked.acquire(timeout=10)
    homes.relays[0].close_wire()
    assert asked.acquire(timeout=10), "the call is not repeated over the other relay"
    go_on.set()
    assert call.result(10).blob_bytes == 100_000
    assert ask(homes.caller, homes.there, "echo").header["caller"] == homes.caller.peer_id


def test_a_call_leaves_a_relay_that_has_fallen_silent(swarm: Swarm) -> None:
    if swarm.transport == "local":
        pytest.skip("there nothing hangs")
    homes = Homes(swarm, relays=2)
    wire = homes.relays[0].wire
    assert isinstance(wire, P2PWire)
    hung, over = threading.Event(), threading.Event()

    async def hang(*_: object) -> None:
        hung.set()
        await asyncio.to_thread(over.wait, 30)

    wire.relay._pipe = hang  # type: ignore[method-assign]
    call = start(homes.caller, homes.caller.wire.call(homes.there, "echo", Message(), timeout_s=30))
    assert hung.wait(10)
    homes.table.gone.add(homes.relays[0].peer_id)
    try:
        assert call.result(10).header["caller"] == homes.caller.peer_id
    finally:
        del wire.relay._pipe
        over.set()


def test_a_connection_that_the_peer_has_opened_is_used_before_a_relay(swarm: Swarm) -> None:
    homes = Homes(swarm)
    swarm.hub.hide(homes.caller.peer_id, hidden=False)
    homes.caller.unseen.clear()
    if isinstance(homes.server.wire, P2PWire):
        homes.server.do(homes.server.wire.connect(homes.caller.addresses()))
    else:
        ask(homes.server, homes.caller.peer_id, "echo")
    before = homes.relayed_bytes()
    assert ask(homes.caller, homes.there, "echo").header["caller"] == homes.caller.peer_id
    assert homes.relayed_bytes() == before


def test_a_peer_that_cannot_be_dialed_is_called_over_its_relay(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    if swarm.transport == "local":
        pytest.skip("the local transport has no addresses")
    homes = Homes(swarm)
    wire = homes.caller.wire
    assert isinstance(wire, P2PWire)
    nowhere = [f"/ip4/127.0.0.1/tcp/9/p2p/{homes.there}"]
    homes.caller.loop.call_soon_threadsafe(lambda: wire.learn(homes.there, nowhere, inbound=True))
    dials: list[str] = []

    async def dial(addresses: Sequence[str]) -> str:
        dials.extend(addresses)
        raise PeerError(f"no answer at {addresses[0]}", code="unreachable")

    monkeypatch.setattr(wire, "_dial", dial)
    for _ in range(3):
        assert ask(homes.caller, homes.there, "echo").header["caller"] == homes.caller.peer_id
    assert homes.relayed_bytes() > 0
    assert dials == nowhere, "not dialed anew for each call"


# limits


MBIT_S = 8.0
BULK_BYTES = 2_000_000
"""Two seconds, and 6 % for headers."""


@pytest.mark.parametrize("which", ["up", "down", "relay"])
def test_what_is_relayed_keeps_to_the_limits_of_the_relay(swarm: Swarm, which: str) -> None:
    if swarm.transport == "local":
        pytest.skip("the local transport has no links")
    homes = Homes(swarm)
    relay = homes.relays[0]
    assert isinstance(relay.wire, P2PWire)
    pace = {"up": relay.wire.up, "down": relay.wire.down, "relay": relay.wire.relay.pace}[which]

    async def limit(mbit_s: float) -> None:
        pace.limit(mbit_s)

    async def bulk() -> float:
        began_s = time.monotonic()
        blobs = [bytes(BULK_BYTES // 8)] * 4
        calls = [homes.caller.wire.call(homes.there, "echo", Message({}, blobs), timeout_s=30)] * 1
        await asyncio.gather(*calls)
        return time.monotonic() - began_s

    async def both() -> tuple[float, list[float]]:
        running, small_s = asyncio.create_task(bulk()), []
        while not running.done():
            began_s = time.monotonic()
            await homes.caller.wire.call(homes.there, "echo", Message(), timeout_s=10)
            small_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.1)
        return await running, small_s

    relay.do(limit(MBIT_S))
    try:
        seconds, small_s = homes.caller.do(both())
    finally:
        relay.do(limit(0))
    assert 2.0 <= seconds < 4.0, "half of it there and half of it back"
    assert max(small_s) < 1.5, "heartbeats do not wait for bulk"
    assert homes.caller.do(bulk()) < 1.5, "without the limit it is quick"


def test_a_caller_holds_only_so_many_circuits(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    if swarm.transport == "local":
        pytest.skip("the local transport has no circuits")
    monkeypatch.setattr("node.swarm.relay.PER_CALLER", 3)
    monkeypatch.setattr(p2p, "CIRCUIT_S", 10.0)
    go_on = threading.Event()

    async def slow(caller: str, message: Message) -> Message:
        await asyncio.to_thread(go_on.wait, 30)
        return Message()

    homes = Homes(swarm, slow=slow)
    relay = homes.relays[0].wire
    assert isinstance(relay, P2PWire)
    calls = [
        start(homes.caller, homes.caller.wire.call(homes.there, "slow", Message(), timeout_s=30)) for _ in range(3)
    ]
    wait_until(lambda: relay.relay.count(homes.caller.peer_id) == 3)
    with pytest.raises(PeerError, match="as much as it can"):
        ask(homes.caller, homes.there, "echo")
    assert ask(homes.server, homes.caller.peer_id, "echo").header["caller"] == homes.there, "another caller has its own"
    go_on.set()
    for call in calls:
        call.result(10)
    wait_until(lambda: not relay.relay._circuits)

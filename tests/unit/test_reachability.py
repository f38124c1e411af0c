"""Whether a node takes itself for reachable: the rule, who asks whom, and what a peer may have probed."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import pytest

from node.errors import PeerError
from node.swarm.base import Message
from node.swarm.directory import Directory, PeerRecord
from node.swarm.identity import new_identity
from node.swarm.local import LocalHub, LocalWire
from node.swarm.reachability import MAX_PROBES, Answer, Reachability, can_connect, judge, tcp_port

RUN = "a" * 64
YES, NO = Answer(reached=True, public=False), Answer(reached=False, public=False)
PUBLIC_YES, PUBLIC_NO = Answer(reached=True, public=True), Answer(reached=False, public=True)


@pytest.mark.parametrize(
    ("answers", "askable", "verdict"),
    [
        ([], 0, None),
        ([], 3, None),
        ([NO], 1, False),
        ([NO], 2, None),
        ([NO, NO], 2, False),
        ([NO, NO], 9, False),
        ([YES], 9, True),
        ([NO, YES, NO], 3, True),
        # a neighbour behind the same router is no witness where others see a public address
        ([YES, PUBLIC_NO, PUBLIC_NO], 3, False),
        ([YES, PUBLIC_NO], 2, None),
        ([NO, NO, PUBLIC_YES], 3, True),
    ],
)
def test_the_rule(answers: Sequence[Answer], askable: int, verdict: bool | None) -> None:
    assert judge(answers, askable) is verdict


def test_the_port_is_that_of_the_first_address_of_its_own() -> None:
    relay = "/ip4/1.2.3.4/tcp/7/p2p/QmR/p2p-circuit/p2p/QmX"
    assert tcp_port([relay, "/ip4/0.0.0.0/udp/5/quic", "/ip4/10.0.0.1/tcp/41234/p2p/QmX"]) == 41234
    assert tcp_port([]) == tcp_port([relay]) == 0


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


class Peer:
    """One end on a local wire; all others see it at `host`."""

    def __init__(self, hub: LocalHub, port: int, host: str = "127.0.0.1") -> None:
        identity = new_identity()
        self.peer_id = identity.peer_id
        self.wire = LocalWire(hub, self.peer_id)
        record = PeerRecord(peer_id=self.peer_id, number=1, run=RUN, head=RUN)
        self.directory = Directory(identity, record, asyncio.get_running_loop().time)
        self.changes: list[bool] = []
        self.changed = asyncio.Event()
        self.seen: list[str] = []
        self.reachability = Reachability(
            self.wire, self.directory, self._seen_at, port, changed=self._change, rng=random.Random(0)
        )
        self._host = host

    def _change(self, inbound: bool) -> None:
        self.changes.append(inbound)
        self.changed.set()

    async def _seen_at(self, peer_id: str) -> str:
        self.seen.append(peer_id)
        return self._host


async def listening() -> tuple[asyncio.Server, int]:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@in_loop
async def test_a_port_that_listens_is_reached_and_one_that_does_not_is_not() -> None:
    server, port = await listening()
    async with server:
        assert await can_connect("127.0.0.1", port, 1.0)
    assert not await can_connect("127.0.0.1", port, 1.0)


@in_loop
async def test_it_asks_and_says_what_holds_with_the_mend() -> None:
    hub = LocalHub()
    server, port = await listening()
    me, others = Peer(hub, port), [Peer(hub, 1) for _ in range(2)]
    ids = [other.peer_id for other in others]
    assert me.reachability.is_inbound is None and str(port) in me.reachability.reason
    async with server:
        await me.reachability.ask(ids)
    assert me.reachability.is_inbound is True and me.changes == [], "it took itself for reachable before"

    for expected in (True, False):  # One failure alone may be who asked.
        for other in others:
            other.reachability._answered_at_s.clear()
        await me.reachability.ask(ids)
        assert me.reachability.is_inbound is expected
    assert me.reachability.is_inbound is False and me.changes == [False]
    assert f"No inbound connection reached TCP port {port}:" in me.reachability.reason
    assert "forward that port or set swarm.announce" in me.reachability.reason


@in_loop
async def test_a_node_that_listens_nowhere_asks_nobody() -> None:
    me = Peer(LocalHub(), 0)
    with suppress(TimeoutError):
        await asyncio.wait_for(me.reachability.run(), 0.1)
    assert me.changes == [False] and "swarm.listen" in me.reachability.reason


@in_loop
async def test_it_asks_by_itself_once_somebody_is_there() -> None:
    hub = LocalHub()
    me, other = Peer(hub, 1), Peer(hub, 1)
    me.directory.merge([other.directory.pulse()])
    task = asyncio.create_task(me.reachability.run())
    try:
        async with asyncio.timeout(10):
            await me.changed.wait()
    finally:
        task.cancel()
    assert me.changes == [False]


@in_loop
async def test_a_peer_that_cannot_be_called_itself_is_asked_too() -> None:
    """A relay among members behind NAT has nobody else to ask, and relays only while others reach it."""
    hub = LocalHub()
    me, other = Peer(hub, 1), Peer(hub, 1)
    other.directory.say(inbound=False)
    me.directory.merge([other.directory.pulse()])
    task = asyncio.create_task(me.reachability.run())
    try:
        async with asyncio.timeout(10):
            await me.changed.wait()
    finally:
        task.cancel()
    assert other.seen == [me.peer_id]


@in_loop
async def test_peers_that_do_not_see_this_node_leave_the_verdict_to_those_that_do() -> None:
    """Members behind NAT are called over a relay: they cannot tell, and the relay alone can."""
    hub = LocalHub()
    me, relay, *hidden = (Peer(hub, 1) for _ in range(4))
    for other in hidden:
        other.directory.say(inbound=False)
    me.directory.merge(other.directory.pulse() for other in (relay, *hidden))
    task = asyncio.create_task(me.reachability.run())
    try:
        async with asyncio.timeout(10):
            await me.changed.wait()
    finally:
        task.cancel()
    assert me.changes == [False] and not any(other.seen for other in hidden)


@in_loop
async def test_one_probe_per_caller_at_a_time_and_of_a_port_only() -> None:
    hub = LocalHub()
    caller, asked = Peer(hub, 1), Peer(hub, 1)

    async def probe(**header: object) -> Message:
        return await caller.wire.call(asked.peer_id, "probe", Message(header), timeout_s=5)

    for port in (0, 65536, -1, "80", None, 80.0):
        with pytest.raises(PeerError):
            await probe(port=port)
    assert (await probe(port=1, host="192.0.2.1")).header == {"reached": False, "public": False}
    assert asked.seen == [caller.peer_id], "it is looked up where the caller is; what it says of that does not count"
    with pytest.raises(PeerError) as caught:
        await probe(port=1)
    assert caught.value.code == "too_soon"


@in_loop
async def test_who_is_seen_through_a_relay_only_is_not_probed() -> None:
    hub = LocalHub()
    caller, asked = Peer(hub, 1), Peer(hub, 1, host="")
    with pytest.raises(PeerError) as caught:
        await caller.wire.call(asked.peer_id, "probe", Message({"port": 1}), timeout_s=5)
    assert caught.value.code == "not_seen"


@in_loop
async def test_all_callers_together_are_bounded() -> None:
    hub = LocalHub()
    asked = Peer(hub, 1)
    callers = [Peer(hub, 1) for _ in range(2)]
    for _ in range(MAX_PROBES):
        await asked.reachability._probes.acquire()
    with pytest.raises(PeerError):
        await callers[0].wire.call(asked.peer_id, "probe", Message({"port": 1}), timeout_s=5)
    asked.reachability._probes.release()
    await callers[1].wire.call(asked.peer_id, "probe", Message({"port": 1}), timeout_s=5)

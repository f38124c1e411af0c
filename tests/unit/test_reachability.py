"""Tests of the verdict on reachability, the choice of the asked peers, and the limits of a probe."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from node.errors import PeerError
from node.status import Channel
from node.swarm.connectivity.reachability import MAX_PROBES, Reachability, ReachabilityFinding, judge, listen_ports
from node.swarm.identity import new_identity
from node.swarm.membership.peer_table import PeerRecord, PeerTable
from node.swarm.transport.wire import Message, Service
from tests.event_loop import in_loop, in_virtual_time
from tests.in_process import InProcessNetwork, InProcessWire

RUN = "a" * 64
HOME, LAN, OTHER_HOME = "203.0.113.2", "192.168.1.5", "198.51.100.9"
PORT = 31337
DIRECT = f"/ip4/{HOME}/tcp/{PORT}"


def finding(seen: str, *, reached: bool) -> ReachabilityFinding:
    tried = (f"/ip4/{seen}/tcp/{PORT}",)
    return ReachabilityFinding(seen, tried, tried if reached else (), "" if reached else "refused")


YES, NO = finding(LAN, reached=True), finding(LAN, reached=False)
WIDE_YES, WIDE_NO = finding(HOME, reached=True), finding(HOME, reached=False)


@pytest.mark.parametrize(
    ("findings", "askable", "verdict"),
    [
        ([], 0, None),
        ([], 3, None),
        ([NO], 1, False),
        ([NO], 2, None),
        ([NO, NO], 2, False),
        ([NO, NO], 9, False),
        ([YES], 9, True),
        ([YES, NO], 2, None),
        ([YES, YES, NO], 3, True),
        # one peer lies
        ([NO, YES, NO], 3, False),
        ([NO, NO, WIDE_YES], 3, None),
        # a neighbour behind the same router is no witness where others see a wide address
        ([YES, WIDE_NO, WIDE_NO], 3, False),
        ([YES, WIDE_NO], 2, False),
        ([YES, WIDE_NO], 3, None),
        ([YES, YES, WIDE_NO], 9, None),
        ([YES, WIDE_YES], 2, True),
    ],
)
def test_reachability_is_decided_by_the_majority_of_the_peers_that_see_the_widest_address(
    findings: Sequence[ReachabilityFinding], askable: int, verdict: bool | None
) -> None:
    assert judge(findings, askable) is verdict


def test_listen_ports_returns_one_tcp_port_for_each_ip_version() -> None:
    relay = "/ip4/1.2.3.4/tcp/7/p2p/QmR/p2p-circuit/p2p/QmX"
    own = ["/ip4/10.0.0.1/tcp/41234/p2p/QmX", "/ip4/10.0.0.2/tcp/5/p2p/QmX", "/ip6/fd00::1/tcp/6/p2p/QmX"]
    assert listen_ports([relay, "/ip4/0.0.0.0/udp/5/quic", *own]) == {4: 41234, 6: 6}
    assert listen_ports([]) == listen_ports([relay]) == {}


class FakeNetwork:
    """A network whose `dial` finds what the test sets for an IP address and port, like `peer_at`."""

    def __init__(self) -> None:
        self.hub = InProcessNetwork()
        self.seen: dict[str, tuple[str, ...]] = {}
        """The IP addresses at which all others see each peer."""
        self.listeners: dict[tuple[str, int], str] = {}
        """The peer id or the failure code that a dial finds."""
        self.dialed: list[tuple[str, int]] = []

    async def dial(self, host: str, port: int, timeout_s: float) -> str:
        self.dialed.append((host, port))
        found = self.listeners.get((host, port), "refused")
        if found in ("refused", "timeout", "not_libp2p"):
            raise PeerError("nobody", code=found)
        return found


class Peer:
    """A peer that all others see at `ips`."""

    def __init__(
        self,
        network: FakeNetwork,
        *ips: str,
        ports: Mapping[int, int] | None = None,
        announced: Sequence[str] = (),
        cache: Path | None = None,
        is_relay: bool = False,
    ) -> None:
        identity = new_identity()
        self.peer_id = identity.peer_id
        self.network = network
        self.move(*(ips or (HOME,)))
        self.wire = InProcessWire(network.hub, self.peer_id)
        record = PeerRecord(peer_id=self.peer_id, number=1, run=RUN, head=RUN)
        self.peer_table = PeerTable(identity, record, asyncio.get_running_loop().time)
        self.changes: list[bool] = []
        self.on_change = asyncio.Event()
        self.reachability = Reachability(
            self.wire,
            self.peer_table,
            self._seen,
            {4: PORT} if ports is None else ports,
            on_change=self._change,
            rng=random.Random(0),
            announced=announced,
            cache=cache,
            dial=network.dial,
            is_relay=is_relay,
        )

    def _change(self, inbound: bool) -> None:
        self.changes.append(inbound)
        self.on_change.set()

    async def _seen(self) -> dict[str, tuple[str, ...]]:
        return {peer: ips for peer, ips in self.network.seen.items() if peer != self.peer_id}

    def move(self, *ips: str) -> None:
        self.network.seen[self.peer_id] = ips

    async def ask(self, others: Sequence[Peer]) -> None:
        for other in others:
            other.reachability._answered_at_s.clear()
        await self.reachability.ask([other.peer_id for other in others])

    def lie(self, answer: dict[str, Any]) -> None:
        async def on_probe(_caller: str, _message: Message) -> Message:
            return Message(answer)

        self.wire.serve({"probe": Service(on_probe, Channel.DHT)})


@in_loop
async def test_address_at_which_peers_reach_the_node_is_confirmed() -> None:
    network = FakeNetwork()
    me, others = Peer(network), [Peer(network) for _ in range(2)]
    network.listeners[HOME, PORT] = me.peer_id
    known = me.reachability
    assert known.is_inbound is None and known.code == "not_tested" and not known.confirmed
    assert known.reason == "Not tested yet: no other peer has tried to connect."
    await me.ask(others)
    assert known.is_inbound is True and known.code == "reached" and known.confirmed == (DIRECT,)
    assert known.reason == f"Other peers reach this node at {HOME}:{PORT} (2 of 2 that tried)."
    assert me.changes == [], "it took itself for callable all along"


@in_loop
async def test_closed_port_is_reported_after_the_second_failure() -> None:
    network = FakeNetwork()
    me, others = Peer(network), [Peer(network) for _ in range(2)]
    network.listeners[HOME, PORT] = me.peer_id
    await me.ask(others)
    del network.listeners[HOME, PORT]
    for expected in (True, False):  # One failure alone may be the fault of the asked peers.
        await me.ask(others)
        assert me.reachability.is_inbound is expected
    assert me.changes == [False] and not me.reachability.confirmed
    assert f"No inbound connection reached TCP port {PORT} " in me.reachability.reason
    assert "the connection is refused" in me.reachability.reason
    assert "forward that port or set swarm.announce" in me.reachability.reason


@pytest.mark.parametrize(
    ("neighbour", "words"),
    [("another", "another node answers"), ("not_libp2p", "another program answers"), ("timeout", "nothing answers")],
)
@in_loop
async def test_another_listener_at_the_address_does_not_make_the_node_reachable(neighbour: str, words: str) -> None:
    network = FakeNetwork()
    me, other = Peer(network), Peer(network)
    network.listeners[HOME, PORT] = new_identity().peer_id if neighbour == "another" else neighbour
    await me.ask([other])
    assert me.reachability.is_inbound is False and words in me.reachability.reason
    assert not me.reachability.confirmed


LIE = {"found": [{"seen": HOME, "tried": [DIRECT], "reached": [DIRECT], "why": ""}]}
OLD_LIE = {"reached": True, "public": True}


@pytest.mark.parametrize("lie", [LIE, OLD_LIE])
@in_loop
async def test_one_lying_peer_does_not_outvote_two_about_reachability(lie: dict[str, Any]) -> None:
    network = FakeNetwork()
    me, others = Peer(network), [Peer(network) for _ in range(3)]
    others[0].lie(lie)
    await me.ask(others)
    assert me.reachability.is_inbound is False and me.reachability.code == "not_reached"

    one_of_two = Peer(network)
    await one_of_two.ask(others[:2])
    assert one_of_two.reachability.is_inbound is not True
    if lie is LIE:
        assert one_of_two.reachability.code == "disputed" and "1 of 2" in one_of_two.reachability.reason


@in_loop
async def test_lying_peer_does_not_change_the_confirmed_addresses() -> None:
    network = FakeNetwork()
    me, others = Peer(network), [Peer(network) for _ in range(3)]
    network.listeners[HOME, PORT] = me.peer_id
    false = f"/ip4/{OTHER_HOME}/tcp/{PORT}"
    others[0].lie({"found": [{"seen": OTHER_HOME, "tried": [false], "reached": [false, "/ip4/8.8.8.8/tcp/22"]}]})
    await me.ask(others)
    assert me.reachability.confirmed == (DIRECT,)
    others[0].lie({"found": [{"seen": HOME, "tried": [DIRECT], "reached": [], "why": "timeout"}]})
    await me.ask(others)
    assert me.reachability.confirmed == (DIRECT,) and "(2 of 3 that tried)" in me.reachability.reason


@in_loop
async def test_neighbour_on_the_same_network_does_not_decide_reachability_from_outside() -> None:
    network = FakeNetwork()
    me, neighbours = Peer(network, LAN), [Peer(network, ip) for ip in ("192.168.1.6", "192.168.1.7")]
    network.listeners[LAN, PORT] = me.peer_id
    neighbours[0].lie({"found": [{"seen": HOME, "tried": [DIRECT], "reached": [], "why": "timeout"}]})
    await me.ask(neighbours)
    assert me.reachability.code == "disputed", "the findings disagree"
    outside = Peer(network, OTHER_HOME)
    outside.lie({"found": [{"seen": HOME, "tried": [DIRECT], "reached": [], "why": "timeout"}]})
    await me.ask([neighbours[1], outside])
    assert me.reachability.code == "not_reached", "only one sees this node from outside"


@in_loop
async def test_each_ip_version_is_tested_by_peers_connected_over_it() -> None:
    network = FakeNetwork()
    both = {4: PORT, 6: PORT + 1}
    me, others = Peer(network, HOME, "2001:db8::5", ports=both), [Peer(network) for _ in range(3)]
    others.append(Peer(network, "2001:db8::9"))
    network.listeners["2001:db8::5", PORT + 1] = me.peer_id
    await me.ask(others)
    known = me.reachability
    assert known.is_inbound is True and known.confirmed == (f"/ip6/2001:db8::5/tcp/{PORT + 1}",)
    assert known.is_closed(4) and not known.is_closed(6)
    assert f"[2001:db8::5]:{PORT + 1}" in known.reason


@in_loop
async def test_announced_address_is_kept_until_peers_refute_it() -> None:
    network = FakeNetwork()
    right, wrong, elsewhere = f"/ip4/{HOME}/tcp/40000", f"/ip4/{HOME}/tcp/40001", f"/ip4/{OTHER_HOME}/tcp/40000"
    announced = [right, wrong, elsewhere]
    me, others = Peer(network, announced=announced), [Peer(network) for _ in range(2)]
    assert me.reachability.announced == tuple(announced)
    network.listeners[HOME, 40000] = me.peer_id
    await me.ask(others)
    assert me.reachability.is_inbound is True and me.reachability.confirmed == (right,)
    assert me.reachability.announced == (right, elsewhere)
    assert f"Nobody reaches {HOME}:40001, which swarm.announce names." in me.reachability.reason
    assert (OTHER_HOME, 40000) not in network.dialed, "that may be another machine"


@in_loop
async def test_port_that_a_router_has_opened_is_dialed() -> None:
    """The router chooses the port, so it is another one than that on which the node listens."""
    network = FakeNetwork()
    me, others = Peer(network), [Peer(network) for _ in range(2)]
    network.listeners[HOME, 56926] = me.peer_id
    await me.ask(others)
    assert me.reachability.code == "not_reached"
    me.reachability._ask_soon = False
    mapped = f"/ip4/{HOME}/tcp/56926"
    me.reachability.note_mapped([mapped])
    assert me.reachability._ask_soon, "it is tested soon"
    await me.ask(others)
    assert me.reachability.code == "reached" and me.reachability.confirmed == (mapped,)
    me.reachability._ask_soon = False
    me.reachability.note_mapped([mapped])
    assert not me.reachability._ask_soon and "announce" not in me.reachability.reason


@in_loop
async def test_announced_host_name_is_dialed_if_it_resolves_to_the_caller() -> None:
    network = FakeNetwork()
    me = Peer(network, "127.0.0.1", announced=["/dns4/localhost/tcp/40000", "/dns4/no.such.invalid/tcp/40000"])
    network.listeners["127.0.0.1", 40000] = me.peer_id
    await me.ask([Peer(network)])
    assert me.reachability.confirmed == ("/dns4/localhost/tcp/40000",)


@in_loop
async def test_confirmed_addresses_survive_a_restart(tmp_path: Path) -> None:
    network = FakeNetwork()
    cache = tmp_path / "cache" / "addresses.json"
    me, others = Peer(network, cache=cache), [Peer(network) for _ in range(2)]
    network.listeners[HOME, PORT] = me.peer_id
    await me.ask(others)

    again = Peer(network, cache=cache)
    again.reachability._load()
    assert again.reachability.confirmed == (DIRECT,) and again.reachability.is_inbound is None
    assert again.reachability.remembered == {DIRECT}
    other_port = Peer(network, cache=cache, ports={4: PORT + 1})
    other_port.reachability._load()
    assert other_port.reachability.confirmed == (), "the node listens on another port now"

    network.listeners = {(OTHER_HOME, PORT): again.peer_id}
    again.move(OTHER_HOME)
    await again.reachability._ask_seen(others[0].peer_id)
    await again.ask(others)
    moved = f"/ip4/{OTHER_HOME}/tcp/{PORT}"
    assert not again.reachability.remembered
    assert again.reachability.confirmed == (moved,) and json.loads(cache.read_text())["confirmed"] == [moved]


@in_loop
async def test_remembered_address_is_not_reported_as_reached_before_it_is_tested(tmp_path: Path) -> None:
    cache, near = tmp_path / "addresses.json", f"/ip4/192.168.1.2/tcp/{PORT}"
    cache.write_text(json.dumps({"confirmed": [DIRECT, near]}))
    network = FakeNetwork()
    me, others = Peer(network, cache=cache), [Peer(network) for _ in range(2)]
    me.reachability._load()
    network.listeners[HOME, PORT] = me.peer_id
    await me.ask(others)
    known = me.reachability
    assert known.reason == f"Other peers reach this node at {HOME}:{PORT} (2 of 2 that tried)."
    assert known.confirmed == (DIRECT, near) and known.remembered == {near}


@in_loop
async def test_a_relay_with_a_closed_port_reports_that_it_relays_no_calls() -> None:
    network = FakeNetwork()
    relay, others = Peer(network, is_relay=True), [Peer(network) for _ in range(2)]
    await relay.ask(others)
    assert relay.reachability.code == "not_reached" and "trains" not in relay.reachability.reason
    assert f"this relay carries no calls until others reach TCP port {PORT}" in relay.reachability.reason


@pytest.mark.parametrize("text", ["", "[]", '{"confirmed": 5}', '{"confirmed": [1, null, "/", "/ip4/1.2.3.4/tcp/7"]}'])
@in_loop
async def test_malformed_cache_of_confirmed_addresses_is_ignored(tmp_path: Path, text: str) -> None:
    cache = tmp_path / "addresses.json"
    cache.write_text(text)
    me = Peer(FakeNetwork(), cache=cache)
    me.reachability._load()
    assert me.reachability.confirmed == ()


@in_loop
async def test_new_observed_address_is_tested_soon() -> None:
    network = FakeNetwork()
    me, others = Peer(network), [Peer(network) for _ in range(4)]
    network.listeners[HOME, PORT] = me.peer_id
    everybody = {other.peer_id for other in others}
    me.reachability._asked_for = everybody
    me.reachability._ask_soon = False
    await me.ask(others)
    assert not me.reachability._is_due(100.0, everybody), "nothing has changed"
    await me.reachability._ask_seen(others[0].peer_id)
    assert not me.reachability._is_due(100.0, everybody)
    me.move(OTHER_HOME)
    await me.reachability._ask_seen(others[0].peer_id)
    assert me.reachability._is_due(10.0, everybody)


@in_loop
async def test_address_that_only_one_neighbour_sees_causes_only_one_new_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour sees another address than the asked peers. Each new address costs one probe."""
    network = FakeNetwork()
    me, neighbour, others = Peer(network), Peer(network), [Peer(network) for _ in range(2)]
    known = me.reachability

    async def on_seen(_caller: str, _message: Message) -> Message:
        return Message({"seen": [LAN]})

    neighbour.wire.serve({"seen": Service(on_seen, Channel.DHT)})
    network.listeners[HOME, PORT] = me.peer_id
    known._asked_for = {other.peer_id for other in others}
    for expected in (True, False, False):
        await me.ask(others)
        known._ask_soon = False
        await known._ask_seen(neighbour.peer_id)
        assert known._ask_soon is expected
        assert known.observed == {HOME, LAN}

    monkeypatch.setattr("node.swarm.connectivity.reachability.RENEW_S", 0.0)
    await known._ask_seen(neighbour.peer_id)
    assert known._ask_soon and known.observed == {LAN}, "old observations are forgotten"


@in_virtual_time
async def test_node_without_a_listen_port_does_not_ask_for_a_probe() -> None:
    me = Peer(FakeNetwork(), ports={})
    with suppress(TimeoutError):
        await asyncio.wait_for(me.reachability.run(), 0.3)
    assert me.changes == [False] and "swarm.listen" in me.reachability.reason


@in_loop
async def test_node_asks_for_a_probe_as_soon_as_it_knows_a_peer() -> None:
    network = FakeNetwork()
    me, other = Peer(network), Peer(network)
    me.peer_table.merge([other.peer_table.pulse()])
    task = asyncio.create_task(me.reachability.run())
    try:
        async with asyncio.timeout(10):
            await me.on_change.wait()
    finally:
        task.cancel()
    assert me.changes == [False]


GOOD = {"ports": {"4": PORT}, "announced": []}


@in_loop
async def test_peer_that_sees_the_node_only_over_a_relay_is_not_asked_for_a_probe() -> None:
    """A relayed peer does not see this node. A connected peer can dial even without an inbound port."""
    network = FakeNetwork()
    me, relayed, connected = Peer(network), Peer(network), Peer(network)
    del network.seen[relayed.peer_id]
    for other in (relayed, connected):
        other.peer_table.update_own(inbound=False, via=(connected.peer_id,))
        me.peer_table.merge([other.peer_table.pulse()])
    assert await me.reachability._find_askable() == {connected.peer_id}


@in_loop
async def test_peers_that_do_not_see_the_node_do_not_keep_its_reachability_undecided() -> None:
    """Until they are tested, these peers take themselves for callable, so each seems able to see the others."""
    network = FakeNetwork()
    me, relay, *others = (Peer(network) for _ in range(5))
    for other in (relay, *others):
        me.peer_table.merge([other.peer_table.pulse()])
    for other in others:
        del network.seen[other.peer_id]

        async def on_probe(_caller: str, _message: Message) -> Message:
            raise PeerError("this node sees the caller only through a relay", code="not_seen")

        other.wire.serve({"probe": Service(on_probe, Channel.DHT)})
    for _ in range(3):
        relay.reachability._answered_at_s.clear()
        await me.reachability.ask(sorted(await me.reachability._find_askable()))
    assert await me.reachability._find_askable() == {relay.peer_id}
    assert me.reachability.is_inbound is False


@in_loop
async def test_probe_dials_only_the_callers_own_address_and_not_too_often() -> None:
    network = FakeNetwork()
    caller, asked = Peer(network), Peer(network)

    async def probe(**header: object) -> Message:
        return await caller.wire.call(asked.peer_id, "probe", Message(header), timeout_s=5)

    for port in (0, 65536, -1, "80", None, 80.0, True):
        with pytest.raises(PeerError):
            await probe(**GOOD | {"ports": {"4": port}})
    wrong: list[dict[str, Any]] = [
        {"ports": {}},
        {"ports": {"5": 1}},
        {"ports": [1]},
        {"announced": 5},
        {"announced": [DIRECT] * 5},
    ]
    for bad in wrong:
        with pytest.raises(PeerError):
            await probe(**GOOD | bad)
    strangers = [f"/ip4/{OTHER_HOME}/tcp/22", "/x", f"{DIRECT}/p2p/x"]
    found = (await probe(**GOOD | {"host": OTHER_HOME, "announced": strangers})).header["found"]
    assert found == [{"seen": HOME, "tried": [DIRECT], "reached": [], "why": "refused"}]
    assert network.dialed == [(HOME, PORT)]
    with pytest.raises(PeerError) as caught:
        await probe(**GOOD)
    assert caught.value.code == "too_soon"


@in_virtual_time
async def test_two_silent_ports_are_reported_before_the_call_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.swarm.connectivity.reachability.PROBE_S", 0.5)
    monkeypatch.setattr("node.swarm.connectivity.reachability.CALL_S", 0.8)
    network = FakeNetwork()

    async def no_answer(_host: str, _port: int, timeout_s: float) -> str:
        await asyncio.sleep(timeout_s)
        raise PeerError("nobody", code="timeout")

    monkeypatch.setattr(network, "dial", no_answer)
    me, other = Peer(network, HOME, "2001:db8::5", ports={4: PORT, 6: PORT}), Peer(network)
    other.move(HOME, "2001:db8::9")
    await me.ask([other])
    assert me.reachability.code == "not_reached"
    assert me.reachability.is_closed(4) and me.reachability.is_closed(6)


@in_loop
async def test_caller_that_is_seen_only_over_a_relay_is_not_probed() -> None:
    network = FakeNetwork()
    caller, asked = Peer(network), Peer(network)
    caller.move()
    with pytest.raises(PeerError) as caught:
        await caller.wire.call(asked.peer_id, "probe", Message(GOOD), timeout_s=5)
    assert caught.value.code == "not_seen"


@in_loop
async def test_number_of_concurrent_probes_is_limited() -> None:
    network = FakeNetwork()
    asked = Peer(network)
    callers = [Peer(network) for _ in range(2)]
    for _ in range(MAX_PROBES):
        await asked.reachability._probes.acquire()
    with pytest.raises(PeerError):
        await callers[0].wire.call(asked.peer_id, "probe", Message(GOOD), timeout_s=5)
    asked.reachability._probes.release()
    await callers[1].wire.call(asked.peer_id, "probe", Message(GOOD), timeout_s=5)

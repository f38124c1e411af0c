"""Tests of hole punching: its candidates, its pauses, and the addresses that others can make a member dial."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address, ip_interface
from typing import Any

import pytest

from node.errors import PeerError
from node.status import Channel, Phase
from node.swarm.connectivity.hole_punching import (
    MAX_PAUSE_S,
    PAUSE_S,
    SPACING_S,
    HolePunching,
    observer_endpoint,
    read_observed,
)
from node.swarm.identity import Identity, new_identity
from node.swarm.membership.peer_table import PeerRecord, PeerTable, sign_record
from node.swarm.transport.address_scope import LocalAddresses
from node.swarm.transport.wire import MALFORMED_ERRORS, Message, Service
from tests.event_loop import in_loop
from tests.in_process import InProcessNetwork, InProcessWire

RUN = "a" * 64
OUTER = {"one": ("8.8.4.4", 40001), "other": ("9.9.9.9", 40002)}
RELAY_IP, RELAY_IP6 = "11.0.1.2", "2001:4860::9"


class Wire(InProcessWire):
    """An in-process wire that records UDP dials."""

    def __init__(self, hub: InProcessNetwork, peer_id: str, network: FakeNetwork) -> None:
        super().__init__(hub, peer_id)
        self.relayed_at_s: dict[str, float] = {}
        self.network = network
        self.dialed: list[tuple[str, str, int]] = []
        self.dropped: list[str] = []
        self.connected: set[str] = set()
        self.udp_versions = {4, 6}
        self.local_addresses = LocalAddresses(interfaces=(ip_interface("192.168.1.2/24"),))

    async def connect_quic(self, peer_id: str, ip: str, port: int) -> None:
        self.dialed.append((peer_id, ip, port))
        to_observer = self.network.relay_has_udp and ip_address(ip).version in self.udp_versions
        if not (to_observer if peer_id == self.network.observer else self.network.nats_allow):
            raise PeerError("nobody", code="unreachable")
        self.connected.add(peer_id)

    async def seen(self) -> dict[str, tuple[str, ...]]:
        connected: dict[str, tuple[str, ...]] = dict.fromkeys(self.connected, ("8.8.8.8",))
        return connected | {self.network.relay.peer_id: (self.network.relay_seen_at,)}

    async def drop(self, peer_id: str) -> None:
        self.connected.discard(peer_id)
        self.dropped.append(peer_id)


class Member:
    def __init__(self, hub: InProcessNetwork, identity: Identity, network: FakeNetwork) -> None:
        self.peer_id = identity.peer_id
        self.wire = Wire(hub, self.peer_id, network)
        record = PeerRecord(
            peer_id=self.peer_id, number=1, run=RUN, head=RUN, phase=Phase.TRAINING, inbound=False,
            via=(network.relay.peer_id,),
        )  # fmt: skip
        self.now_s = asyncio.get_running_loop().time
        self.peer_table = PeerTable(identity, record, self.now_s)
        self.punching = HolePunching(self.wire, self.peer_table)  # type: ignore[arg-type]

    def say(self, **changes: object) -> None:
        self.peer_table.update_own(number=self.peer_table.me.number + 1, **changes)

    def hear(self, *others: Member) -> None:
        self.peer_table.merge(sign_record(other.peer_table.identity, other.peer_table.me) for other in others)

    async def punch(self, peer_id: str, relay: str, version: object = 4) -> Message:
        return await self.wire.call(peer_id, "punch", Message({"relay": relay, "version": version}), timeout_s=5)

    def tries(self) -> list[str]:
        return [record.peer_id for record in self.punching._candidates()]


class FakeNetwork:
    """Two members, sorted by peer id, and a relay that reports the addresses in `outer`."""

    def __init__(self) -> None:
        hub, self.relay = InProcessNetwork(), new_identity()
        self.observer, self.nats_allow, self.relay_has_udp = new_identity().peer_id, True, True
        self.relay_seen_at = RELAY_IP
        relay_wire = InProcessWire(hub, self.relay.peer_id)
        relay_wire.serve({verb: Service(handler, Channel.DHT) for verb, handler in
                          (("observer", self._on_observer), ("outer", self._on_outer))})  # fmt: skip
        one, other = sorted((new_identity() for _ in range(2)), key=lambda identity: identity.peer_id)
        self.one, self.other = Member(hub, one, self), Member(hub, other, self)
        self.outer: dict[str, Any] = {one.peer_id: OUTER["one"], other.peer_id: OUTER["other"]}
        self.relay_record = PeerRecord(
            peer_id=self.relay.peer_id, number=1, run=RUN, head=RUN, relays=True,
            addresses=(f"/ip4/192.168.1.2/tcp/5/p2p/{self.relay.peer_id}",
                       f"/ip4/{RELAY_IP}/tcp/31337/p2p/{self.relay.peer_id}"),
        )  # fmt: skip
        for member in (self.one, self.other):
            member.hear(self.one, self.other)
            member.peer_table.merge([sign_record(self.relay, self.relay_record)])
        self.one.wire.relayed_at_s[other.peer_id] = self.one.now_s()
        self.other.wire.relayed_at_s[one.peer_id] = self.one.now_s()

    async def _on_observer(self, _caller: str, _message: Message) -> Message:
        return Message({"peer": self.observer})

    async def _on_outer(self, _caller: str, message: Message) -> Message:
        return Message({"outer": self.outer[message.header["of"]]})

    async def one_tries(self) -> None:
        record = self.one.peer_table.find(self.other.peer_id)
        assert record is not None
        await self.one.punching._try(record)
        await asyncio.gather(*self.other.punching._dials)


@in_loop
async def test_both_members_dial_the_observed_address_of_the_other() -> None:
    network = FakeNetwork()
    one, other = network.one, network.other
    assert one.tries() == [other.peer_id] and other.tries() == []
    await network.one_tries()
    observed = (network.observer, RELAY_IP, 31337)
    assert one.wire.dialed == [observed, (other.peer_id, *OUTER["other"])]
    assert other.wire.dialed == [observed, (one.peer_id, *OUTER["one"])]
    assert one.tries() == [], "a pause follows an attempt"


@in_loop
async def test_hole_punching_is_tried_only_with_relayed_members_that_share_a_relay() -> None:
    network = FakeNetwork()
    one, other = network.one, network.other
    for member, was, now in (
        (other, {"inbound": False}, {"inbound": True}),
        (other, {"phase": Phase.TRAINING}, {"phase": Phase.PAUSED}),
        (other, {"via": (network.relay.peer_id,)}, {"via": ()}),
        (one, {"inbound": False}, {"inbound": True}),
        (one, {"via": (network.relay.peer_id,)}, {"via": ()}),
    ):
        member.say(**now)
        one.hear(other)
        assert one.tries() == [], now
        member.say(**was)
        one.hear(other)
        assert one.tries() == [other.peer_id], was
    one.wire.relayed_at_s[other.peer_id] -= 3600
    assert one.tries() == [], "it was not called lately"


@in_loop
async def test_pause_between_punches_doubles_on_failure_and_resets_on_success() -> None:
    network = FakeNetwork()
    punching, peer_id = network.one.punching, network.other.peer_id
    network.nats_allow = False
    pauses = []
    for _ in range(8):
        network.other.punching._answered_at_s.clear()
        await network.one_tries()
        pauses.append(round(punching._due_at_s[peer_id] - network.one.now_s()))
    assert pauses[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S] and pauses[-1] == MAX_PAUSE_S
    network.nats_allow = True
    network.other.punching._answered_at_s.clear()
    await network.one_tries()
    assert round(punching._due_at_s[peer_id] - network.one.now_s()) == PAUSE_S


@in_loop
async def test_punch_request_without_a_shared_relay_or_soon_after_another_is_refused() -> None:
    network = FakeNetwork()
    one, other = network.one, network.other
    for relay in (new_identity().peer_id, one.peer_id, ""):
        with pytest.raises(PeerError, match="no relay of both"):
            await one.punch(other.peer_id, relay)
    for version in (5, "4", None, [4]):
        with pytest.raises(PeerError):
            await one.punch(other.peer_id, network.relay.peer_id, version)
    assert other.wire.dialed == []
    await one.punch(other.peer_id, network.relay.peer_id)
    with pytest.raises(PeerError, match="too soon"):
        await one.punch(other.peer_id, network.relay.peer_id)
    other.punching._answered_at_s[one.peer_id] -= SPACING_S
    await one.punch(other.peer_id, network.relay.peer_id)


@in_loop
async def test_number_of_callers_whose_punch_requests_are_answered_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.swarm.connectivity.hole_punching.MAX_ANSWERED", 1)
    network = FakeNetwork()
    network.other.punching._answered_at_s["another"] = network.other.now_s()
    await network.one_tries()
    assert network.other.wire.dialed == [], "too soon"
    assert not network.one.punching._failures[network.other.peer_id], "being too soon is no failure"


@in_loop
async def test_relay_without_udp_is_not_asked_for_its_observer_again_soon() -> None:
    network = FakeNetwork()
    network.relay_has_udp = False
    for _ in range(3):
        await network.one_tries()
    assert len(network.one.wire.dialed) == 1 and network.other.wire.dialed == []


@in_loop
async def test_all_pauses_end_when_the_own_addresses_change() -> None:
    network = FakeNetwork()
    one, other = network.one, network.other
    network.relay_has_udp = False
    one.punching._end_pauses_after_move()
    await network.one_tries()
    one.punching._end_pauses_after_move()
    assert one.tries() == []
    one.wire.local_addresses = LocalAddresses(interfaces=(ip_interface("10.7.0.2/16"),))
    network.relay_has_udp = True
    one.punching._end_pauses_after_move()
    assert one.tries() == [other.peer_id]
    await network.one_tries()
    assert (other.peer_id, *OUTER["other"]) in one.wire.dialed
    one.wire.local_addresses = LocalAddresses(
        interfaces=(*one.wire.local_addresses.interfaces, ip_interface("fe80::1/64"))
    )
    one.punching._end_pauses_after_move()
    assert one.tries() == [], "a link-local address is no new network"


@pytest.mark.parametrize("without", ["one", "other"])
@in_loop
async def test_members_try_ipv4_after_ipv6_has_failed_for_one_of_them(without: str) -> None:
    network = FakeNetwork()
    one, other = network.one, network.other
    address = f"/ip6/{RELAY_IP6}/tcp/31337/p2p/{network.relay.peer_id}"
    changes = {"number": 2, "addresses": (address, *network.relay_record.addresses)}
    for member in (one, other):
        member.peer_table.merge([sign_record(network.relay, network.relay_record.model_copy(update=changes))])
    network.relay_seen_at = RELAY_IP6
    getattr(network, without).wire.udp_versions = {4}
    await network.one_tries()
    assert (one.peer_id, *OUTER["one"]) not in other.wire.dialed
    other.punching._answered_at_s.clear()
    await network.one_tries()
    assert (other.peer_id, *OUTER["other"]) in one.wire.dialed and (one.peer_id, *OUTER["one"]) in other.wire.dialed


@in_loop
async def test_punch_request_of_a_stranger_is_refused() -> None:
    network = FakeNetwork()
    stranger = Member(network.one.wire._hub, new_identity(), network)
    with pytest.raises(PeerError, match="does not know"):
        await stranger.punch(network.other.peer_id, network.relay.peer_id)
    assert network.other.wire.dialed == []


@pytest.mark.parametrize(
    "told",
    [("192.168.1.1", 5000), ("100.64.0.1", 5000), ("127.0.0.1", 5000), ("239.1.2.3", 5000), ("0.0.0.0", 5000),
     ("8.8.8.8", 53), ("8.8.8.8", 0), ("8.8.8.8", 2**16), ("8.8.8.8", True), ("8.8.8.8", "5000"),
     ("2001:4860::1", 5000), ("example.org", 5000), (5, 5000), ("8.8.8.8",), "8.8.8.8", None],
)  # fmt: skip
def test_impossible_observed_address_is_refused(told: object) -> None:
    with pytest.raises((PeerError, *MALFORMED_ERRORS)):
        read_observed({"outer": told}, 4)


def test_observed_address_of_the_requested_ip_version_is_read() -> None:
    assert read_observed({"outer": ["8.8.8.8", 5000]}, 4) == ("8.8.8.8", 5000)
    assert read_observed({"outer": ["2001:4860::1", 5000]}, 6) == ("2001:4860::1", 5000)
    with pytest.raises(PeerError):
        read_observed({"outer": ["::ffff:8.8.8.8", 5000]}, 6)


@in_loop
async def test_invalid_observed_address_ends_only_the_hole_punching_attempt() -> None:
    network = FakeNetwork()
    for told in (("10.0.0.1", 5000), "nothing", None):
        network.outer[network.other.peer_id] = told
        network.other.punching._answered_at_s.clear()
        await network.one_tries()
    assert {peer for peer, _, _ in network.one.wire.dialed} == {network.observer}


@in_loop
async def test_relay_cannot_name_a_known_peer_as_its_address_observer() -> None:
    network = FakeNetwork()
    network.one.wire.connected.add(friend := new_identity().peer_id)
    for observer in (network.other.peer_id, friend, network.relay.peer_id):
        network.observer = observer
        await network.one_tries()
    assert network.one.wire.dialed == [] and network.one.punching._observers == {}


@pytest.mark.parametrize("peer", ["0OIl", "é", "", 7])
@in_loop
async def test_relay_cannot_name_an_invalid_peer_id_as_its_address_observer(peer: Any) -> None:
    network = FakeNetwork()
    network.observer = peer
    await network.one_tries()
    assert network.one.wire.dialed == [] and not network.one.punching._observers


@in_loop
async def test_idle_connection_to_an_address_observer_is_closed() -> None:
    network = FakeNetwork()
    await network.one_tries()
    punching = network.one.punching
    await punching._leave_observers()
    assert network.one.wire.dropped == []
    punching._observers[network.observer] -= 3600
    await punching._leave_observers()
    assert network.one.wire.dropped == [network.observer] and not punching._observers


def test_observer_is_dialed_preferably_at_the_address_where_its_relay_is_seen() -> None:
    told = ["/ip4/192.168.1.2/tcp/1", "/ip4/8.8.8.8/tcp/2", "/ip4/9.9.9.9/tcp/3", "/ip6/2001:4860::1/tcp/4"]
    assert observer_endpoint(told, ["9.9.9.9"], None).port == 3
    assert observer_endpoint(told, ["2001:4860::1"], None).port == 4
    assert observer_endpoint(told, ["2001:4860::1"], 4).port == 2
    for addresses, version in ((told[:1], None), (told[1:3], 6), (["/dns4/relay.example/tcp/5"], None)):
        with pytest.raises(PeerError):
            observer_endpoint(addresses, [], version)

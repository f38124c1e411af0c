"""Whom a member tries to connect with directly, what it lets a relay or a caller send it to dial, and how often."""

from __future__ import annotations

import asyncio
import functools
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from node.errors import PeerError
from node.status import Channel, Phase
from node.swarm.base import STUMBLES, Message, Service
from node.swarm.directory import Directory, PeerRecord, sign_record
from node.swarm.identity import Identity, new_identity
from node.swarm.local import LocalHub, LocalWire

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # hivemind's own
    from node.swarm.hole_punching import (
        MAX_PAUSE_S,
        PAUSE_S,
        SPACING_S,
        HolePunching,
        observer_place,
        read_outer,
    )

RUN = "a" * 64
OUTER = {"one": ("8.8.4.4", 40001), "other": ("9.9.9.9", 40002)}
RELAY_IP = "11.0.1.2"


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return run


class Wire(LocalWire):
    """Notes what is dialed over UDP."""

    def __init__(self, hub: LocalHub, peer_id: str, streets: Streets) -> None:
        super().__init__(hub, peer_id)
        self.relayed_at_s: dict[str, float] = {}
        self.streets = streets
        self.dialed: list[tuple[str, str, int]] = []
        self.dropped: list[str] = []
        self.connected: set[str] = set()

    async def connect_quic(self, peer_id: str, ip: str, port: int) -> None:
        self.dialed.append((peer_id, ip, port))
        if not (self.streets.relay_has_udp if peer_id == self.streets.observer else self.streets.nats_allow):
            raise PeerError("nobody", code="unreachable")
        self.connected.add(peer_id)

    async def seen(self) -> dict[str, tuple[str, ...]]:
        return {self.streets.relay.peer_id: (RELAY_IP,)} | dict.fromkeys(self.connected, ("8.8.8.8",))

    async def drop(self, peer_id: str) -> None:
        self.connected.discard(peer_id)
        self.dropped.append(peer_id)


class Member:
    def __init__(self, hub: LocalHub, identity: Identity, streets: Streets) -> None:
        self.peer_id = identity.peer_id
        self.wire = Wire(hub, self.peer_id, streets)
        record = PeerRecord(
            peer_id=self.peer_id, number=1, run=RUN, head=RUN, phase=Phase.TRAINING, inbound=False,
            via=(streets.relay.peer_id,),
        )  # fmt: skip
        self.now_s = asyncio.get_running_loop().time
        self.directory = Directory(identity, record, self.now_s)
        self.punching = HolePunching(self.wire, self.directory)  # type: ignore[arg-type]

    def say(self, **changes: object) -> None:
        self.directory.say(number=self.directory.me.number + 1, **changes)

    def hear(self, *others: Member) -> None:
        self.directory.merge(sign_record(other.directory.identity, other.directory.me) for other in others)

    async def punch(self, peer_id: str, relay: str, version: object = 4) -> Message:
        return await self.wire.call(peer_id, "punch", Message({"relay": relay, "version": version}), timeout_s=5)

    def tries(self) -> list[str]:
        return [record.peer_id for record in self.punching._candidates()]


class Streets:
    """Two members, the one with the smaller peer id first, and a relay that tells what `outer` says."""

    def __init__(self) -> None:
        hub, self.relay = LocalHub(), new_identity()
        self.observer, self.nats_allow, self.relay_has_udp = new_identity().peer_id, True, True
        relay_wire = LocalWire(hub, self.relay.peer_id)
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
            member.directory.merge([sign_record(self.relay, self.relay_record)])
        self.one.wire.relayed_at_s[other.peer_id] = self.one.now_s()
        self.other.wire.relayed_at_s[one.peer_id] = self.one.now_s()

    async def _on_observer(self, _caller: str, _message: Message) -> Message:
        return Message({"peer": self.observer})

    async def _on_outer(self, _caller: str, message: Message) -> Message:
        return Message({"outer": self.outer[message.header["of"]]})

    async def one_tries(self) -> None:
        record = self.one.directory.find(self.other.peer_id)
        assert record is not None
        await self.one.punching._try(record)
        await asyncio.gather(*self.other.punching._dials)


@in_loop
async def test_both_dial_what_their_relay_sees_and_only_one_of_them_begins() -> None:
    streets = Streets()
    one, other = streets.one, streets.other
    assert one.tries() == [other.peer_id] and other.tries() == []
    await streets.one_tries()
    observed = (streets.observer, RELAY_IP, 31337)
    assert one.wire.dialed == [observed, (other.peer_id, *OUTER["other"])]
    assert other.wire.dialed == [observed, (one.peer_id, *OUTER["one"])]
    assert one.tries() == [], "not before the pause is over"


@in_loop
async def test_only_members_without_a_port_that_are_called_over_a_shared_relay_are_tried() -> None:
    streets = Streets()
    one, other = streets.one, streets.other
    for member, was, now in (
        (other, {"inbound": False}, {"inbound": True}),
        (other, {"phase": Phase.TRAINING}, {"phase": Phase.PAUSED}),
        (other, {"via": (streets.relay.peer_id,)}, {"via": ()}),
        (one, {"inbound": False}, {"inbound": True}),
        (one, {"via": (streets.relay.peer_id,)}, {"via": ()}),
    ):
        member.say(**now)
        one.hear(other)
        assert one.tries() == [], now
        member.say(**was)
        one.hear(other)
        assert one.tries() == [other.peer_id], was
    one.wire.relayed_at_s[other.peer_id] -= 3600
    assert one.tries() == [], "nobody calls it"


@in_loop
async def test_pauses_grow_while_nats_do_not_allow_it_and_shrink_after_a_success() -> None:
    streets = Streets()
    punching, peer_id = streets.one.punching, streets.other.peer_id
    streets.nats_allow = False
    pauses = []
    for _ in range(8):
        streets.other.punching._answered_at_s.clear()
        await streets.one_tries()
        pauses.append(round(punching._due_at_s[peer_id] - streets.one.now_s()))
    assert pauses[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S] and pauses[-1] == MAX_PAUSE_S
    streets.nats_allow = True
    streets.other.punching._answered_at_s.clear()
    await streets.one_tries()
    assert round(punching._due_at_s[peer_id] - streets.one.now_s()) == PAUSE_S


@in_loop
async def test_a_caller_is_answered_once_a_minute_and_only_about_a_relay_of_both() -> None:
    streets = Streets()
    one, other = streets.one, streets.other
    for relay in (new_identity().peer_id, one.peer_id, ""):
        with pytest.raises(PeerError, match="no relay of both"):
            await one.punch(other.peer_id, relay)
    for version in (5, "4", None, [4]):
        with pytest.raises(PeerError):
            await one.punch(other.peer_id, streets.relay.peer_id, version)
    assert other.wire.dialed == []
    await one.punch(other.peer_id, streets.relay.peer_id)
    with pytest.raises(PeerError, match="too soon"):
        await one.punch(other.peer_id, streets.relay.peer_id)
    other.punching._answered_at_s[one.peer_id] -= SPACING_S
    await one.punch(other.peer_id, streets.relay.peer_id)


@in_loop
async def test_few_callers_a_minute_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.swarm.hole_punching.MAX_ANSWERED", 1)
    streets = Streets()
    streets.other.punching._answered_at_s["another"] = streets.other.now_s()
    await streets.one_tries()
    assert streets.other.wire.dialed == [], "too soon"
    assert not streets.one.punching._failures[streets.other.peer_id], "it says nothing of the NATs"


@in_loop
async def test_a_relay_that_does_not_answer_over_udp_is_left_alone_for_a_while() -> None:
    streets = Streets()
    streets.relay_has_udp = False
    for _ in range(3):
        await streets.one_tries()
    assert len(streets.one.wire.dialed) == 1 and streets.other.wire.dialed == []


@in_loop
async def test_a_stranger_is_not_answered() -> None:
    streets = Streets()
    stranger = Member(streets.one.wire._hub, new_identity(), streets)
    with pytest.raises(PeerError, match="does not know"):
        await stranger.punch(streets.other.peer_id, streets.relay.peer_id)
    assert streets.other.wire.dialed == []


@pytest.mark.parametrize(
    "told",
    [("192.168.1.1", 5000), ("100.64.0.1", 5000), ("127.0.0.1", 5000), ("239.1.2.3", 5000), ("0.0.0.0", 5000),
     ("8.8.8.8", 53), ("8.8.8.8", 0), ("8.8.8.8", 2**16), ("8.8.8.8", True), ("8.8.8.8", "5000"),
     ("2001:4860::1", 5000), ("example.org", 5000), (5, 5000), ("8.8.8.8",), "8.8.8.8", None],
)  # fmt: skip
def test_an_address_that_no_home_has_is_not_dialed(told: object) -> None:
    with pytest.raises((PeerError, *STUMBLES)):
        read_outer({"outer": told}, 4)


def test_an_address_of_a_home_is_dialed() -> None:
    assert read_outer({"outer": ["8.8.8.8", 5000]}, 4) == ("8.8.8.8", 5000)
    assert read_outer({"outer": ["2001:4860::1", 5000]}, 6) == ("2001:4860::1", 5000)
    with pytest.raises(PeerError):
        read_outer({"outer": ["::ffff:8.8.8.8", 5000]}, 6)


@in_loop
async def test_what_a_relay_makes_up_ends_the_try_and_nothing_else() -> None:
    streets = Streets()
    for told in (("10.0.0.1", 5000), "nothing", None):
        streets.outer[streets.other.peer_id] = told
        streets.other.punching._answered_at_s.clear()
        await streets.one_tries()
    assert {peer for peer, _, _ in streets.one.wire.dialed} == {streets.observer}


@in_loop
async def test_a_relay_cannot_call_another_peer_its_observer() -> None:
    streets = Streets()
    streets.one.wire.connected.add(friend := new_identity().peer_id)
    for observer in (streets.other.peer_id, friend, streets.relay.peer_id):
        streets.observer = observer
        await streets.one_tries()
    assert streets.one.wire.dialed == [] and streets.one.punching._observers == {}


@in_loop
async def test_the_connection_to_an_observer_is_closed_when_nobody_needs_it() -> None:
    streets = Streets()
    await streets.one_tries()
    punching = streets.one.punching
    await punching._leave_observers()
    assert streets.one.wire.dropped == []
    punching._observers[streets.observer] -= 3600
    await punching._leave_observers()
    assert streets.one.wire.dropped == [streets.observer] and not punching._observers


def test_an_observer_is_looked_for_where_the_relay_is_seen() -> None:
    told = ["/ip4/192.168.1.2/tcp/1", "/ip4/8.8.8.8/tcp/2", "/ip4/9.9.9.9/tcp/3", "/ip6/2001:4860::1/tcp/4"]
    assert observer_place(told, ["9.9.9.9"], None).port == 3
    assert observer_place(told, ["2001:4860::1"], None).port == 4
    assert observer_place(told, ["2001:4860::1"], 4).port == 2
    for addresses, version in ((told[:1], None), (told[1:3], 6), (["/dns4/relay.example/tcp/5"], None)):
        with pytest.raises(PeerError):
            observer_place(addresses, [], version)

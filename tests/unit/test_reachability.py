"""Whether a node takes itself for reachable, and where: the rule, who asks whom, and what a peer may have probed."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from node.errors import PeerError
from node.status import Channel
from node.swarm.base import Message, Service
from node.swarm.directory import Directory, PeerRecord
from node.swarm.identity import new_identity
from node.swarm.local import LocalHub, LocalWire
from node.swarm.reachability import MAX_PROBES, Finding, Reachability, judge, listen_ports

RUN = "a" * 64
HOME, LAN, OTHER_HOME = "203.0.113.2", "192.168.1.5", "198.51.100.9"
PORT = 31337
DIRECT = f"/ip4/{HOME}/tcp/{PORT}"


def finding(seen: str, *, reached: bool) -> Finding:
    tried = (f"/ip4/{seen}/tcp/{PORT}",)
    return Finding(seen, tried, tried if reached else (), "" if reached else "refused")


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
        # one that lies
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
def test_the_rule(findings: Sequence[Finding], askable: int, verdict: bool | None) -> None:
    assert judge(findings, askable) is verdict


def test_the_ports_are_those_of_the_first_address_of_each_ip_version() -> None:
    relay = "/ip4/1.2.3.4/tcp/7/p2p/QmR/p2p-circuit/p2p/QmX"
    own = ["/ip4/10.0.0.1/tcp/41234/p2p/QmX", "/ip4/10.0.0.2/tcp/5/p2p/QmX", "/ip6/fd00::1/tcp/6/p2p/QmX"]
    assert listen_ports([relay, "/ip4/0.0.0.0/udp/5/quic", *own]) == {4: 41234, 6: 6}
    assert listen_ports([]) == listen_ports([relay]) == {}


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return run


class Streets:
    """Who lives where: what a dial to an IP address and a port finds, as `peer_at` would."""

    def __init__(self) -> None:
        self.lives_at: dict[tuple[str, int], str] = {}
        """Peer id, or the word for why nobody answers."""
        self.knocked: list[tuple[str, int]] = []

    async def dial(self, host: str, port: int, timeout_s: float) -> str:
        self.knocked.append((host, port))
        found = self.lives_at.get((host, port), "refused")
        if found in ("refused", "timeout", "not_libp2p"):
            raise PeerError("nobody", code=found)
        return found


class Peer:
    """One end on a local wire; all others see it at `ips`."""

    def __init__(
        self,
        hub: LocalHub,
        streets: Streets,
        *ips: str,
        ports: Mapping[int, int] | None = None,
        announced: Sequence[str] = (),
        cache: Path | None = None,
        is_relay: bool = False,
    ) -> None:
        identity = new_identity()
        self.peer_id = identity.peer_id
        self.hub, self.ips = hub, ips or (HOME,)
        hub.seen = getattr(hub, "seen", {})  # type: ignore[attr-defined]
        hub.seen[self.peer_id] = self.ips  # type: ignore[attr-defined]
        self.wire = LocalWire(hub, self.peer_id)
        record = PeerRecord(peer_id=self.peer_id, number=1, run=RUN, head=RUN)
        self.directory = Directory(identity, record, asyncio.get_running_loop().time)
        self.changes: list[bool] = []
        self.changed = asyncio.Event()
        self.reachability = Reachability(
            self.wire,
            self.directory,
            self._seen,
            {4: PORT} if ports is None else ports,
            changed=self._change,
            rng=random.Random(0),
            announced=announced,
            cache=cache,
            dial=streets.dial,
            is_relay=is_relay,
        )

    def _change(self, inbound: bool) -> None:
        self.changes.append(inbound)
        self.changed.set()

    async def _seen(self) -> dict[str, tuple[str, ...]]:
        return {peer: ips for peer, ips in self.hub.seen.items() if peer != self.peer_id}  # type: ignore[attr-defined]

    def move(self, *ips: str) -> None:
        self.hub.seen[self.peer_id] = ips  # type: ignore[attr-defined]

    async def ask(self, others: Sequence[Peer]) -> None:
        for other in others:
            other.reachability._answered_at_s.clear()
        await self.reachability.ask([other.peer_id for other in others])

    def lie(self, answer: dict[str, Any]) -> None:
        async def on_probe(_caller: str, _message: Message) -> Message:
            return Message(answer)

        self.wire.serve({"probe": Service(on_probe, Channel.DHT)})


@in_loop
async def test_an_address_that_others_have_dialed_is_confirmed() -> None:
    hub, streets = LocalHub(), Streets()
    me, others = Peer(hub, streets), [Peer(hub, streets) for _ in range(2)]
    streets.lives_at[HOME, PORT] = me.peer_id
    known = me.reachability
    assert known.is_inbound is None and known.code == "not_tested" and not known.confirmed
    assert known.reason == "Not tested yet: no other peer has tried to connect."
    await me.ask(others)
    assert known.is_inbound is True and known.code == "reached" and known.confirmed == (DIRECT,)
    assert known.reason == f"Other peers reach this node at {HOME}:{PORT} (2 of 2 that tried)."
    assert me.changes == [], "it took itself for callable before"


@in_loop
async def test_a_port_that_closes_is_told_with_the_mend_the_second_time() -> None:
    hub, streets = LocalHub(), Streets()
    me, others = Peer(hub, streets), [Peer(hub, streets) for _ in range(2)]
    streets.lives_at[HOME, PORT] = me.peer_id
    await me.ask(others)
    del streets.lives_at[HOME, PORT]
    for expected in (True, False):  # One failure alone may be who asked.
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
async def test_whoever_else_answers_at_the_address_does_not_make_it_reachable(neighbour: str, words: str) -> None:
    hub, streets = LocalHub(), Streets()
    me, other = Peer(hub, streets), Peer(hub, streets)
    streets.lives_at[HOME, PORT] = new_identity().peer_id if neighbour == "another" else neighbour
    await me.ask([other])
    assert me.reachability.is_inbound is False and words in me.reachability.reason
    assert not me.reachability.confirmed


LIE = {"found": [{"seen": HOME, "tried": [DIRECT], "reached": [DIRECT], "why": ""}]}
OLD_LIE = {"reached": True, "public": True}


@pytest.mark.parametrize("lie", [LIE, OLD_LIE])
@in_loop
async def test_one_liar_outvotes_no_two(lie: dict[str, Any]) -> None:
    hub, streets = LocalHub(), Streets()
    me, others = Peer(hub, streets), [Peer(hub, streets) for _ in range(3)]
    others[0].lie(lie)
    await me.ask(others)
    assert me.reachability.is_inbound is False and me.reachability.code == "not_reached"

    one_of_two = Peer(hub, streets)
    await one_of_two.ask(others[:2])
    assert one_of_two.reachability.is_inbound is not True
    if lie is LIE:
        assert one_of_two.reachability.code == "disputed" and "1 of 2" in one_of_two.reachability.reason


@in_loop
async def test_a_liar_takes_no_address_away_and_puts_none_first() -> None:
    hub, streets = LocalHub(), Streets()
    me, others = Peer(hub, streets), [Peer(hub, streets) for _ in range(3)]
    streets.lives_at[HOME, PORT] = me.peer_id
    false = f"/ip4/{OTHER_HOME}/tcp/{PORT}"
    others[0].lie({"found": [{"seen": OTHER_HOME, "tried": [false], "reached": [false, "/ip4/8.8.8.8/tcp/22"]}]})
    await me.ask(others)
    assert me.reachability.confirmed == (DIRECT,)
    others[0].lie({"found": [{"seen": HOME, "tried": [DIRECT], "reached": [], "why": "timeout"}]})
    await me.ask(others)
    assert me.reachability.confirmed == (DIRECT,) and "(2 of 3 that tried)" in me.reachability.reason


@in_loop
async def test_a_peer_on_this_network_does_not_speak_for_those_outside() -> None:
    hub, streets = LocalHub(), Streets()
    me, neighbours = Peer(hub, streets, LAN), [Peer(hub, streets, ip) for ip in ("192.168.1.6", "192.168.1.7")]
    streets.lives_at[LAN, PORT] = me.peer_id
    neighbours[0].lie({"found": [{"seen": HOME, "tried": [DIRECT], "reached": [], "why": "timeout"}]})
    await me.ask(neighbours)
    assert me.reachability.code == "disputed", "one word against another"
    outside = Peer(hub, streets, OTHER_HOME)
    outside.lie({"found": [{"seen": HOME, "tried": [DIRECT], "reached": [], "why": "timeout"}]})
    await me.ask([neighbours[1], outside])
    assert me.reachability.code == "not_reached", "only one sees this node from outside"


@in_loop
async def test_ipv4_and_ipv6_are_asked_about_of_those_that_are_connected_over_each() -> None:
    hub, streets = LocalHub(), Streets()
    both = {4: PORT, 6: PORT + 1}
    me, others = Peer(hub, streets, HOME, "2001:db8::5", ports=both), [Peer(hub, streets) for _ in range(3)]
    others.append(Peer(hub, streets, "2001:db8::9"))
    streets.lives_at["2001:db8::5", PORT + 1] = me.peer_id
    await me.ask(others)
    known = me.reachability
    assert known.is_inbound is True and known.confirmed == (f"/ip6/2001:db8::5/tcp/{PORT + 1}",)
    assert known.is_closed(4) and not known.is_closed(6)
    assert f"[2001:db8::5]:{PORT + 1}" in known.reason


@in_loop
async def test_what_the_user_announces_holds_until_nobody_reaches_it() -> None:
    hub, streets = LocalHub(), Streets()
    right, wrong, elsewhere = f"/ip4/{HOME}/tcp/40000", f"/ip4/{HOME}/tcp/40001", f"/ip4/{OTHER_HOME}/tcp/40000"
    announced = [right, wrong, elsewhere]
    me, others = Peer(hub, streets, announced=announced), [Peer(hub, streets) for _ in range(2)]
    assert me.reachability.announced == tuple(announced)
    streets.lives_at[HOME, 40000] = me.peer_id
    await me.ask(others)
    assert me.reachability.is_inbound is True and me.reachability.confirmed == (right,)
    assert me.reachability.announced == (right, elsewhere)
    assert f"Nobody reaches {HOME}:40001, which swarm.announce names." in me.reachability.reason
    assert (OTHER_HOME, 40000) not in streets.knocked, "it is another machine, for all that the asked ones know"


@in_loop
async def test_a_name_is_dialed_where_it_leads_to_the_caller() -> None:
    hub, streets = LocalHub(), Streets()
    me = Peer(hub, streets, "127.0.0.1", announced=["/dns4/localhost/tcp/40000", "/dns4/no.such.invalid/tcp/40000"])
    streets.lives_at["127.0.0.1", 40000] = me.peer_id
    await me.ask([Peer(hub, streets)])
    assert me.reachability.confirmed == ("/dns4/localhost/tcp/40000",)


@in_loop
async def test_confirmed_addresses_outlive_a_restart_and_move_with_the_node(tmp_path: Path) -> None:
    hub, streets = LocalHub(), Streets()
    cache = tmp_path / "cache" / "addresses.json"
    me, others = Peer(hub, streets, cache=cache), [Peer(hub, streets) for _ in range(2)]
    streets.lives_at[HOME, PORT] = me.peer_id
    await me.ask(others)

    again = Peer(hub, streets, cache=cache)
    again.reachability._load()
    assert again.reachability.confirmed == (DIRECT,) and again.reachability.is_inbound is None
    assert again.reachability.remembered == {DIRECT}
    other_port = Peer(hub, streets, cache=cache, ports={4: PORT + 1})
    other_port.reachability._load()
    assert other_port.reachability.confirmed == (), "that port leads here no more"

    streets.lives_at = {(OTHER_HOME, PORT): again.peer_id}
    again.move(OTHER_HOME)
    await again.reachability._ask_seen(others[0].peer_id)
    await again.ask(others)
    moved = f"/ip4/{OTHER_HOME}/tcp/{PORT}"
    assert not again.reachability.remembered
    assert again.reachability.confirmed == (moved,) and json.loads(cache.read_text())["confirmed"] == [moved]


@in_loop
async def test_an_address_of_before_the_start_is_not_said_to_be_reached(tmp_path: Path) -> None:
    cache, near = tmp_path / "addresses.json", f"/ip4/192.168.1.2/tcp/{PORT}"
    cache.write_text(json.dumps({"confirmed": [DIRECT, near]}))
    hub, streets = LocalHub(), Streets()
    me, others = Peer(hub, streets, cache=cache), [Peer(hub, streets) for _ in range(2)]
    me.reachability._load()
    streets.lives_at[HOME, PORT] = me.peer_id
    await me.ask(others)
    known = me.reachability
    assert known.reason == f"Other peers reach this node at {HOME}:{PORT} (2 of 2 that tried)."
    assert known.confirmed == (DIRECT, near) and known.remembered == {near}


@in_loop
async def test_a_relay_whose_port_is_closed_is_told_that_it_is_of_no_use() -> None:
    hub, streets = LocalHub(), Streets()
    relay, others = Peer(hub, streets, is_relay=True), [Peer(hub, streets) for _ in range(2)]
    await relay.ask(others)
    assert relay.reachability.code == "not_reached" and "trains" not in relay.reachability.reason
    assert f"this relay carries no calls until others reach TCP port {PORT}" in relay.reachability.reason


@pytest.mark.parametrize("text", ["", "[]", '{"confirmed": 5}', '{"confirmed": [1, null, "/", "/ip4/1.2.3.4/tcp/7"]}'])
@in_loop
async def test_what_the_file_of_addresses_says_may_be_anything(tmp_path: Path, text: str) -> None:
    cache = tmp_path / "addresses.json"
    cache.write_text(text)
    me = Peer(LocalHub(), Streets(), cache=cache)
    me.reachability._load()
    assert me.reachability.confirmed == ()


@in_loop
async def test_a_new_address_is_noticed_and_tried_at_once() -> None:
    hub, streets = LocalHub(), Streets()
    me, others = Peer(hub, streets), [Peer(hub, streets) for _ in range(4)]
    streets.lives_at[HOME, PORT] = me.peer_id
    everybody = {other.peer_id for other in others}
    me.reachability._asked_for = everybody
    me.reachability._hurries = False
    await me.ask(others)
    assert not me.reachability._is_due(100.0, everybody), "nothing has changed"
    await me.reachability._ask_seen(others[0].peer_id)
    assert not me.reachability._is_due(100.0, everybody)
    me.move(OTHER_HOME)
    await me.reachability._ask_seen(others[0].peer_id)
    assert me.reachability._is_due(10.0, everybody)


@in_loop
async def test_an_address_that_only_some_peers_see_is_new_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour sees another address than the peers that are asked to dial; each change is one more probe."""
    hub, streets = LocalHub(), Streets()
    me, neighbour, others = Peer(hub, streets), Peer(hub, streets), [Peer(hub, streets) for _ in range(2)]
    known = me.reachability

    async def on_seen(_caller: str, _message: Message) -> Message:
        return Message({"seen": [LAN]})

    neighbour.wire.serve({"seen": Service(on_seen, Channel.DHT)})
    streets.lives_at[HOME, PORT] = me.peer_id
    known._asked_for = {other.peer_id for other in others}
    for expected in (True, False, False):
        await me.ask(others)
        known._hurries = False
        await known._ask_seen(neighbour.peer_id)
        assert known._hurries is expected
        assert known.outer == {HOME, LAN}

    monkeypatch.setattr("node.swarm.reachability.RENEW_S", 0.0)
    await known._ask_seen(neighbour.peer_id)
    assert known._hurries and known.outer == {LAN}, "what nobody has said for long is forgotten"


@in_loop
async def test_a_node_that_listens_nowhere_asks_nobody() -> None:
    me = Peer(LocalHub(), Streets(), ports={})
    with suppress(TimeoutError):
        await asyncio.wait_for(me.reachability.run(), 0.3)
    assert me.changes == [False] and "swarm.listen" in me.reachability.reason


@in_loop
async def test_it_asks_by_itself_once_somebody_is_there() -> None:
    hub, streets = LocalHub(), Streets()
    me, other = Peer(hub, streets), Peer(hub, streets)
    me.directory.merge([other.directory.pulse()])
    task = asyncio.create_task(me.reachability.run())
    try:
        async with asyncio.timeout(10):
            await me.changed.wait()
    finally:
        task.cancel()
    assert me.changes == [False]


# what others may have probed


GOOD = {"ports": {"4": PORT}, "announced": []}


@in_loop
async def test_a_peer_that_is_called_over_a_relay_is_not_asked() -> None:
    """It does not see this node; one without an inbound port that is connected directly can dial all the same."""
    hub, streets = LocalHub(), Streets()
    me, relayed, connected = Peer(hub, streets), Peer(hub, streets), Peer(hub, streets)
    relayed.move()
    del hub.seen[relayed.peer_id]  # type: ignore[attr-defined]
    for other in (relayed, connected):
        other.directory.say(inbound=False, via=(connected.peer_id,))
        me.directory.merge([other.directory.pulse()])
    assert await me.reachability._find_askable() == {connected.peer_id}


@in_loop
async def test_peers_that_see_this_node_through_a_relay_only_do_not_keep_it_in_doubt() -> None:
    """Until somebody has tried, each takes itself for callable, so each seems to be a witness for the others."""
    hub, streets = LocalHub(), Streets()
    me, relay, *others = (Peer(hub, streets) for _ in range(5))
    for other in (relay, *others):
        me.directory.merge([other.directory.pulse()])
    for other in others:
        del hub.seen[other.peer_id]  # type: ignore[attr-defined]

        async def on_probe(_caller: str, _message: Message) -> Message:
            raise PeerError("this node sees the caller only through a relay", code="not_seen")

        other.wire.serve({"probe": Service(on_probe, Channel.DHT)})
    for _ in range(3):
        relay.reachability._answered_at_s.clear()
        await me.reachability.ask(sorted(await me.reachability._find_askable()))
    assert await me.reachability._find_askable() == {relay.peer_id}
    assert me.reachability.is_inbound is False


@in_loop
async def test_one_probe_per_caller_at_a_time_and_at_its_own_address_only() -> None:
    hub, streets = LocalHub(), Streets()
    caller, asked = Peer(hub, streets), Peer(hub, streets)

    async def probe(**header: object) -> Message:
        return await caller.wire.call(asked.peer_id, "probe", Message(header), timeout_s=5)

    for port in (0, 65536, -1, "80", None, 80.0, True):
        with pytest.raises(PeerError):
            await probe(**GOOD | {"ports": {"4": port}})
    for bad in ({"ports": {}}, {"ports": {"5": 1}}, {"ports": [1]}, {"announced": 5}, {"announced": [DIRECT] * 5}):
        with pytest.raises(PeerError):
            await probe(**GOOD | bad)
    strangers = [f"/ip4/{OTHER_HOME}/tcp/22", "/x", f"{DIRECT}/p2p/x"]
    found = (await probe(**GOOD | {"host": OTHER_HOME, "announced": strangers})).header["found"]
    assert found == [{"seen": HOME, "tried": [DIRECT], "reached": [], "why": "refused"}]
    assert streets.knocked == [(HOME, PORT)]
    with pytest.raises(PeerError) as caught:
        await probe(**GOOD)
    assert caught.value.code == "too_soon"


@in_loop
async def test_ports_of_both_ip_versions_that_do_not_answer_are_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.swarm.reachability.PROBE_S", 0.5)
    monkeypatch.setattr("node.swarm.reachability.CALL_S", 0.8)
    hub, streets = LocalHub(), Streets()

    async def no_answer(_host: str, _port: int, timeout_s: float) -> str:
        await asyncio.sleep(timeout_s)
        raise PeerError("nobody", code="timeout")

    monkeypatch.setattr(streets, "dial", no_answer)
    me, other = Peer(hub, streets, HOME, "2001:db8::5", ports={4: PORT, 6: PORT}), Peer(hub, streets)
    other.move(HOME, "2001:db8::9")
    await me.ask([other])
    assert me.reachability.code == "not_reached"
    assert me.reachability.is_closed(4) and me.reachability.is_closed(6)


@in_loop
async def test_who_is_seen_through_a_relay_only_is_not_probed() -> None:
    hub, streets = LocalHub(), Streets()
    caller, asked = Peer(hub, streets), Peer(hub, streets)
    caller.move()
    with pytest.raises(PeerError) as caught:
        await caller.wire.call(asked.peer_id, "probe", Message(GOOD), timeout_s=5)
    assert caught.value.code == "not_seen"


@in_loop
async def test_all_callers_together_are_bounded() -> None:
    hub, streets = LocalHub(), Streets()
    asked = Peer(hub, streets)
    callers = [Peer(hub, streets) for _ in range(2)]
    for _ in range(MAX_PROBES):
        await asked.reachability._probes.acquire()
    with pytest.raises(PeerError):
        await callers[0].wire.call(asked.peer_id, "probe", Message(GOOD), timeout_s=5)
    asked.reachability._probes.release()
    await callers[1].wire.call(asked.peer_id, "probe", Message(GOOD), timeout_s=5)

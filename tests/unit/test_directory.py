"""The table of peers, with a clock of the test's own: news, death, suspicion, goodbyes, forgeries."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import msgpack
import pytest

from node.errors import PeerError
from node.status import Phase
from node.swarm import directory as rules
from node.swarm.base import MAX_BLOBS, MAX_HEADER_BYTES, MAX_REPLY_BYTES, Message, pack_header, unpack_header
from node.swarm.directory import (
    DEAD_S,
    FORGOTTEN_S,
    MAX_KNOWN,
    RELAYED_S,
    Directory,
    PeerRecord,
    Signed,
    sign_record,
)
from node.swarm.gossip import MAX_RECORD_BYTES, Gossip
from node.swarm.identity import Identity, new_identity, verify
from node.swarm.local import LocalHub, LocalWire

RUN = "ab" * 32
ME, YOU, THIRD = sorted((new_identity() for _ in range(3)), key=lambda identity: identity.peer_id)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def record(identity: Identity, number: int = 1, **fields: object) -> PeerRecord:
    told: dict[str, object] = {"run": RUN, "head": RUN, "phase": Phase.TRAINING} | fields
    return PeerRecord.model_validate({"peer_id": identity.peer_id, "number": number, **told})


def signed(identity: Identity, number: int = 1, **fields: object) -> Signed:
    return sign_record(identity, record(identity, number, **fields))


def directory(clock: Clock) -> Directory:
    return Directory(ME, record(ME, number=5), clock)


def live_ids(table: Directory) -> set[str]:
    return {r.peer_id for r in table.live()}


def test_a_node_knows_itself_first() -> None:
    table = directory(Clock())
    assert [r.peer_id for r in table.live()] == [ME.peer_id]
    assert table.is_member(ME.peer_id) and not table.is_member(YOU.peer_id)
    table.say(phase=Phase.PAUSED)
    assert table.members() == []


def test_news_is_taken_in_once_and_only_if_newer() -> None:
    table = directory(Clock())
    assert [r.number for r in table.merge([signed(YOU, 3)])] == [3]
    assert table.changed.is_set()
    assert table.merge([signed(YOU, 3), signed(YOU, 2)]) == []
    assert [r.round for r in table.merge([signed(YOU, 4, round=7)])] == [7]
    found = table.find(YOU.peer_id)
    assert found is not None and found.round == 7
    assert table.find(THIRD.peer_id) is None


def test_members_are_in_the_order_of_their_ids_and_only_those_that_train() -> None:
    table = directory(Clock())
    for phase in Phase:
        table.merge([signed(THIRD, table.me.number + 1, phase=phase), signed(YOU)])
        table.say(number=table.me.number + 1)
        trains = phase in (Phase.TRAINING, Phase.SYNCING, Phase.DRAINING)
        expected = [ME, YOU, THIRD] if trains else [ME, YOU]
        assert [r.peer_id for r in table.members()] == [identity.peer_id for identity in expected], phase


def test_silence_is_death_and_old_news_does_not_revive() -> None:
    clock = Clock()
    table = directory(clock)
    table.merge([signed(YOU, 1)])
    clock.now_s += DEAD_S - 0.01
    assert YOU.peer_id in live_ids(table)
    clock.now_s += 0.02
    assert live_ids(table) == {ME.peer_id}
    assert [r.peer_id for r in table.forgotten()] == [YOU.peer_id]
    table.merge([signed(YOU, 1)])
    assert live_ids(table) == {ME.peer_id}
    table.merge([signed(YOU, 2)])
    assert YOU.peer_id in live_ids(table) and table.forgotten() == []


def test_nobody_vouches_for_the_dead() -> None:
    """Records go round only while they are young, so those of the dead fade everywhere."""
    clock = Clock()
    one, other = directory(clock), Directory(THIRD, record(THIRD), clock)
    one.merge([signed(YOU, 1)])
    clock.now_s += RELAYED_S + 0.1
    assert YOU.peer_id in live_ids(one)
    other.merge(one.fresh())
    assert live_ids(other) == {ME.peer_id, THIRD.peer_id}


def test_a_dead_peer_is_dead_to_all_at_the_same_time_however_late_they_heard_of_it() -> None:
    clock = Clock()
    one, other = directory(clock), Directory(THIRD, record(THIRD), clock)
    one.merge([signed(YOU, 1)])
    clock.now_s += RELAYED_S - 0.1
    other.merge(one.fresh())
    assert YOU.peer_id in live_ids(other)
    clock.now_s += DEAD_S - RELAYED_S
    assert YOU.peer_id in live_ids(one) & live_ids(other)
    clock.now_s += 0.2
    assert YOU.peer_id not in live_ids(one) | live_ids(other)


def test_old_news_of_a_peer_that_did_not_answer_is_no_sign_of_life() -> None:
    clock = Clock()
    table = directory(clock)
    table.merge([signed(YOU, 1)])
    clock.now_s += 2
    table.suspect(YOU.peer_id)
    clock.now_s += 1
    table.merge([replace(signed(YOU, 2), age_s=1.5)])
    assert live_ids(table) == {ME.peer_id}
    table.merge([replace(signed(YOU, 3), age_s=0.5)])
    assert YOU.peer_id in live_ids(table)


def test_only_what_the_other_lacks_is_told() -> None:
    clock = Clock()
    one, other = directory(clock), Directory(THIRD, record(THIRD), clock)
    one.merge([signed(YOU, 3)])
    assert [s.open(RUN).peer_id for s in one.fresh(other.wanted())] == [ME.peer_id, YOU.peer_id]
    other.merge([signed(YOU, 3)])
    assert [s.open(RUN).peer_id for s in one.fresh(other.wanted())] == [ME.peer_id]
    one.merge([signed(YOU, 4), signed(THIRD, 5000)])
    told = [s.open(RUN) for s in one.fresh(other.wanted())]
    assert {(r.peer_id, r.number) for r in told[1:]} == {(YOU.peer_id, 4), (THIRD.peer_id, 5000)}
    other.merge(one.fresh(other.wanted()))
    assert other.me.number == 5000, "an echo of its own former life is told, too"


def test_what_is_not_newer_costs_no_check_of_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []

    def counting(peer_id: str, *rest: object) -> bool:
        checks.append(peer_id)
        return verify(peer_id, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(rules, "verify", counting)
    table = directory(Clock())
    for number in (3, 3, 2, 1, 3):
        table.merge([signed(YOU, number)])
    assert checks == [YOU.peer_id]


def test_only_members_that_can_be_called_lead_unless_there_are_none() -> None:
    table = directory(Clock())
    table.merge([signed(YOU, inbound=False), signed(THIRD, phase=Phase.PAUSED)])
    assert table.leaders() == [ME.peer_id]
    table.say(inbound=False)
    assert table.leaders() == sorted([ME.peer_id, YOU.peer_id])


def test_two_that_cannot_be_called_do_not_call_each_other() -> None:
    table = directory(Clock())
    table.merge([signed(YOU, inbound=False), signed(THIRD)])
    assert {r.peer_id for r in table.others()} == {YOU.peer_id, THIRD.peer_id}
    table.say(inbound=False)
    assert {r.peer_id for r in table.others()} == {THIRD.peer_id}
    assert {r.peer_id for r in table.members()} == {ME.peer_id, YOU.peer_id, THIRD.peer_id}


RELAY = new_identity()
HIDDEN = {"inbound": False, "via": (RELAY.peer_id,)}


def test_two_that_cannot_be_called_call_each_other_over_a_live_relay() -> None:
    clock = Clock()
    table = directory(clock)
    table.say(**HIDDEN)
    table.merge([signed(YOU, **HIDDEN)])
    assert table.others() == [], "nobody knows the relay"
    table.merge([signed(RELAY, phase=Phase.PAUSED)])
    assert table.relays_to(YOU.peer_id) == [], "it does not relay"
    table.merge([signed(RELAY, 2, phase=Phase.PAUSED, relays=True)])
    assert table.relays_to(YOU.peer_id) == [RELAY.peer_id]
    assert {r.peer_id for r in table.others()} == {YOU.peer_id, RELAY.peer_id}
    table.merge([signed(RELAY, 3, phase=Phase.PAUSED, relays=True, inbound=False)])
    assert table.relays_to(YOU.peer_id) == [], "it cannot be called itself"
    table.merge([signed(RELAY, 4, phase=Phase.PAUSED, relays=True)])
    table.suspect(RELAY.peer_id)
    assert table.relays_to(YOU.peer_id) == []


def test_leaders_can_be_called_over_ipv4_else_at_all_else_over_relays() -> None:
    table = directory(Clock())
    v4, v6 = ["/ip4/1.2.3.4/tcp/1", "/ip6/2001:db8::1/tcp/1"], ["/ip4/127.0.0.1/tcp/1", "/ip6/2001:db8::2/tcp/1"]
    table.merge([signed(RELAY, phase=Phase.PAUSED, relays=True), signed(THIRD, **HIDDEN)])
    table.say(inbound=False)
    assert table.callable_members() == table.leaders() == [THIRD.peer_id], "over the relay"
    table.merge([signed(YOU, addresses=v6)])
    assert table.callable_members() == [YOU.peer_id]
    table.say(inbound=True, addresses=v4)
    assert table.callable_members() == [ME.peer_id]
    assert table.leaders() == sorted([ME.peer_id, YOU.peer_id, THIRD.peer_id]), "the others lead where it fails"
    table.say(inbound=False)
    table.merge([signed(YOU, 2, inbound=False), signed(THIRD, 2, inbound=False)])
    assert table.callable_members() == [], "nobody reduces"
    assert len(table.leaders()) == 3, "and somebody says so"


def test_pairs_spread_over_the_relays() -> None:
    relays = [new_identity() for _ in range(3)]
    via = tuple(relay.peer_id for relay in relays)
    table = directory(Clock())
    table.merge([signed(relay, relays=True) for relay in relays])
    others = [new_identity() for _ in range(30)]
    table.merge([signed(other, inbound=False, via=via) for other in others])
    assert all(set(table.relays_to(other.peer_id)) == set(via) for other in others)
    assert {table.relays_to(other.peer_id)[0] for other in others} == set(via)


def test_only_peers_of_the_run_are_carried_and_only_by_a_relay() -> None:
    table = directory(Clock())
    table.merge([signed(YOU)])
    with pytest.raises(PeerError, match="relays no calls"):
        table.check_carried(YOU.peer_id, ME.peer_id)
    table.say(relays=True)
    table.check_carried(YOU.peer_id, ME.peer_id)
    for pair in ((YOU, THIRD), (THIRD, YOU)):
        with pytest.raises(PeerError, match="between peers of its run"):
            table.check_carried(pair[0].peer_id, pair[1].peer_id)


def test_who_tells_nothing_for_long_is_silent_and_who_is_suspected_is_not() -> None:
    clock = Clock()
    table = directory(clock)
    table.merge([signed(YOU), signed(THIRD)])
    table.suspect(THIRD.peer_id)
    assert table.silent() == []
    clock.now_s += DEAD_S
    table.merge([signed(YOU, 2)])
    assert table.silent() == [THIRD.peer_id]


def test_who_has_been_dead_for_long_is_forgotten() -> None:
    clock = Clock()
    table = directory(clock)
    table.merge([signed(YOU, 1)])
    clock.now_s += FORGOTTEN_S - 1
    table.merge([signed(THIRD, 1)])
    table.pulse()
    assert table.find(YOU.peer_id) is not None
    clock.now_s += 2
    table.pulse()
    assert table.find(YOU.peer_id) is None and table.find(THIRD.peer_id) is not None


def test_the_table_is_bounded_and_the_living_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_KNOWN", 2)
    clock = Clock()
    table = directory(clock)
    first, second, third, fourth = (new_identity() for _ in range(4))
    table.merge([signed(first)])
    clock.now_s += 1
    table.merge([signed(second)])
    assert table.merge([signed(third)]) == [], "a crowd of newcomers drives out nobody who lives"
    clock.now_s += DEAD_S - 0.5
    table.merge([signed(third)])
    assert live_ids(table) == {ME.peer_id, second.peer_id, third.peer_id} and table.find(first.peer_id) is None
    assert len(table.merge([signed(third, 2), signed(second, 2), signed(fourth)])) == 2


def test_a_failed_call_is_suspicion_until_the_next_news() -> None:
    table = directory(Clock())
    table.merge([signed(YOU, 1)])
    table.changed.clear()
    table.suspect(YOU.peer_id)
    assert live_ids(table) == {ME.peer_id} and table.changed.is_set()
    table.merge([signed(YOU, 1)])
    assert live_ids(table) == {ME.peer_id}
    table.merge([signed(YOU, 2)])
    assert YOU.peer_id in live_ids(table)
    table.suspect(THIRD.peer_id)
    table.suspect(ME.peer_id)
    assert ME.peer_id in live_ids(table)


@pytest.mark.parametrize("phase", [Phase.STOPPED, Phase.LEAVING, Phase.ERROR])
def test_who_says_goodbye_is_gone_at_once(phase: Phase) -> None:
    table = directory(Clock())
    table.merge([signed(YOU, 1), signed(YOU, 2, phase=phase)])
    assert live_ids(table) == {ME.peer_id}
    assert [s.open(RUN).phase for s in table.fresh()[1:]] == [phase], "the goodbye is passed on"
    assert bool(table.forgotten()) == (phase is not Phase.STOPPED)


def test_an_echo_of_a_former_life_is_outnumbered() -> None:
    table = directory(Clock())
    table.merge([signed(ME, 5000, phase=Phase.STOPPED)])
    assert table.me.phase is Phase.TRAINING
    assert table.pulse().open(RUN).number > 5000


def forgeries() -> dict[str, Signed]:
    good = signed(YOU, 9)
    body = good.body
    return {
        "signature of another": sign_record(THIRD, record(YOU, 9)),
        "changed text": Signed(body.replace(b'"number":9', b'"number":8'), good.signature),
        "no signature": Signed(body, b""),
        "cut": Signed(body[:-1], good.signature),
        "no JSON": Signed(b"\xff", good.signature),
        "another run": signed(YOU, 9, run="cd" * 32),
        "another purpose": Signed(body, YOU.sign("diloco join", body)),
        "an unknown field": raw(YOU, b', "admin": true}'),
        "a name too long": raw(YOU, b', "name": "' + b"x" * 65 + b'"}'),
        "a rate without end": raw(YOU, b', "tokens_per_second": 1e999}'),
        "busier than all the time": raw(YOU, b', "compute_utilization_ratio": 1.01}'),
        "a share that is no number": raw(YOU, b', "compute_utilization_ratio": NaN}'),
        "a share that is text": raw(YOU, b', "compute_utilization_ratio": "<b>"}'),
        "too many addresses": raw(YOU, b', "addresses": [' + b",".join([b'"/a"'] * 17) + b"]}"),
        "an address that is none": raw(YOU, b', "addresses": ["http://x"]}'),
        "a number too large": raw(YOU, b', "number": 9223372036854775808}'),
    }


def raw(identity: Identity, end: bytes) -> Signed:
    body = signed(identity, 9).body[:-1] + end
    return Signed(body, identity.sign("diloco peer record", body))


@pytest.mark.parametrize("what", forgeries())
def test_a_record_that_is_not_right_changes_nothing(what: str) -> None:
    table = directory(Clock())
    table.merge([signed(YOU, 3)])
    forged = forgeries()[what]
    with pytest.raises(PeerError):
        forged.open(RUN)
    assert table.merge([forged, signed(THIRD, 1)]) == [record(THIRD, 1)], "the good one beside it is taken"
    found = table.find(YOU.peer_id)
    assert found is not None and found.number == 3


def test_rows_are_for_people() -> None:
    clock = Clock()
    table = directory(clock)
    table.merge([signed(YOU, 1, name="Ada", transport="relay", compute_utilization_ratio=0.75)])
    clock.now_s += 2.0
    me, you = table.rows()
    assert me.this_node and not you.this_node
    assert (you.name, you.transport, you.last_seen_s) == ("Ada", "relay", 2.0)
    assert (me.compute_utilization_ratio, you.compute_utilization_ratio) == (None, 0.75)
    assert (me.name, me.last_seen_s) == (ME.peer_id[-6:], 0.0)


def test_what_peers_call_themselves_is_plain_text() -> None:
    table = directory(Clock())
    table.merge([signed(YOU, 1, name="\x1b[31mAda\n\u202e", version="1\r\n2", state_digest="\x00")])
    table.merge([signed(THIRD, 1, name="\n\u2028")])
    named = {row.peer_id: (row.name, row.version, row.state_digest) for row in table.rows()}
    assert named[YOU.peer_id] == ("[31mAda", "1  2", " ")
    assert named[THIRD.peer_id][0] == THIRD.peer_id[-6:]


def test_gossip_brings_news_through_a_third_and_a_goodbye_at_once() -> None:
    async def main() -> None:
        hub, clock = LocalHub(), Clock()
        tables, gossips = {}, {}
        for identity in (ME, YOU, THIRD):
            tables[identity] = Directory(identity, record(identity, number=1), clock)
            gossips[identity] = Gossip(LocalWire(hub, identity.peer_id), tables[identity], random.Random(0))
        assert await gossips[ME].exchange(YOU.peer_id)
        assert await gossips[THIRD].exchange(YOU.peer_id)
        assert live_ids(tables[THIRD]) == {ME.peer_id, YOU.peer_id, THIRD.peer_id}
        tables[YOU].say(phase=Phase.STOPPED)
        await gossips[YOU].announce()
        assert YOU.peer_id not in live_ids(tables[ME]) | live_ids(tables[THIRD])
        hub.cut(ME.peer_id, THIRD.peer_id)
        tables[ME].merge(tables[THIRD].fresh())
        assert THIRD.peer_id in live_ids(tables[ME])
        assert not await gossips[ME].exchange(THIRD.peer_id)
        assert THIRD.peer_id not in live_ids(tables[ME]), "a failed call is suspicion"

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("silent_s", [0.5, RELAYED_S + 1, DEAD_S + 1, FORGOTTEN_S - 60])
def test_a_node_that_comes_back_with_its_clock_set_back_is_soon_live_again(silent_s: float) -> None:
    async def main() -> None:
        hub, clock = LocalHub(), Clock()
        other = Directory(YOU, record(YOU), clock)
        Gossip(LocalWire(hub, YOU.peer_id), other, random.Random(0))
        other.merge([signed(ME, 1_000_000, phase=Phase.STOPPED)])
        clock.now_s += silent_s
        again = Directory(ME, record(ME, 400_000), clock)
        gossip = Gossip(LocalWire(hub, ME.peer_id), again, random.Random(0))
        assert await gossip.exchange(YOU.peer_id)
        assert again.me.number == 1_000_000
        again.pulse()
        assert await gossip.exchange(YOU.peer_id)
        assert live_ids(other) == {ME.peer_id, YOU.peer_id}
        assert other.find(ME.peer_id) == again.me
        assert len(other.fresh(again.wanted(), ME.peer_id)) == 1, "no echo of what is known"

    asyncio.run(asyncio.wait_for(main(), 20))


def test_others_are_not_told_of_the_long_silent() -> None:
    clock = Clock()
    table = directory(clock)
    table.merge([signed(YOU, 7)])
    clock.now_s += RELAYED_S + 1
    assert len(table.fresh({}, THIRD.peer_id)) == len(table.fresh()) == 1
    (_, echo) = table.fresh({}, YOU.peer_id)
    assert echo.open(RUN).number == 7 and echo.age_s == RELAYED_S + 1


def test_a_question_about_the_fullest_table_fits_into_a_header() -> None:
    wanted = {f"{number:016d}": 2**62 for number in range(MAX_KNOWN + 1)}
    unpacked = unpack_header(pack_header("gossip", Message({"wanted": wanted})), lambda _: 0)
    assert unpacked[1]["wanted"] == wanted


@pytest.mark.parametrize(
    "header",
    [
        {"signatures": [], "wanted": {}},
        {"signatures": [], "ages_ds": [1]},
        {"signatures": [b""], "ages_ds": [1.5]},
        {"signatures": [b""], "ages_ds": [-1]},
        {"signatures": [b""], "ages_ds": [10**9]},
        {"signatures": [], "ages_ds": [], "wanted": []},
        {"signatures": [], "ages_ds": [], "wanted": {"x": "y"}},
    ],
)
def test_gossip_of_the_wrong_form_is_refused(header: dict[str, object]) -> None:
    async def main() -> None:
        hub, clock = LocalHub(), Clock()
        gossip = Gossip(LocalWire(hub, ME.peer_id), directory(clock), random.Random(0))
        blobs = [b"{}"] * len(header["signatures"])  # type: ignore[arg-type]
        with pytest.raises(PeerError):
            await gossip._answer(YOU.peer_id, Message(header, blobs))

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_news_of_a_thousand_peers_fits_into_one_message() -> None:
    address = f"/ip4/203.0.113.255/tcp/31337/p2p/{YOU.peer_id}"
    long = signed(
        YOU,
        2**62,
        name="n" * 64,
        state_digest="ef" * 32,
        addresses=(address,) * 16,
        swarm_tokens=2**60,
        version="v" * 40,
    )
    assert 1000 * len(long.body) < MAX_REPLY_BYTES and len(long.body) < MAX_RECORD_BYTES
    assert MAX_BLOBS > 1000
    assert 1000 * (len(msgpack.packb(long.signature)) + 5) < MAX_HEADER_BYTES


def test_a_thousand_records_are_taken_in_fast() -> None:
    table = directory(Clock())
    identities = [new_identity() for _ in range(1000)]
    news = [signed(identity) for identity in identities]
    assert len(table.merge(news)) == 1000
    assert len(table.members()) == 1001
    assert table.merge(news) == []

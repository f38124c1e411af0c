"""Tests of the peer table and of gossip on a manual clock."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from node.errors import PeerError
from node.status import MEMBER_PHASES, Phase, Report, TaskScores
from node.swarm.identity import Identity, new_identity, verify
from node.swarm.membership import peer_table
from node.swarm.membership.gossip import MAX_REQUEST_BYTES, Gossip, fanout
from node.swarm.membership.peer_table import (
    FORGOTTEN_S,
    GOSSIP_AGE_S,
    MAX_KNOWN,
    MAX_RECORD_BYTES,
    MAX_ROWS,
    PeerRecord,
    PeerTable,
    Signed,
    sign_record,
)
from node.swarm.membership.timings import MemberTimings
from node.swarm.transport.wire import (
    MAX_BLOBS,
    MAX_HEADER_BYTES,
    MAX_REPLY_BYTES,
    Message,
    at_most,
    pack_header,
    unpack_header,
)
from node.worker_protocol import MAX_LINE_BYTES, StatusReport, encode
from tests.in_process import InProcessNetwork, InProcessWire
from tests.unit.clocks import Clock

RUN = "ab" * 32
DEAD_S = MemberTimings().dead_s
ME, YOU, THIRD = sorted((new_identity() for _ in range(3)), key=lambda identity: identity.peer_id)
RELAY = new_identity()
HIDDEN: dict[str, Any] = {"inbound": False, "via": (RELAY.peer_id,)}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> PeerTable:
    return PeerTable(ME, record(ME, number=5), clock)


@pytest.fixture
def other(clock: Clock) -> PeerTable:
    """The table of a second node, THIRD."""
    return PeerTable(THIRD, record(THIRD), clock)


def record(identity: Identity, number: int = 1, **fields: object) -> PeerRecord:
    content: dict[str, object] = {"run": RUN, "head": RUN, "phase": Phase.TRAINING} | fields
    return PeerRecord.model_validate({"peer_id": identity.peer_id, "number": number, **content})


def signed(identity: Identity, number: int = 1, **fields: object) -> Signed:
    return sign_record(identity, record(identity, number, **fields))


def live_ids(table: PeerTable) -> set[str]:
    return {r.peer_id for r in table.live()}


def ids(*identities: Identity) -> list[str]:
    return [identity.peer_id for identity in identities]


# records


def test_a_node_is_in_its_own_peer_table(table: PeerTable) -> None:
    assert [r.peer_id for r in table.live()] == [ME.peer_id]
    assert table.is_member(ME.peer_id) and not table.is_member(YOU.peer_id)
    table.update_own(phase=Phase.PAUSED)
    assert table.members() == []


def test_a_peer_record_is_merged_once_and_only_if_it_is_newer(table: PeerTable) -> None:
    assert [r.number for r in table.merge([signed(YOU, 3)])] == [3]
    assert table.changed.is_set()
    assert table.merge([signed(YOU, 3), signed(YOU, 2)]) == []
    assert [r.round for r in table.merge([signed(YOU, 4, round=7)])] == [7]
    found = table.find(YOU.peer_id)
    assert found is not None and found.round == 7
    assert table.find(THIRD.peer_id) is None


def test_signature_of_an_old_peer_record_is_not_checked(table: PeerTable, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []

    def counting(peer_id: str, *rest: object) -> bool:
        checks.append(peer_id)
        return verify(peer_id, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(peer_table, "verify", counting)
    for number in (3, 3, 2, 1, 3):
        table.merge([signed(YOU, number)])
    assert checks == [YOU.peer_id]


def test_a_restarted_node_outnumbers_its_own_older_records(table: PeerTable) -> None:
    table.merge([signed(ME, 5000, phase=Phase.STOPPED)])
    assert table.me.phase is Phase.TRAINING
    assert table.pulse().open(RUN).number > 5000


def with_end(end: bytes) -> Signed:
    """A signed record of YOU with more fields at its end."""
    body = signed(YOU, 9).body[:-1] + end
    return Signed(body, YOU.sign(peer_table.PURPOSE, body))


GOOD = signed(YOU, 9)
FORGERIES = {
    "signature of another": sign_record(THIRD, record(YOU, 9)),
    "changed text": Signed(GOOD.body.replace(b'"number":9', b'"number":8'), GOOD.signature),
    "no signature": Signed(GOOD.body, b""),
    "cut": Signed(GOOD.body[:-1], GOOD.signature),
    "no JSON": Signed(b"\xff", GOOD.signature),
    "another run": signed(YOU, 9, run="cd" * 32),
    "another purpose": Signed(GOOD.body, YOU.sign("diloco join", GOOD.body)),
    "unknown field": with_end(b', "admin": true}'),
    "name too long": with_end(b', "name": "' + b"x" * 65 + b'"}'),
    "infinite rate": with_end(b', "tokens_per_second": 1e999}'),
    "utilization above 1": with_end(b', "compute_utilization_ratio": 1.01}'),
    "utilization not a number": with_end(b', "compute_utilization_ratio": NaN}'),
    "utilization of text": with_end(b', "compute_utilization_ratio": "<b>"}'),
    "too many addresses": with_end(b', "addresses": [' + b",".join([b'"/a"'] * 17) + b"]}"),
    "invalid address": with_end(b', "addresses": ["http://x"]}'),
    "padded": with_end(b" " * MAX_RECORD_BYTES + b"}"),
    "number too large": with_end(b', "number": 9223372036854775808}'),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_an_invalid_peer_record_changes_nothing(table: PeerTable, what: str) -> None:
    table.merge([signed(YOU, 3)])
    with pytest.raises(PeerError):
        FORGERIES[what].open(RUN)
    assert table.merge([FORGERIES[what], signed(THIRD, 1)]) == [record(THIRD, 1)], "the valid one is merged"
    found = table.find(YOU.peer_id)
    assert found is not None and found.number == 3


def test_records_after_many_forged_ones_are_not_read_and_those_of_other_versions_do_not_count(table: PeerTable) -> None:
    later_version = with_end(b', "new_in_version_9": 1}')
    assert table.merge([later_version] * 50 + [signed(THIRD, 1)]) == [record(THIRD, 1)]
    forged = sign_record(THIRD, record(YOU, 9))
    assert table.merge([forged] * 7 + [signed(THIRD, 2)]) == [record(THIRD, 2)]
    assert table.merge([forged] * 8 + [signed(THIRD, 3)]) == []


def test_a_full_peer_table_keeps_its_live_peers_and_refuses_new_ones(
    clock: Clock, table: PeerTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_table, "MAX_KNOWN", 2)
    first, second, third, fourth = (new_identity() for _ in range(4))
    table.merge([signed(first)])
    clock.now_s += 1
    table.merge([signed(second)])
    assert table.merge([signed(third)]) == [], "newcomers do not replace a live peer"
    clock.now_s += DEAD_S - 0.5
    table.merge([signed(third)])
    assert live_ids(table) == {ME.peer_id, second.peer_id, third.peer_id} and table.find(first.peer_id) is None
    assert len(table.merge([signed(third, 2), signed(second, 2), signed(fourth)])) == 2


def test_strangers_do_not_drive_contributors_out_of_a_full_peer_table(
    clock: Clock, table: PeerTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_table, "MAX_KNOWN", 2)
    silent, returning, strangers = new_identity(), new_identity(), [new_identity() for _ in range(3)]
    table.contributors = lambda: ids(silent, returning)
    table.merge([signed(silent)])
    clock.now_s += DEAD_S + 1
    assert len(table.merge([signed(stranger) for stranger in strangers])) == 1
    assert table.knows(silent.peer_id), "a contributor keeps its place while it is silent"
    assert len(table.merge([signed(returning)])) == 1, "a contributor gets the place of a stranger"
    assert table.merge([signed(stranger, 2) for stranger in strangers]) == []
    assert table.knows(silent.peer_id) and table.knows(returning.peer_id)


# failure detector


def test_a_silent_peer_counts_as_dead_and_an_old_record_does_not_revive_it(clock: Clock, table: PeerTable) -> None:
    table.merge([signed(YOU, 1)])
    clock.now_s += DEAD_S - 0.01
    assert YOU.peer_id in live_ids(table)
    clock.now_s += 0.02
    assert live_ids(table) == {ME.peer_id}
    assert [r.peer_id for r in table.dead()] == [YOU.peer_id]
    table.merge([signed(YOU, 1)])
    assert live_ids(table) == {ME.peer_id}
    table.merge([signed(YOU, 2)])
    assert YOU.peer_id in live_ids(table) and table.dead() == []


def test_silent_peer_is_dead_for_all_nodes_at_the_same_time(clock: Clock, table: PeerTable, other: PeerTable) -> None:
    table.merge([signed(YOU, 1)])
    clock.now_s += GOSSIP_AGE_S - 0.1
    other.merge(table.records_for())
    assert YOU.peer_id in live_ids(other)
    clock.now_s += DEAD_S - GOSSIP_AGE_S
    assert YOU.peer_id in live_ids(table) & live_ids(other)
    clock.now_s += 0.2
    assert YOU.peer_id not in live_ids(table) | live_ids(other)


def test_an_unreachable_peer_is_suspected_until_it_signs_a_newer_record(clock: Clock, table: PeerTable) -> None:
    table.merge([signed(YOU, 1)])
    table.changed.clear()
    clock.now_s += 2
    table.suspect(YOU.peer_id)
    assert live_ids(table) == {ME.peer_id} and table.changed.is_set()
    clock.now_s += 1
    table.merge([signed(YOU, 1), replace(signed(YOU, 2), age_s=1.5)])
    assert live_ids(table) == {ME.peer_id}, "the newer record was signed before the call failed"
    table.merge([replace(signed(YOU, 3), age_s=0.5)])
    assert YOU.peer_id in live_ids(table)
    for unaffected in (THIRD, ME):
        table.suspect(unaffected.peer_id)
    assert ME.peer_id in live_ids(table)


def test_gossip_still_calls_a_suspected_peer_until_it_has_been_silent_for_long(clock: Clock, table: PeerTable) -> None:
    """Only a new record tells that the peer is back. A quorum counts it as living until then."""
    table.merge([signed(YOU), signed(THIRD, 1, phase=Phase.LEAVING)])
    table.suspect(YOU.peer_id)
    clock.now_s += DEAD_S - 0.1
    assert table.others() == [] and [record.peer_id for record in table.gossip_partners()] == [YOU.peer_id]
    clock.now_s += 0.2
    assert table.gossip_partners() == []


def test_a_second_failed_gossip_call_does_not_prolong_the_suspicion(clock: Clock, table: PeerTable) -> None:
    async def main() -> None:
        gossip = new_gossip(InProcessNetwork(), table)
        for _ in range(2):
            clock.now_s += 1
            assert not await gossip.exchange(YOU.peer_id)

    table.merge([signed(YOU, 1)])
    asyncio.run(main())
    assert live_ids(table) == {ME.peer_id}
    table.merge([replace(signed(YOU, 2), age_s=0.5)])
    assert YOU.peer_id in live_ids(table), "another peer has passed on a record from after the first failed call"


@pytest.mark.parametrize("phase", [Phase.STOPPED, Phase.LEAVING, Phase.ERROR])
def test_a_peer_that_says_goodbye_counts_as_dead_at_once(table: PeerTable, phase: Phase) -> None:
    table.merge([signed(YOU, 1), signed(YOU, 2, phase=phase)])
    assert live_ids(table) == {ME.peer_id}
    assert [s.open(RUN).phase for s in table.records_for()[1:]] == [phase], "the goodbye is passed on"
    assert bool(table.dead()) == (phase is not Phase.STOPPED)


def test_a_peer_without_new_records_is_silent_and_a_suspected_one_is_not(clock: Clock, table: PeerTable) -> None:
    table.merge([signed(YOU), signed(THIRD)])
    table.suspect(THIRD.peer_id)
    assert table.silent() == []
    clock.now_s += DEAD_S
    table.merge([signed(YOU, 2)])
    assert table.silent() == [THIRD.peer_id]


def test_a_peer_that_has_been_dead_for_long_is_removed_from_the_table(clock: Clock, table: PeerTable) -> None:
    table.merge([signed(YOU, 1)])
    clock.now_s += FORGOTTEN_S - 1
    table.merge([signed(THIRD, 1)])
    table.pulse()
    assert table.knows(YOU.peer_id)
    clock.now_s += 2
    table.pulse()
    assert not table.knows(YOU.peer_id) and table.knows(THIRD.peer_id)


# leaders and relays


def test_members_are_the_peers_that_train_sorted_by_peer_id(table: PeerTable) -> None:
    for number, phase in enumerate(Phase, 6):
        table.merge([signed(THIRD, number, phase=phase), signed(YOU)])
        expected = ids(ME, YOU, THIRD) if phase in MEMBER_PHASES else ids(ME, YOU)
        assert [r.peer_id for r in table.members()] == expected, phase


def test_an_evicted_member_keeps_its_place_in_the_order_of_leaders(table: PeerTable) -> None:
    """Only this node may know why it is evicted, and all nodes need the same order."""
    table.merge([signed(YOU), signed(THIRD)])
    before = table.leaders()
    table.evict(YOU.peer_id, 600.0)
    assert table.is_evicted(YOU.peer_id) and table.leaders() == before == ids(ME, YOU, THIRD)
    assert table.callable_members(with_evicted=True) == before
    assert [r.peer_id for r in table.members()] == table.callable_members() == ids(ME, THIRD)


def test_a_node_does_not_evict_itself(table: PeerTable) -> None:
    table.evict(ME.peer_id, 600.0)
    assert not table.is_evicted(ME.peer_id)


def test_only_members_that_can_be_called_lead_unless_there_are_none(table: PeerTable) -> None:
    table.merge([signed(YOU, inbound=False), signed(THIRD, phase=Phase.PAUSED)])
    assert table.leaders() == [ME.peer_id]
    table.update_own(inbound=False)
    assert table.leaders() == ids(ME, YOU)


def test_two_peers_without_inbound_ports_do_not_call_each_other(table: PeerTable) -> None:
    table.merge([signed(YOU, inbound=False), signed(THIRD)])
    assert {r.peer_id for r in table.others()} == {YOU.peer_id, THIRD.peer_id}
    table.update_own(inbound=False)
    assert {r.peer_id for r in table.others()} == {THIRD.peer_id}
    assert [r.peer_id for r in table.members()] == ids(ME, YOU, THIRD)


def test_two_peers_without_inbound_ports_call_each_other_over_a_live_relay(table: PeerTable) -> None:
    table.update_own(**HIDDEN)
    table.merge([signed(YOU, **HIDDEN)])
    assert table.others() == [], "the relay is unknown"
    for number, relay, is_usable in (
        (1, {}, False),
        (2, {"relays": True}, True),
        (3, {"relays": True, "inbound": False}, False),
        (4, {"relays": True}, True),
    ):
        table.merge([signed(RELAY, number, phase=Phase.PAUSED, **relay)])
        assert table.relays_to(YOU.peer_id) == (ids(RELAY) if is_usable else []), relay
        assert (YOU.peer_id in {r.peer_id for r in table.others()}) == is_usable
    table.suspect(RELAY.peer_id)
    assert table.relays_to(YOU.peer_id) == []


def test_members_that_everyone_can_call_over_ipv4_are_preferred_as_leaders(table: PeerTable) -> None:
    v4, v6 = ["/ip4/1.2.3.4/tcp/1", "/ip6/2001:db8::1/tcp/1"], ["/ip4/127.0.0.1/tcp/1", "/ip6/2001:db8::2/tcp/1"]
    table.merge([signed(RELAY, phase=Phase.PAUSED, relays=True), signed(THIRD, **HIDDEN)])
    table.update_own(inbound=False)
    assert table.callable_members() == table.leaders() == [THIRD.peer_id], "over the relay"
    table.merge([signed(YOU, addresses=v6)])
    assert table.callable_members() == [YOU.peer_id]
    table.update_own(inbound=True, addresses=v4)
    assert table.callable_members() == [ME.peer_id]
    assert table.leaders() == ids(ME, YOU, THIRD), "the others lead when it fails"
    table.update_own(inbound=False)
    table.merge([signed(YOU, 2, inbound=False), signed(THIRD, 2, inbound=False)])
    assert table.callable_members() == [] and len(table.leaders()) == 3


def test_calls_between_different_pairs_of_peers_are_spread_over_the_relays(table: PeerTable) -> None:
    relays, hidden = [new_identity() for _ in range(3)], [new_identity() for _ in range(30)]
    table.merge([signed(relay, relays=True) for relay in relays])
    table.merge([signed(peer, inbound=False, via=tuple(ids(*relays))) for peer in hidden])
    assert all(set(table.relays_to(peer.peer_id)) == set(ids(*relays)) for peer in hidden)
    assert {table.relays_to(peer.peer_id)[0] for peer in hidden} == set(ids(*relays))


def test_only_a_relay_carries_calls_and_only_between_peers_of_the_run(table: PeerTable) -> None:
    table.merge([signed(YOU)])
    with pytest.raises(PeerError, match="relays no calls"):
        table.check_carried(YOU.peer_id, ME.peer_id)
    table.update_own(relays=True)
    table.check_carried(YOU.peer_id, ME.peer_id)
    for caller, target in ((YOU, THIRD), (THIRD, YOU)):
        with pytest.raises(PeerError, match="between peers of its run"):
            table.check_carried(caller.peer_id, target.peer_id)


# rows


def test_rows_of_the_peer_table_describe_the_live_peers(clock: Clock, table: PeerTable) -> None:
    table.merge([signed(YOU, 1, name="Ada", transport="relay", compute_utilization_ratio=0.75)])
    clock.now_s += 2.0
    me, you = table.rows()
    assert me.this_node and not you.this_node
    assert (you.name, you.transport, you.last_seen_s) == ("Ada", "relay", 2.0)
    assert (me.compute_utilization_ratio, you.compute_utilization_ratio) == (None, 0.75)
    assert (me.name, me.last_seen_s) == (ME.peer_id[-6:], 0.0)


def test_rows_of_the_peer_table_hold_printable_text_only(table: PeerTable) -> None:
    table.merge([signed(YOU, 1, name="\x1b[31mAda\n\u202e", version="1\r\n2", state_digest="\x00")])
    table.merge([signed(THIRD, 1, name="\n\u2028")])
    named = {row.peer_id: (row.name, row.version, row.state_digest) for row in table.rows()}
    assert named[YOU.peer_id] == ("[31mAda", "1  2", " ")
    assert named[THIRD.peer_id][0] == THIRD.peer_id[-6:]


# gossip


def test_a_gossip_reply_holds_only_the_records_that_the_caller_lacks(table: PeerTable, other: PeerTable) -> None:
    table.merge([signed(YOU, 3)])
    assert [s.open(RUN).peer_id for s in table.records_for(other.wanted_numbers())] == ids(ME, YOU)
    other.merge([signed(YOU, 3)])
    assert [s.open(RUN).peer_id for s in table.records_for(other.wanted_numbers())] == ids(ME)
    table.merge([signed(YOU, 4), signed(THIRD, 5000)])
    news = [s.open(RUN) for s in table.records_for(other.wanted_numbers())]
    assert {(r.peer_id, r.number) for r in news[1:]} == {(YOU.peer_id, 4), (THIRD.peer_id, 5000)}
    other.merge(table.records_for(other.wanted_numbers()))
    assert other.me.number == 5000, "the caller's record from before a restart is included"


def test_old_records_are_gossiped_to_their_own_peer_only(clock: Clock, table: PeerTable) -> None:
    table.merge([signed(YOU, 7)])
    clock.now_s += GOSSIP_AGE_S + 1
    assert YOU.peer_id in live_ids(table)
    assert len(table.records_for({}, THIRD.peer_id)) == len(table.records_for()) == 1
    (_, own) = table.records_for({}, YOU.peer_id)
    assert own.open(RUN).number == 7 and own.age_s == GOSSIP_AGE_S + 1


def new_gossip(network: InProcessNetwork, table: PeerTable) -> Gossip:
    return Gossip(InProcessWire(network, table.me.peer_id), table, random.Random(0))


def test_contributors_hear_of_each_other_although_there_are_many_strangers(clock: Clock, table: PeerTable) -> None:
    """Quorums take a contributor that is not heard of for dead. Strangers are free, and pass on nobody's records."""
    contributors, strangers = ids(YOU, THIRD), [f"stranger{number}" for number in range(300)]

    async def main() -> None:
        gossip = new_gossip(InProcessNetwork(), table)
        assert len(gossip._choose(contributors + strangers)) == fanout(302), "without a chain, all are alike"
        table.contributors = lambda: contributors
        chosen = gossip._choose(contributors + strangers)
        assert set(contributors) < set(chosen) and len(chosen) == 2 + fanout(300)
        assert set(gossip._choose(contributors)) == set(contributors)

    asyncio.run(main())


@pytest.mark.timeout(20)
def test_gossip_spreads_records_through_a_third_peer_and_a_goodbye_at_once(clock: Clock) -> None:
    async def main() -> None:
        network = InProcessNetwork()
        tables = {identity: PeerTable(identity, record(identity), clock) for identity in (ME, YOU, THIRD)}
        gossips = {identity: new_gossip(network, table) for identity, table in tables.items()}
        assert await gossips[ME].exchange(YOU.peer_id)
        assert await gossips[THIRD].exchange(YOU.peer_id)
        assert live_ids(tables[THIRD]) == set(ids(ME, YOU, THIRD))
        tables[YOU].update_own(phase=Phase.STOPPED)
        await gossips[YOU].announce()
        assert YOU.peer_id not in live_ids(tables[ME]) | live_ids(tables[THIRD])
        network.cut(ME.peer_id, THIRD.peer_id)
        tables[ME].merge(tables[THIRD].records_for())
        assert THIRD.peer_id in live_ids(tables[ME])
        assert not await gossips[ME].exchange(THIRD.peer_id)
        assert THIRD.peer_id not in live_ids(tables[ME])

    asyncio.run(main())


@pytest.mark.timeout(20)
@pytest.mark.parametrize("silent_s", [0.5, GOSSIP_AGE_S + 1, DEAD_S + 1, FORGOTTEN_S - 60])
def test_restarted_node_whose_clock_was_set_back_is_soon_live(clock: Clock, other: PeerTable, silent_s: float) -> None:
    async def main() -> None:
        network = InProcessNetwork()
        new_gossip(network, other)
        other.merge([signed(ME, 1_000_000, phase=Phase.STOPPED)])
        clock.now_s += silent_s
        again = PeerTable(ME, record(ME, 400_000), clock)
        gossip = new_gossip(network, again)
        assert await gossip.exchange(THIRD.peer_id)
        assert again.me.number == 1_000_000
        again.pulse()
        assert await gossip.exchange(THIRD.peer_id)
        assert live_ids(other) == set(ids(ME, THIRD))
        assert other.find(ME.peer_id) == again.me
        assert len(other.records_for(again.wanted_numbers(), ME.peer_id)) == 1

    asyncio.run(main())


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
def test_a_malformed_gossip_message_is_refused(table: PeerTable, header: dict[str, list[object]]) -> None:
    async def main() -> None:
        gossip = new_gossip(InProcessNetwork(), table)
        with pytest.raises(PeerError):
            await gossip._answer(YOU.peer_id, Message(header, [b"{}"] * len(header["signatures"])))

    asyncio.run(main())


def test_a_gossip_reply_holds_no_more_bytes_than_its_reader_accepts(
    table: PeerTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = signed(YOU, 3), signed(THIRD, 3)
    table.merge([first, second])
    monkeypatch.setattr(peer_table, "MAX_ANSWER_BYTES", len(table.own().body) + len(first.body))
    assert [s.open(RUN).peer_id for s in table.records_for()] == ids(ME, YOU)


def test_a_false_age_does_not_make_a_peer_dead_that_has_a_newer_record(clock: Clock, table: PeerTable) -> None:
    """A hostile peer is the first to pass on each record of YOU, and says that it is as old as a record may be."""

    async def main() -> None:
        gossip = new_gossip(InProcessNetwork(), table)
        for number in range(1, 12):
            clock.now_s += 1.0
            news = signed(YOU, number)
            header = {"signatures": [news.signature], "ages_ds": [round(10 * DEAD_S)]}
            await gossip._answer(THIRD.peer_id, Message(header, [news.body]))
            assert table.present() == set(ids(ME, YOU)), number

    asyncio.run(main())


def test_the_largest_gossip_messages_fit_into_the_size_limits() -> None:
    wanted = {f"{number:016d}": 2**62 for number in range(MAX_KNOWN + 1)}
    unpacked = unpack_header(pack_header("gossip", Message({"wanted": wanted})), at_most(0))
    assert unpacked[1]["wanted"] == wanted
    address = f"/ip4/203.0.113.255/tcp/31337/p2p/{YOU.peer_id}"
    text = {"name": "n" * 64, "version": "v" * 40, "state_digest": "ef" * 32, "addresses": (address,) * 16}
    longest = signed(YOU, 2**62, swarm_tokens=2**60, **text)
    scores = TaskScores(
        round=2**62, state_digest="ef" * 32, scores={f"{i:02d}{'t' * 62}": 0.123456789 for i in range(16)}
    )
    full = signed(YOU, 2**62, **text, via=(YOU.peer_id,) * 3, evaluates=True, publishes=True, evaluation=scores)
    assert len(full.body) < MAX_RECORD_BYTES / 1.5
    assert 1000 * len(longest.body) < MAX_REPLY_BYTES and len(longest.body) < MAX_REQUEST_BYTES
    assert MAX_BLOBS > 1000
    assert 1000 * (len(msgpack.packb(longest.signature)) + 5) < MAX_HEADER_BYTES


def test_peer_that_said_goodbye_differs_from_one_that_fell_silent(table: PeerTable, clock: Clock) -> None:
    table.merge([signed(YOU), signed(THIRD)])
    table.merge([signed(YOU, number=2, phase=Phase.STOPPED)])
    clock.now_s += DEAD_S + 1
    assert [row.peer_id for row in table.rows()] == [ME.peer_id]
    assert table.left() == [YOU.peer_id]
    clock.now_s += peer_table.LEFT_S
    assert table.left() == []


def test_rows_of_many_strangers_do_not_make_the_workers_report_too_long(table: PeerTable) -> None:
    scores = TaskScores(round=1, state_digest="ab" * 32, scores={f"{i:02d}" + "x" * 62: 0.123456789 for i in range(16)})
    wide: dict[str, Any] = {"name": "\U0001f600" * 64, "version": "\U0001f600" * 40, "evaluation": scores}
    members = [signed(new_identity(), name="member") for _ in range(5)]
    strangers = [signed(new_identity(), phase=Phase.STARTING, **wide) for _ in range(MAX_ROWS + 50)]
    table.merge([*strangers, *members])
    assert len(table.live()) == MAX_ROWS + 56
    rows = table.rows()
    assert len(rows) == MAX_ROWS and rows[0].this_node
    assert {row.name for row in rows[1:6]} == {"member"}
    assert len(encode(StatusReport(report=Report(swarm=tuple(rows)), last_round=0))) < MAX_LINE_BYTES

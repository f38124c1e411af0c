"""Tests of the table of credit: sums, encoding, Merkle paths and the limit on its members."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from node.diloco import credit
from node.diloco.credit import EMPTY, MOST_BYTES, OTHERS, Credit, CreditTable, decode, leaf_hash, node_hash, table_of
from node.swarm.identity import peer_id_of_key

MEMBERS = [peer_id_of_key(b"\x08\x01\x12\x20" + bytes([number]) * 32) for number in range(40)]


def grown(rounds: int, members: int, seed: int = 0) -> tuple[CreditTable, int]:
    """A table after some rounds of some members, and the tokens of all of them."""
    rng, table, total = random.Random(seed), EMPTY, 0
    for round_ in range(rounds):
        shares = {peer: rng.randrange(1, 10**6) for peer in rng.sample(MEMBERS[:members], rng.randint(1, members))}
        table, total = table.after(round_, shares), total + sum(shares.values())
    return table, total


def verified(table: CreditTable, peer: str) -> bytes:
    """The root that follows from a member's entry and path."""
    found = leaf_hash(table.entry(peer))
    for step in table.path(peer):
        found = node_hash(step.sibling, found) if step.is_left else node_hash(found, step.sibling)
    return found


def test_credit_adds_up_tokens_and_rounds() -> None:
    one, other, *_ = MEMBERS
    table = EMPTY.after(0, {one: 10, other: 5}).after(1, {other: 7}).after(3, {one: 1})
    assert dict(table) == {one: Credit(11, 2, 0, 3, 3), other: Credit(12, 2, 0, 0, 1)}
    assert table.tokens == 23
    assert dict(EMPTY) == {}, "no table changes in place"


@pytest.mark.parametrize("members", [1, 2, 3, 5, 8, 13, 40])
def test_every_entry_has_a_path_to_the_root(members: int) -> None:
    table, total = grown(20, members)
    assert table.tokens == total
    assert {verified(table, peer) for peer in table} == {table.root}
    assert len(table.encode()) == 63 * len(table), "at most 64 bytes a member"
    assert decode(table.encode()) == table and decode(table.encode()).root == table.root


def test_root_depends_on_every_number_and_id() -> None:
    table, _ = grown(5, 6)
    roots = {table.root}
    for peer, entry in table.items():
        for changed in (
            replace(entry, tokens=entry.tokens + 1),
            replace(entry, rounds=entry.rounds + 1),
            replace(entry, last_round=entry.last_round + 1),
        ):
            roots.add(table_of({**table, peer: changed}).root)
        roots.add(table_of({one: entry for one, entry in table.items() if one != peer}).root)
        roots.add(table_of({MEMBERS[-1] if one == peer else one: entry for one, entry in table.items()}).root)
    assert len(roots) == 1 + 5 * len(table)
    assert EMPTY.root == bytes(32) and decode(b"") == EMPTY


def test_streak_begins_anew_after_a_missed_round() -> None:
    peer, table, streaks = MEMBERS[0], EMPTY, []
    for round_ in (0, 1, 2, 4, 5):
        table = table.after(round_, {peer: 1})
        streaks.append(table[peer].streak_round)
    assert streaks == [0, 0, 0, 4, 4]


def test_order_of_the_members_does_not_matter() -> None:
    table, _ = grown(9, 9)
    again = table_of(dict(reversed(list(table.items()))))
    assert (again.root, list(again)) == (table.root, list(table))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\x00",
        lambda data: data[63:126] + data[:63] + data[126:],
        lambda data: data[:63] + data,
        lambda data: data[:39] + bytes(24) + data[63:],
    ],
    ids=["cut short", "too long", "out of order", "twice", "no rounds"],
)
def test_damaged_table_is_refused(damage: Callable[[bytes], bytes]) -> None:
    table, _ = grown(10, 5)
    with pytest.raises(ValueError, match="credit"):
        decode(damage(table.encode()))


def test_table_of_too_many_members_keeps_the_newest_and_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit, "MOST_MEMBERS", 4)
    table = EMPTY.after(0, {peer: 10 + number for number, peer in enumerate(MEMBERS[:4])})
    assert set(table) == set(MEMBERS[:4])
    table = table.after(1, {MEMBERS[4]: 1, MEMBERS[0]: 1})
    assert set(table) == {OTHERS, MEMBERS[0], MEMBERS[3], MEMBERS[4]}, "of those that are away, most tokens stay"
    assert table[OTHERS] == Credit(11 + 12, 2, 0, 0, 0)
    table = table.after(2, {MEMBERS[5]: 1})
    assert set(table) == {OTHERS, MEMBERS[0], MEMBERS[4], MEMBERS[5]}, "a newcomer keeps its entry"
    assert table.tokens == 10 + 11 + 12 + 13 + 1 + 1 + 1
    assert verified(table, OTHERS) == table.root
    with pytest.raises(ValueError, match="too long"):
        decode(table_of({peer: Credit(1, 1, 0, 0, 0) for peer in MEMBERS[:5]}).encode())


def test_two_spellings_of_one_id_are_refused() -> None:
    line = MEMBERS[0], b"", Credit(1, 1, 0, 0, 0)
    with pytest.raises(ValueError, match="two entries of one member"):
        CreditTable([line, (MEMBERS[0] + " ", b"", line[2])])


def test_long_or_strange_tables_are_refused_at_once() -> None:
    """A table comes from strangers, so its size and the form of its ids are checked before it is decoded."""
    strange = bytes([255]) + bytes(255 + 24)
    for data in (bytes(MOST_BYTES + 1), strange * 100, bytes([5]) + bytes(5 + 24)):
        began_s = time.process_time()
        with pytest.raises(ValueError, match="credit"):
            decode(data)
        assert time.process_time() - began_s < 0.1


def test_a_round_encodes_only_the_entries_that_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ = grown(5, 30)
    encoded: list[str] = []
    real = credit.encode_entry

    def counted(member: str, entry: Credit) -> bytes:
        encoded.append(member)
        return real(member, entry)

    monkeypatch.setattr(credit, "encode_entry", counted)
    after = table.after(9, {MEMBERS[0]: 1, MEMBERS[1]: 1})
    assert sorted(encoded) == sorted(MEMBERS[:2])
    assert decode(after.encode()).root == after.root


def test_names_that_are_no_peer_ids_have_entries_of_their_own() -> None:
    """The reference names its members as it likes."""
    table = EMPTY.after(0, {"node-0": 1, "node-1": 2})
    assert len(table) == 2 and table.tokens == 3 and table.root != EMPTY.after(0, {"node-0": 1, "node-2": 2}).root


@pytest.mark.parametrize(
    "numbers", [(1, 0, 0, 0, 0), (-1, 1, 0, 0, 0), (1, 1, 2, 2, 1), (1, 1, -1, 0, 1), (1, 1, 0, 2, 1), (1, 1, 1, 0, 1)]
)
def test_impossible_credit_is_refused(numbers: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="not the credit"):
        Credit(*numbers)


def test_peer_without_credit_has_no_path() -> None:
    with pytest.raises(KeyError):
        EMPTY.path(MEMBERS[0])

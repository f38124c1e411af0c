"""Tests of signed profiles: who belongs to whom, under which name, and what a hostile key cannot claim."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from node.errors import PeerError, UsageError
from node.host.printable import INVISIBLE, check_label
from node.swarm.identity import identity_of_seed, new_identity
from node.swarm.messages import Document, sign
from node.swarm.owners.profile import (
    LONGEST_NAME,
    TOKEN_PREFIX,
    Owner,
    Profile,
    machine_profile,
    make_token,
    owner_profile,
    read_profile,
    read_token,
)
from node.swarm.owners.profile_table import ProfileTable

ADA, BOX, EVE, JOINING = (new_identity() for _ in range(4))
OF_ADA = owner_profile(ADA, 1, "Ada", "Blue", JOINING).document
OF_BOX = machine_profile(BOX, 1, ADA.peer_id, JOINING).document


def table_of(*documents: Document, credited: Sequence[str] = (), most: int = 4096) -> ProfileTable:
    table = ProfileTable(BOX.peer_id, lambda: credited, most)
    assert table.merge(documents) == []
    return table


@pytest.mark.parametrize("name", ["", "Ada", "Zoë Ångström", "王小明", "مريم", "<b>x</b> & co.", "🚀 crew", "x" * 40])
def test_names_of_all_scripts_and_signs_are_allowed(name: str) -> None:
    assert check_label(name, LONGEST_NAME) == name


@pytest.mark.parametrize(
    "name",
    ["a\nb", "a\tb", "\x1b[31m", "a\u202eb", "a\u2066b", "a\u200bb", "a\u00adb", "\ufeff", "a\u2028b", "a\u00a0b",
     "\ud800", "\ue000", " a", "a ", "a  b", "e\u0301", "a\u0300\u0316\u0317", "\u0301a", "x" * 41, *INVISIBLE],
)  # fmt: skip
def test_names_that_deceive_or_break_lines_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="it has"):
        check_label(name, LONGEST_NAME)
    text = sign(EVE, Profile(number=1)).text.replace('"name":""', f'"name":{name!a}'.replace("'", '"'))
    forged = Document(signer=EVE.peer_id, text=text, signature=EVE.sign("diloco profile", text.encode()).hex())
    with pytest.raises(PeerError):
        read_profile(forged)


def test_machine_belongs_to_an_owner_if_both_have_signed_it() -> None:
    ada = Owner(ADA.peer_id, "Ada", "Blue")
    assert dict(table_of(OF_ADA, OF_BOX).owners()) == {ADA.peer_id: ada, BOX.peer_id: ada}
    assert table_of(OF_BOX, OF_ADA).owner_of(BOX.peer_id) == ada, "in either order"


def test_nobody_can_claim_the_machine_of_another() -> None:
    """Eve signs a profile for the box, and one in which she copies the box's own."""
    claim = machine_profile(BOX, 2, EVE.peer_id, JOINING).document
    of_eve = owner_profile(EVE, 1, "Eve", "", JOINING).document
    table = table_of(OF_ADA, OF_BOX, of_eve)
    forged = Document(signer=BOX.peer_id, text=claim.text, signature=sign(EVE, Profile(number=9)).signature)
    (fault,) = table.merge([forged])
    assert fault.code == "bad_signature"
    assert table.owner_of(BOX.peer_id).key == ADA.peer_id


def test_nobody_joins_an_owner_without_the_token() -> None:
    copied = read_profile(OF_BOX).consent
    for consent in ("", copied, BOX.sign("diloco owner", b"x").hex()):
        claim = sign(EVE, Profile(number=1, owner=ADA.peer_id, consent=consent))
        assert table_of(OF_ADA, claim).owner_of(EVE.peer_id) == Owner(EVE.peer_id)
    other_key = machine_profile(EVE, 1, ADA.peer_id, new_identity()).document
    assert table_of(OF_ADA, other_key).owner_of(EVE.peer_id) == Owner(EVE.peer_id)


def test_machine_of_an_unknown_owner_or_of_another_machine_stands_alone() -> None:
    assert table_of(OF_BOX).owner_of(BOX.peer_id) == Owner(BOX.peer_id)
    assert table_of().owner_of(BOX.peer_id) == Owner(BOX.peer_id)
    of_ada = machine_profile(ADA, 2, EVE.peer_id, JOINING).document
    of_eve = owner_profile(EVE, 1, "Eve", "", JOINING).document
    table = table_of(of_ada, OF_BOX, of_eve)
    assert table.owner_of(ADA.peer_id).name == "Eve"
    assert table.owner_of(BOX.peer_id) == Owner(BOX.peer_id), "Ada is no owner any more"


def test_new_joining_key_lets_go_of_machines_and_the_highest_number_counts() -> None:
    table = table_of(OF_ADA, OF_BOX)
    renewed = owner_profile(ADA, 2, "Ada L.", "", new_identity()).document
    table.merge([renewed])
    assert table.owner_of(BOX.peer_id) == Owner(BOX.peer_id)
    table.merge([OF_ADA])
    assert table.owner_of(ADA.peer_id) == Owner(ADA.peer_id, "Ada L.", ""), "an old profile changes nothing"


def test_tables_are_the_same_whatever_the_order_of_profiles() -> None:
    """Two profiles of one number are signed by a hostile key only, and even then all tables agree."""
    documents = [owner_profile(ADA, n, name, "", JOINING).document for n in (1, 2, 3) for name in ("A", "B")]
    documents += [OF_BOX, *(owner_profile(EVE, n, "E", "", JOINING).document for n in (1, 2))]
    tables = []
    for seed in range(10):
        random.Random(seed).shuffle(documents)
        tables.append(table_of(*documents))
    assert len({table.digests for table in tables}) == 1
    assert {table.owner_of(ADA.peer_id).name for table in tables} == {"B"}


def test_only_profiles_that_differ_are_sent() -> None:
    many = [owner_profile(new_identity(), 1, "x", "", JOINING).document for _ in range(60)]
    full, empty, behind = table_of(*many, OF_ADA), table_of(), table_of(*many)
    assert len(full.differing(empty.digests)) == 61
    assert full.differing(full.digests) == []
    sent = full.differing(behind.digests)
    assert OF_ADA in sent and len(sent) < 10
    behind.merge(sent)
    assert behind.digests == full.digests
    with pytest.raises(PeerError):
        full.differing(b"x")


def test_full_table_keeps_those_who_gave_something_and_their_owners() -> None:
    strangers = [owner_profile(new_identity(), 1, "x", "", JOINING).document for _ in range(40)]
    giver = machine_profile(EVE, 1, ADA.peer_id, JOINING).document
    tables = []
    for order in ([OF_ADA, giver, OF_BOX, *strangers], [*reversed(strangers), OF_BOX, giver, OF_ADA]):
        table = ProfileTable(BOX.peer_id, lambda: [EVE.peer_id], most=12)
        for document in order:
            table.merge([document])
        table.merge([giver, OF_ADA])
        tables.append(table)
        assert len(table) == 12
        assert {ADA.peer_id, EVE.peer_id, BOX.peer_id} <= dict(table.owners()).keys(), "and its own"
    assert tables[0].digests == tables[1].digests


def test_profiles_that_a_full_table_does_not_keep_are_no_change() -> None:
    """Otherwise a peer that sends them makes the node write its file for ever."""
    strangers = [owner_profile(new_identity(), 1, "x", "", JOINING).document for _ in range(40)]
    table = table_of(*strangers, OF_ADA, credited=[ADA.peer_id], most=12)
    changes, digests = table.changes, table.digests
    for _ in range(3):
        table.merge(strangers)
    assert (table.changes, table.digests) == (changes, digests)
    newer = owner_profile(ADA, 99, "Ada L.", "", JOINING).document
    table.merge([newer, *strangers])
    assert table.changes == changes + 1 and table.owner_of(ADA.peer_id).name == "Ada L."


def test_longest_profile_is_accepted_and_a_padded_one_refused() -> None:
    longest = sign(BOX, Profile(number=2**53 - 1, name="\U0001f680" * 40, team="x" * 40, joining_key=JOINING.peer_id,
                                owner=ADA.peer_id, consent="a" * 128))  # fmt: skip
    assert read_profile(longest).name
    assert len(longest.text) <= 520, "as its docstring says"
    text = OF_ADA.text.replace("{", "{" + " " * 300, 1)
    with pytest.raises(PeerError):
        read_profile(Document(signer=ADA.peer_id, text=text, signature=ADA.sign("diloco profile", text.encode()).hex()))


def test_token_carries_owner_and_joining_key_and_a_damaged_one_is_refused() -> None:
    token = make_token(ADA.peer_id, JOINING)
    owner, joining = read_token(f" {token[:30]}\n  {token[30:]} ")
    assert (owner, joining.peer_id) == (ADA.peer_id, JOINING.peer_id)
    at = len(TOKEN_PREFIX) + 20
    for bad in ("", token[:-8], token[at:], token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :], "ä" * 9):
        with pytest.raises(UsageError, match="damaged"):
            read_token(bad)


def test_an_identity_survives_as_its_seed() -> None:
    again = identity_of_seed(ADA.seed)
    assert again.peer_id == ADA.peer_id
    with pytest.raises(ValueError, match="32"):
        identity_of_seed(b"short")

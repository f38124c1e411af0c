"""What a ballot remembers of other members."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from node.errors import PeerError, RoundFailed
from node.swarm.consensus.ballot import MAX_AHEAD, Attempt, Ballot, later_attempt, most_wrong
from node.swarm.consensus.quorum import Electorate
from tests.event_loop import in_loop


def test_a_member_that_could_not_be_reached_is_doubted_only_for_a_time() -> None:
    """One that has answered falsely is doubted until it claims another head."""
    now_s = 100.0
    chain: Any = SimpleNamespace(tip=SimpleNamespace(head="aa"), store=SimpleNamespace(lowest_attempt=lambda _head: 0))
    nothing: Any = None
    ballot = Ballot(chain, nothing, lambda: now_s, can_commit=lambda members, _: bool(members))
    silent: Any = SimpleNamespace(peer_id="silent", head="bb")
    false: Any = SimpleNamespace(peer_id="false", head="bb")
    ballot.add_false_claim(silent, doubt_s=30.0)
    ballot.add_false_claim(false)
    assert ballot.has_false_claim(silent) and ballot.has_false_claim(false)
    assert not ballot.has_false_claim(SimpleNamespace(peer_id="false", head="cc"))  # type: ignore[arg-type]
    now_s = 131.0
    assert not ballot.has_false_claim(silent)
    assert ballot.has_false_claim(false)


def test_a_member_that_is_doubted_for_a_time_is_believed_at_no_head_until_then() -> None:
    now_s = 100.0
    chain: Any = SimpleNamespace(tip=SimpleNamespace(head="aa"), store=SimpleNamespace(lowest_attempt=lambda _head: 0))
    nothing: Any = None
    ballot = Ballot(chain, nothing, lambda: now_s, can_commit=lambda members, _: bool(members))
    ballot.doubt("rival", 20.0)
    records: list[Any] = [
        SimpleNamespace(peer_id=peer, head=head) for peer in ("rival", "other") for head in ("b", "c")
    ]
    assert [ballot.has_false_claim(record) for record in records] == [True, True, False, False]
    now_s = 121.0
    assert not any(map(ballot.has_false_claim, records))


def test_a_leader_that_ends_a_round_that_is_over_does_not_raise_the_attempt_of_the_next_round() -> None:
    """The certificate of a round may arrive from another member just before the leader's answer."""
    nothing: Any = None

    async def number_if_the_head_is(head: str) -> int:
        tip = SimpleNamespace(head="aa")
        chain: Any = SimpleNamespace(tip=tip, store=SimpleNamespace(lowest_attempt=lambda _head: 0))
        ballot = Ballot(chain, nothing, lambda: 0.0, can_commit=lambda members, _: bool(members))
        attempt, tip.head = ballot.current, head
        with pytest.raises(RoundFailed) as caught:
            ballot.follow(attempt, 5, "")
        ballot.give_up(attempt, caught.value)
        return ballot.number

    assert [asyncio.run(number_if_the_head_is(head)) for head in ("aa", "bb")] == [1, 0]


def number_after(
    attempts: Sequence[int],
    contributors: Sequence[int],
    min_peers: int = 2,
    attending: Sequence[int] = (),
    age_s: float = 60.0,
    before: Sequence[int] = (),
    then: Sequence[int] = (),
) -> int:
    """Where node 0 goes from attempt 0 if the others are in these attempts, and node 1 attends others at it.

    The record of a member in attempt -1 still names the round before. `before` are contributors to the record before.
    Afterwards the last member goes to the attempts in `then`, one after the other.
    """
    names = [str(number) for number in range(len(attempts) + 1)]
    chain: Any = SimpleNamespace(
        tip=SimpleNamespace(
            head="aa", digest="dd", round=3, anchor_at_s=-age_s, known=frozenset(map(str, (*contributors, *before)))
        ),
        store=SimpleNamespace(lowest_attempt=lambda _head: 0),
    )
    records = [
        SimpleNamespace(
            peer_id=name,
            head="aa" if attempt >= 0 else "before",
            state_digest="dd",
            attempt=attempt,
            round=3 - (attempt < 0),
        )
        for name, attempt in zip(names, (0, *attempts), strict=True)
    ]
    table: Any = SimpleNamespace(members=lambda: records, me=records[0], is_member=lambda peer: peer in names)
    everyone = frozenset(names)
    electorate = Electorate(frozenset(map(str, contributors)), present=everyone, members=everyone)

    def can_commit(peers: Collection[str], others: Collection[str]) -> bool:
        return len({*peers, *others}) >= min_peers and electorate.is_quorum(peers)

    ballot = Ballot(chain, table, lambda: 0.0, can_commit)
    for later in attending:
        ballot.attended(later, "1").joins["1"] = None  # type: ignore[assignment]
    ballot.follow_members()
    for attempt in then:
        records[-1].attempt = attempt
        ballot.follow_members()
    return ballot.number


@pytest.mark.parametrize(
    ("attempts", "contributors", "number", "why"),
    [
        ((7, 0, 0), (0, 1, 2, 3), 0, "one of three others may be wrong"),
        ((7, 0, 0, 0, 0, 0), range(7), 0, "one of six"),
        ((7, 9, 0, 0, 0, 0), range(7), 0, "two of six"),
        ((7, 9, 8, 0, 0, 0), range(7), 7, "more than a third have reached 7"),
        ((7, 2, 0), (0, 1, 2, 3), 2, "members 0, 2 and 3 are a quorum in attempt 2"),
        ((7, 2, 0, 0, 0), range(5), 2, "both have reached 2, and the others suffice"),
        ((7, 0), (0, 1, 2), 7, "one of two others: nobody can tell who is wrong"),
        ((7, 0, 0), (0, 1), 7, "there is no quorum without the one that is ahead"),
        ((0, 0, 7, 7, 7), (0, 1, 2), 0, "three others that have not contributed do not count"),
        ((2**31 - 1, 0, 0), (0, 1), MAX_AHEAD, "nobody uses up the numbers of attempts"),
    ],
)
def test_one_member_that_is_ahead_ends_no_attempt_of_four_that_can_go_on_without_it(
    attempts: Sequence[int], contributors: Sequence[int], number: int, why: str
) -> None:
    assert number_after(attempts, contributors) == number, why


def test_a_leader_that_leaves_members_out_does_not_silence_them() -> None:
    """With two others, one of them may be right. The leader of the last record would be one of two."""
    assert number_after((7, 0, 0, 0), (0, 1, 2), before=range(5)) == 0


def test_members_that_attend_a_later_attempt_have_reached_it_before_their_records_say_so() -> None:
    assert number_after((0, 3, 0, 0), range(5)) == 0
    assert number_after((0, 3, 0, 0), range(5), attending=[5]) == 3, "member 1 attends attempt 5, and member 2 is in 3"
    assert number_after((0, 3, 0, 0), range(5), attending=[5, 2]) == 2, "it waits in one attempt at a time"


def test_members_that_have_not_heard_of_the_last_commit_count_as_present_for_some_seconds() -> None:
    assert number_after((7, -1, -1), range(4), age_s=1.0) == 0
    assert number_after((7, -1, -1), range(4), age_s=60.0) == 7, (
        "they are behind, so there is no quorum without member 1"
    )


def test_one_of_three_known_members_is_not_needed_if_a_newcomer_can_take_its_place() -> None:
    attempts, known, then = (0, 0, 0, 7), (0, 1, 4), (20, 40, 60)
    assert number_after(attempts, known, min_peers=3, then=then) == 20, "it leads the node on twice"
    assert number_after(attempts, known, min_peers=6, then=then) == 60, "all are too few for a round without it"


def test_a_node_that_is_no_member_itself_may_look_up_later_attempts() -> None:
    """A node that replaces its state is none, and there may be no other."""
    assert most_wrong(0) == most_wrong(1) == 0
    assert later_attempt(0, {"me": 0}, {}, most_wrong(0), lambda _: True) is None


def test_one_of_three_starts_at_most_two_later_attempts_unless_the_others_need_it() -> None:
    def chosen(raised: int, needed: bool) -> tuple[int, str] | None:
        def can_commit(peers: Collection[str]) -> bool:
            return len(peers) >= (3 if needed else 2)

        return later_attempt(0, {"me": 0, "second": 0, "third": 4}, {"third": raised}, most_wrong(3), can_commit)

    assert [chosen(raised, needed=False) for raised in range(4)] == [(4, "third"), (4, "third"), None, None]
    assert [chosen(raised, needed=True) for raised in (2, 63, 64)] == [(4, "third"), (4, "third"), None]


def test_only_members_wait_for_a_later_attempt() -> None:
    chain: Any = SimpleNamespace(tip=SimpleNamespace(head="aa"), store=SimpleNamespace(lowest_attempt=lambda _head: 0))
    table: Any = SimpleNamespace(is_member=lambda peer: peer == "member")
    ballot = Ballot(chain, table, lambda: 0.0, can_commit=lambda members, _: bool(members))
    with pytest.raises(PeerError, match="only members"):
        ballot.attended(3, "stranger")
    assert ballot.attended(0, "stranger").number == 0
    assert ballot.attended(3, "member").number == 3 and ballot.number == 0


def test_a_node_follows_one_member_if_the_others_are_too_few_for_the_run() -> None:
    assert number_after((7, 0, 0), range(4), min_peers=4) == 7


@in_loop
async def test_an_attempt_that_ends_before_its_plan_keeps_no_contribution_waiting() -> None:
    """Each waiting call holds a contribution in memory, and a plan for many members may take a minute."""
    attempt = Attempt("00" * 32, 0)
    waiting = asyncio.create_task(attempt.reducer_ready(60.0))
    await asyncio.sleep(0)
    attempt.ended.set()
    with pytest.raises(PeerError, match="no plan"):
        await asyncio.wait_for(waiting, 5.0)

"""Tests of leader order, quorums, closing a group, and the shares of reducers. Time is an argument."""

from __future__ import annotations

import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.swarm.allreduce.chunk_assignment import FASTEST_BYTES_S, believed, capacities, chunk_owners
from node.swarm.consensus.context import Context
from node.swarm.consensus.depositary import depositaries
from node.swarm.consensus.group_closing import (
    FEW_NEWCOMERS,
    WAITING_CODES,
    ClosingRule,
    Gathering,
    GroupVerdict,
    admitted,
    judge,
    left_out,
)
from node.swarm.consensus.leader_election import leader_of, leader_order, slow_uplinks
from node.swarm.consensus.quorum import Electorate
from node.swarm.identity import new_identity
from node.swarm.messages import Plan, RoundOutcome, sign
from tests.unit.swarm_data import RUN, new_join

TIME = ClosingRule("time", min_peers=2, quorum_ratio=0.5)
STEPS = ClosingRule("steps", min_peers=2, quorum_ratio=0.5)


def electorate(last: Iterable[str], live: Iterable[str], *, is_overdue: bool = False) -> Electorate:
    return Electorate(frozenset(last), frozenset(live), frozenset(live), is_overdue)


def at(
    rule: ClosingRule,
    ready: str,
    live: str,
    last: dict[str, int] | None = None,
    *,
    now_s: float = 0.0,
    quorum_at_s: float | None = None,
    round_s: float | None = 10.0,
    elsewhere: str = "",
    is_overdue: bool = False,
    left_out: str = "",
    known: str = "",
) -> GroupVerdict:
    """The verdict `now_s` seconds after the first member became ready. Each letter is a peer.

    The members in `elsewhere` are live and have moved on to a later round.
    """
    seen = Gathering(
        ready=dict.fromkeys(ready, 1),
        live=list(live),
        last_weights=last or {},
        joined=ready,
        electorate=electorate(last or {}, live + elsewhere, is_overdue=is_overdue),
        opened_at_s=0.0,
        quorum_at_s=quorum_at_s,
        round_s=round_s,
        left_out=left_out,
        known=known,
    )
    return judge(rule, seen, now_s)


EQUAL = dict.fromkeys("abcd", 100)
ONE_HEAVY = {"a": 1000, "b": 10, "c": 10, "d": 10}


@pytest.mark.parametrize(
    ("verdict", "close", "quorum", "code"),
    [
        # min_peers
        (at(TIME, "a", "a"), False, False, "waiting_for_peers"),
        (at(ClosingRule("time", 1, 0.5), "a", "a"), True, True, "complete"),
        (at(TIME, "ab", "ab"), True, True, "complete"),
        (at(ClosingRule("time", 3, 0.5), "ab", "ab", now_s=1e9), False, False, "waiting_for_peers"),
        # all members ready: at once, whatever the weights
        (at(TIME, "abcd", "abcd", EQUAL), True, True, "complete"),
        (at(STEPS, "abcd", "abcd", ONE_HEAVY), True, True, "complete"),
        # a quorum of the last contributors, by count
        (at(TIME, "ab", "abcd", EQUAL, now_s=1e9, quorum_at_s=0), False, False, "waiting_for_peers"),
        (at(TIME, "abc", "abcd", EQUAL), False, True, "grace"),
        (at(TIME, "ab", "abc", EQUAL, now_s=1e9, quorum_at_s=0), False, False, "waiting_for_peers"),
        (at(TIME, "ab", "abc", EQUAL, is_overdue=True), False, True, "grace"),
        (at(TIME, "abc", "abc", EQUAL), True, True, "complete"),
        (at(TIME, "ab", "ab", EQUAL), True, True, "complete"),
        (at(TIME, "ae", "abe", {"b": 1, "c": 1}, now_s=1e9, quorum_at_s=0), False, False, "waiting_for_peers"),
        # members in a later round are not available, so those left behind are no majority
        (at(TIME, "cd", "cd", EQUAL, elsewhere="ab", now_s=1e9), False, False, "waiting_for_peers"),
        (at(TIME, "cd", "cd", EQUAL, elsewhere="ab", is_overdue=True), False, False, "waiting_for_peers"),
        (at(TIME, "cd", "cd", EQUAL, elsewhere="b", is_overdue=True), True, True, "complete"),
        # quorum by weight of the live members
        (at(TIME, "bcd", "abcd", ONE_HEAVY, now_s=59), False, False, "waiting_for_quorum"),
        # a heavy member can withhold it for three rounds and 30 s
        (at(TIME, "bcd", "abcd", ONE_HEAVY, now_s=61), True, True, "late"),
        (at(TIME, "bc", "abcd", ONE_HEAVY, now_s=1e9), False, False, "waiting_for_peers"),
        (at(TIME, "abc", "abcd", ONE_HEAVY), False, True, "grace"),
        (at(TIME, "bcd", "bcd", ONE_HEAVY), True, True, "complete"),
        # a new member counts as the mean of the known
        (at(TIME, "ab", "abxy", {"a": 100, "b": 100}), False, True, "grace"),
        (at(TIME, "ab", "abxyz", {"a": 100, "b": 100}), False, False, "waiting_for_quorum"),
        # grace: max(2 s, 0.1 T_r) from the quorum on
        (at(TIME, "abc", "abcd", EQUAL, now_s=6.9, quorum_at_s=5), False, True, "grace"),
        (at(TIME, "abc", "abcd", EQUAL, now_s=7.1, quorum_at_s=5), True, True, "late"),
        (at(TIME, "abc", "abcd", EQUAL, now_s=14, quorum_at_s=5, round_s=100), False, True, "grace"),
        (at(TIME, "abc", "abcd", EQUAL, now_s=15.1, quorum_at_s=5, round_s=100), True, True, "late"),
        (at(TIME, "abc", "abcd", EQUAL, now_s=2.1, quorum_at_s=0, round_s=None), True, True, "late"),
        # a recently excluded member: until it is ready, up to a quarter of a round
        (at(TIME, "abc", "abcd", EQUAL, now_s=24, quorum_at_s=0, round_s=100, left_out="d"), False, True, "grace"),
        (at(TIME, "abc", "abcd", EQUAL, now_s=25.1, quorum_at_s=0, round_s=100, left_out="d"), True, True, "late"),
        (at(TIME, "abd", "abcd", EQUAL, now_s=10.1, quorum_at_s=0, round_s=100, left_out="d"), True, True, "late"),
        (at(TIME, "abc", "abcd", EQUAL, now_s=10.1, quorum_at_s=0, round_s=100, left_out="e"), True, True, "late"),
        (at(TIME, "abc", "abcd", EQUAL, now_s=2.1, quorum_at_s=0, round_s=None, left_out="d"), True, True, "late"),
        # steps: slow members have three rounds and 30 s
        (at(STEPS, "abc", "abcd", EQUAL, now_s=59), False, True, "waiting_for_slow"),
        (at(STEPS, "abc", "abcd", EQUAL, now_s=61), True, True, "late"),
        (at(STEPS, "abc", "abcd", EQUAL, now_s=31, round_s=None), True, True, "late"),
        (at(STEPS, "ab", "abcd", EQUAL, now_s=1e9), False, False, "waiting_for_peers"),
        # members that have not contributed lately: waited for, and without a weight until they are ready
        (at(TIME, "ab", "abxyz", EQUAL, known="ab", is_overdue=True), False, True, "grace"),
        (at(TIME, "ab", "abxyz", EQUAL, known="ab", now_s=7.1, quorum_at_s=5), True, True, "late"),
        (at(TIME, "abx", "abxyz", EQUAL, known="ab"), False, True, "grace"),
        (at(STEPS, "ab", "abx", EQUAL, known="ab", now_s=59), False, True, "waiting_for_slow"),
        # the first round: more than half of the members
        (at(TIME, "abc", "abcd"), False, True, "grace"),
        (at(TIME, "ab", "abcd"), False, False, "waiting_for_peers"),
        (at(TIME, "ab", "abcd", now_s=1e9), False, False, "waiting_for_peers"),
    ],
)
def test_group_closes_when_all_members_are_ready_or_when_a_quorum_has_waited_long_enough(
    verdict: GroupVerdict, close: bool, quorum: bool, code: str
) -> None:
    assert (verdict.close, verdict.has_quorum, verdict.code) == (close, quorum, code)
    assert code in WAITING_CODES
    assert verdict.reason.endswith(".")
    assert re.match(r"(1 of 1 member is|1 of \d+ members is|[02-9] of \d+ members are) ready", verdict.reason)


@given(
    st.sets(st.sampled_from("abcdefgh"), min_size=1),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 10**6)),
    st.sampled_from(["time", "steps"]),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_two_disjoint_groups_never_both_close(
    live: set[str], last: dict[str, int], policy: str, min_peers: int, rng: random.Random
) -> None:
    """This holds if both leaders see the same peers, and at least one contributor to the last round."""
    first = {peer for peer in sorted(live) if rng.random() < 0.5}
    second = live - first
    rule = ClosingRule(policy, min_peers, 0.5)  # type: ignore[arg-type]
    closes = [
        at(rule, "".join(ready), "".join(sorted(live)), last, now_s=1e9, quorum_at_s=0.0).close
        for ready in (first, second)
    ]
    if live & last.keys():
        assert not all(closes)


LETTERS = st.sets(st.sampled_from("abcdefgh"))


@given(LETTERS.filter(bool), LETTERS, LETTERS, LETTERS, LETTERS)
def test_two_quorums_share_a_member_unless_half_of_the_members_are_believed_dead(
    last: set[str], one: set[str], one_lives: set[str], other: set[str], other_lives: set[str]
) -> None:
    """This holds whichever members the two leaders believe to be live."""
    quorums = [
        electorate(last, all_live).is_quorum(members) for members, all_live in ((one, one_lives), (other, other_lives))
    ]
    most_live = all(2 * len(last & all_live) > len(last) for all_live in (one_lives, other_lives))
    if most_live and all(quorums):
        assert last & one & other


@given(LETTERS, LETTERS, LETTERS)
def test_all_live_members_are_a_quorum_that_shares_a_live_member_with_other_quorums(
    last: set[str], quorum: set[str], all_live: set[str]
) -> None:
    assert electorate(last, all_live).is_quorum(all_live)
    if 2 * len(last & quorum) > len(last) and last & quorum & all_live:
        assert not electorate(last, all_live).is_quorum(all_live - quorum)


@pytest.mark.parametrize(
    ("age_s", "round_s", "expected"), [(29, None, False), (31, None, True), (69, 10, False), (71, 10, True)]
)
def test_a_round_is_overdue_after_four_round_lengths_and_thirty_seconds(
    age_s: float, round_s: float | None, expected: bool
) -> None:
    assert TIME.is_overdue(age_s, round_s) is expected


@given(st.sets(st.text(max_size=8), min_size=1, max_size=20), st.text(max_size=64), st.integers(0, 100))
def test_the_leader_does_not_depend_on_the_order_of_the_peers(peers: set[str], parent: str, attempt: int) -> None:
    order = leader_order(parent, sorted(peers))
    assert order == leader_order(parent, sorted(peers, reverse=True))
    assert sorted(order) == sorted(peers)
    assert leader_of(parent, sorted(peers), [], attempt) == order[attempt % len(order)]


def test_a_peer_that_leaves_does_not_change_the_leader_order_of_the_others() -> None:
    peers = [f"peer{i}" for i in range(50)]
    order = leader_order("parent", peers)
    for gone in peers:
        assert leader_order("parent", [p for p in peers if p != gone]) == [p for p in order if p != gone]


def test_members_lead_equally_often() -> None:
    peers = [f"peer{i}" for i in range(10)]
    counts = Counter(leader_of(f"head{k}", peers, [], 0) for k in range(5000))
    assert set(counts) == set(peers)
    assert max(counts.values()) < 1.25 * min(counts.values())


@given(st.integers(0, 256), st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_chunks_are_assigned_to_reducers_in_proportion_to_their_capacity(chunks: int, capacities: list[float]) -> None:
    if sum(capacities) <= 0:
        with pytest.raises(ValueError, match="capacity"):
            chunk_owners(chunks, capacities)
        return
    owners = chunk_owners(chunks, capacities)
    assert len(owners) == chunks and list(owners) == sorted(owners)
    for index, capacity in enumerate(capacities):
        assert abs(owners.count(index) - chunks * capacity / sum(capacities)) <= 1.0 + 1e-6


def test_reducers_of_equal_capacity_get_equal_shares_of_the_chunks() -> None:
    assert chunk_owners(8, [1, 1, 1, 1]) == (0, 0, 1, 1, 2, 2, 3, 3)
    assert chunk_owners(1, [1, 1, 1]).__len__() == 1
    assert chunk_owners(10, [0, 1]) == (1,) * 10
    with pytest.raises(ValueError, match="at least one reducer"):
        chunk_owners(3, [])


class Crowd:
    """A simulation of the rules with many peers. Seconds are simulated."""

    def __init__(self, peers: int, rng: random.Random) -> None:
        self.peers = [f"peer{i:04}" for i in range(peers)]
        self.speed = {peer: rng.uniform(0.3, 1.0) for peer in self.peers}
        self.last: dict[str, int] = {}
        self._rng = rng

    def round(self, live: Sequence[str], round_s: float) -> tuple[float, list[str]]:
        """Return the seconds from the anchor until the group closes, and the group."""
        ready_at_s = {peer: round_s * self._rng.uniform(1.0, 1.02) for peer in live}
        for peer in self._rng.sample(list(live), len(live) // 50):
            ready_at_s[peer] = round_s * 10  # These peers stall.
        opened_at_s = min(ready_at_s.values())
        quorum_at_s: float | None = None
        now_s = opened_at_s
        while True:
            ready = {peer: int(1000 * self.speed[peer]) for peer in live if ready_at_s[peer] <= now_s}
            seen = Gathering(
                ready, list(live), self.last, ready, electorate(self.last, live), opened_at_s, quorum_at_s, round_s
            )
            verdict = judge(TIME, seen, now_s)
            if verdict.close:
                self.last = ready
                return now_s, sorted(ready)
            if verdict.has_quorum and quorum_at_s is None:
                quorum_at_s = now_s
            now_s += 0.1
            assert now_s < 2 * round_s, verdict


def test_a_thousand_simulated_peers_close_rounds_in_time() -> None:
    rng = random.Random(0)
    crowd = Crowd(1000, rng)
    live, began_s = list(crowd.peers), time.thread_time()
    for number in range(12):
        closed_at_s, group = crowd.round(live, round_s=100.0)
        assert closed_at_s <= 100 * 1.02 + max(TIME.least_grace_s, 0.1 * 100.0) + 0.2
        assert len(group) >= 0.97 * len(live)
        owners = chunk_owners(256, [1.0] * len(group))
        assert len(owners) == 256
        assert leader_of(f"head{number}", group, [], 0) in group
        live = rng.sample(crowd.peers, 900)  # A tenth leaves and others return.
    assert time.thread_time() - began_s < 20


@pytest.mark.parametrize(
    ("declared", "shares"),
    [
        ([], []),
        ([0.0], [1.0]),
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
        # within a factor of two: equal
        ([10e6, 5.1e6, 9e6], [1.0, 1.0, 1.0]),
        ([10e6, 5e6, 4.9e6], [1.0, 0.5, 0.5]),
        # a slow uplink: 10 Mbit/s against 100
        ([12.5e6, 12.0e6, 1.25e6], [1.0, 1.0, 0.125]),
        # an unknown rate counts as the median of the known
        ([8e6, 0.0, 8e6, 1e6], [1.0, 1.0, 1.0, 0.125]),
        ([0.0, 1e6], [1.0, 1.0]),
        # above 1 Gbit/s shares do not grow; no share is 0
        ([1e11, FASTEST_BYTES_S, 64e6], [1.0, 1.0, 1.0]),
        ([1e8, 1.0], [1.0, 2.0**-10]),
    ],
)
def test_capacities_of_reducers_follow_their_declared_uplinks(declared: list[float], shares: list[float]) -> None:
    assert capacities(declared) == shares


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=40))
def test_capacities_of_reducers_are_powers_of_two_in_the_order_of_their_uplinks(declared: list[float]) -> None:
    shares = capacities(declared)
    assert len(shares) == len(declared) and max(shares) == 1.0 and min(shares) > 0
    assert all(math.log2(share).is_integer() for share in shares)
    known = sorted((rate, share) for rate, share in zip(declared, shares, strict=True) if rate > 0)
    assert [share for _, share in known] == sorted(share for _, share in known)


@given(st.lists(st.floats(1e6, 1.999e6), min_size=1, max_size=16), st.integers(1, 300))
def test_uplinks_that_differ_by_less_than_a_factor_of_two_give_equal_shares(declared: list[float], chunks: int) -> None:
    assert chunk_owners(chunks, capacities(declared)) == chunk_owners(chunks, [1.0] * len(declared))


@pytest.mark.parametrize(
    ("votes", "last", "here", "moved", "expected"),
    [
        ("ab", "abc", "abc", "", True),  # more than half of the last contributors
        ("abc", "abcde", "de", "", True),  # the same, but all of them are dead
        ("a", "abc", "abc", "", False),  # the other contributors would know of it
        ("a", "ab", "b", "a", True),  # one of two went on alone: no contradiction
        ("a", "abc", "ac", "b", False),
        ("a", "abc", "b", "ac", True),  # most are in a later round
        ("x", "abc", "ab", "x", False),  # new members do not commit for the others
        ("a", "abcd", "ab", "", False),
        ("ab", "abcd", "ab", "", True),  # the others are dead
        ("x", "", "ax", "", True),  # before the first record
        ("x", "abc", "x", "", True),  # all contributors are dead
    ],
)
def test_a_certificate_is_believed_unless_most_contributors_contradict_it(
    votes: str, last: str, here: str, moved: str, expected: bool
) -> None:
    assert electorate(last, here + moved).believes(votes, moved) is expected


def test_an_attempt_has_no_leader_without_members() -> None:
    """All members may be downloading a state at the same time."""
    assert leader_of("ab", [], [], 3) == "" and leader_of("ab", ["a"], [], 3) == "a"


def test_quorum_before_the_first_record_is_more_than_half_of_the_members() -> None:
    assert electorate("", "abc").is_quorum("ab") and not electorate("", "abc").is_quorum("a")


def test_quorum_without_living_contributors_is_more_than_half_of_the_members() -> None:
    assert electorate("xyz", "abc").is_quorum("ab") and not electorate("xyz", "abc").is_quorum("a")


ALL, WITHOUT_D = ("a", "b", "c", "d"), ("a", "b", "c")


@pytest.mark.parametrize(
    ("round_", "recent", "joined", "expected"),
    [
        (3, [ALL, WITHOUT_D, WITHOUT_D], "", "d"),
        (3, [ALL, ALL, WITHOUT_D], "", ""),  # excluded once
        (4, [ALL, WITHOUT_D, WITHOUT_D], "", ""),  # only every third round
        (5, [ALL, WITHOUT_D, WITHOUT_D], "", ""),
        (6, [ALL, *[WITHOUT_D] * 5], "", "d"),
        (15, [ALL, *[WITHOUT_D] * 12], "", ""),  # excluded for too long
        (15, [ALL, *[WITHOUT_D] * 12], "d", "d"),  # too late each time
        (3, [WITHOUT_D, WITHOUT_D], "e", "e"),  # a new member that is always late
        (3, [WITHOUT_D, WITHOUT_D], "abc", ""),
        (0, [], "d", ""),
        (3, [WITHOUT_D], "d", ""),
    ],
)
def test_every_third_round_waits_for_members_that_were_recently_excluded(
    round_: int, recent: list[tuple[str, ...]], joined: str, expected: str
) -> None:
    assert left_out(round_, recent, joined) == frozenset(expected)


@pytest.mark.parametrize(
    ("known", "newcomers", "number", "min_peers", "expected"),
    [
        (5, 3, 0, 1, 3),
        (5, 20, 0, 1, 5),  # as many as known members
        (1, 20, 0, 1, FEW_NEWCOMERS),
        (5, 20, 1, 1, 2),  # after a failed attempt
        (1, 20, 3, 1, 1),
        (2, 20, 1, 6, 4),  # as many as the run needs
        (0, 20, 1, 1, 20),  # before the first record, or if no known member has joined
    ],
)
def test_a_plan_has_all_known_members_that_joined_and_not_too_many_newcomers(
    known: int, newcomers: int, number: int, min_peers: int, expected: int
) -> None:
    here, others = {f"k{i}" for i in range(known)}, {f"n{i}" for i in range(newcomers)}
    group = admitted(here | others, here | {"away"}, number, min_peers, b"lot")
    assert here <= group <= here | others
    assert len(group) == known + expected


def test_newcomers_are_drawn_by_lot() -> None:
    others = [f"n{i}" for i in range(20)]
    drawn = Counter(peer for lot in range(100) for peer in admitted(["c", *others], "c", 0, 1, bytes([lot])))
    assert drawn["c"] == 100
    assert all(drawn[peer] > 5 for peer in others)


def test_a_depositary_has_a_much_faster_uplink_than_its_depositor() -> None:
    rates = {"a": 1e7, "b": 1e6, "c": 1e7, "d": 3.9e5, "me": 1e7, "e": 4e5}
    assert set(depositaries("me", "parent", 1e5, rates)) == {"a", "b", "c", "e"}
    assert depositaries("me", "parent", 0.0, rates) == [], "its own rate is unknown"
    assert depositaries("me", "parent", 1e7, rates) == []


def test_a_member_that_claims_a_fast_uplink_does_not_attract_deposits() -> None:
    assert depositaries("me", "parent", 1e6, {"a": 1e6, "b": 1e6, "liar": 9e11}) == []
    assert depositaries("me", "parent", 1e6, {"fast": 1e7}) == ["fast"], "with two members the other one is the median"


def test_depositaries_are_spread_over_the_fast_members() -> None:
    rates = {f"fast{i}": 1e7 for i in range(8)}
    first = Counter(depositaries(f"slow{i}", "parent", 1e5, rates)[0] for i in range(400))
    assert set(first) == set(rates) and max(first.values()) < 2 * min(first.values())


def test_members_on_slow_uplinks_lead_last() -> None:
    peers = [f"peer{i}" for i in range(8)]
    slow = {"peer1", "peer5"}
    led = [leader_of("parent", peers, [], attempt, slow) for attempt in range(8)]
    assert set(led[:6]) == set(peers) - slow and set(led[6:]) == slow, "all members lead"
    assert led[:6] == [peer for peer in leader_order("parent", peers) if peer not in slow]
    assert leader_of("parent", ["peer1"], [], 3, slow) == "peer1"


def test_a_newcomer_that_claims_a_fast_uplink_averages_no_more_than_the_others() -> None:
    homes = {f"home{i}": 1.25e6 for i in range(4)}
    rates = believed(homes | {"stranger": FASTEST_BYTES_S}, homes)
    assert rates == 5 * [1.25e6]
    owners = chunk_owners(128, capacities(rates))
    assert max(Counter(owners).values()) <= 26
    assert believed({"stranger": 7.0}, []) == [7.0], "before the first record, all are newcomers"
    assert believed({"home": 1e6, "fast": 1e9}, ["home", "fast"]) == [1e6, 1e9]


def test_joins_that_a_leader_adds_to_its_plan_make_no_contributor_slow() -> None:
    """With invented members on fast uplinks, a leader could make all others slow, and lead every round."""
    keys = sorted((new_identity() for _ in range(8)), key=lambda key: key.peer_id)
    rates = {key.peer_id: 1e9 if number % 2 else 1e6 for number, key in enumerate(keys)}
    contributors = [key.peer_id for key in keys[::2]]
    leader, *_ = contributors
    rates[leader] = 1e9
    joins = tuple(sign(key, new_join().model_copy(update={"upload_bytes_s": rates[key.peer_id]})) for key in keys)
    plan = Plan(run=RUN, parent=RUN, attempt=0, leader=leader, joins=joins, reducers=(leader,), owners=(0,))
    outcome = RoundOutcome(round=0, plan=plan, included=tuple(contributors), results="00" * 32)
    tip = SimpleNamespace(
        head="head", proof=SimpleNamespace(outcome=sign(keys[0], outcome)), leader=leader,
        last_weights=dict.fromkeys(contributors, 100),
    )  # fmt: skip
    table = SimpleNamespace(leaders=lambda: contributors, callable_members=lambda **_: contributors)
    context: Any = SimpleNamespace(chain=SimpleNamespace(tip=tip), peer_table=table)
    context._leaders = partial(Context._leaders, context)
    assert [Context.leader_at(context, attempt) for attempt in range(4)].index(leader) == 3


def test_the_last_leader_leads_after_those_who_are_as_fast() -> None:
    peers = [f"peer{i}" for i in range(6)]
    for head in range(50):
        led = [leader_of(f"head{head}", peers, [], attempt, {"peer2", "peer3"}, ["peer4"]) for attempt in range(6)]
        assert led[3] == "peer4" and set(led[4:]) == {"peer2", "peer3"}


def test_one_newcomer_leads_after_each_turn_of_all_contributors() -> None:
    """Strangers need no work to be members, and may be many. But all contributors may have failed."""
    contributors, strangers = ["peer0", "peer1"], [f"stranger{i}" for i in range(100)]
    led = [leader_of("head", contributors, strangers, attempt) for attempt in range(300)]
    assert led[0::3] == 100 * led[:1] and led[1::3] == 100 * led[1:2] and set(led[:2]) == set(contributors)
    assert led[2::3] == leader_order("head", strangers)


def test_others_lead_in_turn_if_no_contributor_is_a_member() -> None:
    peers = ["peer0", "peer1", "peer2"]
    assert [leader_of("head", [], peers, attempt) for attempt in range(3)] == leader_order("head", peers)


@pytest.mark.parametrize(
    ("uplinks", "slow"),
    [
        ({}, ""),
        ({"a": 0.0, "b": 0.0}, ""),
        ({"a": 1e7, "b": 1e7, "c": 1e7, "d": 2.5e5}, "d"),
        ({"a": 1e7, "b": 1e7, "c": 0.0, "d": 2.5e5}, "d"),
        ({"a": 1e7, "b": 3e6}, ""),
        ({"a": 1e7, "b": 2.5e5}, ""),  # with two members neither is slow
        ({"a": 1e12, "b": 1e12, "c": 1e6, "d": 1e6}, ""),  # half of the members claim false rates
        ({"a": 1e7, "b": 2.5e6, "c": 1e7}, "b"),
    ],
)
def test_uplinks_are_slow_in_comparison_with_the_median_uplink(uplinks: dict[str, float], slow: str) -> None:
    assert slow_uplinks(uplinks) == frozenset(slow)


@pytest.mark.parametrize(
    ("last", "live", "members", "suffice"),
    [
        ("abcd", "abcd", "ab", True),
        ("abcd", "abcd", "a", False),
        ("abcd", "abcd", "axyz", False),  # Others than contributors do not count.
        ("abcd", "ab", "c", True),  # A dead contributor counts, because it has signed its join.
        ("", "abc", "a", False),
        ("", "abc", "ab", True),
    ],
)
def test_a_plan_needs_half_as_many_contributors_as_live(last: str, live: str, members: str, suffice: bool) -> None:
    assert electorate(last, live).suffice(members) == suffice


def test_only_contributors_decide_while_one_of_them_lives() -> None:
    assert electorate("abc", "ax").deciding == set("abc")
    assert electorate("abc", "xy").deciding == set("abcxy")
    assert electorate("", "xy").deciding == electorate("", "xy").voters == set("xy")
    assert electorate("abc", "xy").voters == set("abc")

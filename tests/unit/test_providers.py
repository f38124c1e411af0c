"""In the vote between state digests, signed tokens count, and no peer outweighs all others together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from node.diloco.outer import OuterOptimizer, genesis
from node.status import Phase
from node.swarm.chain.chain import OuterRule, make_tip
from node.swarm.membership.peer_table import PeerRecord
from node.swarm.state_sync.providers import AvailableState, Sightings, is_outvoted, vote_weights, winning_digest
from node.swarm.state_sync.server import Snapshot

RUN, HEAD, TRUE, FALSE, ELSEWHERE = "ab" * 32, "aa" * 32, "bb" * 32, "cc" * 32, "cd" * 32
TIP = make_tip(genesis(torch.zeros(10)), RUN, None, OuterRule(0.7, OuterOptimizer(), 10), {}, 0.0)
SMALL, LARGE = "0" * 64, "f" * 64
"""These digests are below and above any real digest."""


def state(digest: str, tokens: dict[str, int], votes: dict[str, str]) -> AvailableState:
    return AvailableState(Snapshot(7, HEAD, 1000, digest, [], None), tokens, set(), votes)


def record(peer: str, digest: str, head: str = RUN) -> PeerRecord:
    return PeerRecord(peer_id=peer, number=1, run=RUN, head=head, state_digest=digest, phase=Phase.TRAINING)


def test_a_vote_on_states_weighs_its_signed_tokens_but_no_more_than_all_others() -> None:
    tokens = {"a": 300, "b": 200, "gone": 900}
    assert vote_weights(tokens, ["a", "b", "new"]) == {"a": 201, "b": 200, "new": 1}
    assert vote_weights(tokens, ["a"]) == {"a": 1}
    assert vote_weights({}, ["a", "b"]) == {"a": 1, "b": 1} and vote_weights({}, []) == {}


@pytest.mark.parametrize(
    ("digest", "tokens", "votes", "has_majority", "is_loser"),
    [
        (TRUE, {"a": 100, "b": 100, "liar": 150}, {"a": TRUE, "b": TRUE, "liar": FALSE}, True, False),
        (FALSE, {"a": 100, "b": 100, "liar": 150}, {"a": TRUE, "b": TRUE, "liar": FALSE}, False, True),
        # With its own keys, a liar proves a head that no other peer knows.
        (FALSE, {"liar": 2**40, "other key": 2**40}, {"a": "", "b": "", "liar": FALSE}, False, False),
        (TRUE, {"a": 1000, "b": 1000}, {"a": TRUE, "b": TRUE} | {f"new {i}": FALSE for i in range(50)}, True, False),
        # A peer that does not know the head does not vote against it.
        (TRUE, {}, {"a": TRUE, "b": "", "c": ""}, False, False),
        (TRUE, {}, {"a": TRUE}, True, False),
        (TRUE, {}, {}, False, False),
        (SMALL, {"a": 1, "b": 1, "liar": 64}, {"a": TRUE, "b": TRUE, "c": "", "liar": SMALL}, False, True),
        (LARGE, {"a": 1, "b": 1, "liar": 64}, {"a": TRUE, "b": TRUE, "c": "", "liar": LARGE}, False, True),
    ],
)
def test_a_state_needs_the_majority_of_the_weighted_votes(
    digest: str, tokens: dict[str, int], votes: dict[str, str], has_majority: bool, is_loser: bool
) -> None:
    one = state(digest, tokens, votes)
    assert (one.has_majority, one.is_outvoted) == (has_majority, is_loser)


def test_a_state_without_a_majority_is_taken_after_it_was_offered_for_a_time() -> None:
    unsure, other, sightings = state(TRUE, {}, {}), state(FALSE, {}, {}), Sightings()

    def settled(found: list[AvailableState], now_s: float) -> list[AvailableState]:
        return sightings.settled(found, now_s, 5.0, has_chain=False)

    assert settled([unsure], 10.0) == [] == settled([unsure, other], 14.0)
    assert settled([unsure, other], 15.0) == [unsure]
    assert settled([other], 16.0) == [] == settled([unsure], 17.0), "it was gone for a while"
    assert settled([state(TRUE, {}, {"a": TRUE})], 18.0) and settled([replace(unsure, is_proven=True)], 18.0)


def test_a_node_that_has_a_chain_looks_for_a_time_before_it_takes_any_state() -> None:
    sightings = Sightings()

    def settled(digest: str, now_s: float) -> list[AvailableState]:
        return sightings.settled([state(digest, {}, {"a": digest})], now_s, 5.0, has_chain=True)

    assert settled(TRUE, 10.0) == [] == settled(FALSE, 14.0)
    assert len(settled(LARGE, 15.0)) == 1, "another state in each search is a chain that goes on"
    assert sightings.settled([], 16.0, 5.0, has_chain=True) == [] == settled(LARGE, 17.0)


def test_the_smaller_digest_wins_between_two_votes() -> None:
    assert winning_digest({"a": 100, "b": 6400}, {"a": TRUE, "b": FALSE}) == TRUE
    assert winning_digest({"a": 6400, "b": 100}, {"a": FALSE, "b": TRUE, "c": ""}) == TRUE
    assert winning_digest({}, {"c": ""}) == winning_digest({}, {}) == ""


@pytest.mark.parametrize(
    ("others", "lost"),
    [
        ([], False),
        ([("b", SMALL, RUN), ("c", SMALL, RUN)], True),
        ([("b", SMALL, RUN), ("c", TIP.digest, RUN)], False),
        # Right after a commit, the votes of c and d are not known yet.
        ([("b", SMALL, RUN), ("c", TIP.digest, ELSEWHERE), ("d", TIP.digest, ELSEWHERE)], False),
        # The last vote cannot change the result.
        ([("b", SMALL, RUN), ("c", SMALL, RUN), ("d", SMALL, RUN), ("e", TIP.digest, ELSEWHERE)], True),
        # x and y did not contribute to the newest record.
        ([("b", SMALL, RUN), ("c", SMALL, RUN), ("x", "", ELSEWHERE), ("y", "", ELSEWHERE)], True),
    ],
)
def test_node_is_outvoted_only_if_missing_votes_cannot_save_it(others: list[tuple[str, str, str]], lost: bool) -> None:
    tip = replace(TIP, last_weights=dict.fromkeys("abcde", 100))
    assert is_outvoted([record("a", TIP.digest), *(record(*other) for other in others)], tip) is lost


@pytest.mark.parametrize("digest", [SMALL, LARGE])
@pytest.mark.parametrize("honest", [2, 10])
def test_one_contributor_does_not_outvote_two_that_agree_whatever_it_signs(honest: int, digest: str) -> None:
    names = [f"honest {i}" for i in range(honest)]
    tip = replace(TIP, last_weights=dict.fromkeys(names, 100) | {"liar": 6400})
    records = [*(record(name, TIP.digest) for name in names), record("liar", digest)]
    assert not is_outvoted(records, tip)
    unknown = [record(name, "", head=ELSEWHERE) for name in names[1:]]
    assert not is_outvoted([records[0], *unknown, records[-1]], tip)
    assert is_outvoted([records[-1], *records[:-1]], replace(tip, digest=digest)), "the liar itself is outvoted"


def test_peers_that_did_not_contribute_have_no_vote_on_states() -> None:
    records = [record("a", TIP.digest), *(record(f"stranger {i}", SMALL) for i in range(300))]
    assert not is_outvoted(records, replace(TIP, last_weights={"a": 100}))
    assert not is_outvoted(records, TIP), "before the first record"


@pytest.mark.parametrize("weights", [(100, 1), (1, 100), (100, 100)])
def test_the_larger_digest_is_outvoted_if_there_are_two_contributors(weights: tuple[int, int]) -> None:
    tip = replace(TIP, last_weights=dict(zip("ab", weights, strict=True)))
    assert is_outvoted([record("a", TIP.digest), record("b", SMALL)], tip)
    assert not is_outvoted([record("a", TIP.digest), record("b", LARGE)], tip)


def test_live_members_at_the_same_head_decide_between_two_contributors() -> None:
    tip = replace(TIP, last_weights={"a": 100, "liar": 100})
    records = [record("a", TIP.digest), record("liar", SMALL)]
    assert is_outvoted(records, tip)
    assert not is_outvoted([*records, record("c", TIP.digest)], tip)
    assert is_outvoted([*records, record("c", TIP.digest, head=ELSEWHERE)], tip), "c is at another head"

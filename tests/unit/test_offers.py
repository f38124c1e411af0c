"""Whose word about a state counts how much: signed tokens, live peers, and nobody more than all others together."""

from __future__ import annotations

import pytest

from node.swarm.offers import Offer, prevailing, weigh
from node.swarm.state import Snapshot

HEAD, TRUE, FALSE = "aa" * 32, "bb" * 32, "cc" * 32


def offer(digest: str, included: dict[str, int], told: dict[str, str]) -> Offer:
    return Offer(Snapshot(7, HEAD, 1000, digest, [], None), included, set(), told)


def test_weights_are_signed_tokens_and_one_for_all_others() -> None:
    included = {"a": 300, "b": 200, "gone": 900}
    assert weigh(included, ["a", "b", "new"]) == {"a": 201, "b": 200, "new": 1}
    assert weigh(included, ["a"]) == {"a": 1}
    assert weigh({}, ["a", "b"]) == {"a": 1, "b": 1} and weigh({}, []) == {}


def test_a_state_that_most_tokens_stand_behind_is_backed() -> None:
    told = {"a": TRUE, "b": TRUE, "liar": FALSE}
    included = {"a": 100, "b": 100, "liar": 150}
    assert offer(TRUE, included, told).is_backed and not offer(TRUE, included, told).is_outvoted
    assert not offer(FALSE, included, told).is_backed and offer(FALSE, included, told).is_outvoted


def test_a_proof_of_ones_own_making_outweighs_nobody() -> None:
    """Keys are free: a liar can prove any head with tokens at will, that nobody else knows."""
    told = {"a": "", "b": "", "liar": FALSE}
    assert not offer(FALSE, {"liar": 2**40, "liar's other key": 2**40}, told).is_backed


def test_who_has_contributed_nothing_weighs_a_token() -> None:
    told = {"a": TRUE, "b": TRUE, **{f"stranger {i}": FALSE for i in range(50)}}
    assert offer(TRUE, {"a": 1000, "b": 1000}, told).is_backed


def test_peers_that_do_not_know_the_head_are_no_votes_against_it() -> None:
    told = {"a": TRUE, "b": "", "c": ""}
    one = offer(TRUE, {}, told)
    assert not one.is_backed and not one.is_outvoted
    assert offer(TRUE, {}, {"a": TRUE}).is_backed, "the only one there is"
    assert not offer(TRUE, {}, {}).is_outvoted


@pytest.mark.parametrize("false", ["00" * 32, "ff" * 32], ids=["smaller", "greater"])
def test_one_against_several_prevails_nowhere(false: str) -> None:
    told = {"a": TRUE, "b": TRUE, "c": "", "liar": false}
    tokens = {"a": 100, "b": 100, "c": 100, "liar": 6400}
    assert prevailing(tokens, told) == TRUE
    assert offer(false, tokens, told).is_outvoted and not offer(TRUE, tokens, told).is_outvoted


def test_of_two_the_smaller_digest_prevails_and_of_none_no_digest() -> None:
    assert prevailing({"a": 100, "b": 6400}, {"a": TRUE, "b": FALSE}) == TRUE
    assert prevailing({"a": 6400, "b": 100}, {"a": FALSE, "b": TRUE, "c": ""}) == TRUE
    assert prevailing({}, {"c": ""}) == prevailing({}, {}) == ""

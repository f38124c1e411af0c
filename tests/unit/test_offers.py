"""Whose word about a state counts how much: signed tokens, live peers, and nobody more than all others together."""

from __future__ import annotations

from node.swarm.offers import Offer, weigh
from node.swarm.records import Join
from node.swarm.state import Snapshot

HEAD, TRUE, FALSE = "aa" * 32, "bb" * 32, "cc" * 32


def join(tokens: int) -> Join:
    return Join(run="dd" * 32, parent="ee" * 32, tokens=tokens, step_s=1.0, norm=1.0)


def offer(digest: str, included: dict[str, int], told: dict[str, str]) -> Offer:
    snapshot = Snapshot(7, HEAD, 1000, digest, [], None)
    return Offer(snapshot, {peer: join(tokens) for peer, tokens in included.items()}, set(), told)


def test_weights_are_signed_tokens_and_one_for_all_others() -> None:
    included = {"a": join(300), "b": join(200), "gone": join(900)}
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

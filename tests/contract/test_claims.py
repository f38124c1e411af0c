"""What members say to have accepted: it goes before all else, so it must be true, theirs, and possible to adopt."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from node.errors import PeerError
from node.swarm.attempt import Accepted
from node.swarm.base import Message
from node.swarm.records import Document, accept
from tests.contract.harness import Node, Swarm, round_of
from tests.contract.test_hostile import PARAMETERS, SOON_S, _call, forged_join, lone_outcome


def claim_of(node: Node, outcome: Document, hashes: bytes, number: int = 0) -> list[Any]:
    return [number, outcome.model_dump(), hashes.hex(), accept(node.seat.identity, outcome.hash, number)]


def test_a_member_that_goes_on_telling_what_it_has_accepted_is_heard_once(swarm: Swarm) -> None:
    _, second, _, member = _at_rest(swarm)
    parent = member.tip.head
    outcome, hashes = lone_outcome(member, parent, 1.0)
    header = {"attempt": 1, "join": forged_join(member, parent).model_dump()}
    header["accepted"] = claim_of(member, outcome, hashes)
    for _ in range(5):
        assert _call(member, second, "join", Message(header)).header["status"] == "wait"
    assert len(second.rounds._attempts[1].proposals) == 1


BAD_CLAIMS: dict[str, Callable[[list[Any]], Any]] = {
    "without a vote": lambda claim: claim[:3],
    "an empty vote": lambda claim: [*claim[:3], ""],
    "a vote in capitals": lambda claim: [*claim[:3], claim[3].upper()],
    "a vote of another attempt": lambda claim: [1, *claim[1:]],
    "a number out of the blue": lambda claim: [10**9, *claim[1:]],
    "a number that is none": lambda claim: [math.inf, *claim[1:]],
    "a number as text": lambda claim: ["0", *claim[1:]],
    "no list": lambda claim: {"number": 0},
}


@pytest.mark.parametrize("what", BAD_CLAIMS)
def test_a_claim_to_have_accepted_that_no_vote_stands_behind_is_refused(swarm: Swarm, what: str) -> None:
    _, _, second, member = _at_rest(swarm)
    outcome, hashes = lone_outcome(member, member.tip.head, 1.0)
    claim = BAD_CLAIMS[what](claim_of(member, outcome, hashes))
    join = {"attempt": 2, "join": forged_join(member, member.tip.head).model_dump()}
    with pytest.raises(PeerError) as caught:
        _call(member, second, "join", Message(join | {"accepted": claim}))
    assert caught.value.code != "internal"
    assert not second.rounds._attempts[2].joins, "who claims what is false does not take part by it"
    good = claim_of(member, outcome, hashes)
    assert _call(member, second, "join", Message(join | {"accepted": good})).header["status"] == "wait"


def _at_rest(swarm: Swarm) -> list[Node]:
    """Nodes that answer, but do nothing by themselves; in the order in which they lead."""
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    for node in nodes:
        node.stop()
    return nodes


def test_nobody_accepts_now_or_is_believed_to_have_accepted_what_comes_later(swarm: Swarm) -> None:
    _, first, second, member = _at_rest(swarm)
    outcome, hashes = lone_outcome(member, member.tip.head, 1.0, attempt=1)
    join = {"attempt": 2, "join": forged_join(member, member.tip.head).model_dump()}
    for number in (0, 2):
        with pytest.raises(PeerError):
            _call(member, second, "join", Message(join | {"accepted": claim_of(member, outcome, hashes, number)}))
    first.rounds._attempt(0).asked.add(member.peer_id)
    header = {"parent": member.tip.head, "attempt": 0, "hashes": hashes.hex()}
    with pytest.raises(PeerError, match="later"):
        _call(member, first, "propose", Message(header, [outcome.model_dump_json().encode()]))
    assert first.rounds.accepted is None


@pytest.mark.parametrize("what", ["chunks that nobody has", "a mean that is too long", "a result"])
def test_a_claim_is_proposed_again_only_if_it_can_be_adopted(swarm: Swarm, what: str) -> None:
    """What a member has accepted may be committed, so it goes first; but what nobody can adopt stops nobody."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    *_, member = nodes
    value = 1e9 if what == "a mean that is too long" else 1.0
    outcome, hashes = lone_outcome(member, member.tip.head, value)
    if what == "chunks that nobody has":
        member.seat.loop.call_soon_threadsafe(member.rounds.results.clear)
    number, _, text, vote = claim_of(member, outcome, hashes)
    member.rounds.accepted = Accepted(number, outcome, text, vote)
    for node in nodes:
        node.rounds.number = 1
    done = round_of(nodes, 0, SOON_S)
    assert (done[0].tip.head == outcome.hash) == (what == "a result")
    assert done[0].tip.proof is not None and done[0].tip.proof.attempt == 1

"""A claim to have accepted an outcome takes precedence, so it must be proved, and the outcome adoptable."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from node.errors import PeerError
from node.swarm.consensus.handlers import MAX_REFUSED_CLAIMS
from node.swarm.consensus.voter import Voter
from node.swarm.messages import AcceptedOutcome, Document, accept
from node.swarm.transport.wire import Message
from tests.contract.harness import Node, Swarm, round_of
from tests.contract.test_hostile import PARAMETERS, SOON_S, _call, forged_join, lone_outcome, propose


def claim_of(node: Node, outcome: Document, hashes: bytes, number: int = 0) -> list[Any]:
    return [number, outcome.model_dump(), hashes.hex(), accept(node.host.identity, outcome.hash, number)]


def test_a_repeated_claim_of_an_accepted_outcome_is_checked_once(swarm: Swarm) -> None:
    _, second, _, member = _at_rest(swarm)
    parent = member.tip.head
    outcome, hashes = lone_outcome(member, parent, 1.0)
    header = {"attempt": 1, "join": forged_join(member, parent, attempt=1, accepted=outcome.hash).model_dump()}
    header["accepted"] = claim_of(member, outcome, hashes)
    for _ in range(5):
        assert _call(member, second, "attend", Message(header)).header["status"] == "wait"
    assert len(second.participant.ballot._attempts[1].proposals) == 1


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
def test_a_claim_of_an_accepted_outcome_without_a_valid_vote_is_refused(swarm: Swarm, what: str) -> None:
    _, _, second, member = _at_rest(swarm)
    outcome, hashes = lone_outcome(member, member.tip.head, 1.0)
    claim = BAD_CLAIMS[what](claim_of(member, outcome, hashes))
    signed = forged_join(member, member.tip.head, attempt=2, accepted=outcome.hash)
    join = {"attempt": 2, "join": signed.model_dump()}
    with pytest.raises(PeerError) as caught:
        _call(member, second, "attend", Message(join | {"accepted": claim}))
    assert caught.value.code != "internal"
    assert not second.participant.ballot._attempts[2].joins, "a false claim is no valid join"
    good = claim_of(member, outcome, hashes)
    assert _call(member, second, "attend", Message(join | {"accepted": good})).header["status"] == "wait"


def test_few_wrong_claims_of_a_member_are_checked(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check takes up to a tenth of a second."""
    _, _, second, member = _at_rest(swarm)
    outcome, hashes = lone_outcome(member, member.tip.head, 1.0)
    claim = claim_of(member, outcome, hashes)
    signed = forged_join(member, member.tip.head, attempt=2, accepted=outcome.hash)
    join = {"attempt": 2, "join": signed.model_dump()}
    checks, read = [], Voter.read_accepted

    def count(*args: Any) -> AcceptedOutcome:
        checks.append(args)
        return read(*args)

    monkeypatch.setattr(Voter, "read_accepted", count)
    for _ in range(5):
        with pytest.raises(PeerError, match="has not voted"):
            _call(member, second, "attend", Message(join | {"accepted": [*claim[:3], ""]}))
    assert len(checks) == MAX_REFUSED_CLAIMS


def test_a_join_names_the_outcome_that_its_member_claims(swarm: Swarm) -> None:
    _, second, _, member = _at_rest(swarm)
    outcome, hashes = lone_outcome(member, member.tip.head, 1.0)
    claim = claim_of(member, outcome, hashes)
    for attempt, accepted in ((1, ""), (1, "ab" * 32), (0, outcome.hash)):
        join = forged_join(member, member.tip.head, attempt=attempt, accepted=accepted)
        with pytest.raises(PeerError, match="another"):
            _call(member, second, "attend", Message({"attempt": 1, "join": join.model_dump(), "accepted": claim}))
    join = forged_join(member, member.tip.head, attempt=1, accepted=outcome.hash)
    with pytest.raises(PeerError, match="another accepted outcome"):
        _call(member, second, "attend", Message({"attempt": 1, "join": join.model_dump()}))


def _at_rest(swarm: Swarm) -> list[Node]:
    """Nodes that only answer, in the order in which they lead."""
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    for node in nodes:
        node.stop()
    return nodes


def test_an_outcome_of_a_later_attempt_is_not_accepted(swarm: Swarm) -> None:
    _, first, second, member = _at_rest(swarm)
    outcome, hashes = lone_outcome(member, member.tip.head, 1.0, attempt=1)
    signed = forged_join(member, member.tip.head, attempt=2, accepted=outcome.hash)
    join = {"attempt": 2, "join": signed.model_dump()}
    for number in (0, 2):
        with pytest.raises(PeerError):
            _call(member, second, "attend", Message(join | {"accepted": claim_of(member, outcome, hashes, number)}))
    first.participant.ballot.attempt(0).asked.add(member.peer_id)
    with pytest.raises(PeerError, match="later"):
        propose(member, first, outcome, hashes.hex())
    assert first.participant.ballot.accepted is None


@pytest.mark.parametrize("what", ["chunks that nobody has", "a mean that is too long", "a result"])
def test_a_claimed_outcome_is_proposed_again_only_if_it_can_be_adopted(swarm: Swarm, what: str) -> None:
    """An accepted outcome may already be committed, so it is proposed first, unless it cannot be adopted."""
    nodes = swarm.nodes(3, swarm.rules(PARAMETERS, "fp32", min_peers=1))
    other, *_, member = nodes
    value = 1e9 if what == "a mean that is too long" else 1.0
    outcome, hashes = lone_outcome(member, member.tip.head, value, others=[other])
    if what == "chunks that nobody has":
        member.host.loop.call_soon_threadsafe(member.participant.ctx.results.clear)
    number, _, text, vote = claim_of(member, outcome, hashes)
    member.participant.ballot.accepted = AcceptedOutcome(attempt=number, outcome=outcome, hashes=text, vote=vote)
    for node in nodes:
        node.participant.ballot.number = 1
    done = round_of(nodes, 0, SOON_S)
    assert (done[0].tip.head == outcome.hash) == (what == "a result")
    assert done[0].tip.proof is not None and done[0].tip.proof.attempt == 1

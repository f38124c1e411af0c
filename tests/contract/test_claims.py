"""A claim to have accepted an outcome takes precedence, so it must be proved, and the outcome adoptable."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from node.errors import PeerError
from node.swarm.consensus.ballot import Attempt
from node.swarm.consensus.handlers import MAX_REFUSED_CLAIMS
from node.swarm.consensus.voter import MAX_CLAIMS, Voter
from node.swarm.identity import new_identity
from node.swarm.messages import AcceptedOutcome, Document, Join, RoundOutcome, accept, parse, sign
from node.swarm.transport.wire import MAX_HEADER_BYTES, Message
from tests.contract.harness import Node, Swarm, offer_all, round_of
from tests.contract.test_hostile import PARAMETERS, SOON_S, _call, forged_join, lone_outcome, propose


def claim_of(node: Node, outcome: Document, hashes: bytes, number: int = 0) -> dict[str, Any]:
    vote = accept(node.host.identity, outcome.hash, number)
    return {"attempt": number, "outcome": outcome.model_dump(), "hashes": hashes.hex(), "vote": vote}


def claiming(header: dict[str, Any], claim: object) -> Message:
    return Message(header, [json.dumps(claim).encode()])


def test_a_repeated_claim_of_an_accepted_outcome_is_checked_once(swarm: Swarm) -> None:
    _, second, _, member = _at_rest(swarm)
    parent = member.tip.head
    outcome, hashes = lone_outcome(member, parent, 1.0)
    header = {"attempt": 1, "join": forged_join(member, parent, attempt=1, accepted=outcome.hash).model_dump()}
    for _ in range(5):
        request = claiming(header, claim_of(member, outcome, hashes))
        assert _call(member, second, "attend", request).header["status"] == "wait"
    assert len(second.participant.ballot._attempts[1].proposals) == 1


def test_the_same_outcome_in_the_claims_of_many_members_is_checked_once(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a signature of each member of its plan."""
    _, leader, first, other = _at_rest(swarm)
    parent = leader.tip.head
    outcome, hashes = lone_outcome(first, parent, 1.0)
    checked: list[str] = []
    check = Voter._check_outcome

    def count(voter: Voter, document: Document, *rest: Any) -> Any:
        checked.append(document.signer)
        return check(voter, document, *rest)

    monkeypatch.setattr(Voter, "_check_outcome", count)
    for member in (first, other):
        header = {"attempt": 1, "join": forged_join(member, parent, attempt=1, accepted=outcome.hash).model_dump()}
        request = claiming(header, claim_of(member, outcome, hashes))
        assert _call(member, leader, "attend", request).header["status"] == "wait"
    assert checked == [first.peer_id]


def test_a_checked_outcome_of_another_signer_is_checked_again(swarm: Swarm) -> None:
    """Its hash does not cover the signer. A member could make another one look as if it had signed two outcomes."""
    _, leader, hostile, framed = _at_rest(swarm)
    parent = leader.tip.head
    outcome, hashes = lone_outcome(hostile, parent, 1.0)
    header = {"attempt": 1, "join": forged_join(hostile, parent, attempt=1, accepted=outcome.hash).model_dump()}
    assert (
        _call(hostile, leader, "attend", claiming(header, claim_of(hostile, outcome, hashes))).header["status"]
        == "wait"
    )
    forged = outcome.model_copy(update={"signer": framed.peer_id})
    header["join"] = forged_join(framed, parent, attempt=1, accepted=outcome.hash).model_dump()
    with pytest.raises(PeerError) as caught:
        _call(framed, leader, "attend", claiming(header, claim_of(framed, forged, hashes)))
    assert caught.value.code == "bad_signature"
    assert not leader.peer_table.is_evicted(framed.peer_id)


BAD_CLAIMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "without a vote": lambda claim: {name: claim[name] for name in ("attempt", "outcome", "hashes")},
    "an empty vote": lambda claim: claim | {"vote": ""},
    "a vote in capitals": lambda claim: claim | {"vote": claim["vote"].upper()},
    "a vote of another attempt": lambda claim: claim | {"attempt": 1},
    "a number out of the blue": lambda claim: claim | {"attempt": 10**9},
    "a number that is none": lambda claim: claim | {"attempt": math.inf},
    "a list as number": lambda claim: claim | {"attempt": [0]},
    "a list": lambda claim: [*claim.values()],
    "nothing": lambda claim: None,
}


@pytest.mark.parametrize("what", BAD_CLAIMS)
def test_a_claim_of_an_accepted_outcome_without_a_valid_vote_is_refused(swarm: Swarm, what: str) -> None:
    _, _, second, member = _at_rest(swarm)
    outcome, hashes = lone_outcome(member, member.tip.head, 1.0)
    claim = BAD_CLAIMS[what](claim_of(member, outcome, hashes))
    signed = forged_join(member, member.tip.head, attempt=2, accepted=outcome.hash)
    join = {"attempt": 2, "join": signed.model_dump()}
    with pytest.raises(PeerError) as caught:
        _call(member, second, "attend", claiming(join, claim))
    assert caught.value.code != "internal"
    assert not second.participant.ballot._attempts[2].joins, "a false claim is no valid join"
    good = claim_of(member, outcome, hashes)
    assert _call(member, second, "attend", claiming(join, good)).header["status"] == "wait"


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
    for _ in range(MAX_REFUSED_CLAIMS + 3):
        with pytest.raises(PeerError, match="has not voted"):
            _call(member, second, "attend", claiming(join, claim | {"vote": ""}))
    assert len(checks) == MAX_REFUSED_CLAIMS


def test_few_different_claims_of_a_member_are_kept_in_a_round(swarm: Swarm) -> None:
    """A member may make any number of outcomes with invented keys, and each is as long as a plan."""
    _, _, second, member = _at_rest(swarm)
    made = [lone_outcome(member, member.tip.head, float(value)) for value in range(MAX_CLAIMS + 2)]

    async def claim(number: int) -> None:
        text = json.dumps(claim_of(member, *made[number])).encode()
        second.participant._handlers.voter.read_accepted(text, member.peer_id, Attempt(member.tip.head, 2))

    for number in range(MAX_CLAIMS):
        second.host.do(claim(number))
    for number in (MAX_CLAIMS, MAX_CLAIMS + 1):
        with pytest.raises(PeerError, match="too many outcomes"):
            second.host.do(claim(number))
    second.host.do(claim(3))
    assert len(second.participant.ballot.checked_claims) == MAX_CLAIMS


def test_a_join_names_the_outcome_that_its_member_claims(swarm: Swarm) -> None:
    _, second, _, member = _at_rest(swarm)
    outcome, hashes = lone_outcome(member, member.tip.head, 1.0)
    claim = claim_of(member, outcome, hashes)
    for attempt, accepted in ((1, ""), (1, "ab" * 32), (0, outcome.hash)):
        join = forged_join(member, member.tip.head, attempt=attempt, accepted=accepted)
        with pytest.raises(PeerError, match="another"):
            _call(member, second, "attend", claiming({"attempt": 1, "join": join.model_dump()}, claim))
    join = forged_join(member, member.tip.head, attempt=1, accepted=outcome.hash)
    with pytest.raises(PeerError, match="another accepted outcome"):
        _call(member, second, "attend", Message({"attempt": 1, "join": join.model_dump()}))


@pytest.mark.timeout(120)
def test_members_that_have_accepted_a_very_long_outcome_join_again_and_commit_it(swarm: Swarm) -> None:
    """A hostile leader may fill its plan with joins of invented keys. Then a claim is longer than a header may be."""
    nodes = swarm.nodes(4, swarm.rules(PARAMETERS, "fp32", min_peers=2))
    done = round_of(nodes, 0)
    *honest, bad = nodes
    outcome, hashes = padded_outcome(bad, done[0].tip.head, nodes)
    assert len(outcome.text) > MAX_HEADER_BYTES
    for node in honest:
        propose(bad, node, outcome, hashes.hex())
    for node in honest:
        go_on(node, 1)
    offer_all(honest, 1)
    assert {node.committed(60).tip.head for node in honest} == {outcome.hash}


def test_nobody_votes_for_an_outcome_that_would_be_too_long_to_claim(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, second, member = _at_rest(swarm)
    outcome, hashes = lone_outcome(member, member.tip.head, 1.0)
    monkeypatch.setattr("node.swarm.consensus.voter.MAX_CLAIM_BYTES", len(outcome.text))
    with pytest.raises(PeerError, match="too long"):
        propose(member, second, outcome, hashes.hex())
    assert second.participant.ballot.accepted is None


def test_an_outcome_of_this_attempt_must_be_signed_by_its_leader(swarm: Swarm) -> None:
    """A leader cannot hide that it proposes two outcomes by signing one of them with another key."""
    _, _, second, member = _at_rest(swarm)
    outcome, hashes = lone_outcome(member, member.tip.head, 1.0)
    stranger, content = new_identity(), parse(RoundOutcome, outcome.text)
    plan = content.plan.model_copy(update={"leader": stranger.peer_id})
    other = sign(stranger, content.model_copy(update={"plan": plan}))
    with pytest.raises(PeerError, match="not signed by its leader"):
        propose(member, second, other, hashes.hex())


def padded_outcome(node: Node, parent: str, members: Sequence[Node]) -> tuple[Document, bytes]:
    """An outcome of these members and a thousand invented ones, with as many spaces at its end as a text may have."""
    outcome, hashes = lone_outcome(node, parent, 1.0, round_=1)
    plan, join = parse(RoundOutcome, outcome.text).plan, forged_join(node, parent)
    content = parse(Join, join.text)
    joins = [forged_join(one, parent) for one in members] + [sign(new_identity(), content) for _ in range(1000)]
    plan = plan.model_copy(update={"joins": tuple(sorted(joins, key=lambda one: one.signer))})
    full = parse(RoundOutcome, outcome.text).model_copy(update={"plan": plan, "included": plan.members})
    text = full.model_dump_json()
    text += " " * int(0.95 * len(text))
    signature = node.host.identity.sign("diloco outcome", text.encode()).hex()
    return Document(signer=node.peer_id, text=text, signature=signature), hashes


def go_on(node: Node, number: int) -> None:
    async def to_attempt() -> None:
        node.participant.ballot.number = number

    node.host.do(to_attempt())


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
            _call(member, second, "attend", claiming(join, claim_of(member, outcome, hashes, number)))
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
    member.participant.ballot.accepted = AcceptedOutcome.model_validate(claim_of(member, outcome, hashes))
    for node in nodes:
        node.participant.ballot.number = 1
    done = round_of(nodes, 0, SOON_S)
    assert (done[0].tip.head == outcome.hash) == (what == "a result")
    assert done[0].tip.proof is not None and done[0].tip.proof.attempt == 1

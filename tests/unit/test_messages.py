"""Tests of signed documents, and of every rule for plans, outcomes, proofs and deposits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from node.errors import PeerError
from node.swarm.identity import Identity, new_identity
from node.swarm.messages import (
    Bounds,
    Content,
    Deposit,
    Document,
    Join,
    Plan,
    Proof,
    RoundOutcome,
    accept,
    accepted_by,
    check_deposit,
    check_hashes,
    check_light,
    check_outcome,
    check_plan,
    check_proof,
    included_joins,
    parse,
    read,
    results_root,
    sign,
    split_hashes,
)

RUN, PARENT, STATE, CHUNKS = "ab" * 32, "cd" * 32, "5a" * 32, 4
PEERS = sorted((new_identity() for _ in range(4)), key=lambda identity: identity.peer_id)
A, B, C, D = PEERS
OUTSIDER = new_identity()
MAX_TOKENS = 1000
BOUNDS = Bounds(RUN, (CHUNKS,), 2, MAX_TOKENS)
HASHES = [bytes([i]) * 32 for i in range(CHUNKS)]


def join(identity: Identity, **changes: Any) -> Document:
    fields: dict[str, Any] = {"run": RUN, "parent": PARENT, "state": STATE, "tokens": 100, "step_s": 0.5, "norm": 1.0}
    return sign(identity, Join(**fields | changes))


def plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "run": RUN,
        "parent": PARENT,
        "attempt": 0,
        "leader": A.peer_id,
        "joins": tuple(join(p) for p in PEERS),
        "reducers": (A.peer_id, C.peer_id),
        "owners": (0, 0, 1, 1),
    }
    return Plan(**fields | changes)


def outcome(**changes: Any) -> RoundOutcome:
    fields: dict[str, Any] = {
        "round": 0,
        "plan": plan(),
        "included": (A.peer_id, B.peer_id, D.peer_id),
        "results": results_root(HASHES),
    }
    return RoundOutcome(**fields | changes)


def proof(signed: Document | None = None, voters: tuple[Identity, ...] = (A, B, C), **changes: Any) -> Proof:
    document = signed or sign(A, outcome())
    fields: dict[str, Any] = {
        "outcome": document,
        "attempt": 2,
        "group": tuple(p.peer_id for p in PEERS),
        "accepts": {p.peer_id: accept(p, document.hash, 2) for p in voters},
        "hashes": b"".join(HASHES).hex(),
    }
    return Proof(**fields | changes)


def refused(work: Callable[[], object], match: str | None = None) -> str:
    with pytest.raises(PeerError, match=match) as caught:
        work()
    return caught.value.code


# documents


def test_a_signed_document_survives_serialisation_with_its_hash() -> None:
    document = sign(A, outcome())
    again = Document.model_validate_json(document.model_dump_json())
    assert again == document and again.hash == document.hash
    assert read(again, RoundOutcome) == outcome()
    assert read(again, RoundOutcome).plan.members == tuple(p.peer_id for p in PEERS)
    assert read(again, RoundOutcome).plan.chunks_of(C.peer_id) == [2, 3]
    assert read(again, RoundOutcome).plan.chunks_of(B.peer_id) == []


def test_signature_of_a_document_binds_signer_kind_and_text() -> None:
    document = join(A)
    assert refused(lambda: read(document.model_copy(update={"signer": B.peer_id}), Join)) == "bad_signature"
    assert refused(lambda: read(document, Plan)) == "bad_signature"
    changed = document.model_copy(update={"text": document.text.replace("100", "999")})
    assert refused(lambda: read(changed, Join)) == "bad_signature"
    spaced = document.model_copy(update={"text": document.text.replace(":", ": ")})
    assert refused(lambda: read(spaced, Join)) == "bad_signature", "white space changes the text"


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 0},
        {"tokens": 2**48},
        {"step_s": 0},
        {"step_s": 1e-7},
        {"step_s": 5e-324},
        {"step_s": 86_401.0},
        {"settle_s": -1.0},
        {"settle_s": 86_401.0},
        {"settle_s": float("nan")},
        {"round_s": 0},
        {"step_s": float("nan")},
        {"step_s": float("inf")},
        {"norm": float("nan")},
        {"norm": float("inf")},
        {"norm": -1.0},
        {"run": "x"},
        {"parent": "AB" * 32},
        {"admin": True},
    ],
)
def test_a_signed_join_with_a_value_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    content = Join(run=RUN, parent=PARENT, state=STATE, tokens=1, step_s=1, norm=1).model_copy(update=fields)
    text = content.model_dump_json() if "admin" not in fields else content.model_dump_json()[:-1] + ',"admin":true}'
    signature = A.sign("diloco join", text.encode()).hex()
    refused(lambda: read(Document(signer=A.peer_id, text=text, signature=signature), Join), "join is not valid")


def signed(kind: type[Content], text: str) -> Document:
    signature = A.sign(f"diloco {kind.kind_name}", text.encode()).hex()
    return Document(signer=A.peer_id, text=text, signature=signature)


def test_a_join_with_the_longest_valid_values_is_accepted() -> None:
    fields = dict.fromkeys(
        ("norm", "upload_bytes_s", "transfer_s", "settle_s", "evaluation_loss", "training_loss"),
        1.2345678901234567e-305,
    )
    fields |= {"step_s": 86_399.99999999999, "round_s": 1.2345678901234567e305}
    more: dict[str, Any] = {"attempt": 2**31 - 1, "accepted": STATE, "keeps": STATE[:16]}
    full = Join(run=RUN, parent=PARENT, state=STATE, tokens=2**48 - 1, reduces=False, **more, **fields)
    assert len(full.model_dump_json()) <= 679 < Join.longest
    assert read(sign(A, full), Join) == full


@pytest.mark.parametrize("padding", ["\n" * 600_000, " " * 400])
def test_a_padded_join_is_refused_in_every_document(padding: str) -> None:
    padded = signed(Join, join(A).text + padding)
    assert refused(lambda: read(padded, Join), "too long") == "bad_size"
    candidate = plan(joins=(padded, join(C)), reducers=(C.peer_id,), owners=(0,) * CHUNKS)
    assert refused(lambda: checked(candidate), "too long") == "bad_size"
    document = sign(A, outcome(plan=candidate, included=(A.peer_id, C.peer_id)))
    assert refused(lambda: weighed(read(document, RoundOutcome)), "too long") == "bad_size"
    assert refused(lambda: proven(proof(document)), "too long") == "bad_size"
    assert refused(lambda: check_light(proof(document), BOUNDS), "too long") == "bad_size"


@pytest.mark.parametrize("content", [plan(), outcome()], ids=["plan", "outcome"])
def test_a_padded_plan_or_outcome_is_refused(content: Content) -> None:
    kind, text = type(content), content.model_dump_json()
    first_key = text[1 : text.index(",") + 1]
    for padded in (text + 2 * len(text) * " ", "{" + first_key * 1000 + text[1:]):
        assert refused(partial(read, signed(kind, padded), kind), "padded") == "bad_size"
    assert read(signed(kind, text + " "), kind) == content


def test_a_proof_with_too_many_votes_is_refused() -> None:
    text = proof().model_copy(update={"accepts": {str(i): "00" * 64 for i in range(1025)}}).model_dump_json()
    refused(lambda: parse(Proof, text), "not valid")


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '"x"', "\ud800".encode("utf-8", "surrogatepass")])
def test_a_document_with_unparsable_text_is_refused(text: str | bytes) -> None:
    refused(lambda: parse(Plan, text), "not valid")


def test_a_vote_binds_voter_head_and_attempt() -> None:
    vote = accept(A, "head", 3)
    assert accepted_by(A.peer_id, "head", 3, vote)
    assert not accepted_by(B.peer_id, "head", 3, vote)
    assert not accepted_by(A.peer_id, "tail", 3, vote)
    assert not accepted_by(A.peer_id, "head", 4, vote)
    for damaged in ("", "zz", vote[:-2], vote.upper() + "0"):
        assert not accepted_by(A.peer_id, "head", 3, damaged)


# plans


def checked(candidate: Plan) -> dict[str, Join]:
    return check_plan(candidate, BOUNDS, PARENT, 0)


def test_check_plan_returns_the_joins_of_all_members() -> None:
    assert {peer: j.tokens for peer, j in checked(plan()).items()} == {p.peer_id: 100 for p in PEERS}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"run": "00" * 32}, "another round"),
        ({"parent": "00" * 32}, "another round"),
        ({"joins": (join(B), join(A)), "reducers": (A.peer_id,), "owners": (0,) * 4}, "each member once"),
        ({"joins": (join(A), join(A)), "reducers": (A.peer_id,), "owners": (0,) * 4}, "each member once"),
        ({"reducers": (A.peer_id, OUTSIDER.peer_id)}, "reducers that are not members"),
        ({"owners": (0, 0, 1)}, "chunks without an owner"),
        ({"owners": (0, 0, 1, 1, 1)}, "chunks without an owner"),
        ({"owners": (0, 0, 1, 2)}, "does not exist"),
        ({"owners": (0, 0, 1, -1)}, "does not exist"),
        ({"joins": (join(A), join(C, tokens=1001))}, "1000 are allowed"),
        ({"joins": (join(A), join(C, run="00" * 32))}, "join is for another round"),
        ({"joins": (join(A), join(C, parent="00" * 32))}, "join is for another round"),
        ({"joins": (join(A), join(C).model_copy(update={"signature": "00" * 64}))}, "wrong signature"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(changes: dict[str, Any], match: str) -> None:
    refused(lambda: checked(plan(**changes)), match)


def test_a_plan_without_members_or_reducers_is_invalid() -> None:
    for changes in ({"joins": ()}, {"reducers": ()}, {"attempt": -1}, {"attempt": 2**31}):
        with pytest.raises(ValueError, match="validation error"):
            plan(**changes)


# outcomes


def test_an_outcome_that_includes_fewer_than_half_of_its_plan_is_refused() -> None:
    weighed(outcome(included=(A.peer_id, B.peer_id)), min_peers=1)
    refused(lambda: weighed(outcome(included=(A.peer_id,)), min_peers=1), "fewer than half")


def weighed(candidate: RoundOutcome, hashes: list[bytes] = HASHES, min_peers: int = 2) -> dict[str, Join]:
    bounds = Bounds(RUN, (CHUNKS,), min_peers, MAX_TOKENS)
    joins = check_outcome(candidate, bounds)
    check_hashes(candidate, hashes, bounds)
    return joins


def test_included_joins_returns_the_joins_of_included_members_only() -> None:
    joins = weighed(outcome())
    assert set(joins) == {p.peer_id for p in PEERS}
    assert set(included_joins(outcome(), joins)) == {A.peer_id, B.peer_id, D.peer_id}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"included": (A.peer_id, OUTSIDER.peer_id)}, "did not join"),
        ({"included": (B.peer_id, A.peer_id)}, "did not join"),
        ({"included": (A.peer_id, A.peer_id)}, "did not join"),
        ({"included": (A.peer_id,)}, "fewer peers"),
        ({"results": "00" * 32}, "hashes do not match"),
        ({"plan": plan(run="00" * 32)}, "another round"),
        ({"plan": plan(owners=(0, 0, 0))}, "chunks without an owner"),
    ],
)
def test_an_outcome_that_breaks_a_rule_is_refused(changes: dict[str, Any], match: str) -> None:
    refused(lambda: weighed(outcome(**changes)), match)


@pytest.mark.parametrize("hashes", [HASHES[:-1], [*HASHES, bytes(32)], HASHES[::-1], []])
def test_chunk_hashes_that_do_not_match_the_outcome_are_refused(hashes: list[bytes]) -> None:
    assert refused(lambda: weighed(outcome(), hashes), "hashes do not match") == "bad_size"


def test_chunk_hashes_are_split_from_hexadecimal_text() -> None:
    assert split_hashes(b"".join(HASHES).hex()) == HASHES
    refused(lambda: split_hashes("xyz"), "not hexadecimal")


# proofs


def proven(candidate: Proof, min_peers: int = 2) -> tuple[RoundOutcome, dict[str, Join]]:
    return check_proof(candidate, Bounds(RUN, (CHUNKS,), min_peers, MAX_TOKENS))


def test_a_proof_with_the_votes_of_a_majority_is_valid() -> None:
    found, joins = proven(proof())
    assert found == outcome() and set(joins) == {p.peer_id for p in PEERS}
    survivors = proof(voters=(C, D), group=(C.peer_id, D.peer_id))
    assert proven(survivors)[0] == outcome(), "a later leader's group may be smaller than the plan's"


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (proof(voters=(A, B)), "more than half"),
        (proof(voters=()), "more than half"),
        (proof(voters=(A, B, OUTSIDER)), "outside its group"),
        (proof(voters=(A,), group=(A.peer_id,) * 3 + (B.peer_id,)), "names a member twice"),
        (proof(group=(*(p.peer_id for p in PEERS), A.peer_id)), "names a member twice"),
        (proof(attempt=3), "more than half"),
        (proof(sign(B, outcome())), "not signed by the leader of its plan"),
        (proof(accepts={p.peer_id: accept(A, sign(A, outcome()).hash, 2) for p in PEERS}), "more than half"),
        (proof(voters=(A,), group=(A.peer_id,)), "smaller group"),
        (proof(sign(A, outcome(included=(A.peer_id,)))), "fewer peers"),
        (proof(sign(A, outcome(plan=plan(run="00" * 32)))), "another round"),
        (proof(hashes=b"".join(HASHES[:-1]).hex()), "hashes do not match"),
        (proof(hashes="zz"), "not hexadecimal"),
        (proof(sign(A, outcome()).model_copy(update={"text": sign(A, outcome(round=1)).text})), "wrong signature"),
        (proof(sign(A, outcome()).model_copy(update={"signer": B.peer_id})), "wrong signature"),
        (proof(sign(A, plan())), "wrong signature"),
    ],
)
def test_a_proof_that_breaks_a_rule_is_refused(bad: Proof, match: str) -> None:
    refused(lambda: proven(bad), match)


def test_a_proof_of_one_member_is_valid_if_min_peers_is_one() -> None:
    alone = plan(joins=(join(A),), reducers=(A.peer_id,), owners=(0,) * 4)
    document = sign(A, outcome(plan=alone, included=(A.peer_id,)))
    candidate = proof(document, voters=(A,), group=(A.peer_id,))
    assert proven(candidate, min_peers=1)[0].included == (A.peer_id,)
    refused(lambda: proven(candidate, min_peers=2), "fewer peers")


def test_a_proof_without_chunk_hashes_is_valid_only_as_a_light_proof() -> None:
    bare = proof(hashes="")
    assert check_light(bare, BOUNDS)[0] == outcome()
    refused(lambda: proven(bare), "hashes do not match")
    refused(lambda: check_light(proof(voters=(A, B), hashes=""), BOUNDS), "more than half")


# deposits


def deposit(**changes: Any) -> Document:
    return sign(A, Deposit(**{"run": RUN, "parent": PARENT, "root": results_root(HASHES)} | changes))


def test_check_deposit_returns_the_signed_chunk_hashes() -> None:
    assert check_deposit(deposit(), b"".join(HASHES), BOUNDS, PARENT, 0) == HASHES


@pytest.mark.parametrize(
    ("document", "hashes"),
    [
        (deposit(parent="ef" * 32), b"".join(HASHES)),
        (deposit(run="ef" * 32), b"".join(HASHES)),
        (deposit(root="ef" * 32), b"".join(HASHES)),
        (deposit().model_copy(update={"signer": B.peer_id}), b"".join(HASHES)),
        (deposit(), b"".join(HASHES[:-1])),
        (deposit(), b"".join(reversed(HASHES))),
        (deposit(), b"".join(HASHES).hex()),
        (deposit(), None),
        (join(A), b"".join(HASHES)),
    ],
)
def test_a_deposit_with_wrong_content_is_refused(document: Document, hashes: object) -> None:
    refused(lambda: check_deposit(document, hashes, BOUNDS, PARENT, 0))

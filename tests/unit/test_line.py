"""Which of two lines of rounds holds, and what a peer must show for its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from node.errors import PeerError
from node.swarm import line as line_module
from node.swarm.identity import Identity, new_identity
from node.swarm.line import Link, abreast, extend, heads_of, prevails, read_line, since
from node.swarm.records import Bounds, Join, Outcome, Plan, Proof, accept, results_root, sign

RUN, HASHES = "ab" * 32, [bytes(32)]
BOUNDS = Bounds(RUN, (1,), 1, 1000)
A, B = sorted((new_identity() for _ in range(2)), key=lambda identity: identity.peer_id)


def committed(parent: str, round_: int, tokens: int = 100, by: Sequence[Identity] = (A, B)) -> Proof:
    joins = tuple(sign(i, Join(run=RUN, parent=parent, tokens=tokens, step_s=1, norm=1)) for i in by)
    names = tuple(i.peer_id for i in by)
    plan = Plan(run=RUN, parent=parent, attempt=0, joins=joins, reducers=names[:1], owners=(0,))
    document = sign(by[0], Outcome(round=round_, plan=plan, included=names, results=results_root(HASHES)))
    accepts = {i.peer_id: accept(i, document.hash, 0) for i in by}
    return Proof(outcome=document, attempt=0, group=names, accepts=accepts, hashes=HASHES[0].hex())


def rounds_after(parent: str, first: int, tokens: Sequence[int]) -> tuple[Link, ...]:
    line: tuple[Link, ...] = ()
    for number, count in enumerate(tokens, first):
        proof = committed(parent, number, count)
        line += read_line([proof.model_dump_json()], BOUNDS)
        parent = proof.outcome.hash
    return line


def test_a_line_is_read_back_with_the_tokens_that_were_signed_and_without_hashes() -> None:
    line = rounds_after(RUN, 0, [10, 20])
    assert [(link.round, link.tokens) for link in line] == [(0, 20), (1, 40)]
    assert line[1].parent == line[0].head and line[0].members == (A.peer_id, B.peer_id)
    assert HASHES[0].hex() not in line[0].text
    assert read_line([link.text for link in line], BOUNDS) == line


def test_a_line_that_was_tampered_with_is_refused() -> None:
    line = rounds_after(RUN, 0, [10, 20, 30])
    texts = [link.text for link in line]
    for broken in ([texts[0], texts[2]], texts[::-1], [texts[0], texts[0]]):
        with pytest.raises(PeerError, match="broken"):
            read_line(broken, BOUNDS)
    with pytest.raises(PeerError):
        read_line([texts[0].replace('tokens\\\\\\":10', 'tokens\\\\\\":999')], BOUNDS)
    with pytest.raises(PeerError, match="allowed"):
        read_line([committed(RUN, 0, 1001).model_dump_json()], BOUNDS)
    with pytest.raises(PeerError):
        read_line(["{}"], BOUNDS)


def test_the_rounds_since_a_head() -> None:
    line = rounds_after(RUN, 0, [1, 2, 3])
    assert since(line, RUN) == line
    assert since(line, line[0].head) == line[1:]
    assert since(line, line[-1].head) == ()
    assert since(line, "unknown") == line, "no common head is known: all that can be shown"
    assert heads_of(line, line[-1].head) == [line[2].head, line[1].head, line[0].head, RUN]
    assert heads_of((), RUN) == [RUN]


def test_more_tokens_hold_whatever_the_number_of_rounds_and_both_sides_say_the_same() -> None:
    many, few = rounds_after(RUN, 0, [10, 10, 10]), rounds_after(RUN, 0, [100])
    assert prevails(few, many) and not prevails(many, few)


def test_of_as_many_tokens_the_smaller_head_holds_and_both_sides_say_the_same() -> None:
    one, other = rounds_after(RUN, 0, [10, 20]), rounds_after(RUN, 0, [20, 10])
    assert prevails(one, other) is not prevails(other, one)
    assert prevails(one, other) is (one[-1].head < other[-1].head)
    assert not prevails(one, one)


def test_any_round_prevails_over_none() -> None:
    line = rounds_after(RUN, 0, [1])
    assert prevails(line, ()) and not prevails((), line) and not prevails((), ())


def test_the_oldest_rounds_fall_off_by_number_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    line = rounds_after(RUN, 0, [1, 2, 3])
    monkeypatch.setattr(line_module, "LINE_ROUNDS", 2)
    assert extend(line[:2], line[2]) == line[1:]
    monkeypatch.setattr(line_module, "LINE_BYTES", len(line[2].text) + 1)
    assert extend(line[:2], line[2]) == line[2:]
    monkeypatch.setattr(line_module, "LINE_BYTES", 1)
    assert extend(line[:2], line[2]) == line[2:], "the newest always stays"


def test_lines_without_a_common_head_are_weighed_over_the_rounds_that_both_show() -> None:
    long = rounds_after(RUN, 0, [10, 10, 10, 10])
    short = rounds_after(RUN, 0, [10, 9, 11, 11, 11])[2:]
    theirs, mine = abreast(short, long)
    assert [link.round for link in theirs] == [2, 3, 4] and [link.round for link in mine] == [2, 3]
    assert abreast(long, short) == (mine, theirs)
    assert abreast(short, ()) == (short, ()) and abreast((), ()) == ((), ())
    assert prevails(theirs, mine) and not prevails(mine, theirs)

"""The rule that chooses between two chains, and the verification of a chain's links."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from node.errors import PeerError
from node.swarm.chain import fork_choice
from node.swarm.chain.fork_choice import (
    Link,
    append_link,
    continued,
    contributors_at,
    heads_of,
    is_heavier,
    links_after,
    overlapping,
    read_links,
    supporters,
)
from node.swarm.identity import new_identity
from node.swarm.messages import Bounds, Proof
from tests.unit.swarm_data import RUN, A, B, committed

BOUNDS = Bounds(RUN, (1,), 1, 1000)


def chain_of(tokens: Sequence[int]) -> tuple[Link, ...]:
    """Links of rounds after RUN. Each of two members contributes the given number of tokens to each round."""
    links: tuple[Link, ...] = ()
    parent = RUN
    for number, count in enumerate(tokens):
        proof = committed(parent, number, tokens=count)
        links += read_links([proof.model_dump_json()], BOUNDS)
        parent = proof.outcome.hash
    return links


def test_chain_links_have_the_signed_tokens_and_no_chunk_hashes() -> None:
    links = chain_of([10, 20])
    assert [(link.round, link.tokens) for link in links] == [(0, 20), (1, 40)]
    assert links[1].parent == links[0].head and links[0].members == (A.peer_id, B.peer_id)
    assert bytes(32).hex() not in links[0].text
    assert read_links([link.text for link in links], BOUNDS) == links


def test_chain_links_that_were_tampered_with_are_refused() -> None:
    texts = [link.text for link in chain_of([10, 20, 30])]
    for broken in ([texts[0], texts[2]], texts[::-1], [texts[0], texts[0]]):
        with pytest.raises(PeerError, match="not contiguous"):
            read_links(broken, BOUNDS)
    with pytest.raises(PeerError, match="allowed"):
        read_links([committed(RUN, 0, tokens=1001).model_dump_json()], BOUNDS)
    for text in (texts[0].replace('tokens\\\\\\":10', 'tokens\\\\\\":999'), "{}"):
        with pytest.raises(PeerError):
            read_links([text], BOUNDS)


def test_links_after_a_head_are_the_later_ones_or_all_if_the_head_is_unknown() -> None:
    links = chain_of([1, 2, 3])
    assert links_after(links, RUN) == links
    assert links_after(links, links[0].head) == links[1:]
    assert links_after(links, links[-1].head) == ()
    assert links_after(links, "unknown") == links
    assert heads_of(links, links[-1].head) == [links[2].head, links[1].head, links[0].head, RUN]
    assert heads_of((), RUN) == [RUN]


def test_rounds_of_another_chain_continue_those_before_the_fork_point() -> None:
    mine, other = chain_of([1, 2, 3]), chain_of([9, 8])
    theirs = links_of(committed(mine[0].head, 1, tokens=7))
    assert continued(mine, theirs) == (mine[0], *theirs)
    assert continued(mine, other) == other and continued((), theirs) == theirs
    assert continued(mine, ()) == ()


def links_of(*proofs: Proof) -> tuple[Link, ...]:
    return read_links([proof.model_dump_json() for proof in proofs], BOUNDS)


def test_the_chain_that_more_contributors_to_the_common_round_support_wins_whatever_its_tokens() -> None:
    """Otherwise one member could take the run over: it can sign rounds with any number of tokens alone."""
    common = links_of(committed(RUN, 0))
    both = links_of(committed(common[0].head, 1, (A, B), tokens=1))
    first = committed(common[0].head, 1, (A,), tokens=1000)
    long = links_of(first, committed(first.outcome.hash, 2, (A,), tokens=1000))
    electorate = contributors_at(common, common[0].head)
    assert electorate == (A.peer_id, B.peer_id) and contributors_at(common, RUN) == ()
    assert [supporters(links) for links in (both, long, ())] == [{A.peer_id, B.peer_id}, {A.peer_id}, set()]
    assert is_heavier(both, long, electorate) and not is_heavier(long, both, electorate)
    for too_few in ((A.peer_id,), ()):  # Both chains have the same support, so the tokens decide.
        assert is_heavier(long, both, too_few) and not is_heavier(both, long, too_few)


def test_live_members_decide_if_the_contributors_to_the_common_round_do_not() -> None:
    """A founder that began alone has left. A hostile member shows another first round."""
    founder, hostile, others = new_identity(), new_identity(), [new_identity().peer_id for _ in range(2)]
    mine = links_of(committed(RUN, 0, (founder,), tokens=1))
    forged = links_of(committed(RUN, 0, (hostile,), tokens=1000))
    standing = dict.fromkeys(others, mine[0].head) | {hostile.peer_id: forged[0].head}
    for electorate in ((), (founder.peer_id, hostile.peer_id), (new_identity().peer_id,)):
        assert is_heavier(mine, forged, electorate, standing) and not is_heavier(forged, mine, electorate, standing)
    assert is_heavier(forged, mine, (hostile.peer_id,), standing), "the contributors come first"


def test_contributors_to_later_rounds_support_a_chain_whose_first_certificate_leaves_out_their_votes() -> None:
    """A hostile leader may show the others a certificate with its own vote only."""
    parent = committed(RUN, 0).outcome.hash
    first = committed(parent, 1, (A, B), tokens=1)
    weak = first.model_copy(update={"group": (A.peer_id,), "accepts": {A.peer_id: first.accepts[A.peer_id]}})
    honest = links_of(weak, committed(first.outcome.hash, 2, (A, B), tokens=1))
    forged = links_of(committed(parent, 1, (A,), tokens=1000))
    electorate = (A.peer_id, B.peer_id)
    assert [len(supporters(links)) for links in (honest[:1], honest, forged)] == [1, 2, 1]
    assert is_heavier(honest, forged, electorate) and not is_heavier(forged, honest, electorate)


def test_a_contribution_to_the_first_round_after_the_fork_point_is_no_support() -> None:
    """Both chains share its parent, so anyone may include it."""
    parent = committed(RUN, 0).outcome.hash
    both = committed(parent, 1, (A, B))
    stolen = both.model_copy(update={"group": (A.peer_id,), "accepts": {A.peer_id: both.accepts[A.peer_id]}})
    assert B.peer_id in links_of(stolen)[0].members and supporters(links_of(stolen)) == {A.peer_id}


def test_the_chain_with_more_tokens_is_heavier_whatever_its_length() -> None:
    long, heavy = chain_of([10, 10, 10]), chain_of([100])
    assert is_heavier(heavy, long) and not is_heavier(long, heavy)
    assert is_heavier(long, ()) and not is_heavier((), long) and not is_heavier((), ())


def test_the_smaller_head_decides_between_chains_with_equal_tokens() -> None:
    one, other = chain_of([10, 20]), chain_of([20, 10])
    assert is_heavier(one, other) is not is_heavier(other, one)
    assert is_heavier(one, other) is (one[-1].head < other[-1].head)
    assert not is_heavier(one, one)


def test_the_oldest_chain_links_are_dropped_above_a_number_and_above_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    links = chain_of([1, 2, 3])
    monkeypatch.setattr(fork_choice, "MAX_LINKS", 2)
    assert append_link(links[:2], links[2]) == links[1:]
    for size_bytes in (len(links[2].text) + 1, 1):
        monkeypatch.setattr(fork_choice, "MAX_LINKS_BYTES", size_bytes)
        assert append_link(links[:2], links[2]) == links[2:], "the newest one always stays"


def test_chains_without_a_known_fork_point_are_compared_over_the_rounds_that_both_have() -> None:
    long, short = chain_of([10, 10, 10, 10]), chain_of([10, 9, 11, 11, 11])[2:]
    theirs, mine = overlapping(short, long)
    assert [link.round for link in theirs] == [2, 3, 4] and [link.round for link in mine] == [2, 3]
    assert overlapping(long, short) == (mine, theirs)
    assert overlapping(short, ()) == (short, ()) and overlapping((), ()) == ((), ())
    assert is_heavier(theirs, mine) and not is_heavier(mine, theirs)

"""Lines of committed rounds, and which of two holds. Pure rules over signed proofs; knows no network and no state.

Where a swarm was split, both parts commit rounds after the same one. When they meet again the line with more tokens
since they parted holds, and of equals the one with the smaller head. Only tokens in records that the members signed
count, so both sides come to the same answer, whatever anybody claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node.errors import PeerError
from node.swarm.records import Bounds, Outcome, Proof, check_light, included_joins, parse

LINE_ROUNDS = 256
"""Rounds that a node can show of its line; splits that last longer are judged by these."""
LINE_BYTES = 4 * 2**20
"""And no more bytes than this, so that a line is one answer."""


@dataclass(frozen=True, slots=True)
class Link:
    """One committed round of a line."""

    parent: str
    head: str
    round: int
    tokens: int
    """Signed by the members whose contributions are in."""
    members: tuple[str, ...]
    """Those members."""
    text: str
    """The proof as JSON, without the hashes of its result."""


def link_of(proof: Proof, outcome: Outcome, tokens: int) -> Link:
    text = proof.model_copy(update={"hashes": ""}).model_dump_json()
    return Link(outcome.plan.parent, proof.outcome.hash, outcome.round, tokens, outcome.included, text)


def extend(line: Sequence[Link], link: Link) -> tuple[Link, ...]:
    """The line with one more round; the oldest fall off its end."""
    longer = (*line, link)[-LINE_ROUNDS:]
    size = sum(len(one.text) for one in longer)
    while size > LINE_BYTES and len(longer) > 1:
        size -= len(longer[0].text)
        longer = longer[1:]
    return longer


def read_line(texts: Sequence[str | bytes], bounds: Bounds) -> tuple[Link, ...]:
    """Links that a peer shows: each committed, each after the one before. Raises PeerError. Heavy: many signatures."""
    line: list[Link] = []
    for text in texts[:LINE_ROUNDS]:
        proof = parse(Proof, text)
        outcome, joins = check_light(proof, bounds)
        if line and (outcome.plan.parent != line[-1].head or outcome.round != line[-1].round + 1):
            raise PeerError("a line of rounds is broken")
        line.append(link_of(proof, outcome, sum(j.tokens for j in included_joins(outcome, joins).values())))
    return tuple(line)


def heads_of(line: Sequence[Link], head: str) -> list[str]:
    """Every head that the line has had, newest first."""
    return [head, *(link.parent for link in reversed(line))]


def since(line: Sequence[Link], head: str) -> tuple[Link, ...]:
    """The rounds after `head`; all that are known where it is not in the line."""
    for place, link in enumerate(line):
        if link.parent == head:
            return tuple(line[place:])
    return () if line and line[-1].head == head else tuple(line)


def abreast(theirs: Sequence[Link], mine: Sequence[Link]) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """Two lines that do not show where they parted, from the first round on that both of them show."""
    first = max((line[0].round for line in (theirs, mine) if line), default=0)
    cut_theirs, cut_mine = ([link for link in line if link.round >= first] for line in (theirs, mine))
    return tuple(cut_theirs), tuple(cut_mine)


def prevails(theirs: Sequence[Link], mine: Sequence[Link]) -> bool:
    """Whether of two lines since they parted the other one holds."""
    if not theirs or not mine:
        return bool(theirs)
    ours, others = sum(link.tokens for link in mine), sum(link.tokens for link in theirs)
    return (-others, theirs[-1].head) < (-ours, mine[-1].head)

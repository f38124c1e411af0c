"""The chain of committed rounds as light proofs, and the rule that chooses between two chains. All functions are pure.

During a network split, both sides commit rounds after the same fork point. The winner is the chain with, in this order:

1. the support of more contributors to the last common round. A peer supports a chain if it voted for the first round
   after the fork point, or contributed to a later one.
2. the support of more live members. A member whose record names a head of the chain supports it, too.
3. more tokens since the fork point.
4. the smaller head.

Support comes first because one member could sign rounds with any number of tokens alone. Contributions count beside
votes because certificates of the same outcome may have different votes, and a hostile leader may leave votes out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from node.errors import PeerError
from node.swarm.messages import Bounds, Proof, RoundOutcome, check_light, included_joins, parse, voters

MAX_LINKS = 256
"""Committed rounds that a node keeps as links. A longer split is judged by these links alone."""
MAX_LINKS_BYTES = 4 * 2**20  # Limit on the text of all links, so that they fit into one reply


@dataclass(frozen=True, slots=True)
class Link:
    """One committed round of the chain. Checkpoints store these fields."""

    parent: str
    head: str
    round: int
    tokens: int
    """Tokens of the included contributions, as signed by their members."""
    members: tuple[str, ...]
    """Peer ids of the members whose contributions are included."""
    text: str
    """The proof as JSON, without the chunk hashes."""


def link_of(proof: Proof, outcome: RoundOutcome, tokens: int) -> Link:
    text = proof.model_copy(update={"hashes": ""}).model_dump_json()
    return Link(outcome.plan.parent, proof.outcome.hash, outcome.round, tokens, outcome.included, text)


def append_link(links: Sequence[Link], link: Link) -> tuple[Link, ...]:
    """Append a link, and drop the oldest links beyond MAX_LINKS and MAX_LINKS_BYTES."""
    longer = (*links, link)[-MAX_LINKS:]
    size_bytes = sum(len(one.text.encode()) for one in longer)
    while size_bytes > MAX_LINKS_BYTES and len(longer) > 1:
        size_bytes -= len(longer[0].text.encode())
        longer = longer[1:]
    return longer


def read_links(texts: Sequence[str | bytes], bounds: Bounds) -> tuple[Link, ...]:
    """Read the links that a peer sent, and check that each is committed and follows the one before. Raises PeerError.

    Slow: verifies every signature.
    """
    links: list[Link] = []
    for text in texts[:MAX_LINKS]:
        proof = parse(Proof, text)
        outcome, joins = check_light(proof, bounds)
        if links and (outcome.plan.parent != links[-1].head or outcome.round != links[-1].round + 1):
            raise PeerError("the links of a chain are not contiguous")
        links.append(link_of(proof, outcome, sum(j.tokens for j in included_joins(outcome, joins).values())))
    return tuple(links)


def heads_of(links: Sequence[Link], head: str) -> list[str]:
    """All known heads of the chain that ends at `head`, newest first."""
    return [head, *(link.parent for link in reversed(links))]


def links_after(links: Sequence[Link], head: str) -> tuple[Link, ...]:
    """The links after `head`; all of them if `head` is not on the chain."""
    for place, link in enumerate(links):
        if link.parent == head:
            return tuple(links[place:])
    return () if links and links[-1].head == head else tuple(links)


def continued(mine: Sequence[Link], theirs: Sequence[Link]) -> tuple[Link, ...]:
    """The links of `mine` up to the fork point, followed by `theirs`; only `theirs` if they do not continue `mine`."""
    shared = next((place + 1 for place, link in enumerate(mine) if theirs and link.head == theirs[0].parent), 0)
    return (*mine[:shared], *theirs)


def overlapping(theirs: Sequence[Link], mine: Sequence[Link]) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """Cut two chains whose fork point is unknown, so that both begin with the same round number."""
    first = max((links[0].round for links in (theirs, mine) if links), default=0)
    cut_theirs, cut_mine = (tuple(link for link in links if link.round >= first) for links in (theirs, mine))
    return cut_theirs, cut_mine


def weight(links: Sequence[Link]) -> int:
    """The sum of the tokens of all links."""
    return sum(link.tokens for link in links)


def contributors_to(links: Sequence[Link]) -> set[str]:
    """All contributors to these rounds."""
    return {peer for link in links for peer in link.members}


def contributors_at(links: Sequence[Link], head: str) -> tuple[str, ...]:
    """The contributors to the round of this head, who decide about the next round. Empty if the round is not known."""
    return next((link.members for link in links if link.head == head), ())


def supporters(links: Sequence[Link]) -> set[str]:
    """The peers that have signed that they support the chain with these links. Slow: verifies signatures.

    Contributors to the first link do not count: they stood on the fork point, which both chains share.
    """
    later = {peer for link in links[1:] for peer in link.members}
    return voters(parse(Proof, links[0].text)) | later if links else set()


def is_heavier(
    theirs: Sequence[Link],
    mine: Sequence[Link],
    electorate: Collection[str] = (),
    standing: Mapping[str, str] = MappingProxyType({}),
) -> bool:
    """Whether the chain `theirs` wins over this node's chain `mine`. Both start at the fork point. Slow.

    Args:
        electorate: the contributors to the last common round; empty if that round is not known.
        standing: the head that each live member names in its record.
    """
    if not theirs or not mine:
        return bool(theirs)

    def rank(links: Sequence[Link]) -> tuple[int, int, int, str]:
        heads, signed = {link.head for link in links}, supporters(links)
        live = sum(peer in signed or head in heads for peer, head in standing.items())
        return -len(signed.intersection(electorate)), -live, -weight(links), links[-1].head

    return rank(theirs) < rank(mine)

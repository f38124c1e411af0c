"""Credit: the tokens and rounds that each member has contributed, as a Merkle tree under the digest of the outer state.

The table follows from the committed rounds alone, so all nodes have the same one, and it survives what the state
survives. The tokens of all entries add up to the tokens of the state.

An entry is encoded as 1 byte of length, the member's id (38 bytes of a libp2p peer id), and 24 bytes of numbers.
Entries are in the order of these ids. The tree has their BLAKE3 hashes as leaves. A node is the hash of its two
children, and the last node of a level without a partner moves up as it is. Leaves and nodes are hashed with different
key contexts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property

import base58
from blake3 import blake3

LEAF_CONTEXT = "diloco-node credit leaf v1"
NODE_CONTEXT = "diloco-node credit node v1"
NUMBERS = struct.Struct("<QIIII")
"""The numbers of `Credit`, in order."""
MOST_MEMBERS = 16_384
"""Limit on the entries. Beyond it, those with the fewest tokens become part of the entry `OTHERS`."""
MOST_BYTES = 64 * MOST_MEMBERS
"""Limit on the size of an encoded table of libp2p's peer ids."""
OTHERS = ""
"""The id of the entry for members whose entries were given up."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What one member has contributed."""

    tokens: int
    rounds: int
    first_round: int
    streak_round: int
    """The first of the newest rounds in a row that include the member."""
    last_round: int

    def __post_init__(self) -> None:
        rounds = 0, self.first_round, self.streak_round, self.last_round
        if self.rounds < 1 or self.tokens < 0 or sorted(rounds) != list(rounds):
            raise ValueError(f"{self} is not the credit of a contributor.")


@dataclass(frozen=True, slots=True)
class Step:
    """One level of a Merkle path: the hash of the other child, and whether that is the left one."""

    sibling: bytes
    is_left: bool


class CreditTable(Mapping[str, Credit]):
    """The credit of all members that ever contributed, by peer id. Never changed in place."""

    def __init__(self, entries: Mapping[str, Credit] | None = None) -> None:
        """Raises ValueError for a peer id that is not base58 of at most 255 bytes."""
        by_id = sorted((base58.b58decode(peer), peer, credit) for peer, credit in (entries or {}).items())
        self._entries = {peer: credit for _, peer, credit in by_id}
        self._encoded = [_encode(raw, credit) for raw, _, credit in by_id]

    def __getitem__(self, peer: str) -> Credit:
        return self._entries[peer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(self.root)

    @property
    def tokens(self) -> int:
        return sum(credit.tokens for credit in self._entries.values())

    def after(self, round_: int, tokens: Mapping[str, int]) -> CreditTable:
        """The table after a round to which these members have contributed these tokens."""
        entries = dict(self._entries)
        for peer, share in tokens.items():
            old = entries.get(peer)
            if old is None:
                entries[peer] = Credit(share, 1, round_, round_, round_)
                continue
            streak_round = old.streak_round if old.last_round == round_ - 1 else round_
            entries[peer] = Credit(old.tokens + share, old.rounds + 1, old.first_round, streak_round, round_)
        if len(entries) > MOST_MEMBERS:
            _give_up(entries)
        return CreditTable(entries)

    def encode(self) -> bytes:
        return b"".join(self._encoded)

    @cached_property
    def root(self) -> bytes:
        """The root of the tree, 32 bytes; zeros for an empty table."""
        levels = self._levels
        return levels[-1][0] if levels[0] else bytes(32)

    @cached_property
    def _levels(self) -> list[list[bytes]]:
        levels = [[leaf_hash(entry) for entry in self._encoded]]
        while len(levels[-1]) > 1:
            below = levels[-1]
            pairs = [node_hash(*below[i : i + 2]) for i in range(0, len(below) - 1, 2)]
            levels.append(pairs + below[len(below) - len(below) % 2 :])
        return levels

    def entry(self, peer: str) -> bytes:
        """The encoded entry of a member. Raises KeyError."""
        return self._encoded[self._place(peer)]

    def path(self, peer: str) -> list[Step]:
        """The Merkle path from a member's entry to the root, lowest level first. Raises KeyError."""
        place, steps = self._place(peer), []
        for level in self._levels[:-1]:
            sibling = place ^ 1
            if sibling < len(level):
                steps.append(Step(level[sibling], is_left=sibling < place))
            place //= 2
        return steps

    def _place(self, peer: str) -> int:
        if peer not in self._entries:
            raise KeyError(peer)
        return list(self._entries).index(peer)


EMPTY = CreditTable()


def decode(data: bytes) -> CreditTable:
    """Read what `CreditTable.encode` has written. Raises ValueError for anything else."""
    entries, at = {}, 0
    while at < len(data):
        end = at + 1 + data[at]
        numbers = data[end : end + NUMBERS.size]
        if len(numbers) != NUMBERS.size:
            raise ValueError("A table of credit is cut short.")
        entries[base58.b58encode(data[at + 1 : end]).decode()] = Credit(*NUMBERS.unpack(numbers))
        at = end + NUMBERS.size
    table = CreditTable(entries)
    if len(table) > MOST_MEMBERS or table.encode() != data:
        raise ValueError("A table of credit is not in order, or too long.")
    return table


def leaf_hash(entry: bytes) -> bytes:
    """The hash of an encoded entry, 32 bytes."""
    return blake3(entry, derive_key_context=LEAF_CONTEXT).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return blake3(left + right, derive_key_context=NODE_CONTEXT).digest()


def encode_entry(peer: str, credit: Credit) -> bytes:
    """The encoded entry of a member. Raises ValueError for an id that is not base58."""
    return _encode(base58.b58decode(peer), credit)


def _encode(raw: bytes, credit: Credit) -> bytes:
    if len(raw) > 255:
        raise ValueError("A member's id is longer than 255 bytes.")
    try:
        numbers = NUMBERS.pack(*astuple(credit))
    except struct.error as exc:
        raise ValueError(f"{credit} does not fit.") from exc
    return bytes([len(raw)]) + raw + numbers


def _give_up(entries: dict[str, Credit]) -> None:
    """Move the entries with the fewest tokens, then the smallest ids, to `OTHERS`, until MOST_MEMBERS are left."""
    least = sorted((credit.tokens, peer) for peer, credit in entries.items() if peer != OTHERS)
    count = len(entries) + (OTHERS not in entries) - MOST_MEMBERS
    gone = [entries.pop(peer) for _, peer in least[:count]]
    if OTHERS in entries:
        gone.append(entries[OTHERS])
    entries[OTHERS] = Credit(
        sum(credit.tokens for credit in gone),
        sum(credit.rounds for credit in gone),
        min(credit.first_round for credit in gone),
        max(credit.last_round for credit in gone),
        max(credit.last_round for credit in gone),
    )

"""Credit: the tokens and rounds that each member has contributed, as a Merkle tree under the digest of the outer state.

The table follows from the committed rounds alone, so all nodes have the same one. It is stored and transferred with the
state. The tokens of all entries add up to the tokens of the state.

An entry is encoded as 1 byte of length, the member's id (38 bytes of a libp2p peer id), and 24 bytes of numbers.
Entries are in the order of these ids. The tree has their BLAKE3 hashes as leaves. A node is the hash of its two
children, and the last node of a level without a partner moves up as it is. Leaves and nodes are hashed with different
key contexts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache

import base58
from blake3 import blake3

LEAF_CONTEXT = "diloco-node credit leaf v1"
NODE_CONTEXT = "diloco-node credit node v1"
NUMBERS = struct.Struct("<QIIII")
"""The numbers of `Credit`, in order."""
MOST_MEMBERS = 16_384
"""Limit on the entries. Beyond it, those of members that are away longest become part of the entry `OTHERS`."""
ID_BYTES = 38
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

    def __init__(self, lines: Iterable[tuple[str, bytes, Credit]] = ()) -> None:
        """`lines` are member, encoded entry and credit, in any order. Raises ValueError if two have one id."""
        in_order = sorted(lines, key=lambda line: raw_id(line[0]))
        self._entries = {member: credit for member, _, credit in in_order}
        self._encoded = {member: encoded for member, encoded, _ in in_order}
        if len({raw_id(member) for member in self._entries}) < len(in_order):
            raise ValueError("A table of credit has two entries of one member.")

    def __getitem__(self, member: str) -> Credit:
        return self._entries[member]

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
        changed = {member: _added(self._entries.get(member), round_, share) for member, share in tokens.items()}
        entries = {**self._entries, **changed}
        if len(entries) > MOST_MEMBERS:
            _give_up(entries)
        return self._with(entries)

    def _with(self, entries: Mapping[str, Credit]) -> CreditTable:
        """A table of these entries, which encodes only those that this one does not have."""
        return CreditTable(
            (
                member,
                self._encoded[member] if self._entries.get(member) is credit else encode_entry(member, credit),
                credit,
            )
            for member, credit in entries.items()
        )

    def encode(self) -> bytes:
        return b"".join(self._encoded.values())

    @cached_property
    def root(self) -> bytes:
        """The root of the tree, 32 bytes; zeros for an empty table."""
        levels = self._levels
        return levels[-1][0] if levels[0] else bytes(32)

    @cached_property
    def _levels(self) -> list[list[bytes]]:
        levels = [[leaf_hash(entry) for entry in self._encoded.values()]]
        while len(levels[-1]) > 1:
            below = levels[-1]
            pairs = [node_hash(*below[i : i + 2]) for i in range(0, len(below) - 1, 2)]
            levels.append(pairs + below[len(below) - len(below) % 2 :])
        return levels

    def entry(self, member: str) -> bytes:
        """The encoded entry of a member. Raises KeyError."""
        return self._encoded[member]

    def path(self, member: str) -> list[Step]:
        """The Merkle path from a member's entry to the root, lowest level first. Raises KeyError."""
        if member not in self._entries:
            raise KeyError(member)
        place, steps = list(self._entries).index(member), []
        for level in self._levels[:-1]:
            sibling = place ^ 1
            if sibling < len(level):
                steps.append(Step(level[sibling], is_left=sibling < place))
            place //= 2
        return steps


def table_of(entries: Mapping[str, Credit]) -> CreditTable:
    return EMPTY._with(entries)


EMPTY = CreditTable()


def decode(data: bytes) -> CreditTable:
    """Read what `CreditTable.encode` has written. Raises ValueError for anything else. Slow."""
    if len(data) > MOST_BYTES:
        raise ValueError("A table of credit is too long.")
    entries: dict[str, Credit] = {}
    at = 0
    while at < len(data):
        end = at + 1 + data[at]
        numbers = data[end : end + NUMBERS.size]
        if data[at] not in (0, ID_BYTES) or len(numbers) != NUMBERS.size:
            raise ValueError("A table of credit has an entry of another form.")
        entries[base58.b58encode(data[at + 1 : end]).decode()] = Credit(*NUMBERS.unpack(numbers))
        at = end + NUMBERS.size
    table = table_of(entries)
    if len(table) > MOST_MEMBERS or table.encode() != data:
        raise ValueError("A table of credit is not in order, or too long.")
    return table


@lru_cache(maxsize=2 * MOST_MEMBERS)
def raw_id(member: str) -> bytes:
    """The bytes of a peer id. Any other name, such as one of the reference, is hashed."""
    if not member:
        return b""
    try:
        raw = base58.b58decode(member)
    except ValueError:
        raw = b""
    return raw if len(raw) == ID_BYTES else hashlib.sha256(member.encode()).digest()


def encode_entry(member: str, credit: Credit) -> bytes:
    """The encoded entry of a member. Raises ValueError for numbers that do not fit."""
    raw = raw_id(member)
    try:
        return bytes([len(raw)]) + raw + NUMBERS.pack(*astuple(credit))
    except struct.error as exc:
        raise ValueError(f"{credit} does not fit into a table of credit.") from exc


def leaf_hash(entry: bytes) -> bytes:
    """The hash of an encoded entry, 32 bytes."""
    return blake3(entry, derive_key_context=LEAF_CONTEXT).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return blake3(left + right, derive_key_context=NODE_CONTEXT).digest()


def _added(old: Credit | None, round_: int, tokens: int) -> Credit:
    if old is None:
        return Credit(tokens, 1, round_, round_, round_)
    streak_round = old.streak_round if old.last_round == round_ - 1 else round_
    return Credit(old.tokens + tokens, old.rounds + 1, old.first_round, streak_round, round_)


def _give_up(entries: dict[str, Credit]) -> None:
    """Move the entries that are oldest, then those with the fewest tokens, to `OTHERS`, until MOST_MEMBERS are left."""
    members = ((credit.last_round, credit.tokens, member) for member, credit in entries.items() if member != OTHERS)
    count = len(entries) + (OTHERS not in entries) - MOST_MEMBERS
    gone = [entries.pop(member) for *_, member in sorted(members)[:count]]
    if OTHERS in entries:
        gone.append(entries[OTHERS])
    entries[OTHERS] = Credit(
        sum(credit.tokens for credit in gone),
        sum(credit.rounds for credit in gone),
        min(credit.first_round for credit in gone),
        max(credit.last_round for credit in gone),
        max(credit.last_round for credit in gone),
    )

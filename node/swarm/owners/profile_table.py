"""The profiles of all known keys: a last-writer-wins map of bounded size. It does no networking and no disk access."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator

from node.errors import PeerError
from node.swarm.messages import Document
from node.swarm.owners.profile import Owner, Profile, may_join, read_profile

MOST_PROFILES = 4096
"""Limit on the profiles. Beyond it, those of keys without credit are given up first."""
BUCKETS, DIGEST_BYTES = 128, 8


class ProfileTable:
    """Only the swarm's event loop uses it."""

    def __init__(self, own_key: str, credited: Callable[[], Container[str]], most: int = MOST_PROFILES) -> None:
        """`credited` returns the keys that have contributed to the run."""
        self._own_key, self._credited, self._most = own_key, credited, most
        self._entries: dict[str, tuple[Document, Profile]] = {}
        self.changes = 0
        """How often the table has changed. A profile that a full table does not keep changes nothing."""
        self._digests: tuple[int, bytes] = (-1, b"")
        """The number of changes at which the digests were computed, and the digests."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def documents(self) -> list[Document]:
        return [document for document, _ in self._entries.values()]

    # merging

    def merge(self, documents: Iterable[Document]) -> list[PeerError]:
        """Take over the profiles that are valid and newer than the known ones. Returns the faults of invalid ones."""
        faults, before = [], dict(self._entries)
        for document in documents:
            known = self._entries.get(document.signer)
            if known is not None and known[0].text == document.text:
                continue
            try:
                profile = read_profile(document)
            except PeerError as exc:
                faults.append(exc)
                continue
            if known is None or _order(document, profile) > _order(*known):
                self._entries[document.signer] = document, profile
        self._give_up()
        self.changes += self._entries != before
        return faults

    def _give_up(self) -> None:
        """Drop what is over the limit: first keys without credit, in an order that is the same on all nodes."""
        count = len(self._entries) - self._most
        if count <= 0:
            return
        credited = self._credited()
        needed = {key for key in self._entries if key in credited} | {self._own_key}
        needed |= {profile.owner for key, (_, profile) in self._entries.items() if key in needed}
        order = sorted(self._entries, key=lambda key: (key in needed, hashlib.sha256(key.encode()).digest()))
        for key in order[:count]:
            del self._entries[key]

    # comparing with another table

    @property
    def digests(self) -> bytes:
        """Each bucket's digest. Equal buckets of two tables hold the same profiles."""
        if self._digests[0] != self.changes:
            self._digests = self.changes, self._compute_digests()
        return self._digests[1]

    def _compute_digests(self) -> bytes:
        buckets: list[list[bytes]] = [[] for _ in range(BUCKETS)]
        for document, _ in self._entries.values():
            text = f"{document.signer} {document.text}".encode()
            buckets[bucket_of(document.signer)].append(hashlib.sha256(text).digest())
        return b"".join(hashlib.sha256(b"".join(sorted(one))).digest()[:DIGEST_BYTES] for one in buckets)

    def differing(self, digests: bytes) -> list[Document]:
        """The profiles in the buckets whose digests differ. Raises PeerError if the digests have the wrong form."""
        if len(digests) != BUCKETS * DIGEST_BYTES:
            raise PeerError("digests of profiles have the wrong form")
        places = [slice(i, i + DIGEST_BYTES) for i in range(0, len(digests), DIGEST_BYTES)]
        own = self.digests
        differs = [own[place] != digests[place] for place in places]
        return [document for document in self.documents if differs[bucket_of(document.signer)]]

    # queries

    def find(self, key: str) -> Profile | None:
        return self._entries[key][1] if key in self._entries else None

    def owner_of(self, key: str) -> Owner:
        """The owner of a machine. A machine whose owner has not agreed, or is unknown, stands alone without a name."""
        profile = self.find(key)
        if profile is None:
            return Owner(key)
        if not profile.owner:
            return Owner(key, profile.name, profile.team)
        owner = self.find(profile.owner)
        is_joined = (
            owner is not None and not owner.owner and may_join(owner.joining_key, profile.owner, key, profile.consent)
        )
        return Owner(profile.owner, owner.name, owner.team) if owner is not None and is_joined else Owner(key)

    def owners(self) -> Iterator[tuple[str, Owner]]:
        """Each key that has a profile, and its owner. The table may change meanwhile."""
        for key in list(self._entries):
            yield key, self.owner_of(key)


def bucket_of(key: str) -> int:
    return hashlib.sha256(key.encode()).digest()[0] % BUCKETS


def _order(document: Document, profile: Profile) -> tuple[int, str]:
    """The greater of two profiles of one key counts, on all nodes."""
    return profile.number, document.text

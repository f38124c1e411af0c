"""Listings of runs for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from node.config.manifest import Manifest, RunConfig
from node.swarm.identity import Identity, new_identity
from node.swarm.membership.directory import LISTING_LIFE_S, MAX_LISTING_BYTES, Listing, sign_listing
from node.training.model import unit_elements
from tests.swarm.harness import tiny

Entry = tuple[str, bytes, float]
"""The signer, the value and the expiry of an entry of the directory."""

ADDRESS = f"/ip4/203.0.113.5/tcp/31337/p2p/{new_identity().peer_id}"


def manifest_of(name: str, **tables: Any) -> Manifest:
    run = RunConfig.model_validate(tiny(name=name, **tables))
    digest = sha256(name.encode()).hexdigest()
    parameters = sum(unit_elements(run.model))
    return Manifest(run_id=digest[:32], initial_digest=digest, parameters=parameters, run=run)


def listing_of(name: str, *, addresses: tuple[str, ...] = (ADDRESS,), members: int = 2, **tables: Any) -> Listing:
    text = manifest_of(name, **tables).canonical().decode()
    return Listing(manifest=text, addresses=addresses, members=members, round=3, tokens=1000)


def soon(seconds: float = 60.0) -> int:
    return int(time.time() + seconds)


def good_entry(number: int, **tables: Any) -> Entry:
    identity, expires_at = new_identity(), soon(LISTING_LIFE_S)
    return identity.peer_id, sign_listing(identity, listing_of(f"run {number}", **tables), expires_at), expires_at


def forged(identity: Identity) -> Entry:
    """A listing that somebody else has signed."""
    return identity.peer_id, sign_listing(new_identity(), listing_of("forged"), soon()), soon()


def expired(identity: Identity) -> Entry:
    return identity.peer_id, sign_listing(identity, listing_of("expired"), soon(-5)), soon(-5)


def kept_too_long(identity: Identity) -> Entry:
    late = soon(100 * LISTING_LIFE_S)
    return identity.peer_id, sign_listing(identity, listing_of("kept too long"), late), late


def oversized(identity: Identity) -> Entry:
    listing = listing_of("oversized", purpose="".join(chr(0x4E00 + 7 * i % 20_000) for i in range(2000)))
    value = sign_listing(identity, listing, soon())
    assert len(value) > MAX_LISTING_BYTES
    return identity.peer_id, value, soon()


def renewed(identity: Identity) -> Entry:
    """A copy of a listing, to be stored for longer than its signer wanted."""
    return identity.peer_id, sign_listing(identity, listing_of("renewed"), soon(20)), soon(100)


BAD_KINDS: list[Callable[[Identity], Entry]] = [forged, expired, kept_too_long, oversized, renewed]

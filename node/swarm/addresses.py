"""Addresses that peers tell: libp2p multiaddresses that end in the peer's id. Hostile until read here."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr


@lru_cache(maxsize=2**14)
def read_address(address: str) -> tuple[str, Multiaddr] | None:
    """A peer's id, and where it is dialed; None for what is no such address. Cached: they are told again and again."""
    where, _, peer_id = address.rpartition("/p2p/")
    try:
        if not peer_id or PeerID.from_base58(peer_id).to_base58() != peer_id:
            return None
        return peer_id, Multiaddr(where)
    except (ValueError, LookupError):
        return None


def addresses_of(peer_id: str, addresses: Iterable[str]) -> tuple[str, ...]:
    """Those that lead to this peer: of the others, one that it signed may lead anywhere, or be none at all."""
    return tuple(address for address in addresses if (found := read_address(address)) and found[0] == peer_id)

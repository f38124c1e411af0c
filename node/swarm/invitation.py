"""Which addresses an invite names, and where it can be used. Knows no wire.

An invite names addresses at which others have reached a node, or that its owner announces; only where there are none of
these, addresses that mean something on this network or machine only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from node.swarm.directory import PeerRecord
from node.swarm.places import Here, Scope, place_of

MAX_PEERS = 4
"""Peers that an invite names, so that it still works when one of them is gone."""
MAX_ADDRESSES = 16
OTHERS_S = 20.0
"""So long after its start, a node with bootstrap peers gives no invite that works on this network only."""
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


def invited(own: Sequence[str], others: Sequence[PeerRecord], seen: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The addresses for an invite, each with a peer id.

    `own`: where this node can be called, best first. `others`: live inbound peers. `seen`: the IP addresses at which
    this node itself sees each of them; what a peer tells of other IP addresses may be wrong, and is left out.
    """
    peers = [list(own), *(_seen_addresses(record, seen.get(record.peer_id, ())) for record in others)]
    for wanted in (Scope.WIDE, Scope.NETWORK):
        told = [[a for a in addresses if _fits(a, wanted)] for addresses in peers]
        told = [addresses for addresses in told if addresses][:MAX_PEERS]
        if told:
            return tuple(dict.fromkeys(address for addresses in told for address in addresses))[:MAX_ADDRESSES]
    return ()


def _fits(address: str, wanted: Scope) -> bool:
    place = place_of(address)
    return place is not None and (place.scope is Scope.WIDE) == (wanted is Scope.WIDE)


def _seen_addresses(record: PeerRecord, ips: Sequence[str]) -> list[str]:
    """Of what a peer tells, the addresses at which this node sees it, and then its names."""
    places = {address: place for address in record.addresses if (place := place_of(address)) is not None}
    seen = [address for address, place in places.items() if place.host in ips]
    return [*seen, *(address for address, place in places.items() if place.ip is None)] if seen else []


def reach_of(addresses: Sequence[str]) -> Scope:
    """From how far away an invite with these addresses can be used."""
    return max((place.scope for place in map(place_of, addresses) if place is not None), default=Scope.HOST)


def is_too_early(addresses: Sequence[str], *, has_bootstrap: bool, knows_others: bool, age_s: float) -> bool:
    """Whether an invite with these addresses waits, as others, which can be called from outside, may be found yet."""
    return has_bootstrap and not knows_others and age_s < OTHERS_S and reach_of(addresses) is not Scope.WIDE


def invite_note(
    addresses: Sequence[str], here: Here, port: int, *, in_container: bool, remembered: Collection[str] = ()
) -> str:
    """One sentence, with the mend, where an invite with these addresses may not work everywhere.

    `remembered`: addresses without a peer id at which nobody has tried to reach this node since its start.
    """
    tested = [address for address in addresses if address.partition("/p2p/")[0] not in remembered]
    if reach_of(tested) is Scope.WIDE or not addresses:
        return ""
    reach = reach_of(addresses)
    if reach is Scope.WIDE:
        return (
            "Nobody has tried this invite's addresses since this node's start: it works outside this network only if "
            "they still lead to this node. Wait until another node has joined, or set swarm.announce."
        )
    outside = {one.ip for one in here.interfaces if not one.ip.is_loopback and not one.ip.is_link_local}
    is_bridged = in_container and len({ip for ip in outside if ip.version == 4}) <= 1
    where = "machine" if reach is Scope.HOST or is_bridged else "network"
    return (
        f"This invite works only on this {where}: nobody outside has reached this node yet. Set swarm.announce "
        f"(DILOCO_SWARM__ANNOUNCE) to the address that others reach, such as /ip4/203.0.113.5/tcp/{port or 31337}, and "
        f"forward or publish that port."
    )


def is_container(marks: Sequence[str] = _CONTAINER_MARKS) -> bool:
    """Whether this process runs in a container of Docker or Podman."""
    return any(Path(mark).exists() for mark in marks)

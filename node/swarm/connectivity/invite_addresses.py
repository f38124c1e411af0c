"""Chooses the addresses that an invite names, and tells where such an invite can be used.

An invite names addresses at which other peers have reached a node, and those that the owner announces. If there are
none, it names addresses that are only valid on this network or machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from node.swarm.membership.peer_table import PeerRecord
from node.swarm.transport.address_scope import LocalAddresses, Scope, parse_endpoint

MAX_PEERS = 4
"""An invite names up to this many peers, so that it still works when one of them is gone."""
MAX_ADDRESSES = 16
OTHERS_S = 20.0
"""For this long after its start, a node with bootstrap peers gives no invite that works on this network only."""
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


def choose_invite_addresses(
    own: Sequence[str], others: Sequence[PeerRecord], seen: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Choose the addresses for an invite, each with a peer id.

    `own` are this node's callable addresses, best first. `others` are live peers that accept connections. `seen` are
    the IP addresses at which this node sees each of those peers. Their other IP addresses may be wrong, and are left
    out.
    """
    peers = [list(own), *(_seen_addresses(record, seen.get(record.peer_id, ())) for record in others)]
    for want_wide in (True, False):
        fitting = [[address for address in addresses if _is_wide(address) is want_wide] for addresses in peers]
        named = [addresses for addresses in fitting if addresses][:MAX_PEERS]
        if named:
            return tuple(dict.fromkeys(address for addresses in named for address in addresses))[:MAX_ADDRESSES]
    return ()


def _is_wide(address: str) -> bool | None:
    """Whether the address has internet scope; None if it is not a direct address."""
    endpoint = parse_endpoint(address)
    return None if endpoint is None else endpoint.scope is Scope.WIDE


def _seen_addresses(record: PeerRecord, ips: Sequence[str]) -> list[str]:
    """The IP addresses at which this node sees a peer, and then the peer's DNS names. Empty if it sees no address."""
    endpoints = {a: endpoint for a in record.addresses if (endpoint := parse_endpoint(a)) is not None}
    seen = [address for address, endpoint in endpoints.items() if endpoint.host in ips]
    return [*seen, *(address for address, endpoint in endpoints.items() if endpoint.ip is None)] if seen else []


def widest_reach(addresses: Sequence[str]) -> Scope:
    """From how far away an invite with these addresses can be used."""
    return max((e.scope for e in map(parse_endpoint, addresses) if e is not None), default=Scope.HOST)


def is_too_early(addresses: Sequence[str], *, has_bootstrap: bool, knows_others: bool, age_s: float) -> bool:
    """Whether the invite must wait, because peers that can be called from outside may still be found."""
    return has_bootstrap and not knows_others and age_s < OTHERS_S and widest_reach(addresses) is not Scope.WIDE


def invite_note(
    addresses: Sequence[str], local: LocalAddresses, port: int, *, in_container: bool, remembered: Collection[str] = ()
) -> str:
    """Say in a sentence or two, with the remedy, why this invite may not work everywhere; empty if it works everywhere.

    `remembered` are addresses without a peer id that no peer has tested since this node's start.
    """
    tested = [address for address in addresses if address.partition("/p2p/")[0] not in remembered]
    if widest_reach(tested) is Scope.WIDE or not addresses:
        return ""
    reach = widest_reach(addresses)
    if reach is Scope.WIDE:
        return (
            "No peer has tried this invite's addresses since this node's start. Outside this network, the invite works "
            "only if they still lead to this node. Wait until another node has joined, or set swarm.announce."
        )
    outside = {one.ip for one in local.interfaces if not one.ip.is_loopback and not one.ip.is_link_local}
    is_bridged = in_container and len({ip for ip in outside if ip.version == 4}) <= 1
    where = "machine" if reach is Scope.HOST or is_bridged else "network"
    return (
        f"This invite works only on this {where}, because no peer outside has reached this node. Set swarm.announce "
        f"(DILOCO_SWARM__ANNOUNCE) to the address that others reach, such as /ip4/203.0.113.5/tcp/{port or 31337}, and "
        f"forward or publish that port."
    )


def is_container(marks: Sequence[str] = _CONTAINER_MARKS) -> bool:
    """Whether this process runs in a container of Docker or Podman."""
    return any(Path(mark).exists() for mark in marks)

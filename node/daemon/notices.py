"""What the owner should know beside the phase: rules, as pure functions. Knows values; the board keeps what holds."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from packaging.version import InvalidVersion, Version

from node.config import ApiConfig
from node.status import Notice, PeerRow

NO_TLS = "no_tls"
NEWER_VERSION = "newer_version"
WILDCARDS = frozenset({"0.0.0.0", "::"})
"""All addresses of the machine; no name in a Host header."""


def no_tls(api: ApiConfig) -> Notice | None:
    """For as long as the page can be had from elsewhere, and what is said to it can be read on the way.

    Bound to all addresses, as in a container, the node answers to loopback's names and to `api.allowed_hosts` only.
    """
    names = [name for name in (api.host, *api.allowed_hosts) if not _is_loopback(name) and name not in WILDCARDS]
    if api.tls_cert or _is_loopback(api.host) or not names:
        return None
    text = (
        f"The page is open to other machines (api.host is {api.host}; it answers to {', '.join(names)}) without TLS: "
        "whoever is on the way can read the token. Set api.tls_cert and api.tls_key, or bind 127.0.0.1 and use an SSH "
        "tunnel."
    )
    return Notice(code=NO_TLS, level="warning", text=text)


def newer_version(own: str, rows: Iterable[PeerRow]) -> Notice | None:
    """Where more than half of the other live peers run a newer version than this node."""
    mine, others = _parsed(own), [_parsed(row.version) for row in rows if not row.this_node]
    newer = Counter(version for version in others if version is not None and mine is not None and version > mine)
    if not newer or 2 * newer.total() <= len(others):
        return None
    usual = newer.most_common(1)[0][0]
    who = f"{newer.total()} of {len(others)} peers run a newer version, most of them {usual}"
    if len(others) == 1:
        who = f"The other peer runs a newer version, {usual}"
    text = f"{who}; this is {own}: update."
    return Notice(code=NEWER_VERSION, level="info", text=text)


@lru_cache(maxsize=256)
def _parsed(text: str) -> Version | None:
    """None for what is no version: other peers may say anything."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

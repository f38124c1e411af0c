"""Removes secrets from configuration tables, and secrets, addresses and user names from text for a support bundle."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any

HIDDEN = "(hidden)"
ADDRESS = "(address)"
SECRET_WORDS = ("token", "secret", "password", "webhook", "ntfy")

_NAMED_SECRET = re.compile(
    r"(?i)((?:\b|_)(?:token|password|passwd|secret|api[_-]?key|authorization|diloco_session_\w+)[\"']?\s*[=:]\s*[\"']?)"
    r"(?!bearer\b|\(hidden\))[^\s\"',;&]+"
)
_REPLACEMENTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [^-]+-----.*?(?:-----END [^-]+-----|\Z)", re.DOTALL), HIDDEN),
    (re.compile(r"diloco1-[\w=-]+"), HIDDEN),
    (re.compile(r"(?i)(bearer\s+|[#?&]token=)[\w.~+/=-]+"), rf"\1{HIDDEN}"),
    (re.compile(r"\bhf_\w{8,}"), HIDDEN),
    (_NAMED_SECRET, rf"\1{HIDDEN}"),
    (re.compile(r"/(?:ip4|ip6|ip6zone|dns|dns4|dns6|dnsaddr|unix)/[^\s\"',;)\]}]+"), ADDRESS),
    # Credentials in a URL, then its host.
    (re.compile(r"(?<=://)[^\s/@\"']+@"), ""),
    (re.compile(r"(?<=://)[^\s/:\"'\[\]]+|(?<=://)\[[^\]]+\]"), ADDRESS),
    # A host name with a dot and a port; a line of a Python file (`work.py:31`) looks the same and stays.
    (
        re.compile(r"(?<![\w.-])(?:[A-Za-z0-9-]{1,63}\.){1,10}[A-Za-z][A-Za-z0-9-]{1,62}(?<!\.py):[0-9]{1,5}(?!\w)"),
        ADDRESS,
    ),
)
_IPV4_ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?::\d{1,5})?(?!\.?\d)")
"""Also after a word and a colon, as in `peer:203.0.113.5`, and before a colon, as in the messages of Go."""
_MAYBE_IP_ADDRESS = re.compile(r"(?<![\w.:])[0-9A-Fa-f]*[:.][0-9A-Fa-f:.]*[0-9A-Fa-f:](?![\w])")


def hide_secrets(table: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested table that hides the values of keys whose last word is in SECRET_WORDS."""
    hidden: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            hidden[key] = hide_secrets(value)
        elif value and any(key == word or key.endswith("_" + word) for word in SECRET_WORDS):
            hidden[key] = HIDDEN
        else:
            hidden[key] = value
    return hidden


class Redactor:
    """Replaces the known secrets of one node, and everything that has the form of a secret or an address."""

    def __init__(self, secrets: Iterable[str], replacements: Iterable[tuple[str, str]]) -> None:
        """`replacements` are pairs of a further text, such as the home folder, and its replacement."""
        known = [(secret, HIDDEN) for secret in secrets if secret] + [(old, new) for old, new in replacements if old]
        self._known = sorted(known, key=lambda pair: -len(pair[0]))

    def __call__(self, text: str) -> str:
        for old, new in self._known:
            text = text.replace(old, new)
        for pattern, replacement in _REPLACEMENTS:
            text = pattern.sub(replacement, text)
        return _MAYBE_IP_ADDRESS.sub(_redact_address, _IPV4_ADDRESS.sub(ADDRESS, text))


def _redact_address(match: re.Match[str]) -> str:
    """Replace an IPv4 or IPv6 address with or without a port; times of day and versions stay."""
    text = match[0]
    for candidate in (text, text.rstrip(":."), text.rpartition(":")[0]):
        try:
            ipaddress.ip_address(candidate)
        except ValueError:
            continue
        return ADDRESS
    return text

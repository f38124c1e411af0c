"""Text without what nobody else may read: keys, invites, addresses, names of machine and user. Knows patterns only."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

HIDDEN = "(hidden)"
_INVITE = re.compile(r"diloco1-[\w=-]+")
_MULTIADDRESS = re.compile(r"/(?:ip4|ip6|ip6zone|dns|dns4|dns6|dnsaddr|unix)/[^\s\"',;)\]}]+")
_BEARER = re.compile(r"(?i)(bearer\s+|[#?&]token=)[\w.~+/=-]+")
_NAMED = re.compile(
    r"(?i)((?:\b|_)(?:token|password|passwd|secret|api[_-]?key|authorization|diloco_session_\w+)[\"']?\s*[=:]\s*[\"']?)"
    r"(?!bearer\b|\(hidden\))[^\s\"',;&]+"
)
_HUB_TOKEN = re.compile(r"\bhf_\w{8,}")
_PEM = re.compile(r"-----BEGIN [^-]+-----.*?(?:-----END [^-]+-----|\Z)", re.DOTALL)
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@\"']+@")
_HOST = re.compile(r"(?<=://)[^\s/:\"'\[\]]+|(?<=://)\[[^\]]+\]")
_NAME_AND_PORT = re.compile(
    r"(?<![\w.-])(?:[A-Za-z0-9-]{1,63}\.){1,10}[A-Za-z][A-Za-z0-9-]{1,62}(?<!\.py):[0-9]{1,5}(?![\w:])"
)
"""A host's name with a dot; a line of a Python file looks the same."""
_ADDRESS = re.compile(r"(?<![\w.:])[0-9A-Fa-f]*[:.][0-9A-Fa-f:.]*[0-9A-Fa-f:](?![\w])")


class Scrubber:
    """Made of the secrets of one node, which are hidden wherever they stand; the rest goes by its form."""

    def __init__(self, secrets: Iterable[str], places: Iterable[tuple[str, str]]) -> None:
        """`places`: what else is replaced, such as the home folder, and by what."""
        self._replaced = [(secret, HIDDEN) for secret in secrets if secret] + [(a, b) for a, b in places if a]
        self._replaced.sort(key=lambda pair: -len(pair[0]))

    def __call__(self, text: str) -> str:
        for what, by in self._replaced:
            text = text.replace(what, by)
        text = _PEM.sub(HIDDEN, text)
        text = _INVITE.sub(HIDDEN, text)
        text = _BEARER.sub(lambda found: found[1] + HIDDEN, text)
        text = _NAMED.sub(lambda found: found[1] + HIDDEN, _HUB_TOKEN.sub(HIDDEN, text))
        text = _MULTIADDRESS.sub("(address)", text)
        text = _CREDENTIALS.sub("", text)
        text = _NAME_AND_PORT.sub("(address)", _HOST.sub("(address)", text))
        return _ADDRESS.sub(_without_address, text)


def _without_address(found: re.Match[str]) -> str:
    """IPv4 with or without a port, IPv6; times of day and versions stay."""
    text = found[0]
    for candidate in (text, text.rstrip(":."), text.rpartition(":")[0]):
        try:
            ipaddress.ip_address(candidate)
        except ValueError:
            continue
        return "(address)"
    return text

"""Text that is safe to show in logs, terminals and pages."""

from __future__ import annotations

import re

CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Characters that no log line may contain, for a set in a regular expression: control characters except tab and line
feed, line separators, marks that change the direction of writing, and surrogates."""
_UNPRINTABLE = re.compile(f"[\t\n{CONTROLS}]")


def printable(text: object, max_length: int) -> str:
    """Make a stranger's text one line without control characters, truncated; "" if it is no string."""
    return _UNPRINTABLE.sub(" ", text[:max_length]) if isinstance(text, str) else ""

"""Text that is safe to show in logs, terminals and pages."""

from __future__ import annotations

import re
import unicodedata

CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Characters that no log line may contain, for a set in a regular expression: control characters except tab and line
feed, line separators, marks that change the direction of writing, and surrogates."""
_UNPRINTABLE = re.compile(f"[\t\n{CONTROLS}]")


def printable(text: object, max_length: int) -> str:
    """Make a stranger's text one line without control characters, truncated; "" if it is no string."""
    return _UNPRINTABLE.sub(" ", text[:max_length]) if isinstance(text, str) else ""


INVISIBLE = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
"""Letters and marks that look like nothing."""
MOST_MARKS = 2
"""Most combining marks in a row; more of them cover the lines above and below."""


def check_label(text: str, max_length: int) -> str:
    """Return a name that people have chosen, if it is one clean line. Raises ValueError with the rule that it breaks.

    The text is in Unicode's normal form C, so that equal names are equal texts.
    """
    kinds = [unicodedata.category(character) for character in text]
    marks = "".join("m" if kind[0] == "M" else " " for kind in kinds)
    if len(text) > max_length:
        raise ValueError(f"it has {len(text)} characters: use at most {max_length}")
    if text != unicodedata.normalize("NFC", text) or text != text.strip() or "  " in text:
        raise ValueError("it has extra spaces, or accents that are apart from their letters: remove them")
    if any(
        kind[0] == "C" or (kind[0] == "Z" and character != " ") for kind, character in zip(kinds, text, strict=True)
    ):
        raise ValueError("it has an invisible or control character: use letters, digits, signs and spaces")
    if set(text) & set(INVISIBLE) or marks.startswith("m") or "m" * (MOST_MARKS + 1) in marks:
        raise ValueError("it has an invisible letter, or too many accents: use letters, digits, signs and spaces")
    return text

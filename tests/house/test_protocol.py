"""PROTOCOL.md names only functions, classes, files and verbs that exist in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "node"
PROTOCOL = ROOT / "swarm" / "PROTOCOL.md"
SOURCES = {path: path.read_text() for folder in ("swarm", "diloco") for path in (ROOT / folder).rglob("*.py")}
CODE = "\n".join(SOURCES.values())
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", PROTOCOL.read_text())))


def exists(quoted: str) -> bool:
    """Whether a quoted name is an existing path, or its last part is defined or written as a string in the code."""
    if "/" in quoted or quoted.endswith((".py", ".md")):
        return (PROTOCOL.parent / quoted).exists()
    name = re.escape(quoted.split(".")[-1])
    is_module = any(path.stem == quoted.split(".")[-1] for path in SOURCES)
    return (
        is_module or re.search(rf'\b(def|class) {name}\b|^ *(self\.)?{name}\b *[:=]|"{name}"', CODE, re.M) is not None
    )


@pytest.mark.parametrize("quoted", QUOTED)
def test_each_name_quoted_in_protocol_md_exists_in_the_code(quoted: str) -> None:
    assert exists(quoted)


def test_protocol_md_names_every_verb_of_the_swarm() -> None:
    verbs = set(re.findall(r'"(\w+)": (?:small|large|Service)\(', CODE))
    assert verbs
    assert verbs <= set(QUOTED)

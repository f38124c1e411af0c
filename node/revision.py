"""Which commit this program was made from. Knows the package's folder; a build leaves a file there."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("revision.txt")
ASK_S = 2.0


@cache
def revision() -> str:
    """Twelve hex digits, with `+` where files were changed since; empty where nobody knows."""
    try:
        return FILE.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return _of_checkout(FILE.parents[1])


def _of_checkout(root: Path) -> str:
    """Only of its own repository: that of a folder around it says nothing."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()

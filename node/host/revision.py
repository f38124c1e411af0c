"""The commit that this program was built from, and the versions of installed packages."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path

from node.host.programs import output_of

FILE = Path(__file__).parents[1] / "revision.txt"
"""A build of the package or image writes this file."""
GIT_TIMEOUT_S = 2.0


@cache
def revision() -> str:
    """Return the commit: twelve hex digits, and `+` if files have changed since. Empty if unknown."""
    try:
        return FILE.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return _checkout_revision(FILE.parents[1])


def installed_version(package: str) -> str | None:
    """The version of a package, without importing it (torch would cost 300 MB). None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _checkout_revision(root: Path) -> str:
    if not (root / ".git").exists():  # Otherwise git would find a repository around this folder.
        return ""
    command = ("git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
    return output_of(*command, timeout_s=GIT_TIMEOUT_S).strip()

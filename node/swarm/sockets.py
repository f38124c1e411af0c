"""A folder for a node's unix sockets: a short path, one per data folder, cleaned by the next start. Knows no daemon.

A process that is killed cannot clean up. So the name follows from the data folder, and whoever comes next with the same
one finds what was left there. A lock on a file in it tells whether its owner still lives.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOCK = "lock"
MAX_BASE_CHARACTERS = 50
"""A unix socket's whole path must stay under 104 bytes."""


@dataclass(slots=True)
class SocketFolder:
    """Owned by this process until `close`."""

    path: Path
    _lock: int = -1

    def clear(self) -> None:
        """Remove all but the lock."""
        for old in self.path.iterdir():
            if old.name != LOCK:
                with suppress(OSError):
                    old.unlink()

    def close(self) -> None:
        """Remove it."""
        with suppress(OSError):
            self.clear()
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def open_sockets(owner: Path) -> SocketFolder:
    """The folder that belongs to this path; another one where that is in use, or somebody else's."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) > MAX_BASE_CHARACTERS:
        base = Path("/tmp")  # noqa: S108 - only a folder that is this user's own, and closed to others, is used in it
    name = hashlib.sha256(str(owner.resolve()).encode()).hexdigest()[:12]
    path = base / f"diloco-{os.getuid()}-{name}"
    try:
        folder = SocketFolder(path, _take(path))
    except OSError:
        return SocketFolder(Path(tempfile.mkdtemp(prefix="diloco-", dir=base)))
    folder.clear()
    return folder


def _take(path: Path) -> int:
    """The lock's file handle. OSError where the folder is in use or not to be trusted."""
    path.mkdir(mode=0o700, exist_ok=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise PermissionError(f"{path} is not this user's own")
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino != (path / LOCK).stat().st_ino:
            raise FileNotFoundError("its owner was just leaving")
    except OSError:
        os.close(handle)
        raise
    return handle

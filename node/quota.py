"""What a data folder may hold: counted, made room in, and refused. Knows file names and ages; no content, no node.

Whoever writes much asks for room first and holds it while writing, so the folder is never above its limit. The oldest
goes first: checkpoints (never the newest whole one), results and downloads, what libraries keep in folders of the cache
(as what comes from the hub), old logs, what was set aside as damaged. What is small or irreplaceable (keys, settings,
history, the newest checkpoint) stays; RESERVE_BYTES are for its growth. Text that the owner has put into the folder is
neither counted nor touched.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from node.errors import QuotaError

RESERVE_BYTES = 8_000_000
SMALL_BYTES = 15_000_000
"""Most of what is small and stays: history, the log that is being written."""
META_BYTES = 1_000_000
"""Of a checkpoint, for what is not tensors: records, leaves of the digest, heads of the files."""
LEAST_BYTES = RESERVE_BYTES + SMALL_BYTES
"""A limit below it leaves no room for anything."""
MB = 1e6

logger = logging.getLogger(__name__)

Room = Callable[[int], AbstractContextManager[None]]
"""Room for so many bytes, held until the end of the block. Raises QuotaError."""


def any_room(_size_bytes: int) -> AbstractContextManager[None]:
    """Where there is no limit."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Item:
    """Something that may go: a file, or a folder with all in it."""

    path: Path
    modified_ns: int
    size_bytes: int


class Quota:
    """One process's. Any thread may ask."""

    def __init__(
        self, folder: Path, limit_bytes: float, text_folder: Path, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        """`limit_bytes` 0: none. `tell` hears why there is no room, and an empty text when there is again."""
        self.limit_bytes = limit_bytes
        self._folder, self._text, self._tell = folder, text_folder, tell
        self._held_bytes = 0
        self._is_refusing = False
        self._lock = threading.Lock()

    @contextmanager
    def room(self, size_bytes: int) -> Iterator[None]:
        with self._lock:
            if self.limit_bytes:
                self._make_room(size_bytes)
            elif self._is_refusing:
                self._refuse("")
            self._held_bytes += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self._held_bytes -= size_bytes

    def _make_room(self, size_bytes: int) -> None:
        target_bytes = self.limit_bytes - RESERVE_BYTES - self._held_bytes - size_bytes
        used_bytes, items = self.used_bytes(), list(self._items())
        if used_bytes - sum(item.size_bytes for item in items) > target_bytes:
            error = QuotaError(
                f"limits.disk_gb allows {self.limit_bytes / MB:.1f} MB, so {size_bytes / MB:.1f} MB more were not "
                f"written: {self._folder} holds {used_bytes / MB:.1f} MB, and nothing of it may go; raise the limit."
            )
            self._refuse(str(error))
            raise error
        if self._is_refusing:
            self._refuse("")
        _evict(items, used_bytes - target_bytes)

    def _refuse(self, why: str) -> None:
        """Or, with an empty text, no more."""
        self._is_refusing = bool(why)
        self._tell(why)

    def enforce(self) -> None:
        """Remove the oldest where there is more than allowed, as after a change of the limit.

        Raises QuotaError where that does not suffice.
        """
        with self._lock:
            if not self.limit_bytes:
                return
            _evict(list(self._items()), self.used_bytes() + RESERVE_BYTES - self.limit_bytes)
            used_bytes = self.used_bytes()
        if used_bytes > self.limit_bytes:
            raise QuotaError(
                f"limits.disk_gb allows {self.limit_bytes / MB:.1f} MB, and {self._folder} holds "
                f"{used_bytes / MB:.1f} MB of which nothing may go: raise it."
            )

    def used_bytes(self) -> int:
        return _size(self._folder, self._text)

    def least_bytes(self) -> int:
        """Less than this does not do: what cannot go, and another checkpoint beside the newest; as at a start."""
        newest = self._newest_checkpoint()
        next_bytes = _size(newest) + META_BYTES if newest is not None else 0
        stays_bytes = self.used_bytes() - sum(item.size_bytes for item in self._items())
        return max(2 * next_bytes + LEAST_BYTES, stays_bytes + next_bytes + RESERVE_BYTES)

    def _items(self) -> Iterator[Item]:
        """All that may go."""
        stays = {self._newest_checkpoint(), _newest(self._folder.glob("cache/download-*.bin"))}
        stays |= {_newest(self._folder.glob("logs/*"))}
        patterns = ("checkpoints/*round-*", "cache/results-*.bin", "cache/download-*.bin", "logs/*")
        for pattern in (*patterns, "cache/*/*", "history/*damaged*", "*.damaged*"):
            for path in self._folder.glob(pattern):
                if path not in stays and not path.name.startswith("."):
                    with suppress(OSError):
                        yield Item(path, path.stat().st_mtime_ns, _size(path))

    def _newest_checkpoint(self) -> Path | None:
        """Whole ones have their list of contents; a name is put in place only then."""
        whole = [path for path in self._folder.glob("checkpoints/round-*") if (path / "meta.json").exists()]
        return max(whole, key=lambda path: int(path.name.removeprefix("round-")), default=None)


def _evict(items: list[Item], over_bytes: float) -> None:
    """The oldest first, until so much is gone."""
    for item in sorted(items, key=lambda item: item.modified_ns):
        if over_bytes <= 0:
            return
        _remove(item.path)
        logger.info("Removed %s, %.1f MB, for limits.disk_gb.", item.path.name, item.size_bytes / MB)
        over_bytes -= item.size_bytes


def quota_bytes(disk_gb: float) -> float:
    return disk_gb * 1e9


def _newest(paths: Iterator[Path]) -> Path | None:
    found = []
    for path in paths:
        with suppress(OSError):
            found.append((path.stat().st_mtime_ns, path))
    return max(found)[1] if found else None


def _size(path: Path, beside: Path | None = None) -> int:
    """Of a file, or of all files below a folder, less one folder; those that vanish meanwhile are left out."""
    total = 0
    with suppress(OSError):
        if not path.is_dir():
            return path.lstat().st_size
    for root, folders, files in os.walk(path):
        folders[:] = [name for name in folders if Path(root, name) != beside]
        for name in files:
            with suppress(OSError):
                total += Path(root, name).lstat().st_size
    return total


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()

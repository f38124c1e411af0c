"""The size limit of a data folder: writers reserve room before they write, and the oldest files are removed.

Removable are checkpoints (except the newest complete one), rounds that wait to be published or evaluated (except the
oldest, on which a process works), round results, downloads and logs (except the newest), folders that libraries keep in
the cache, and files set aside as damaged. A file with several names, such as a state that two checkpoints share, counts
once. Keys, settings and history stay, and may grow by RESERVE_BYTES. The owner's text folder is neither counted nor
changed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from node.errors import QuotaError

RESERVE_BYTES = 8_000_000
SMALL_BYTES = 15_000_000
"""Upper bound of the small files that stay: history and the current log."""
META_BYTES = 1_000_000
"""Part of a checkpoint that is not tensors: records, digest leaves, file headers."""
LEAST_BYTES = RESERVE_BYTES + SMALL_BYTES
"""Lowest limit that is allowed. A lower one would leave no room for a checkpoint."""
MB = 1e6
WAITING = ("publish/round-*", "evaluate/round-*")
"""Folders of the rounds that wait to be published or evaluated (`publication.waiting_rounds`)."""
LASTING = ("checkpoints", "cache/results-*.bin", "cache/feedback.bin", *WAITING)
"""What a run keeps on the disk (`Requirements.disk_bytes`)."""
_CHECKPOINT = re.compile(r"round-(-?\d+)")

HUB_LOGIN = ("token", "stored_tokens")
"""Files of the hub's library with the owner's login. Containers and services keep it in the cache."""

logger = logging.getLogger(__name__)

Room = Callable[[int], AbstractContextManager[None]]
"""Reserves the given number of bytes until the end of a `with` block. Raises QuotaError."""


def any_room(_size_bytes: int) -> AbstractContextManager[None]:
    """A `Room` without a limit."""
    return nullcontext()


class Quota:
    """Keeps the folder within the limit, for one process. Thread-safe."""

    def __init__(
        self, folder: Path, limit_bytes: float, text_folder: Path, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        """`limit_bytes` 0 means no limit. `tell` gets the reason if there is no room, and "" when there is again."""
        self.limit_bytes = limit_bytes
        self._folder, self._text_folder, self._tell = folder, text_folder, tell
        self._reserved_bytes = 0
        self._is_refusing = False
        self._lock = threading.Lock()

    @contextmanager
    def room(self, size_bytes: int) -> Iterator[None]:
        with self._lock:
            if self.limit_bytes:
                self._make_room(size_bytes)
            else:
                self._set_refusal("")
            self._reserved_bytes += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self._reserved_bytes -= size_bytes

    def _make_room(self, size_bytes: int) -> None:
        target_bytes = self.limit_bytes - RESERVE_BYTES - self._reserved_bytes - size_bytes
        used_bytes, items = self.used_bytes(), list(self._removable())
        is_too_little = used_bytes - _freed_bytes(path for _, path in items) > target_bytes
        if is_too_little or _remove_oldest(items, used_bytes - target_bytes) > 0:
            error = QuotaError(
                f"limits.disk_gb allows {self.limit_bytes / MB:.1f} MB, so {size_bytes / MB:.1f} MB were not written: "
                f"{self._folder} holds {used_bytes / MB:.1f} MB, and too little of it is removable; raise the limit."
            )
            self._set_refusal(str(error))
            raise error
        self._set_refusal("")

    def _set_refusal(self, reason: str) -> None:
        if reason or self._is_refusing:
            self._tell(reason)
        self._is_refusing = bool(reason)

    def enforce(self) -> None:
        """Remove the oldest files until the limit is kept, as after a change of it. Raises QuotaError if it is not."""
        with self._lock:
            if not self.limit_bytes:
                return
            _remove_oldest(self._removable(), self.used_bytes() + RESERVE_BYTES - self.limit_bytes)
            used_bytes = self.used_bytes()
        if used_bytes > self.limit_bytes:
            raise QuotaError(
                f"limits.disk_gb allows {self.limit_bytes / MB:.1f} MB, but {self._folder} holds "
                f"{used_bytes / MB:.1f} MB that cannot be removed: raise the limit."
            )

    def used_bytes(self) -> int:
        return size_of(self._folder, self._text_folder)

    def least_bytes(self) -> int:
        """Return the lowest usable limit: room for the files that stay, and for a second checkpoint."""
        newest = self._newest_checkpoint()
        checkpoint_bytes = size_of(newest) + META_BYTES if newest is not None else 0
        fixed_bytes = self.used_bytes() - _freed_bytes(path for _, path in self._removable())
        return max(2 * checkpoint_bytes + LEAST_BYTES, fixed_bytes + checkpoint_bytes + RESERVE_BYTES)

    def _removable(self) -> Iterator[tuple[int, Path]]:
        """Yield when each removable file or folder was modified, in ns, and its path."""
        kept = {self._newest_checkpoint(), _newest(self._folder.glob("cache/download-*.bin"))}
        kept |= {_newest(self._folder.glob("logs/*"))}
        kept |= {min(self._folder.glob(pattern), default=None) for pattern in WAITING}
        patterns = ("checkpoints/*round-*", *WAITING, "cache/results-*.bin", "cache/download-*.bin", "logs/*")
        for pattern in (*patterns, "cache/*/*", "history/*damaged*", "*.damaged*"):
            for path in self._folder.glob(pattern):
                # A hidden folder is in use by a process. The tokens are the owner's login at the hub.
                is_hidden = any(part.startswith(".") for part in path.relative_to(self._folder).parts)
                if path in kept or is_hidden or path.suffix == ".key" or path.name in HUB_LOGIN:
                    continue
                if not self._is_behind_link(path):  # `used_bytes` does not count what a link leads to.
                    with suppress(OSError):
                        yield path.stat().st_mtime_ns, path

    def _is_behind_link(self, path: Path) -> bool:
        """Whether a folder between the data folder and this path is a symbolic link."""
        inner = path.relative_to(self._folder).parent
        return any((self._folder / parent).is_symlink() for parent in (inner, *inner.parents) if parent.parts)

    def _newest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint. A complete one has a meta.json."""
        rounds = {path: _CHECKPOINT.fullmatch(path.name) for path in self._folder.glob("checkpoints/round-*")}
        complete = {path: int(name[1]) for path, name in rounds.items() if name and (path / "meta.json").exists()}
        return max(complete, key=complete.__getitem__, default=None)


def quota_bytes(disk_gb: float) -> float:
    return disk_gb * 1e9


def _remove_oldest(items: Iterable[tuple[int, Path]], excess_bytes: float) -> float:
    """Remove files and folders until `excess_bytes` are freed. Returns the bytes that are still too many."""
    for _, path in sorted(items, key=lambda item: item[0]):
        if excess_bytes <= 0:
            break
        before_bytes = _freed_bytes([path])
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        freed_bytes = before_bytes - _freed_bytes([path])  # Another user's files cannot be removed.
        if freed_bytes:
            logger.info("Removed %s (%.1f MB) to keep limits.disk_gb.", path.name, freed_bytes / MB)
        excess_bytes -= freed_bytes
    return excess_bytes


def _newest(paths: Iterator[Path]) -> Path | None:
    found = []
    for path in paths:
        with suppress(OSError):
            found.append((path.stat().st_mtime_ns, path))
    return max(found)[1] if found else None


def size_of(path: Path, excluded: Path | None = None) -> int:
    """The bytes of a file, or of all files below a folder except those in `excluded`. Vanished files count 0."""
    return _size_of_all(_files(path, excluded))


def lasting_bytes(folder: Path) -> int:
    """The bytes of what a run keeps in this data folder."""
    return _size_of_all(one for pattern in LASTING for path in folder.glob(pattern) for one in _files(path))


def _size_of_all(files: Iterable[os.stat_result]) -> int:
    """A file with several names counts once."""
    return sum({(one.st_dev, one.st_ino): one.st_size for one in files}.values())


def _freed_bytes(paths: Iterable[Path]) -> int:
    """The bytes that are freed if all these files and folders are removed: those of files without a name elsewhere."""
    files = [one for path in paths for one in _files(path)]
    names = Counter((one.st_dev, one.st_ino) for one in files)
    freed = {(one.st_dev, one.st_ino): one for one in files if names[one.st_dev, one.st_ino] >= one.st_nlink}
    return sum(one.st_size for one in freed.values())


def _files(path: Path, excluded: Path | None = None) -> Iterator[os.stat_result]:
    """The file itself, or all files below a folder except those in `excluded`. Vanished files are left out."""
    with suppress(OSError):
        if not path.is_dir():
            yield path.lstat()
            return
    for root, folders, files in os.walk(path):
        folders[:] = [name for name in folders if Path(root, name) != excluded]
        for name in files:
            with suppress(OSError):
                yield Path(root, name).lstat()

"""Atomic writes of small files and of folders."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from node.errors import UsageError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a write for which there is no room: on the disk, in a quota, or under a limit of file sizes."""
LEFT_S = 3600.0
"""A folder of another machine that has not changed for so long was left by a killed process."""


def check_space(error: OSError) -> None:
    """Raise this error of a write if there was no room. The command line has a sentence and an exit code for it."""
    if error.errno in NO_SPACE:
        raise error


def expand_user(path: Path | str) -> Path:
    """Replace `~` or `~user` at the start of a path. Raises UsageError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise UsageError(f"The path {path} names no user of this machine: write the whole path.") from exc


def write_whole(path: Path, data: bytes | str, *, forced: bool = True) -> None:
    """Replace a file atomically: write a temporary file with mode 0600, fsync and rename it. `str` becomes UTF-8.

    Without `forced` there is no fsync: the write survives a killed process, but perhaps not a power cut. Raises OSError
    if the disk refuses the write; the file then keeps its previous content.
    """
    temporary = path.with_name(path.name + ".new")
    # Another user of a shared folder may have put a link there, to have a file of this user overwritten.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if forced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def set_aside(path: Path) -> str:
    """Rename a damaged file, which replaces the one set aside before. Returns a sentence for the owner."""
    aside = path.with_name(f"{path.stem}.damaged{path.suffix}")
    try:
        path.replace(aside)
    except OSError as exc:
        return f"It could not be set aside ({exc.strerror})."
    return f"It was set aside as {aside.name}."


def write_new(path: Path, text: str) -> None:
    """Write a new file that the user has named, in UTF-8. Raises UsageError, or OSError if the disk is full."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as exc:
        raise UsageError(f"{path} exists already: name a new file.") from exc
    except OSError as exc:
        with suppress(OSError):
            path.unlink()  # It is not whole, and would be in the way of the next try.
        check_space(exc)
        raise UsageError(f"{path} cannot be written ({exc.strerror}): name a file in a folder that you own.") from exc


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new hidden folder in `parent`, and remove it at the end.

    What killed processes have left of earlier folders of this name is removed first. A lock on each folder, which ends
    with its process, tells those from folders in use. On a network file system another machine cannot see the lock, so
    what another machine has left is removed once nothing in it has changed for LEFT_S.
    """
    start, own, end = f".{name}-", f"{_machine_mark()}-", ".writing"
    for path in [p for p in parent.iterdir() if p.name.startswith(start) and p.name.endswith(end)]:
        with suppress(OSError), _locked(path):
            if path.name.startswith(start + own) or time.time() - _newest_change_at(path) > LEFT_S:
                shutil.rmtree(path)
    temporary = Path(tempfile.mkdtemp(prefix=start + own, suffix=end, dir=parent))
    try:
        with _locked(temporary):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target`, and rename it to `target` at the end, or remove it after an exception.

    Other users may read it in the end, and the folders above it that it makes. `target` must be absent or empty.
    """
    _make_folders(target.parent)
    with scratch_folder(target.parent, target.name) as temporary:
        yield temporary
        for path in temporary.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
            sync_folder(path)
        temporary.chmod(0o755)
        sync_folder(temporary)
        temporary.replace(target)
    sync_folder(target.parent)


def _make_folders(folder: Path) -> None:
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)  # The process may have a stricter umask.


def _machine_mark() -> str:
    """Identifies this machine until its next start."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    except OSError:
        return f"{uuid.getnode():x}"


def _newest_change_at(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises BlockingIOError if another process has locked the folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Call fsync on a folder, so that new and changed names in it survive a power cut. A file is synced as well."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Atomic writes of small files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, data: bytes | str, *, forced: bool = True) -> None:
    """Replace a file atomically: write a temporary file with mode 0600, fsync and rename it. `str` becomes UTF-8.

    Without `forced` there is no fsync: the write survives a killed process, but perhaps not a power cut. Raises OSError
    if the disk refuses the write; the file then keeps its previous content.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if forced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Call fsync on a folder, so that new and changed names in it survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

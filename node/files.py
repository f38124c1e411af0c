"""Small files, written whole or not at all. Knows the file system and nothing else."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, data: bytes | str, *, forced: bool = True) -> None:
    """A temporary file beside it that only its owner may read, fsync, rename. `str` becomes UTF-8.

    `forced=False`: no fsync, where nobody can wait for one; a power cut may cost the newest, a kill does not.
    OSError where the disk does not take it; what was there before is there still.
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
    """fsync of a folder, so that the names in it outlive a power cut, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

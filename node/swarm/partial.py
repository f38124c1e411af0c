"""What is here already of a state that is being downloaded: a file that outlives a broken try, and the process.

Knows the digest's tree and no peer. No list of what is done is kept: what lies in the file is hashed, and what has the
right hash is done. Written with plain writes, not through a memory map, where a full disk would be a signal.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from node.diloco.digest import LEAF_BYTES, leaf_bounds, leaf_hash
from node.errors import MachineError
from node.quota import Room, any_room

NAME_CHARACTERS = 16
"""Of the digest, in the file's name."""
_PREFIX, _SUFFIX = "download-", ".bin"
_VALUE_BYTES = 4
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class PartialState:
    """One begun download: anchor, then momentum, fp32 little-endian, 8 bytes a parameter."""

    def __init__(self, folder: Path, digest: str, parameters: int, room: Room = any_room) -> None:
        self._room = room
        self.path = folder / f"{_PREFIX}{digest[:NAME_CHARACTERS]}{_SUFFIX}"
        self._folder = folder
        self._parameters = parameters
        self._bounds = leaf_bounds(parameters)
        self._handle = -1

    def open(self, leaves: Sequence[bytes]) -> list[int]:
        """Begin, or go on. Returns the leaves that are still missing; heavy where much is here. Raises MachineError."""
        size_bytes = 2 * _VALUE_BYTES * self._parameters
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            found = os.fstat(self._handle)
            if found.st_size != size_bytes:
                os.ftruncate(self._handle, 0)
                with self._room(size_bytes):  # From here on the file counts with all of its length.
                    os.ftruncate(self._handle, size_bytes)
            free_bytes = shutil.disk_usage(self._folder).free
            if size_bytes - min(size_bytes, os.fstat(self._handle).st_blocks * 512) > free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return [index for index, wanted in enumerate(leaves) if leaf_hash(self._read(index)) != wanted]
        except OSError as exc:
            raise self._disk_error(exc) from exc

    def put(self, index: int, data: bytes) -> None:
        """Keep a leaf that has been checked. Raises MachineError."""
        offset, size_bytes = self._place(index)
        assert len(data) == size_bytes
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._handle, view, offset)
                view, offset = view[written:], offset + written
        except OSError as exc:
            raise self._disk_error(exc) from exc

    def load(self) -> tuple[Tensor, Tensor]:
        """Anchor and momentum, fp32 cpu [P], in memory of their own. Raises MachineError."""
        vectors = torch.empty(self._parameters), torch.empty(self._parameters)
        try:
            for which, vector in enumerate(vectors):
                values = vector.numpy()
                for place, (start, end) in enumerate(self._bounds):
                    data = self._read(which * len(self._bounds) + place)
                    values[start:end] = np.frombuffer(data, dtype="<f4")
        except (OSError, ValueError) as exc:
            raise MachineError(f"{self.path} cannot be read ({exc}): remove it, and start again.", code="disk") from exc
        return vectors

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def remove(self) -> None:
        self.close()
        with suppress(OSError):
            self.path.unlink()

    def size_of(self, index: int) -> int:
        """Bytes of a leaf."""
        return self._place(index)[1]

    def _place(self, index: int) -> tuple[int, int]:
        """Offset and length in bytes."""
        which, place = divmod(index, len(self._bounds))
        start, end = self._bounds[place]
        return _VALUE_BYTES * (which * self._parameters + start), _VALUE_BYTES * (end - start)

    def _read(self, index: int) -> bytes:
        offset, size_bytes = self._place(index)
        assert size_bytes <= LEAF_BYTES
        return os.pread(self._handle, size_bytes, offset)

    def _disk_error(self, exc: OSError) -> MachineError:
        self.close()
        if exc.errno not in _FULL:
            return MachineError(
                f"The state that is downloaded could not be written to {self._folder} ({exc.strerror or exc}): make "
                "that folder writable or move node.data_dir.",
                code="disk",
            )
        needed = 2 * _VALUE_BYTES * self._parameters / 2**20
        try:
            free = f"{shutil.disk_usage(self._folder).free / 2**20:.1f} MiB are free"
        except OSError:
            free = "less is free"
        return MachineError(
            f"The disk is full: the state that is downloaded needs {needed:.1f} MiB in {self._folder} and {free} "
            f"({exc.strerror}); what has come is kept: free some space, or move node.data_dir to a larger disk.",
            code="disk_full",
        )


def begun(folder: Path) -> list[str]:
    """The first characters of the digests of the downloads that were begun here, the newest first."""
    files = []
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            files.append((path.stat().st_mtime_ns, path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)))
    return [name for _, name in sorted(files, reverse=True)]


def forget(folder: Path, keep: Sequence[str] = ()) -> None:
    """Remove begun downloads, but for those of these digests."""
    kept = {digest[:NAME_CHARACTERS] for digest in keep}
    for name in begun(folder):
        if name not in kept:
            (folder / f"{_PREFIX}{name}{_SUFFIX}").unlink(missing_ok=True)

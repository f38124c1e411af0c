"""The file of a partial download. It outlives a failed attempt and the process.

The file has no list of finished leaves: a leaf is finished if its bytes have the right hash. The file is written with
plain writes, because writing to a memory map on a full disk would raise a signal.
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

from node.diloco.digest import leaf_hash, tree_slices
from node.errors import MachineError
from node.host.disk_quota import Room, any_room
from node.host.files import NO_SPACE

NAME_CHARACTERS = 16  # Characters of the digest in the file's name
_PREFIX, _SUFFIX = "download-", ".bin"
_VALUE_BYTES = 4


class PartialState:
    """The file of one state. It holds anchor and momentum, in fp32 little-endian: 8 bytes per parameter in all, or 12
    with two moments."""

    def __init__(self, folder: Path, digest: str, parameters: int, room: Room = any_room, moments: int = 1) -> None:
        self.path = folder / f"{_PREFIX}{digest[:NAME_CHARACTERS]}{_SUFFIX}"
        self._folder, self._room = folder, room
        self._parameters, self._moments, self._slices = parameters, moments, tree_slices(parameters, moments)
        self._size_bytes = (1 + moments) * _VALUE_BYTES * parameters
        self._handle = -1

    def open(self, leaves: Sequence[bytes]) -> list[int]:
        """Create or reopen the file. Returns the indices of missing leaves. Slow: hashes it. Raises MachineError."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.fstat(self._handle).st_size != self._size_bytes:
                os.ftruncate(self._handle, 0)
                with self._room(self._size_bytes):  # The quota counts the whole length from now on.
                    os.ftruncate(self._handle, self._size_bytes)
            allocated_bytes = min(self._size_bytes, os.fstat(self._handle).st_blocks * 512)
            if self._size_bytes - allocated_bytes > shutil.disk_usage(self._folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return [index for index, digest in enumerate(leaves) if leaf_hash(self._read(index)) != digest]
        except OSError as exc:
            raise self._disk_error(exc) from exc

    def put(self, index: int, data: bytes) -> None:
        """Write a leaf that has been verified. Raises MachineError."""
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
        """Read anchor and momentum, fp32 cpu [P] and [moments P], into memory. Raises MachineError."""
        vectors = torch.empty(self._parameters), torch.empty(self._moments * self._parameters)
        try:
            for index, (vector, start, end) in enumerate(self._slices):
                vectors[vector].numpy()[start:end] = np.frombuffer(self._read(index), dtype="<f4")
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
        """Size of a leaf in bytes."""
        return self._place(index)[1]

    def _place(self, index: int) -> tuple[int, int]:
        """Offset and size of a leaf in bytes."""
        vector, start, end = self._slices[index]
        return _VALUE_BYTES * (vector * self._parameters + start), _VALUE_BYTES * (end - start)

    def _read(self, index: int) -> bytes:
        offset, size_bytes = self._place(index)
        return os.pread(self._handle, size_bytes, offset)

    def _disk_error(self, exc: OSError) -> MachineError:
        self.close()
        if exc.errno not in NO_SPACE:
            return MachineError(
                f"The downloaded state could not be written to {self._folder} ({exc.strerror or exc}): make that "
                "folder writable or move node.data_dir.",
                code="disk",
            )
        try:
            free = f"{shutil.disk_usage(self._folder).free / 2**20:.1f} MiB are free"
        except OSError:
            free = "less is free"
        return MachineError(
            f"The disk is full: the downloaded state needs {self._size_bytes / 2**20:.1f} MiB in {self._folder} and "
            f"{free} ({exc.strerror}). The finished part is kept: free some space, or move node.data_dir to a larger "
            "disk.",
            code="disk_full",
        )


def partial_downloads(folder: Path) -> list[str]:
    """The digest prefix of each partial download in a folder, newest first."""
    files = []
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            files.append((path.stat().st_mtime_ns, path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)))
    return [name for _, name in sorted(files, reverse=True)]


def remove_partial_downloads(folder: Path, keep: Sequence[str] = ()) -> None:
    """Remove the partial downloads in a folder, except those of the digests in `keep`."""
    kept = {digest[:NAME_CHARACTERS] for digest in keep}
    for name in partial_downloads(folder):
        if name not in kept:
            (folder / f"{_PREFIX}{name}{_SUFFIX}").unlink(missing_ok=True)

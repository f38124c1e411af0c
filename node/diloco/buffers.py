"""Keeps the memory of freed vectors for new ones, as torch does on GPUs.

The kernel clears new memory page by page when it is first written. Without reuse, that took longer than the outer step.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

SMALLEST_BYTES = 2**20
"""Smaller vectors come from torch's allocator, which keeps memory of this size itself."""
KEPT = 3
"""Freed vectors whose memory is kept: the anchor and the momentum of an earlier state, and a round's mean."""


class VectorPool:
    """Creates fp32 vectors on the cpu, in memory that no tensor and no array refers to any longer. Thread-safe.

    The kernel takes the memory of free vectors for other uses if it needs some (MADV_FREE).
    """

    def __init__(self) -> None:
        # No lock: a vector may be freed, and `_keep` be called, on any thread at any point, also within `_take`.
        self._free: list[mmap.mmap] = []

    def empty(self, elements: int) -> Tensor:
        """Return a vector, fp32 [elements], with undefined content. Raises MemoryError if there is no memory for it."""
        size_bytes = elements * torch.float32.itemsize
        if size_bytes < SMALLEST_BYTES:
            return torch.empty(elements)
        memory = self._take(size_bytes) or _allocate(size_bytes)
        array = np.frombuffer(memory, np.float32)
        weakref.finalize(array, self._keep, memory).atexit = False
        return torch.from_numpy(array)

    def _take(self, size_bytes: int) -> mmap.mmap | None:
        for memory in list(self._free):
            if len(memory) == size_bytes:
                with suppress(ValueError):  # Another thread took it.
                    self._free.remove(memory)
                    return memory
        return None

    def _keep(self, memory: mmap.mmap) -> None:
        _advise(memory, "MADV_FREE")
        self._free.append(memory)
        del self._free[:-KEPT]


def _allocate(size_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:  # Callers take an OSError for one of the disk or the network.
        raise MemoryError(f"The system has no {size_bytes / 1e9:.1f} GB of memory for a vector.") from exc
    _advise(memory, "MADV_HUGEPAGE")
    return memory


def _advise(memory: mmap.mmap, advice: str) -> None:
    """Give the kernel a hint, if it knows this one."""
    if hasattr(mmap, advice):
        with suppress(OSError):
            memory.madvise(getattr(mmap, advice))


vectors = VectorPool()
"""The pool of this process."""

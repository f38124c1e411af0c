"""A codec that makes few numbers as long as the chunks of a real model, so that transfers take realistic time."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from node.diloco.codec import Data


class PaddedFp32:
    """fp32 [n], followed by zeros up to the least size of a chunk. Plain Python is faster than torch here."""

    name, stretch_ratio = "padded", 0.0

    def __init__(self, chunk_bytes: int = 0) -> None:
        """`chunk_bytes` is the least encoded size. 0 means no padding."""
        self._chunk_bytes = chunk_bytes

    def encoded_bytes(self, n: int) -> int:
        return max(self._chunk_bytes, 4 * n)

    def encode(self, x: Tensor) -> bytes:
        return struct.pack(f"<{len(x)}f", *x.tolist()).ljust(self.encoded_bytes(len(x)), b"\0")

    def check(self, data: Data, n: int) -> None:
        self._read(data, n)

    def decode(self, data: Data, n: int) -> Tensor:
        return torch.tensor(self._read(data, n))

    def _read(self, data: Data, n: int) -> tuple[float, ...]:
        if len(data) != self.encoded_bytes(n):
            raise ValueError(f"{len(data)} bytes do not encode {n} elements")
        values = struct.unpack_from(f"<{n}f", data)
        if not all(map(math.isfinite, values)):
            raise ValueError("a value is not finite")
        return values

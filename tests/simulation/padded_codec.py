"""A codec that makes few numbers as long as the chunks of a real model, so that transfers take realistic time."""

from __future__ import annotations

from torch import Tensor

from node.diloco.codec import Data, Fp32

_FP32 = Fp32()


class PaddedFp32:
    """fp32 [n], followed by zeros up to the least size of a chunk."""

    name, stretch_ratio = "padded", 0.0

    def __init__(self, chunk_bytes: int = 0) -> None:
        """`chunk_bytes`: least encoded size; 0: no padding."""
        self._chunk_bytes = chunk_bytes

    def encoded_bytes(self, n: int) -> int:
        return max(self._chunk_bytes, _FP32.encoded_bytes(n))

    def encode(self, x: Tensor) -> bytes:
        return _FP32.encode(x).ljust(self.encoded_bytes(len(x)), b"\0")

    def check(self, data: Data, n: int) -> None:
        self.decode(data, n)

    def decode(self, data: Data, n: int) -> Tensor:
        if len(data) != self.encoded_bytes(n):
            raise ValueError(f"{len(data)} bytes do not encode {n} elements")
        return _FP32.decode(data[: _FP32.encoded_bytes(n)], n)

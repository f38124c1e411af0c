"""How vectors become bytes on the wire, and back. Knows formats and the chunk grid; not what the vectors mean.

A codec is deterministic, and its `decode` trusts nothing: a wrong size, a scale out of range or a value that is not
finite is a ValueError. All numbers on the wire are little-endian. Vectors are fp32 [n]; they are encoded on the device
that they are on, and decoded on the cpu. Formats of fewer bits: `blockwise`, `sparse`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from node.diloco.blockwise import E3M0, Int4, Int8
from node.diloco.sparse import TopK
from node.diloco.wireform import little, require_finite, require_size, require_vector

BLOCK = 4096
"""Elements that share one scale. Chunks begin at multiples of it, so a chunk's encoding does not depend on the grid."""
MAX_CHUNKS = 256
MAX_CHUNK_ELEMENTS = 2**22
MIN_EXPONENT = -102
"""Smallest scale of fp16 is 2^-102: its least step is then 2^-126, so nothing decodes to a denormal fp32 number."""
MAX_EXPONENT = 113
"""Scale that brings 2^128, the end of fp32, to 2^15."""
LARGEST_HALF_BITS = 0x7800
"""2^15 as fp16, the largest magnitude that an encoder writes."""
HEADROOM_BITS = 15
"""The largest value of a block is scaled into [2^14, 2^15): a binade below fp16's end, so rounding cannot overflow."""


class Codec(Protocol):
    """A wire format for fp32 vectors."""

    @property
    def name(self) -> str:
        """As in the manifest's `sync.codec`."""

    @property
    def stretch_ratio(self) -> float:
        """By how much encoding may make a vector longer: the L2 norm of the decoded over its own, less 1."""

    def encoded_bytes(self, n: int) -> int:
        """Size of `encode` for any vector of `n` elements."""

    def encode(self, x: Tensor) -> bytes:
        """`x` is fp32 [n] on any device. ValueError when a value is not finite."""

    def check(self, data: bytes | memoryview, n: int) -> None:
        """ValueError unless `decode` would give `n` finite values. Cheaper than decoding."""

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        """A fresh fp32 [n]. ValueError when `data` is not an encoding of `n` finite values."""


class Fp32:
    """Four bytes an element; loses nothing."""

    name, stretch_ratio = "fp32", 0.0

    def encoded_bytes(self, n: int) -> int:
        return 4 * n

    def encode(self, x: Tensor) -> bytes:
        require_finite(require_vector(x), "The vector to encode")
        return little(x.detach().cpu().contiguous().numpy()).tobytes()

    def check(self, data: bytes | memoryview, n: int) -> None:
        self.decode(data, n)

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        require_size(data, self.encoded_bytes(n), self.name)
        x = torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))
        require_finite(x, "The encoded vector")
        return x


class Fp16:
    """Two bytes an element and one a block: int8 exponents e of all blocks first, then fp16 values v; x is v * 2^e.

    Error bound, with M the largest magnitude of x's block: |x - decoded| <= max(|x| 2^-11, M 2^-39, 2^-127). The first
    is fp16's rounding, the second its least step under the block's scale, the third the smallest scale.
    """

    name, stretch_ratio = "fp16", 1e-3

    def encoded_bytes(self, n: int) -> int:
        return -(-n // BLOCK) + 2 * n

    def encode(self, x: Tensor) -> bytes:
        flat = require_vector(x).detach().contiguous()
        exponents = _exponents(flat)
        scaled = torch.empty_like(flat)
        _scale(flat, -exponents, out=scaled)
        if exponents.numel() and exponents.max() == MAX_EXPONENT:
            # Values just below the end of fp32 would round up to 2^128, which is infinite.
            scaled.clamp_(-(2.0**HEADROOM_BITS) + 16, 2.0**HEADROOM_BITS - 16)
        halves = scaled.to(torch.float16).cpu().numpy()
        return b"".join((exponents.to(torch.int8).cpu().numpy().tobytes(), little(halves).view(np.uint8).data))

    def check(self, data: bytes | memoryview, n: int) -> None:
        """Looks at the bits: no value above 2^15, as no encoder writes one, so that none can overflow its scale."""
        require_size(data, self.encoded_bytes(n), self.name)
        if n == 0:
            return
        blocks = -(-n // BLOCK)
        front = np.frombuffer(data, np.int8, count=blocks)
        magnitudes = np.frombuffer(data, "<u2", offset=blocks) & 0x7FFF
        if magnitudes.max() > LARGEST_HALF_BITS:
            raise ValueError("The encoded vector has a value that is not finite.")
        if front.min() < MIN_EXPONENT or front.max() >= MAX_EXPONENT:
            self.decode(data, n)

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        require_size(data, self.encoded_bytes(n), self.name)
        blocks = -(-n // BLOCK)
        front = np.frombuffer(data, np.int8, count=blocks)
        if blocks and not (front.min() >= MIN_EXPONENT and front.max() <= MAX_EXPONENT):
            raise ValueError("The encoded vector has a scale out of range.")
        # The values may lie at an odd address: copied as bytes, they are aligned for the conversion.
        halves = np.empty(n, "<f2")
        halves.view(np.uint8)[:] = np.frombuffer(data, np.uint8, offset=blocks) if n else 0
        x = torch.from_numpy(halves.astype(np.float16, copy=False)).to(torch.float32)
        _scale(x, torch.from_numpy(front.astype(np.int32)), out=x)
        require_finite(x, "The encoded vector")
        return x


CODECS: dict[str, Callable[[], Codec]] = {
    "fp32": Fp32,
    "fp16": Fp16,
    "int8": Int8,
    "int4": Int4,
    "e3m0": E3M0,
    "topk": TopK,
}


def make_codec(name: str) -> Codec:
    """The codec of the manifest's `sync.codec`."""
    if name not in CODECS:
        raise ValueError(f"There is no codec {name!r}: use one of {', '.join(CODECS)}.")
    return CODECS[name]()


def chunk_elements(parameters: int) -> int:
    """Elements of a chunk: the least multiple of BLOCK that makes at most 256 chunks, but never above 2^22."""
    blocks = -(-parameters // BLOCK)
    return min(MAX_CHUNK_ELEMENTS, max(1, -(-blocks // MAX_CHUNKS)) * BLOCK)


def chunk_bounds(parameters: int) -> list[tuple[int, int]]:
    """The grid on which a vector of `parameters` elements is cut for the wire: element ranges, in order."""
    size = chunk_elements(parameters)
    return [(start, min(start + size, parameters)) for start in range(0, parameters, size)]


def _exponents(x: Tensor) -> Tensor:
    """int32 [blocks]: e such that the block's largest magnitude, divided by 2^e, is in [2^14, 2^15); clamped."""
    whole = x.numel() // BLOCK * BLOCK
    lows, highs = [], []
    for part in (x[:whole].view(-1, BLOCK), x[whole:].view(1, -1)):
        if part.numel():
            # Two passes: `aminmax` along a dimension is ten times slower.
            lows.append(torch.amin(part, dim=1))
            highs.append(torch.amax(part, dim=1))
    if not lows:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    largest = torch.maximum(torch.cat(highs), -torch.cat(lows))
    require_finite(largest, "The vector to encode")
    exponents: Tensor = torch.frexp(largest).exponent - HEADROOM_BITS
    return torch.where(largest > 0, exponents, MIN_EXPONENT).clamp_(MIN_EXPONENT, MAX_EXPONENT)


def _scale(x: Tensor, exponents: Tensor, *, out: Tensor) -> None:
    """out = x * 2^exponents, a scale per block, int32 [blocks] in -113..113.

    The factors are made from their bits (biased exponent, no mantissa): a library power function may be off by an ulp.
    """
    factors = ((exponents + 127) << 23).view(torch.float32)
    whole = x.numel() // BLOCK * BLOCK
    torch.mul(x[:whole].view(-1, BLOCK), factors[: whole // BLOCK, None], out=out[:whole].view(-1, BLOCK))
    if whole < x.numel():
        torch.mul(x[whole:], factors[-1], out=out[whole:])

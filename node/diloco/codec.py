"""Codecs for fp32 vectors on the wire, and the grid of chunks on which vectors are cut.

A codec is deterministic. Its `decode` trusts nothing: a wrong size, a scale out of range or a value that is not finite
is a ValueError. All numbers on the wire are little-endian. Vectors are fp32 [n]; they are encoded on their own device
and decoded on the cpu. Shape suffixes: B blocks, E elements of a block, K kept elements of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Data = bytes | memoryview

BLOCK = 4096
"""Elements of a block of fp16 and topk. Chunks begin at its multiples, so no block lies in two chunks."""
MAX_CHUNKS = 128
MAX_CHUNK_ELEMENTS = 2**22
FLOAT_MAX = 3.4028234663852886e38


class Codec(Protocol):
    """A wire format for fp32 vectors."""

    @property
    def name(self) -> str:
        """The codec's name in the manifest's `sync.codec`."""

    @property
    def stretch_ratio(self) -> float:
        """How much encoding may lengthen a vector: L2 norm of the decoded vector divided by the original's, minus 1."""

    def encoded_bytes(self, n: int) -> int:
        """Size of what `encode` returns for any vector of `n` elements."""

    def encode(self, x: Tensor) -> bytes:
        """Encode `x`, fp32 [n] on any device. Raises ValueError for a value that is not finite."""

    def check(self, data: Data, n: int) -> None:
        """Raise ValueError unless `decode` would give `n` finite values. Cheaper than decoding."""

    def decode(self, data: Data, n: int) -> Tensor:
        """Return a new fp32 [n] on the cpu. Raises ValueError unless `data` encodes `n` finite values."""


class Fp32:
    """Four bytes an element, without loss."""

    name, stretch_ratio = "fp32", 0.0

    def encoded_bytes(self, n: int) -> int:
        return 4 * n

    def encode(self, x: Tensor) -> bytes:
        _require_finite(_contiguous_vector(x), "The vector to encode")
        return _to_bytes(x)

    def check(self, data: Data, n: int) -> None:
        self.decode(data, n)

    def decode(self, data: Data, n: int) -> Tensor:
        _require_size(data, self.encoded_bytes(n), self.name)
        x = torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))
        _require_finite(x, "The encoded vector")
        return x


MIN_EXPONENT = -102
"""Smallest scale of fp16 is 2^-102: its least step is then 2^-126, so nothing decodes to a denormal fp32 number."""
MAX_EXPONENT = 113
"""Exponent of the scale that brings 2^128, the end of fp32, to 2^15."""
LARGEST_HALF_BITS = 0x7800
"""2^15 as fp16, the largest magnitude that an encoder writes."""
HEADROOM_BITS = 15
"""The largest value of a block is scaled into [2^14, 2^15): a binade below fp16's end, so rounding cannot overflow."""


class Fp16:
    """Two bytes an element and one a block: int8 exponents e of all blocks, then fp16 values v. x is v * 2^e.

    Error bound, with M the largest magnitude of x's block: |x - decoded| <= max(|x| 2^-11, M 2^-39, 2^-127). The first
    is fp16's rounding, the second its least step under the block's scale, the third the smallest scale.
    """

    name, stretch_ratio = "fp16", 1e-3

    def encoded_bytes(self, n: int) -> int:
        return _block_count(n, BLOCK) + 2 * n

    def encode(self, x: Tensor) -> bytes:
        flat = _contiguous_vector(x)
        exponents = _exponents(flat)
        scaled = torch.empty_like(flat)
        _scale(flat, -exponents, out=scaled)
        if exponents.size and exponents.max() == MAX_EXPONENT:
            # Values just below the end of fp32 would round up to 2^128, which is infinite.
            scaled.clamp_(-(2.0**HEADROOM_BITS) + 16, 2.0**HEADROOM_BITS - 16)
        return _to_bytes(torch.from_numpy(exponents.astype(np.int8)), scaled.to(torch.float16))

    def check(self, data: Data, n: int) -> None:
        """Read the bits only. No encoder writes a value above 2^15, so no accepted value can overflow its scale."""
        exponents = self._exponents_of(data, n)
        if n == 0:
            return
        magnitudes = np.frombuffer(data, "<u2", offset=len(exponents)) & 0x7FFF
        if magnitudes.max() > LARGEST_HALF_BITS:
            raise ValueError("The encoded vector has a value that is not finite.")
        if exponents.max() == MAX_EXPONENT:
            self.decode(data, n)

    def decode(self, data: Data, n: int) -> Tensor:
        exponents = self._exponents_of(data, n)
        # The values may lie at an odd address: copied as bytes, they are aligned for the conversion.
        halves = np.empty(n, "<f2")
        halves.view(np.uint8)[:] = np.frombuffer(data, np.uint8, offset=len(exponents)) if n else 0
        x = torch.empty(n)
        _scale(torch.from_numpy(halves.astype(np.float16, copy=False)), exponents.astype(np.int32), out=x)
        _require_finite(x, "The encoded vector")
        return x

    def _exponents_of(self, data: Data, n: int) -> npt.NDArray[np.int8]:
        _require_size(data, self.encoded_bytes(n), self.name)
        exponents = np.frombuffer(data, np.int8, count=_block_count(n, BLOCK))
        if n and not (exponents.min() >= MIN_EXPONENT and exponents.max() <= MAX_EXPONENT):
            raise ValueError("The encoded vector has a scale out of range.")
        return exponents


def _exponents(x: Tensor) -> npt.NDArray[np.int32]:
    """int32 [B]: e such that the block's largest magnitude, divided by 2^e, is in [2^14, 2^15); clamped.

    Computed in numpy, because a torch operation on the few blocks of a chunk costs more than a pass over its elements.
    """
    whole = x.numel() // BLOCK * BLOCK
    parts = [part for part in (x[:whole].view(-1, BLOCK), x[whole:].view(1, -1)) if part.numel()]
    if not parts:
        return np.empty(0, np.int32)
    # Two passes: `aminmax` along a dimension is ten times slower.
    largest = np.concatenate([torch.maximum(torch.amax(p, 1), torch.amin(p, 1).neg_()).cpu().numpy() for p in parts])
    if not np.isfinite(largest).all():
        raise ValueError("The vector to encode has a value that is not finite.")
    exponents = np.frexp(largest)[1].astype(np.int32) - HEADROOM_BITS
    return np.where(largest > 0, exponents, MIN_EXPONENT).clip(MIN_EXPONENT, MAX_EXPONENT).astype(np.int32)


def _scale(x: Tensor, exponents: npt.NDArray[np.int32], *, out: Tensor) -> None:
    """out = x * 2^exponents, one scale a block. x: fp16 or fp32 [n]; out: fp32 [n]; exponents: int32 [B] in -113..113.

    The factors are made from their bits (biased exponent, no mantissa): a library power function may be off by an ulp.
    They have a dimension, so that torch multiplies in fp32.
    """
    factors = torch.from_numpy(((exponents + 127) << 23).view(np.float32)).to(x.device)
    whole = x.numel() // BLOCK * BLOCK
    torch.mul(x[:whole].view(-1, BLOCK), factors[: whole // BLOCK, None], out=out[:whole].view(-1, BLOCK))
    if whole < x.numel():
        torch.mul(x[whole:], factors[-1:], out=out[whole:])


SCALE_BLOCK = 256
"""Elements that share one scale in the codecs of 8 and 4 bits."""
SLICE_ELEMENTS = 2**17
"""Elements encoded at a time on the cpu, so that the intermediate values stay in its cache."""
MIN_SCALE_BITS = 0x0080
"""2^-126 as bfloat16, so that no scale is denormal."""


class Blockwise:
    """Base of the codecs of 8 and 4 bits: each block of 256 elements has a scale s, each element a code.

        int8   x is s q,  q = -127..127      s = the block's largest magnitude / 127
        int4   x is s q,  q = -7..7          s = .. / 7
        e3m0   x is s v,  v = 0, +-2^-6 .. +-1, sign and 3 exponent bits (arXiv 2501.18512)      s = ..

    Scales are bfloat16, rounded up, so no q leaves its range, and q s is exact in fp32: every decoder gets the same
    bits. On the wire: the scales of all blocks; then each block's codes, as two's complement (int8), or two in a byte
    (the first half of the block in the low bits), the code being q + 8, or sign and exponent. The last block is padded
    with zeros. Scales take 16 bits in 256 elements: 0.8 % of int8 and 1.6 % of 4 bits.

    Error bounds, with M the largest magnitude of x's block, up to 2^127: int8 and int4 half a step, at most
    1.008 M / top / 2; e3m0 max(0.338 |x|, 1.52 M / 128). A block whose M is below top x 2^-126 may decode to zeros.
    """

    name: str
    stretch_ratio: float
    """Gaussian blocks get 0.9 % longer in 4 bits; ones with an outlier of 16 standard deviations 8 %."""
    top: float
    """Magnitude, in scales, of the block's largest element."""
    code_bytes: int
    """Bytes of a block's codes."""

    def __init__(self) -> None:
        self._max_scale_bits = _bfloat16_below(FLOAT_MAX / self.top)
        self._safe_scale_bits = _bfloat16_below(FLOAT_MAX / (self.top + 1))
        """With scales up to this one, no code overflows, not even one that no encoder writes (-128, -8)."""

    def encoded_bytes(self, n: int) -> int:
        return _block_count(n, SCALE_BLOCK) * (2 + self.code_bytes)

    def encode(self, x: Tensor) -> bytes:
        flat = _contiguous_vector(x)
        blocks = _block_count(flat.numel(), SCALE_BLOCK)
        # A GPU encodes all blocks at a time, as each operation costs a launch.
        slice_blocks = SLICE_ELEMENTS // SCALE_BLOCK if flat.device.type == "cpu" else max(1, blocks)
        largest = torch.empty(blocks, device=flat.device)
        scale_bits = torch.empty(blocks, dtype=torch.int16, device=flat.device)
        codes = torch.empty(blocks, self.code_bytes, dtype=torch.uint8, device=flat.device)
        # Allocated once: new memory for each slice costs more than the arithmetic.
        size = (min(blocks, slice_blocks), SCALE_BLOCK)
        scaled_BE = torch.empty(size, device=flat.device)
        scratch_2BE = torch.empty((2, *size), dtype=torch.int16, device=flat.device)
        for at, part_BE in _block_slices(flat, slice_blocks):
            count, end = len(part_BE), at + len(part_BE)
            torch.maximum(part_BE.amax(1), part_BE.amin(1).neg_(), out=largest[at:end])
            bits = (((largest[at:end] / self.top).view(torch.int32) + 0xFFFF) >> 16).clamp_(
                MIN_SCALE_BITS, self._max_scale_bits
            )
            scale_bits[at:end] = bits
            inverse = (bits << 16).view(torch.float32).reciprocal_()
            torch.mul(part_BE, inverse[:, None], out=scaled_BE[:count])
            self._write_codes(scaled_BE[:count], codes[at:end], scratch_2BE[:, :count])
        _require_finite(largest, "The vector to encode")
        return _to_bytes(scale_bits, codes)

    def check(self, data: Data, n: int) -> None:
        """All codes are numbers, so only the scales are read, unless one is so large that a code may overflow."""
        bits = self._scale_bits(data, n)
        if bits.size and bits.max() > self._safe_scale_bits:
            self.decode(data, n)

    def decode(self, data: Data, n: int) -> Tensor:
        bits = self._scale_bits(data, n)
        scales = torch.from_numpy(bits.astype(np.int32) << 16).view(torch.float32)
        raw = np.frombuffer(data, np.uint8)[2 * len(bits) :]
        codes = torch.from_numpy(raw.reshape(len(bits), self.code_bytes).copy())
        out_BE = torch.empty(len(bits), SCALE_BLOCK)
        step = SLICE_ELEMENTS // SCALE_BLOCK
        for at in range(0, len(bits), step):
            part_BE = out_BE[at : at + step]
            self._read_codes(codes[at : at + step], part_BE)
            part_BE.mul_(scales[at : at + step, None])
        if bits.size and bits.max() > self._safe_scale_bits:
            _require_finite(out_BE.view(-1), "The encoded vector")
        return out_BE.view(-1)[:n]

    def _scale_bits(self, data: Data, n: int) -> npt.NDArray[np.int16]:
        _require_size(data, self.encoded_bytes(n), self.name)
        bits = np.frombuffer(data, "<i2", count=_block_count(n, SCALE_BLOCK)).astype(np.int16, copy=False)
        if bits.size and not (bits.min() >= MIN_SCALE_BITS and bits.max() <= self._max_scale_bits):
            raise ValueError("The encoded vector has a scale out of range: a value is not finite.")
        return bits

    def _write_codes(self, scaled_BE: Tensor, codes: Tensor, scratch_2BE: Tensor) -> None:
        """Write the codes of fp32 elements within -top..top (up to rounding) to `codes`. Overwrites all arguments."""
        raise NotImplementedError

    def _read_codes(self, codes: Tensor, out_BE: Tensor) -> None:
        """Write the elements of these codes, in units of the scale, to `out_BE`."""
        raise NotImplementedError


class Int8(Blockwise):
    name, stretch_ratio, top, code_bytes = "int8", 0.01, 127.0, SCALE_BLOCK

    def _write_codes(self, scaled_BE: Tensor, codes: Tensor, scratch_2BE: Tensor) -> None:
        codes.view(torch.int8).copy_(scaled_BE.round_().clamp_(-self.top, self.top))

    def _read_codes(self, codes: Tensor, out_BE: Tensor) -> None:
        out_BE.copy_(codes.view(torch.int8))


class Int4(Blockwise):
    name, stretch_ratio, top, code_bytes = "int4", 0.25, 7.0, SCALE_BLOCK // 2

    def _write_codes(self, scaled_BE: Tensor, codes: Tensor, scratch_2BE: Tensor) -> None:
        low, high = scaled_BE.round_().clamp_(-self.top, self.top).chunk(2, dim=1)
        codes.copy_(torch.add(low, high, alpha=16).add_(8 * 17))

    def _read_codes(self, codes: Tensor, out_BE: Tensor) -> None:
        low, high = out_BE.chunk(2, dim=1)
        low.copy_(codes & 15)
        high.copy_(codes >> 4)
        out_BE.sub_(8)


class E3M0(Blockwise):
    name, stretch_ratio, top, code_bytes = "e3m0", 0.25, 1.0, SCALE_BLOCK // 2

    def _write_codes(self, scaled_BE: Tensor, codes: Tensor, scratch_2BE: Tensor) -> None:
        """Use the exponent bits of bfloat16. Adding half of the mantissa's range rounds to the nearest power."""
        bits, signs = scratch_2BE
        bits.view(torch.bfloat16).copy_(scaled_BE)
        torch.bitwise_right_shift(bits, 12, out=signs).bitwise_and_(8)
        bits.bitwise_and_(0x7FFF).add_(0x40 - (120 << 7)).clamp_(0, (8 << 7) - 1).bitwise_right_shift_(7)
        low, high = bits.bitwise_or_(signs).chunk(2, dim=1)
        codes.copy_(low.add_(high, alpha=16))

    def _read_codes(self, codes: Tensor, out_BE: Tensor) -> None:
        low, high = out_BE.chunk(2, dim=1)
        for part, code in ((low, codes & 15), (high, codes >> 4)):
            part.copy_(torch.index_select(E3M0_VALUES, 0, code.view(-1).to(torch.int32)).view(part.shape))


E3M0_VALUES = torch.tensor([sign * magnitude for sign in (1, -1) for magnitude in (0, *(2.0**e for e in range(-6, 1)))])


def _block_slices(flat: Tensor, slice_blocks: int) -> Iterator[tuple[int, Tensor]]:
    """Cut a vector into slices of at most `slice_blocks` blocks. Yields the number of a slice's first block, and the
    slice as [B, 256]: a view, except for the last block, which is padded with zeros.
    """
    whole = flat.numel() // SCALE_BLOCK * SCALE_BLOCK
    size = slice_blocks * SCALE_BLOCK
    for start in range(0, whole, size):
        yield start // SCALE_BLOCK, flat[start : min(start + size, whole)].view(-1, SCALE_BLOCK)
    if whole < flat.numel():
        last = flat.new_zeros(1, SCALE_BLOCK)
        last[0, : flat.numel() - whole] = flat[whole:]
        yield whole // SCALE_BLOCK, last


def _bfloat16_below(value: float) -> int:
    """Bits of the largest bfloat16 that is not above `value`."""
    return int(np.float32(value).view(np.int32)) >> 16


INT2_BLOCK_BYTES = 4 + SCALE_BLOCK // 4
INT2_STEPS = 3
"""Steps of Lloyd's algorithm. On Gaussian blocks, three come within 1 % of the least error."""
MIN_MAGNITUDE_BITS, MAX_MAGNITUDE_BITS = 0x0080, 0x7F7F


class Int2:
    """Sends each element with 2 bits: a sign, and which of its block's two magnitudes.

    Each block of 256 elements has the two magnitudes that give the least squared error (Lloyd 1982, "Least Squares
    Quantization in PCM", after a few steps). A Gaussian vector keeps 88 % of its energy. On the wire: both magnitudes
    of every block as bfloat16, the smaller first; then the codes, four in a byte (bit 0 the larger magnitude, bit 1 the
    minus sign). The last block is padded with zeros. 2.125 bits an element. Needs error feedback.
    """

    name, stretch_ratio = "int2", 0.01

    def encoded_bytes(self, n: int) -> int:
        return _block_count(n, SCALE_BLOCK) * INT2_BLOCK_BYTES

    def encode(self, x: Tensor) -> bytes:
        flat = _contiguous_vector(x)
        _require_finite(flat, "The vector to encode")
        blocks = _block_count(flat.numel(), SCALE_BLOCK)
        bits = torch.empty(blocks, 2, dtype=torch.int16, device=flat.device)
        codes = torch.empty(blocks, SCALE_BLOCK // 4, dtype=torch.uint8, device=flat.device)
        slice_blocks = SLICE_ELEMENTS // SCALE_BLOCK if flat.device.type == "cpu" else max(1, blocks)
        for at, part_BE in _block_slices(flat, slice_blocks):
            end, sizes_BE = at + len(part_BE), part_BE.abs()
            large_BE = sizes_BE >= _halfway(sizes_BE)
            bits[at:end] = _magnitude_bits(_two_magnitudes(sizes_BE, large_BE))
            codes_BE = large_BE.to(torch.uint8) | (part_BE < 0).to(torch.uint8) << 1
            quarters = codes_BE.view(-1, SCALE_BLOCK // 4, 4)
            codes[at:end] = quarters[..., 0] | quarters[..., 1] << 2 | quarters[..., 2] << 4 | quarters[..., 3] << 6
        return _to_bytes(bits, codes)

    def check(self, data: Data, n: int) -> None:
        self._magnitudes(data, n)

    def decode(self, data: Data, n: int) -> Tensor:
        magnitudes_B2 = torch.from_numpy(self._magnitudes(data, n))
        blocks = len(magnitudes_B2)
        values_B4 = torch.cat([magnitudes_B2, -magnitudes_B2], dim=1)
        raw = np.frombuffer(data, np.uint8)[4 * blocks :]
        packed = torch.from_numpy(raw.reshape(blocks, SCALE_BLOCK // 4).copy())
        out_BE = torch.empty(blocks, SCALE_BLOCK)
        quarters = out_BE.view(blocks, SCALE_BLOCK // 4, 4)
        for i in range(4):
            quarters[..., i] = values_B4.gather(1, (packed >> 2 * i & 3).long())
        return out_BE.view(-1)[:n]

    def _magnitudes(self, data: Data, n: int) -> npt.NDArray[np.float32]:
        """The magnitudes, fp32 [B, 2]. Raises ValueError."""
        _require_size(data, self.encoded_bytes(n), self.name)
        return _read_magnitudes(data, _block_count(n, SCALE_BLOCK))


class TopK:
    """Sends the largest of each 4096 elements with 2 bits each (after SparseLoCo, arXiv 2508.15706). Experimental.

    `topk` sends 256 of them, `topk64` sends 64, as SparseLoCo does.

    Two bits are a sign and which of two magnitudes: the mean of the kept elements at or above their mean, and of the
    rest. On the wire: both magnitudes of every block as bfloat16; the places of the kept elements, in rising order, 12
    bits each, two in three bytes; then their codes, four in a byte (bit 0 the larger magnitude, bit 1 the minus sign).
    The last block is padded with zeros. 0.88 bits an element, or 0.23. Without error feedback most of the vector is
    lost.
    """

    name, stretch_ratio, kept = "topk", 0.01, 256

    def encoded_bytes(self, n: int) -> int:
        return _block_count(n, BLOCK) * (4 + self.kept * (12 + 2) // 8)

    def encode(self, x: Tensor) -> bytes:
        flat = _contiguous_vector(x)
        _require_finite(flat, "The vector to encode")
        blocks = _block_count(flat.numel(), BLOCK)
        if not blocks:
            return b""
        padded_BE = torch.zeros(blocks * BLOCK, device=flat.device)
        padded_BE[: flat.numel()] = flat
        padded_BE = padded_BE.view(blocks, BLOCK)
        places_BK = padded_BE.abs().topk(self.kept, dim=1, sorted=False).indices.sort(dim=1).values
        kept_BK = padded_BE.gather(1, places_BK)
        sizes_BK = kept_BK.abs()
        # In fp64: the mean of numbers near the end of fp32 must not overflow.
        large_BK = sizes_BK >= sizes_BK.double().mean(1, keepdim=True)
        bits = _magnitude_bits(_two_magnitudes(sizes_BK, large_BK))
        codes_BK = large_BK.to(torch.uint8) | (kept_BK < 0).to(torch.uint8) << 1
        return _to_bytes(bits) + _pack_places(places_BK.cpu().numpy()) + _pack_codes(codes_BK.cpu().numpy())

    def check(self, data: Data, n: int) -> None:
        self._read(data, n)

    def decode(self, data: Data, n: int) -> Tensor:
        magnitudes_B2, places_BK, codes_BK = self._read(data, n)
        out_BE = torch.zeros(len(places_BK), BLOCK)
        sizes_BK = np.take_along_axis(magnitudes_B2, (codes_BK & 1).astype(np.int64), axis=1)
        values_BK = torch.from_numpy(np.where(codes_BK & 2, -sizes_BK, sizes_BK))
        out_BE.scatter_(1, torch.from_numpy(places_BK.astype(np.int64)), values_BK)
        return out_BE.view(-1)[:n]

    def _read(
        self, data: Data, n: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
        """Magnitudes [B, 2], places [B, K] and codes [B, K]."""
        _require_size(data, self.encoded_bytes(n), self.name)
        blocks = _block_count(n, BLOCK)
        magnitudes_B2 = _read_magnitudes(data, blocks)
        packed = np.frombuffer(data, np.uint8)[4 * blocks :]
        places_bytes = self.kept * 12 // 8
        places_BK = _unpack_places(packed[: blocks * places_bytes].reshape(blocks, places_bytes))
        if (places_BK[:, 1:] <= places_BK[:, :-1]).any():
            raise ValueError("The encoded vector names a place twice, or places out of order.")
        codes_BK = _unpack_codes(packed[blocks * places_bytes :].reshape(blocks, self.kept // 4))
        return magnitudes_B2, places_BK, codes_BK


def _halfway(sizes_BE: Tensor) -> Tensor:
    """Halfway between the two magnitudes that give the least squared error, fp32 [B, 1].

    Near the end of fp32 it may be infinite or not a number. Then all elements of the block get one magnitude.
    """
    total_B1 = sizes_BE.sum(1, keepdim=True)
    halfway_B1 = total_B1 / sizes_BE.shape[1]
    for _ in range(INT2_STEPS):
        large_BE = (sizes_BE >= halfway_B1).to(torch.float32)
        count_B1, sum_B1 = large_BE.sum(1, keepdim=True), large_BE.mul_(sizes_BE).sum(1, keepdim=True)
        upper_B1 = sum_B1 / count_B1.clamp(min=1)
        lower_B1 = (total_B1 - sum_B1) / (sizes_BE.shape[1] - count_B1).clamp(min=1)
        halfway_B1 = (upper_B1 + lower_B1) / 2
    return halfway_B1


class TopK64(TopK):
    name, kept = "topk64", 64


def _two_magnitudes(sizes_BK: Tensor, large_BK: Tensor) -> Tensor:
    """The mean of each row's other elements, and of those in `large_BK`, fp32 [B, 2]."""
    return torch.stack([_masked_mean(sizes_BK, ~large_BK), _masked_mean(sizes_BK, large_BK)], dim=1)


def _magnitude_bits(magnitudes_B2: Tensor) -> Tensor:
    """The magnitudes as bfloat16, rounded down, int16 [B, 2]."""
    bits = (magnitudes_B2.view(torch.int32) >> 16).to(torch.int16)
    return torch.where(bits < MIN_MAGNITUDE_BITS, torch.zeros_like(bits), bits)


def _read_magnitudes(data: Data, blocks: int) -> npt.NDArray[np.float32]:
    """The magnitudes at the start of the data, fp32 [B, 2]. Raises ValueError for a magnitude out of range."""
    bits = np.frombuffer(data, "<u2", count=2 * blocks).reshape(blocks, 2)
    if bits.size and (bits.max() > MAX_MAGNITUDE_BITS or ((bits > 0) & (bits < MIN_MAGNITUDE_BITS)).any()):
        raise ValueError("The encoded vector has a magnitude out of range: a value is not finite.")
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _masked_mean(sizes_BK: Tensor, mask_BK: Tensor) -> Tensor:
    """Mean of the masked elements of each row, fp32 [B]; zero for a row without any."""
    total = torch.where(mask_BK, sizes_BK, 0.0).double().sum(1)
    return (total / mask_BK.sum(1).clamp(min=1)).float()


def _pack_places(places_BK: npt.NDArray[np.int64]) -> bytes:
    low, high = (places_BK[:, half::2].astype(np.uint16) for half in (0, 1))
    packed = np.stack([low & 0xFF, (low >> 8) | (high & 0xF) << 4, high >> 4], axis=-1)
    return packed.astype(np.uint8).tobytes()


def _unpack_places(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    first, middle, last = (packed[:, i::3].astype(np.uint16) for i in range(3))
    places = np.stack([first | (middle & 0xF) << 8, middle >> 4 | last << 4], axis=-1)
    return places.reshape(len(packed), 2 * first.shape[1])


def _pack_codes(codes_BK: npt.NDArray[np.uint8]) -> bytes:
    packed = sum(codes_BK[:, i::4] << 2 * i for i in range(4))
    return np.asarray(packed, np.uint8).tobytes()


def _unpack_codes(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.stack([packed >> 2 * i & 3 for i in range(4)], axis=-1).reshape(len(packed), 4 * packed.shape[1])


CODECS: dict[str, Callable[[], Codec]] = {
    "fp32": Fp32,
    "fp16": Fp16,
    "int8": Int8,
    "int4": Int4,
    "e3m0": E3M0,
    "int2": Int2,
    "topk": TopK,
    "topk64": TopK64,
}


@cache
def make_codec(name: str) -> Codec:
    """Return the codec of the manifest's `sync.codec`, which has no state. Raises ValueError for an unknown name."""
    if name not in CODECS:
        raise ValueError(f"There is no codec {name!r}: use one of {', '.join(CODECS)}.")
    return CODECS[name]()


def chunk_elements(parameters: int) -> int:
    """Elements of a chunk: the least multiple of BLOCK that makes at most 128 chunks, but never above 2^22."""
    blocks = _block_count(parameters, BLOCK)
    return min(MAX_CHUNK_ELEMENTS, max(1, _block_count(blocks, MAX_CHUNKS)) * BLOCK)


def chunk_bounds(parameters: int) -> list[tuple[int, int]]:
    """The grid on which a vector of `parameters` elements is cut for the wire: element ranges, in order."""
    size = chunk_elements(parameters)
    return [(start, min(start + size, parameters)) for start in range(0, parameters, size)]


def _block_count(n: int, size: int) -> int:
    return -(-n // size)


def _contiguous_vector(x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or x.dim() != 1:
        raise ValueError(f"A codec takes fp32 vectors, not {x.dtype} {tuple(x.shape)}.")
    return x.detach().contiguous()


def _require_size(data: Data, expected: int, name: str) -> None:
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size != expected:
        raise ValueError(f"The encoded vector has {size} bytes where {name} needs {expected}.")


def _require_finite(x: Tensor, what: str) -> None:
    """One pass without a temporary: minimum and maximum propagate a NaN."""
    if x.numel():
        low, high = torch.aminmax(x)
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            raise ValueError(f"{what} has a value that is not finite.")


def _to_bytes(*tensors: Tensor) -> bytes:
    """The tensors' elements one after the other, little-endian."""
    arrays: list[npt.NDArray[Any]] = [tensor.detach().cpu().contiguous().numpy() for tensor in tensors]
    little = [array.astype(array.dtype.newbyteorder("<"), copy=False) for array in arrays]
    return b"".join(array.view(np.uint8).data for array in little)

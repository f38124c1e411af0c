"""Codecs of 8 and 4 bits: each block of 256 elements has a scale, each element a few bits. Knows no chunk, no peer.

    int8   x is s q,  q = -127..127      s = the block's largest magnitude / 127
    int4   x is s q,  q = -7..7          s = .. / 7
    e3m0   x is s v,  v = 0, +-2^-6 .. +-1, sign and 3 exponent bits (Streaming DiLoCo, 2501.18512)      s = ..

Scales are bfloat16, rounded up, so no q leaves its range, and q s is exact in fp32: whoever decodes gets the same bits.
On the wire: the scales of all blocks, little-endian; then a block's codes, as two's complement (int8), or two in a byte
(the first half of the block in the low bits), the code being q + 8 or sign and exponent. The last block is filled up
with zeros. All bits of overhead: 16 in 256 elements, 0.8 % of int8 and 1.6 % of 4 bits.

Error bounds, with M the largest magnitude of x's block, up to 2^127: int8 and int4 half a step, at most 1.008 M / top;
e3m0 max(0.338 |x|, 1.52 M / 128). A block whose M is below top x 2^-126 may decode to zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from node.diloco.wireform import little, require_finite, require_size, require_vector

SCALE_BLOCK = 256
"""Elements that share one scale."""
SLICE = 2**17
"""Elements encoded at a time on the cpu, so that what lies between them stays in its cache."""
MIN_SCALE_BITS = 0x0080
"""2^-126, the smallest normal number, so that nothing decodes to a denormal one."""
FLOAT_MAX = 3.4028234663852886e38


class Blockwise:
    """A codec with one scale a block. Formats say how many bits an element has, and what they mean."""

    name: str
    stretch_ratio: float
    """Gaussian blocks get 0.9 % longer in 4 bits; ones with an outlier of 16 standard deviations 8 %."""
    top: float
    """Magnitude, in scales, of the block's largest element."""
    code_bytes: int
    """Bytes of a block's codes."""
    needs_spare = False
    """Whether `_write` needs room for two int16 an element."""

    def __init__(self) -> None:
        self._max_scale_bits = _bfloat16_below(FLOAT_MAX / self.top)
        self._safe_scale_bits = _bfloat16_below(FLOAT_MAX / (self.top + 1))
        """Up to here no code can overflow, also none that no encoder writes (-128, -8)."""

    def encoded_bytes(self, n: int) -> int:
        return -(-n // SCALE_BLOCK) * (2 + self.code_bytes)

    def encode(self, x: Tensor) -> bytes:
        flat = require_vector(x).detach().contiguous()
        blocks = -(-flat.numel() // SCALE_BLOCK)
        largest = torch.empty(blocks, device=flat.device)
        scale_bits = torch.empty(blocks, dtype=torch.int16, device=flat.device)
        codes = torch.empty(blocks, self.code_bytes, dtype=torch.uint8, device=flat.device)
        # Made once: memory that is fetched anew for each slice costs more than the arithmetic.
        size = (min(blocks, _slice_blocks(flat)), SCALE_BLOCK)
        room_BE = torch.empty(size, device=flat.device)
        spare_BE = torch.empty((2, *size), dtype=torch.int16, device=flat.device) if self.needs_spare else None
        for at, part in _slices(flat):
            end = at + len(part)
            torch.maximum(part.amax(1), part.amin(1).neg_(), out=largest[at:end])
            bits = (((largest[at:end] / self.top).view(torch.int32) + 0xFFFF) >> 16).clamp_(
                MIN_SCALE_BITS, self._max_scale_bits
            )
            scale_bits[at:end] = bits
            inverse = (bits << 16).view(torch.float32).reciprocal_()
            scaled = torch.mul(part, inverse[:, None], out=room_BE[: len(part)])
            self._write(scaled, codes[at:end], spare_BE[:, : len(part)] if spare_BE is not None else None)
        require_finite(largest, "The vector to encode")
        return b"".join((little(scale_bits.cpu().numpy()).data, codes.cpu().numpy().data))

    def check(self, data: bytes | memoryview, n: int) -> None:
        """Any codes are numbers; the scales must be those of an encoder."""
        bits = self._scale_bits(data, n)
        if bits.size and bits.max() > self._safe_scale_bits:
            self.decode(data, n)

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        bits = self._scale_bits(data, n)
        scales = torch.from_numpy(bits.astype(np.int32) << 16).view(torch.float32)
        raw = np.frombuffer(data, np.uint8)[2 * len(bits) :]
        codes = torch.from_numpy(raw.reshape(len(bits), self.code_bytes).copy())
        out = torch.empty(len(bits), SCALE_BLOCK)
        step = SLICE // SCALE_BLOCK
        for at in range(0, len(bits), step):
            part = out[at : at + step]
            self._read(codes[at : at + step], part)
            part.mul_(scales[at : at + step, None])
        if bits.size and bits.max() > self._safe_scale_bits:
            require_finite(out.view(-1), "The encoded vector")
        return out.view(-1)[:n]

    def _scale_bits(self, data: bytes | memoryview, n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
        require_size(data, self.encoded_bytes(n), self.name)
        bits = np.frombuffer(data, "<i2", count=-(-n // SCALE_BLOCK)).astype(np.int16, copy=False)
        if bits.size and not (bits.min() >= MIN_SCALE_BITS and bits.max() <= self._max_scale_bits):
            raise ValueError("The encoded vector has a scale out of range: a value is not finite.")
        return bits

    def _write(self, scaled_BE: Tensor, codes: Tensor, spare_2BE: Tensor | None) -> None:
        """Codes uint8 [B, code_bytes] of elements fp32 [B, 256] within -top..top (and a rounding). Overwrites all."""
        raise NotImplementedError

    def _read(self, codes: Tensor, out_BE: Tensor) -> None:
        """The elements of these codes, in scales."""
        raise NotImplementedError


class Int8(Blockwise):
    name, stretch_ratio, top, code_bytes = "int8", 0.01, 127.0, SCALE_BLOCK

    def _write(self, scaled_BE: Tensor, codes: Tensor, spare_2BE: Tensor | None) -> None:
        codes.view(torch.int8).copy_(scaled_BE.round_().clamp_(-self.top, self.top))

    def _read(self, codes: Tensor, out_BE: Tensor) -> None:
        out_BE.copy_(codes.view(torch.int8))


class Int4(Blockwise):
    name, stretch_ratio, top, code_bytes = "int4", 0.25, 7.0, SCALE_BLOCK // 2

    def _write(self, scaled_BE: Tensor, codes: Tensor, spare_2BE: Tensor | None) -> None:
        low, high = _halves(scaled_BE.round_().clamp_(-self.top, self.top))
        codes.copy_(torch.add(low, high, alpha=16).add_(8 * 17))

    def _read(self, codes: Tensor, out_BE: Tensor) -> None:
        low, high = _halves(out_BE)
        low.copy_(codes & 15)
        high.copy_(codes >> 4)
        out_BE.sub_(8)


class E3M0(Blockwise):
    name, stretch_ratio, top, code_bytes = "e3m0", 0.25, 1.0, SCALE_BLOCK // 2
    needs_spare = True

    def _write(self, scaled_BE: Tensor, codes: Tensor, spare_2BE: Tensor | None) -> None:
        """By the bits of bfloat16: 8 of exponent, 7 of mantissa. Half a mantissa more rounds to the nearest power."""
        assert spare_2BE is not None
        bits, signs = spare_2BE
        bits.view(torch.bfloat16).copy_(scaled_BE)
        torch.bitwise_right_shift(bits, 12, out=signs).bitwise_and_(8)
        bits.bitwise_and_(0x7FFF).add_(0x40 - (120 << 7)).clamp_(0, (8 << 7) - 1).bitwise_right_shift_(7)
        low, high = _halves(bits.bitwise_or_(signs))
        codes.copy_(low.add_(high, alpha=16))

    def _read(self, codes: Tensor, out_BE: Tensor) -> None:
        low, high = _halves(out_BE)
        for part, code in ((low, codes & 15), (high, codes >> 4)):
            part.copy_(torch.index_select(E3M0_VALUES, 0, code.view(-1).to(torch.int32)).view(part.shape))


E3M0_VALUES = torch.tensor([sign * magnitude for sign in (1, -1) for magnitude in (0, *(2.0**e for e in range(-6, 1)))])


def _slices(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Number of the first block, and blocks [B, 256]; the last one filled up. Views, but for that one."""
    whole = flat.numel() // SCALE_BLOCK * SCALE_BLOCK
    size = _slice_blocks(flat) * SCALE_BLOCK
    for start in range(0, whole, size):
        yield start // SCALE_BLOCK, flat[start : min(start + size, whole)].view(-1, SCALE_BLOCK)
    if whole < flat.numel():
        last = flat.new_zeros(1, SCALE_BLOCK)
        last[0, : flat.numel() - whole] = flat[whole:]
        yield whole // SCALE_BLOCK, last


def _slice_blocks(flat: Tensor) -> int:
    """Blocks that are encoded at a time; on a GPU all of them, as each operation costs a launch."""
    return (SLICE if flat.device.type == "cpu" else max(SLICE, flat.numel())) // SCALE_BLOCK


def _halves(x_BE: Tensor) -> tuple[Tensor, Tensor]:
    """First and second half of each block, [B, 128]: views."""
    half = x_BE.shape[1] // 2
    return x_BE[:, :half], x_BE[:, half:]


def _bfloat16_below(value: float) -> int:
    """Bits of the largest bfloat16 that is not above."""
    return int(np.float32(value).view(np.int32)) >> 16

"""Top-k: of each block of 4096 elements the 256 largest, 2 bits each (after SparseLoCo, 2508.15706). An experiment.

Two bits are a sign and which of two magnitudes: the mean of those kept that are above their mean, and of the rest. On
the wire: both magnitudes of every block as little-endian bfloat16; the places of those kept, in rising order, 12 bits
each, two in three bytes; then their 2-bit codes, four in a byte (bit 0 the larger magnitude, bit 1 the minus sign). The
last block is filled up with zeros. 0.88 bits an element. Without error feedback most of the vector is lost for good.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.diloco.wireform import little, require_finite, require_size, require_vector

SPARSE_BLOCK = 4096
"""2^12, so that a place has 12 bits."""
KEPT = 256
PLACES_BYTES = KEPT * 12 // 8
BLOCK_BYTES = 4 + PLACES_BYTES + KEPT * 2 // 8
MAX_MAGNITUDE_BITS = 0x7F7F
MIN_MAGNITUDE_BITS = 0x0080


class TopK:
    name, stretch_ratio = "topk", 0.01

    def encoded_bytes(self, n: int) -> int:
        return -(-n // SPARSE_BLOCK) * BLOCK_BYTES

    def encode(self, x: Tensor) -> bytes:
        flat = require_vector(x).detach().contiguous()
        require_finite(flat, "The vector to encode")
        blocks = -(-flat.numel() // SPARSE_BLOCK)
        if not blocks:
            return b""
        padded_BE = torch.zeros(blocks * SPARSE_BLOCK, device=flat.device)
        padded_BE[: flat.numel()] = flat
        padded_BE = padded_BE.view(blocks, SPARSE_BLOCK)
        places_BK = padded_BE.abs().topk(KEPT, dim=1, sorted=False).indices.sort(dim=1).values
        kept_BK = padded_BE.gather(1, places_BK)
        sizes_BK = kept_BK.abs()
        # In fp64: the mean of numbers near the end of fp32 must not overflow.
        large_BK = sizes_BK >= sizes_BK.double().mean(1, keepdim=True)
        magnitudes = torch.stack([_mean_where(sizes_BK, ~large_BK), _mean_where(sizes_BK, large_BK)], dim=1)
        bits = (magnitudes.view(torch.int32) >> 16).to(torch.int16)
        bits = torch.where(bits < MIN_MAGNITUDE_BITS, torch.zeros_like(bits), bits)
        codes_BK = large_BK.to(torch.uint8) | (kept_BK < 0).to(torch.uint8) << 1
        head = little(bits.cpu().numpy()).tobytes()
        return head + _pack_places(places_BK.cpu().numpy()) + _pack_codes(codes_BK.cpu().numpy())

    def check(self, data: bytes | memoryview, n: int) -> None:
        self._read(data, n)

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        magnitudes_B2, places_BK, codes_BK = self._read(data, n)
        out_BE = torch.zeros(len(places_BK), SPARSE_BLOCK)
        sizes = np.take_along_axis(magnitudes_B2, (codes_BK & 1).astype(np.int64), axis=1)
        values = torch.from_numpy(np.where(codes_BK & 2, -sizes, sizes))
        out_BE.scatter_(1, torch.from_numpy(places_BK.astype(np.int64)), values)
        return out_BE.view(-1)[:n]

    def _read(
        self, data: bytes | memoryview, n: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
        require_size(data, self.encoded_bytes(n), self.name)
        blocks = -(-n // SPARSE_BLOCK)
        bits = np.frombuffer(data, "<u2", count=2 * blocks).reshape(blocks, 2)
        if bits.size and (bits.max() > MAX_MAGNITUDE_BITS or ((bits > 0) & (bits < MIN_MAGNITUDE_BITS)).any()):
            raise ValueError("The encoded vector has a magnitude out of range: a value is not finite.")
        packed = np.frombuffer(data, np.uint8)[4 * blocks :]
        places = _unpack_places(packed[: blocks * PLACES_BYTES].reshape(blocks, PLACES_BYTES))
        if (places[:, 1:] <= places[:, :-1]).any():
            raise ValueError("The encoded vector names a place twice, or places out of order.")
        codes = _unpack_codes(packed[blocks * PLACES_BYTES :].reshape(blocks, KEPT // 4))
        return (bits.astype(np.uint32) << 16).view(np.float32), places, codes


def _mean_where(sizes_BK: Tensor, chosen_BK: Tensor) -> Tensor:
    """Mean of the chosen in each row, fp32 [B]; zero where there are none."""
    total = torch.where(chosen_BK, sizes_BK, 0.0).double().sum(1)
    return (total / chosen_BK.sum(1).clamp(min=1)).float()


def _pack_places(places_BK: npt.NDArray[np.int64]) -> bytes:
    low, high = (places_BK[:, half::2].astype(np.uint16) for half in (0, 1))
    packed = np.stack([low & 0xFF, (low >> 8) | (high & 0xF) << 4, high >> 4], axis=-1)
    return packed.astype(np.uint8).tobytes()


def _unpack_places(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    first, middle, last = (packed[:, i::3].astype(np.uint16) for i in range(3))
    places = np.empty((len(packed), KEPT), np.uint16)
    places[:, 0::2] = first | (middle & 0xF) << 8
    places[:, 1::2] = middle >> 4 | last << 4
    return places


def _pack_codes(codes_BK: npt.NDArray[np.uint8]) -> bytes:
    packed = sum(codes_BK[:, i::4] << 2 * i for i in range(4))
    return np.asarray(packed, np.uint8).tobytes()


def _unpack_codes(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    codes = np.empty((len(packed), KEPT), np.uint8)
    for i in range(4):
        codes[:, i::4] = packed >> 2 * i & 3
    return codes

"""Tensors in safetensors files: written and checked in one go, read whole or by byte ranges. Knows no checkpoint.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian length of the header; the header, JSON,
with dtype, shape and place of each tensor; the bytes. Written here and not by the library: its writer tells no errno
when the disk is full, and would need a second pass for the checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 2**20
_PIECE_BYTES = 16 * 2**20
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


class FileFacts(TypedDict):
    """What a reader checks a file against."""

    bytes: int
    blake2b: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """Write and sync a new file. OSError if the disk does not take it."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.blake2b(digest_size=32)
    size_bytes = 0
    with path.open("xb", buffering=0) as file:
        for piece in (memoryview(_LENGTH.pack(len(encoded)) + encoded), *map(_bytes_of, tensors.values())):
            for part in _parts(piece):
                _write_all(file.fileno(), part)
                digest.update(part)
                size_bytes += len(part)
        os.fsync(file.fileno())
    return FileFacts(bytes=size_bytes, blake2b=digest.hexdigest())


def read_tensors(path: Path, facts: FileFacts) -> dict[str, Tensor]:
    """All tensors, in memory of their own. ValueError if the file is not what was written."""
    size_bytes = path.stat().st_size
    if size_bytes != facts["bytes"]:
        raise ValueError(f"{path.name} has {size_bytes} bytes instead of {facts['bytes']}")
    digest = hashlib.blake2b(digest_size=32)
    tensors: dict[str, Tensor] = {}
    with path.open("rb") as file:
        header, data_start = _read_header(file.fileno())
        digest.update(os.pread(file.fileno(), data_start, 0))
        file.seek(data_start)
        for name, entry in header.items():
            tensor = torch.empty(entry["shape"], dtype=_BY_NAME[entry["dtype"]])
            for part in _parts(_bytes_of(tensor)):
                if file.readinto(part) != len(part):
                    raise ValueError(f"{path.name} ends early")
                digest.update(part)
            tensors[name] = tensor
    if digest.hexdigest() != facts["blake2b"]:
        raise ValueError(f"{path.name} does not have its checksum")
    return tensors


def read_slice(path: Path, tensor_name: str, start_byte: int, length: int) -> bytes:
    """`length` bytes of one tensor, little-endian as on disk, without reading the rest.

    ValueError if the tensor has no such bytes, OSError if the file is gone: checkpoints are pruned.
    """
    with path.open("rb", buffering=0) as file:
        header, data_start = _read_header(file.fileno())
        if tensor_name not in header:
            raise ValueError(f"{path.name} has no tensor {tensor_name!r}: ask for one of {', '.join(header)}.")
        begin, end = header[tensor_name]["data_offsets"]
        if start_byte < 0 or length < 0 or begin + start_byte + length > end:
            raise ValueError(
                f"{tensor_name} has {end - begin} bytes: {length} bytes from {start_byte} on are not all among them."
            )
        data = bytearray()
        while len(data) < length:
            piece = os.pread(file.fileno(), length - len(data), data_start + begin + start_byte + len(data))
            if not piece:
                raise ValueError(f"{path.name} ends early")
            data += piece
        return bytes(data)


def _read_header(handle: int) -> tuple[dict[str, Any], int]:
    """The header, its entries in the order of their bytes, and where these begin. Nothing in it is believed yet."""
    prefix = os.pread(handle, _LENGTH.size, 0)
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else _MAX_HEADER_BYTES + 1
    if length > _MAX_HEADER_BYTES:
        raise ValueError("the file has no safetensors header")
    header = json.loads(os.pread(handle, length, _LENGTH.size))
    if not isinstance(header, dict):
        raise ValueError("the safetensors header is not an object")
    data_start = _LENGTH.size + length
    at = 0
    for entry in header.values():
        begin, end = entry["data_offsets"]
        size_bytes = math.prod(entry["shape"]) * _BY_NAME[entry["dtype"]].itemsize
        if begin != at or end - begin != size_bytes or min(entry["shape"], default=1) < 0:
            raise ValueError("the safetensors header contradicts itself")
        at = end
    if data_start + at != os.fstat(handle).st_size:
        raise ValueError("the safetensors header does not fit the file's size")
    return header, data_start


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory if it is contiguous on the CPU, else a copy's."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # an array is a buffer; numpy's stubs do not say so


def _parts(whole: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(whole), _PIECE_BYTES):
        yield whole[start : start + _PIECE_BYTES]


def _write_all(handle: int, data: memoryview) -> None:
    """One `write` may take less than it is given, also just before a full disk."""
    while data:
        data = data[os.write(handle, data) :]

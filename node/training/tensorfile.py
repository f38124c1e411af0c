"""Tensors in safetensors files: written with a checksum in one pass, read whole or by byte ranges.

A file (https://github.com/huggingface/safetensors) has 8 bytes with the header's length, little-endian, a JSON header
with dtype, shape and offsets of each tensor, and the tensors' bytes. The library's writer is not used, because it
reports no errno when the disk is full, and the checksum would need a second pass.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 2**20
_PIECE_BYTES = 16 * 2**20
_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class FileFacts(TypedDict):
    """Size and checksum of a file, which a reader checks."""

    bytes: int
    blake2b: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor], check: Callable[[], None] = lambda: None) -> FileFacts:
    """Write and sync a new file. Raises OSError if the disk does not take it.

    `check` is called before each piece of _PIECE_BYTES. It may raise to stop the write.
    """
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.blake2b(digest_size=32)
    size_bytes = 0
    with path.open("xb", buffering=0) as file:
        for data in (memoryview(_LENGTH.pack(len(encoded)) + encoded), *map(_bytes_of, tensors.values())):
            for piece in _pieces(data):
                check()
                _write_all(file.fileno(), piece)
                digest.update(piece)
                size_bytes += len(piece)
        os.fsync(file.fileno())
    return FileFacts(bytes=size_bytes, blake2b=digest.hexdigest())


def read_tensors(path: Path, facts: FileFacts) -> dict[str, Tensor]:
    """Read all tensors, each into its own memory on the cpu. Raises ValueError if the file does not match `facts`."""
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
            tensors[name] = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
            for piece in _pieces(_bytes_of(tensors[name])):
                if file.readinto(piece) != len(piece):
                    raise ValueError(f"{path.name} ends early")
                digest.update(piece)
    if digest.hexdigest() != facts["blake2b"]:
        raise ValueError(f"the checksum of {path.name} is wrong")
    return tensors


def read_slice(path: Path, tensor_name: str, start_byte: int, length: int) -> bytes:
    """Read `length` bytes of one tensor, little-endian as on disk, without reading the rest of the file.

    Raises ValueError if the tensor has no such bytes, and OSError if the file is gone, as old checkpoints are removed.
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
    """Return the validated header, with entries in the order of their bytes, and the offset of the first tensor."""
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
        size_bytes = math.prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize
        if begin != at or end - begin != size_bytes or min(entry["shape"], default=1) < 0:
            raise ValueError("the safetensors header contradicts itself")
        at = end
    if data_start + at != os.fstat(handle).st_size:
        raise ValueError("the safetensors header does not fit the file's size")
    return header, data_start


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory if it is contiguous on the cpu, otherwise that of a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stubs do not declare the buffer protocol


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


def _write_all(handle: int, data: memoryview) -> None:
    """Write all of `data`. `os.write` may write only a part, for example just before the disk is full."""
    while data:
        data = data[os.write(handle, data) :]

"""What all wire formats share: what they take, what they refuse. Knows no format."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def require_vector(x: Tensor) -> Tensor:
    """`x`, if it is fp32 [n]; ValueError otherwise."""
    if x.dtype != torch.float32 or x.dim() != 1:
        raise ValueError(f"A codec takes fp32 vectors, not {x.dtype} {tuple(x.shape)}.")
    return x


def require_size(data: bytes | memoryview, expected: int, name: str) -> None:
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size != expected:
        raise ValueError(f"The encoded vector has {size} bytes where {name} needs {expected}.")


def require_finite(x: Tensor, what: str) -> None:
    """One pass, no temporary: minimum and maximum carry a NaN along."""
    if x.numel():
        low, high = torch.aminmax(x)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise ValueError(f"{what} has a value that is not finite.")


def little(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.astype(array.dtype.newbyteorder("<"), copy=False)

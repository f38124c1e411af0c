"""Several processes of one node that make each inner step together, one device each.

Rank 0 is the worker, the only rank that the swarm knows. It broadcasts each call, and all ranks execute it. With
`data-parallel`, each rank has all parameters and a part of the batch's rows, and gradients are summed after the last
micro-batch. With `fsdp`, parameters, gradients and moments are sharded (FSDP2, `fully_shard`). Only rank 0 holds the
anchor, as all ranks share one host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from node.errors import NodeError

TIMEOUT_S = 600.0
"""Longest time of a step. A rank that dies is noticed at once, as the worker watches the processes."""
CALL_TIMEOUT = timedelta(days=3650)
"""Longest time between two calls. Rank 0 may have to wait for text, peers or a download."""
BUCKET_ELEMENTS = 1 << 25
_ENDED, _OUT_OF_MEMORY, _DONE = range(3)
"""What a rank tells the others after each part of a step. The least counts."""

T = TypeVar("T")


class StepEnded(NodeError):
    """Another rank has ended the step, which has changed nothing."""


@dataclass(frozen=True, slots=True)
class _TensorMeta:
    """Stands for a tensor among a call's arguments. The tensor itself is broadcast next."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Ranks:
    """This process's membership in the group of ranks."""

    def __init__(self, rank: int, size: int, folder: Path, device: torch.device, *, is_sharded: bool) -> None:
        """Join the group, and return when all ranks have joined. They meet in `folder`, which only they may use."""
        self.rank, self.size, self.is_sharded, self._device = rank, size, is_sharded, device
        if dist.is_initialized():  # Amended settings may need another model or other batches, and so new ranks.
            dist.destroy_process_group()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(folder / "ranks"), size)  # type: ignore[attr-defined]  # missing in its __all__
        backend = dist.get_default_backend_for_device(device)
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        self._calls = dist.new_group(backend="gloo", timeout=CALL_TIMEOUT)

    def broadcast_call(self, name: str, *args: Any) -> None:
        """On rank 0, make the other ranks call `name`. Tensors are sent separately, through the host's memory."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        plain = [_TensorMeta(tuple(arg.shape), arg.dtype) if isinstance(arg, Tensor) else arg for arg in args]
        dist.broadcast_object_list([name, plain], src=0, group=self._calls)
        for tensor in tensors:
            dist.broadcast(tensor.cpu().contiguous(), src=0, group=self._calls)

    def receive_call(self) -> tuple[str, list[Any]]:
        """On the other ranks, wait for the next call and return its name and arguments. Tensors are on the cpu."""
        received: list[Any] = [None, None]
        dist.broadcast_object_list(received, src=0, group=self._calls)
        name, args = received
        for i, arg in enumerate(args):
            if isinstance(arg, _TensorMeta):
                args[i] = torch.empty(arg.shape, dtype=arg.dtype)
                dist.broadcast(args[i], src=0, group=self._calls)
        return name, args

    def shard(self, loss: nn.Module, layers: Iterable[nn.Module]) -> nn.Module:
        """Return the module whose call gives the loss. With `fsdp`, shard each layer in place, and then the rest."""
        if not self.is_sharded:
            return loss
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self._device.type, (self.size,))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(loss, mesh=mesh, reshard_after_forward=True)
        return loss

    def own_rows(self, batch: Tensor) -> Tensor:
        """This rank's part of a batch [B, T + 1]. Some ranks have one row less than the others."""
        return torch.tensor_split(batch, self.size)[self.rank]

    @property
    def loss_factor(self) -> float:
        """Factor for the loss, because FSDP averages gradients over the ranks and the step needs their sum."""
        return float(self.size) if self.is_sharded else 1.0

    def together(self, action: Callable[[], T]) -> T:
        """Call `action` on each rank. If it raises on one rank, every rank raises.

        Raises on the other ranks torch.OutOfMemoryError for that error, and StepEnded for another one. An error of the
        computation itself is raised on its own rank only: that process must end, as the others may be in a collective.
        For a sharded model, torch.OutOfMemoryError is such an error.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = action()
        except RuntimeError as exc:
            if self.is_sharded or not isinstance(exc, torch.OutOfMemoryError):
                raise
            error = exc
        except Exception as exc:  # noqa: BLE001 - raised again below
            error = exc
        own = _DONE if error is None else _OUT_OF_MEMORY if isinstance(error, RuntimeError) else _ENDED
        least = torch.tensor([own])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._calls)
        if error is not None and own == least:
            raise error
        if least == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError("Another rank of this node is out of memory.")
        if least == _ENDED:
            raise StepEnded("Another rank of this node has ended the step.")
        return cast("T", result)

    def sum_gradients_(self, parameters: Iterable[Tensor]) -> None:
        """Sum gradients over the ranks, in place. Leaves sharded gradients as they are, as FSDP has reduced them."""
        if self.is_sharded:
            return
        bucket: list[Tensor] = []
        size = 0
        for parameter in parameters:
            if parameter.grad is None:
                continue
            bucket.append(parameter.grad)
            size += parameter.grad.numel()
            if size >= BUCKET_ELEMENTS:
                _sum_bucket_(bucket)
                bucket, size = [], 0
        if bucket:
            _sum_bucket_(bucket)

    def sum_(self, scalar: Tensor) -> Tensor:
        """Sum a scalar, fp32 [] on the device, over the ranks, in place."""
        dist.all_reduce(scalar)
        return scalar


def _sum_bucket_(tensors: list[Tensor]) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor. Does not import the module of DTensor, which takes a second."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank, by a collective. Returns any other tensor as it is."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def place_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Copy `value` to the parameter's device, sharded like the parameter. `value` must be the same on every rank."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter
        on_device = value.to(parameter.device)
        return distribute_tensor(on_device, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return value.to(parameter.device, copy=True)

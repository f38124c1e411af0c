"""Several processes of one node that make an inner step together, a device each. Knows torch.distributed; no swarm.

Rank 0 is the worker, the one that the swarm knows. The others repeat what it does: it tells them each call, and all
make it. `data-parallel`: each has all parameters and a part of the batch's rows, and gradients are summed after the
last micro-batch. `fsdp`: parameters, gradients and moments are shards (FSDP2, `fully_shard`). The anchor is held once,
by rank 0: all ranks share one host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

TIMEOUT_S = 600.0
"""Longest step; a rank that has died is noticed at once, by whoever watches the processes."""
FOR_EVER = timedelta(days=3650)
"""Between two calls: the others may have to wait for text, for peers, for a download."""
BUCKET_ELEMENTS = 1 << 25


class Ranks:
    """This process's place among them."""

    def __init__(self, rank: int, size: int, folder: Path, device: torch.device, *, is_sharded: bool) -> None:
        """Returns when all have come. `folder`: where they meet; empty before, and nobody else's."""
        self.rank, self.size, self.is_sharded, self._device = rank, size, is_sharded, device
        timeout = timedelta(seconds=TIMEOUT_S)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(folder / "ranks"), size)  # type: ignore[attr-defined]  # missing in its __all__
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        self._calls = dist.new_group(backend="gloo", timeout=FOR_EVER)

    # calls

    def tell(self, name: str, *args: Any) -> None:
        """Rank 0: have the others make this call, too. Tensors go by themselves, over the host's memory."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        plain = [_Shape.of(arg) if isinstance(arg, Tensor) else arg for arg in args]
        dist.broadcast_object_list([name, plain], src=0, group=self._calls)
        for tensor in tensors:
            dist.broadcast(tensor.cpu().contiguous(), src=0, group=self._calls)

    def hear(self) -> tuple[str, list[Any]]:
        """The others: the next call; its tensors on the cpu."""
        told: list[Any] = [None, None]
        dist.broadcast_object_list(told, src=0, group=self._calls)
        name, plain = told
        args = []
        for arg in plain:
            if isinstance(arg, _Shape):
                tensor = torch.empty(arg.shape, dtype=arg.dtype)
                dist.broadcast(tensor, src=0, group=self._calls)
                args.append(tensor)
            else:
                args.append(arg)
        return name, args

    # steps

    def wrap(self, loss: nn.Module, layers: Iterable[nn.Module]) -> nn.Module:
        """The module whose call gives the loss; sharded where that is asked for, layer by layer, then the rest."""
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
        """This rank's part of a batch [B, T + 1]."""
        return torch.tensor_split(batch, self.size)[self.rank]

    @property
    def loss_factor(self) -> float:
        """Sharded gradients arrive as a mean over the ranks, and are to be a sum."""
        return float(self.size) if self.is_sharded else 1.0

    def agree(self, is_well: bool) -> bool:
        """Whether all are well. Without shards nobody waits for another during a pass, so all come here.

        With shards those that are well could not come; there, whoever is not does not, either, and all end.
        """
        if self.is_sharded:
            return is_well
        flag = torch.tensor([1 if is_well else 0])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._calls)
        return bool(flag.item())

    def sum_gradients_(self, parameters: Iterable[Tensor]) -> None:
        """Gradients become their sum over the ranks, in place; sharded ones are already."""
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
                _sum_together_(bucket)
                bucket, size = [], 0
        if bucket:
            _sum_together_(bucket)

    def sum_(self, scalar: Tensor) -> Tensor:
        """Of a scalar, fp32 [] on the device, over the ranks; in place."""
        dist.all_reduce(scalar)
        return scalar


class _Shape:
    """Stands for a tensor that follows."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    @staticmethod
    def of(tensor: Tensor) -> _Shape:
        return _Shape(tuple(tensor.shape), tensor.dtype)


def _sum_together_(tensors: list[Tensor]) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; asked without that library, which takes a second to load."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; of one that is not sharded itself. All ranks must come."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value`, the same on every rank, placed as the parameter is; a copy on its device."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        place: Any = parameter
        on_device = value.to(parameter.device)
        return distribute_tensor(on_device, place.device_mesh, place.placements, src_data_rank=None)
    return value.to(parameter.device, copy=True)

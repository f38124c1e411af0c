"""A node's own copy of the model and its optimizer, in one process or in several ranks.

All vectors are fp32, on the cpu unless said otherwise, in `flatten`'s order: [P] all parameters, [P_f] a fragment.
"""

from __future__ import annotations

from contextlib import suppress
from subprocess import SubprocessError

import torch
from torch import Tensor, nn

from node.config.manifest import InnerConfig
from node.diloco.fragments import Ranges
from node.errors import MachineError, NodeError
from node.training.accelerator import accelerator_of
from node.training.inner import Callback, Execution, FaultHook, InnerLoop, StepResult
from node.training.model import CPU, Change, change_flat_, take_flat
from node.training.ranks import Ranks

NO_COMPILER = "no_compiler"
META = torch.device("meta")
"""The device of tensors without memory."""


class Replica:
    """All ranks execute each call that rank 0 makes. The other ranks run `follow`."""

    def __init__(
        self, model: nn.Module, cfg: InnerConfig, device: torch.device, how: Execution, ranks: Ranks | None = None
    ) -> None:
        self._ranks = ranks
        self.inner = InnerLoop(model, cfg, device, how, ranks)
        self._model, self._device = model, device
        self._all: Ranges = ((0, sum(p.numel() for p in model.parameters())),)

    def follow(self, fault_hook: FaultHook | None = None) -> None:
        """Execute the calls of rank 0 until this process is ended. Only for other ranks. `step` gets `fault_hook`."""
        assert self._ranks is not None
        while True:
            name, args = self._ranks.receive_call()
            with suppress(NodeError):  # Rank 0 meets the same error and handles it.
                getattr(self, name)(*args, *((fault_hook,) if name == "step" else ()))

    def _broadcast(self, name: str, *args: object, only_if_sharded: bool = False) -> None:
        """Broadcast a call. `only_if_sharded` is for calls that rank 0 can answer alone if it has all parameters."""
        if self._ranks is not None and self._ranks.rank == 0 and (self._ranks.is_sharded or not only_if_sharded):
            self._ranks.broadcast_call(name, *args)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks make each step."""
        return self._ranks is not None

    def use_threads(self, number: int) -> None:
        """Set the number of threads of each rank, from its next step on."""
        self._broadcast("use_threads", number)
        self.inner.use_threads(number)

    def step(
        self, batch: Tensor, lr: float, fault_hook: FaultHook | None = None, after_micro_batch: Callback = lambda: None
    ) -> StepResult:
        """Take an inner step like `InnerLoop.step` on all rows of `batch`, int64 [B, T + 1].

        Only rank 0 gets `after_micro_batch`. If it raises, the other ranks raise StepEnded.
        """
        self._broadcast("step", batch, lr)
        return self.inner.step(batch, lr, fault_hook, after_micro_batch)

    def warm_up(self, rows: int, length: int) -> None:
        """Make passes without effect to compile the layers. Raises MachineError with code NO_COMPILER if that fails."""
        self._broadcast("warm_up", rows, length)
        try:
            batch = torch.zeros(rows, length + 1, dtype=torch.int64)
            self.inner.probe(batch)
            self.inner.loss_of(batch)  # An evaluation is compiled by itself.
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError, SubprocessError) as exc:
            raise MachineError(
                "The layers could not be compiled: install a C++ compiler and Python's header files, or set "
                "devices.compile to off.",
                code=NO_COMPILER,
            ) from exc

    def perturb(self, ratio: float) -> None:
        """Change the parameters like `InnerLoop.perturb`."""
        self._broadcast("perturb", ratio)
        self.inner.perturb(ratio)

    def loss_of(self, batch: Tensor) -> float:
        """Evaluate like `InnerLoop.loss_of`."""
        self._broadcast("loss_of", batch, only_if_sharded=True)
        return self.inner.loss_of(batch)

    @property
    def _copies(self) -> torch.device:
        """Where copies of sharded tensors are made. The other ranks only take part in gathering them."""
        return CPU if self._ranks is None or self._ranks.rank == 0 else META

    @property
    def can_sample(self) -> bool:
        """Whether this process has the whole model."""
        return self._ranks is None or not self._ranks.is_sharded

    def take(self, ranges: Ranges, *, on_host: bool = True) -> Tensor:
        """Copy a fragment [P_f] to the cpu. If `on_host` is False, copy it to the training device if that can encode,
        has the whole model, and has memory for the copy."""
        self._broadcast("take", ranges, only_if_sharded=True)
        if not on_host and self.can_sample and accelerator_of(self._device).can_encode:
            with suppress(torch.OutOfMemoryError):
                return take_flat(self._model, ranges, self._device)
        return take_flat(self._model, ranges, self._copies)

    def put(self, ranges: Ranges, values: Tensor) -> None:
        """Overwrite a fragment with `values` [P_f]."""
        self._broadcast("put", ranges, values)
        change_flat_(self._model, ranges, lambda part, at, _: values[at].to(part.device))

    def change(self, ranges: Ranges, change: Change) -> None:
        """Overwrite a fragment in place, as `change_flat_` does."""
        if self._ranks is None:
            change_flat_(self._model, ranges, change)
            return
        values, at = self.take(ranges), 0
        for low, high in ranges:
            part = slice(at, at + high - low)
            values[part] = change(values[part], part, slice(low, high))
            at = part.stop
        self.put(ranges, values)

    @property
    def parameters(self) -> Tensor:
        """A copy of all parameters [P]."""
        return self.take(self._all)

    def load(self, flat: Tensor) -> None:
        """Overwrite all parameters with `flat` [P]. Raises ValueError if it does not fit."""
        if flat.shape != (self._all[0][1],):
            raise ValueError(f"A vector of shape {tuple(flat.shape)} does not fit {self._all[0][1]} parameters.")
        self.put(self._all, flat)

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state for a checkpoint, as from `InnerLoop.state_tensors`."""
        self._broadcast("optimizer_state", only_if_sharded=True)
        return self.inner.state_tensors(self._copies)

    def load_optimizer_state(self, tensors: dict[str, Tensor]) -> None:
        """Load the result of `optimizer_state`. Raises KeyError or ValueError if it does not fit the model."""
        self._broadcast("load_named_tensors", list(tensors), *tensors.values())
        self.inner.load_state_tensors(tensors)

    def load_named_tensors(self, names: list[str], *tensors: Tensor) -> None:
        """Load the optimizer state on a rank other than 0. Each tensor is an argument, as each is broadcast alone."""
        self.inner.load_state_tensors(dict(zip(names, tensors, strict=True)))

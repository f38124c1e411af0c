"""A node's own parameters and their optimizer, in one process or in several alike. Knows no round and no text.

All vectors are fp32, on the cpu unless said otherwise, in `flatten`'s order: P elements, or P_f of a fragment.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from node.diloco.fragments import Ranges
from node.errors import MachineError, NodeError
from node.manifest import InnerConfig
from node.training.inner import Between, Execution, InnerLoop, Spoil, StepResult
from node.training.model import CPU, change_flat_, take_flat
from node.training.ranks import Ranks

Change = Callable[[Tensor, slice, slice], Tensor]


class Replica:
    """On rank 0 each call is made by all ranks; `follow` is what the others do."""

    def __init__(
        self, model: nn.Module, cfg: InnerConfig, device: torch.device, how: Execution, ranks: Ranks | None = None
    ) -> None:
        self._ranks = ranks
        self.inner = InnerLoop(model, cfg, device, how, ranks)
        self._model, self._device = model, device
        self._all: Ranges = ((0, sum(p.numel() for p in model.parameters())),)

    def follow(self, spoil: Spoil | None = None) -> None:
        """Ranks other than 0: make the calls that rank 0 makes, until this process is ended. `spoil`: in its steps."""
        assert self._ranks is not None
        while True:
            name, args = self._ranks.hear()
            with suppress(NodeError):  # It is for rank 0, where the same happens, to say what follows.
                getattr(self, name)(*args, *((spoil,) if name == "step" else ()))

    def _tell(self, name: str, *args: object, always: bool = True) -> None:
        """`always`: also where each rank has all parameters."""
        if self._ranks is not None and self._ranks.rank == 0 and (always or self._ranks.is_sharded):
            self._ranks.tell(name, *args)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks make each step."""
        return self._ranks is not None

    def use_threads(self, number: int) -> None:
        """Each rank computes on so many, from its next step on."""
        self._tell("use_threads", number)
        torch.set_num_threads(number)

    # steps

    def step(self, batch: Tensor, lr: float, spoil: Spoil | None = None, between: Between = lambda: None) -> StepResult:
        """As `InnerLoop.step`, on all rows of `batch`, int64 [B, T + 1].

        With several ranks `between` may not raise: the others would wait for this one.
        """
        self._tell("step", batch, lr)
        return self.inner.step(batch, lr, spoil, between)

    def warm_up(self, rows: int, length: int) -> None:
        """Make a pass that changes nothing, so that layers compile now; minutes. MachineError where they cannot."""
        self._tell("warm_up", rows, length)
        try:
            self.inner.probe(torch.zeros(rows, length + 1, dtype=torch.int64))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as exc:
            raise MachineError(
                "The layers could not be compiled: install a C++ compiler, or leave devices.compile off.",
                code="no_compiler",
            ) from exc

    def nudge(self, share: float) -> None:
        self._tell("nudge", share)
        self.inner.nudge(share)

    def loss_of(self, batch: Tensor) -> float:
        """As `InnerLoop.loss_of`."""
        self._tell("loss_of", batch, always=False)
        return self.inner.loss_of(batch)

    # parameters

    def take(self, ranges: Ranges, *, on_host: bool = True) -> Tensor:
        """A copy of some parameters [P_f]; on the device unless `on_host`."""
        self._tell("take", ranges, always=False)
        return take_flat(self._model, ranges, CPU if on_host else self._device)

    def put(self, ranges: Ranges, values: Tensor) -> None:
        """Overwrite some parameters with `values` [P_f]. ValueError if they do not fit."""
        self._tell("put", ranges, values)
        change_flat_(self._model, ranges, lambda part, at, _: values[at].to(part.device))

    def change(self, ranges: Ranges, change: Change) -> None:
        """Overwrite a fragment in place, as `change_flat_`."""
        if self._ranks is None:
            change_flat_(self._model, ranges, change)
            return
        values, at = self.take(ranges), 0
        for low, high in ranges:
            there = slice(at, at + high - low)
            values[there] = change(values[there], there, slice(low, high))
            at = there.stop
        self.put(ranges, values)

    @property
    def parameters(self) -> Tensor:
        """A copy of all [P]."""
        return self.take(self._all)

    def load(self, flat: Tensor) -> None:
        """Overwrite all parameters with `flat` [P]. ValueError if it does not fit."""
        if flat.shape != (self._all[0][1],):
            raise ValueError(f"A vector of shape {tuple(flat.shape)} does not fit {self._all[0][1]} parameters.")
        self.put(self._all, flat)

    # the optimizer

    def moments(self) -> dict[str, Tensor]:
        """For a checkpoint, as `InnerLoop.state_tensors`."""
        self._tell("moments", always=False)
        return self.inner.state_tensors()

    def load_moments(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `moments` gave. KeyError or ValueError if it does not fit the model."""
        self._tell("load_named", list(tensors), *tensors.values())
        self.inner.load_state_tensors(tensors)

    def load_named(self, names: list[str], *tensors: Tensor) -> None:
        self.inner.load_state_tensors(dict(zip(names, tensors, strict=True)))

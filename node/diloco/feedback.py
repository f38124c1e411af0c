"""Error feedback: what encoding loses of one contribution is added to the next. Knows tensors; no codec, no network.

LoCo (2407.04480), with a moving average: h = g + e is encoded, and e' = (1 - beta) e + beta (h - decoded h). With
beta 1 it is the classical rule, by which everything arrives in the end. The sign is that of the pseudo-gradient: what
decoded too short is added. A residual advances only where the contribution was included; it begins at zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ErrorFeedback:
    """One node's residual, fp32 [P] on the cpu. Alternates: `add`, then `lost`, then `advance` if it was included."""

    def __init__(self, parameters: int, *, beta: float, residual: Tensor | None = None) -> None:
        if not 0 < beta <= 1:
            raise ValueError(f"The moving average of the error feedback needs 0 < beta <= 1, not {beta}.")
        self.residual = torch.zeros(parameters) if residual is None else residual
        if self.residual.shape != (parameters,) or self.residual.dtype != torch.float32:
            raise ValueError(f"The residual must be fp32 [{parameters}].")
        self._beta = beta
        self._next: Tensor | None = None

    def add(self, gradient: Tensor) -> Tensor:
        """h = g + e: what is to be encoded in place of the pseudo-gradient. Both fp32 [P] on the cpu."""
        return gradient + self.residual

    def lost(self, wanted: Tensor, decoded: Tensor) -> None:
        """What `add` gave, and what of it arrives: kept until it is known whether it was included."""
        self._next = torch.lerp(self.residual, wanted - decoded, self._beta)

    def advance(self) -> None:
        """The contribution was included."""
        if self._next is not None:
            self.residual, self._next = self._next, None

    def keep(self) -> None:
        """It was not: all of it is in the local parameters still, and the residual stays as it is."""
        self._next = None

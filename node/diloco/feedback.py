"""Error feedback: what encoding lost of one vector is added to the next one of the same sender.

A member feeds back the error of its contributions, a reducer that of its means. With the pseudo-gradient or the mean g,
the residual e (zero at first), and Q(h) for what arrives of an encoded vector h:

    h = d e + g                        d: decay
    e' = b e + (1 - b) (h - Q(h))      b: err_beta

    classic       d = 1, b = 0         everything arrives in the end
    SparseLoCo    d = 0.95, b = 0      old errors are forgotten (arXiv 2508.15706)
    LoCo          d = 1, b = 0.8       e is stored in 8 bits, and is set to zero every T rounds (arXiv 2407.04480)

LoCo's b is that of its authors' implementation, the weight of the old average. A moving average repays each error over
about 1 / (1 - b) rounds. It suits codecs that send every element with a small error, and not those that leave most
elements out: of these it repays only the share 1 - b.

The sign is that of the pseudo-gradient: what was decoded too short is added. Vectors are fp32 [P] on the cpu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from node.diloco.aggregate import square_norm
from node.diloco.codec import Int8

FEEDBACK_RATIO = 0.5
"""A reducer adds at most this share of a mean's norm. So the norm of what it sends has a bound that all nodes know."""
SAMPLE = 2**20


@dataclass(frozen=True, slots=True)
class FeedbackRule:
    """How a residual changes from one contribution to the next. Raises ValueError for numbers out of range."""

    decay: float = 1.0
    """d, above 0 and at most 1."""
    err_beta: float = 0.0
    """b, from 0 to below 1."""
    is_8bit: bool = False
    """Whether the residual is stored with the codec int8, about one byte an element, instead of fp32."""
    reset_rounds: int = 0
    """T; 0 means that the residual is never reset."""

    @property
    def bytes_per_parameter(self) -> float:
        """Size of a stored residual."""
        return Int8().encoded_bytes(SAMPLE) / SAMPLE if self.is_8bit else 4.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1 or not 0 <= self.err_beta < 1 or self.reset_rounds < 0:
            raise ValueError(
                f"Error feedback needs 0 < decay <= 1, 0 <= err_beta < 1 and reset_rounds >= 0, not {self.decay}, "
                f"{self.err_beta} and {self.reset_rounds}."
            )


CLASSIC = FeedbackRule()
LOCO = FeedbackRule(err_beta=0.8, is_8bit=True, reset_rounds=128)


class ErrorFeedback:
    """One node's residual. For each contribution call `add`, then `record_error`, then `advance` or `discard`."""

    def __init__(self, parameters: int, rule: FeedbackRule, stored: Tensor | None = None) -> None:
        """`stored` is an earlier `stored` of the same rule. Raises ValueError if it does not fit."""
        self._rule, self.parameters, self._codec = rule, parameters, Int8()
        self.stored = self._pack(torch.zeros(parameters)) if stored is None else stored
        """The residual: fp32 [P], or as the bytes of int8, uint8 [B]."""
        self._check()
        self._next: Tensor | None = None

    @property
    def residual(self) -> Tensor:
        """e, fp32 [P] on the cpu; a copy only if it is stored in 8 bits."""
        if not self._rule.is_8bit:
            return self.stored
        return self._codec.decode(self.stored.numpy().data, self.parameters)

    def add(self, gradient: Tensor, most_ratio: float = math.inf) -> Tensor:
        """h: the vector to encode in place of g. A new fp32 [P] on the cpu.

        If the residual is longer than `most_ratio` times g, only a part of this length is added; the rest is lost.
        """
        scale, residual = self._rule.decay, self.residual
        if most_ratio < math.inf:
            longest = most_ratio * math.sqrt(square_norm(gradient))
            length = scale * math.sqrt(square_norm(residual))
            scale *= min(1.0, longest / length) if length else 1.0
        return torch.add(gradient, residual, alpha=scale)

    def record_error(self, wanted: Tensor, decoded: Tensor) -> None:
        """Store the next residual. `wanted` is the result of `add` and is overwritten; `decoded` is Q(h)."""
        error = wanted.sub_(decoded)
        if self._rule.err_beta:
            error = error.mul_(1 - self._rule.err_beta).add_(self.residual * self._rule.err_beta)
        self._next = self._pack(error)

    def advance(self, number: int) -> None:
        """Keep the new residual, because the round included the contribution. `number` counts this vector's rounds."""
        if self._next is not None:
            self.stored, self._next = self._next, None
        if self._rule.reset_rounds and (number + 1) % self._rule.reset_rounds == 0:
            self.stored = self._pack(torch.zeros(self.parameters))

    def discard(self) -> None:
        """Discard the new residual. The local parameters still hold all of the contribution, which was excluded."""
        self._next = None

    def _pack(self, residual: Tensor) -> Tensor:
        if not self._rule.is_8bit:
            return residual
        return torch.from_numpy(np.frombuffer(bytearray(self._codec.encode(residual)), np.uint8))

    def _check(self) -> None:
        if not self._rule.is_8bit:
            fits = self.stored.shape == (self.parameters,) and self.stored.dtype == torch.float32
        else:
            fits = self.stored.shape == (self._codec.encoded_bytes(self.parameters),)
            fits = fits and self.stored.dtype == torch.uint8
        if not fits:
            raise ValueError(f"The residual does not fit {self.parameters} parameters with {self._rule}.")

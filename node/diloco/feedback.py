"""Error feedback: what encoding lost of one vector is added to the next one of the same sender.

A member feeds back the error of its contributions, a reducer that of its means. With the pseudo-gradient or the mean g,
the residual e (zero at first), and Q(h) for what arrives of an encoded vector h:

    h = d e + g                        d: decay
    e' = b e + (1 - b) (h - Q(h))      b: err_beta

    classic       d = 1, b = 0         everything arrives in the end
    SparseLoCo    d = 0.95, b = 0      old errors are forgotten (arXiv 2508.15706)
    LoCo          d = 1, b = 0.8       e is stored in 8 bits, and is set to zero every T rounds (arXiv 2407.04480)

LoCo's b is that of its authors' implementation, the weight of the old average. With d = 1, the sum of all that arrives
is the sum of all g minus e / (1 - b). So LoCo repays an error within about 1 / (1 - b) rounds, and a reset loses
e / (1 - b). That suits codecs that send every element with a small error. The residual of a codec that leaves most
elements out grows for many rounds.

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

MOST_RESIDUAL_RATIO = {"fp32": 0.0, "fp16": 1e-3, "int8": 0.04, "int4": 0.4, "e3m0": 0.3}
"""A reducer adds at most this share of the norm of a mean, by the codec of the mean. So what it sends has a bound that
all nodes know. Honest residuals are shorter: with `classic` 2e-4, 0.007, 0.14 and 0.20 of the norm of Gaussian vectors,
and for int8 0.02 and int4 0.3 of that of their cubes."""
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

    def add(self, gradient: Tensor, stored: Tensor | None, most_ratio: float = math.inf) -> Tensor:
        """h: the vector to encode in place of g, from a stored residual; None means zero. A new fp32 [P].

        If the residual is longer than `most_ratio` times g, only a part of this length is added; the rest is lost.
        """
        if stored is None:
            return gradient.clone()
        residual, scale = self.unpack(stored, gradient.numel()), self.decay
        if most_ratio < math.inf:
            longest = most_ratio * math.sqrt(square_norm(gradient))
            length = scale * math.sqrt(square_norm(residual))
            scale *= min(1.0, longest / length) if length else 1.0
        return torch.add(gradient, residual, alpha=scale)

    def residual_after(self, wanted: Tensor, decoded: Tensor, stored: Tensor | None) -> Tensor:
        """e', as it is stored. `wanted` is the result of `add` and is overwritten; `decoded` is Q(h)."""
        error = wanted.sub_(decoded)
        if self.err_beta:
            error.mul_(1 - self.err_beta)
            if stored is not None:
                error.add_(self.unpack(stored, error.numel()) * self.err_beta)
        return self.pack(error)

    def is_reset_after(self, number: int) -> bool:
        """Whether the residual is set to zero after the round with this number. `number` counts the vector's rounds."""
        return bool(self.reset_rounds) and (number + 1) % self.reset_rounds == 0

    def pack(self, residual: Tensor) -> Tensor:
        """The residual as it is stored: fp32 [P], or as the bytes of int8, uint8 [B]."""
        if not self.is_8bit:
            return residual
        return torch.from_numpy(np.frombuffer(bytearray(Int8().encode(residual)), np.uint8))

    def unpack(self, stored: Tensor, parameters: int) -> Tensor:
        """e, fp32 [P] on the cpu; a copy only if it is stored in 8 bits."""
        return Int8().decode(stored.numpy().data, parameters) if self.is_8bit else stored

    def fits(self, stored: Tensor, parameters: int) -> bool:
        """Whether `stored` can be the residual of a vector of this size."""
        if not self.is_8bit:
            return stored.shape == (parameters,) and stored.dtype == torch.float32
        return stored.shape == (Int8().encoded_bytes(parameters),) and stored.dtype == torch.uint8

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1 or not 0 <= self.err_beta < 1 or self.reset_rounds < 0:
            raise ValueError(
                f"Error feedback needs 0 < decay <= 1, 0 <= err_beta < 1 and reset_rounds >= 0, not {self.decay}, "
                f"{self.err_beta} and {self.reset_rounds}."
            )


CLASSIC = FeedbackRule()
LOCO = FeedbackRule(err_beta=0.8, is_8bit=True, reset_rounds=512)


class ErrorFeedback:
    """One member's residual. For each contribution call `add`, then `record_error`, then `round_over`."""

    def __init__(self, parameters: int, rule: FeedbackRule, stored: Tensor | None = None) -> None:
        """`stored` is an earlier `stored` of the same rule. Raises ValueError if it does not fit."""
        self._rule, self._parameters = rule, parameters
        self.stored = self._zero() if stored is None else stored
        """The residual: fp32 [P], or as the bytes of int8, uint8 [B]."""
        if not rule.fits(self.stored, parameters):
            raise ValueError(f"The residual does not fit {parameters} parameters with {rule}.")
        self._next: Tensor | None = None

    @property
    def residual(self) -> Tensor:
        """e, fp32 [P] on the cpu."""
        return self._rule.unpack(self.stored, self._parameters)

    def add(self, gradient: Tensor) -> Tensor:
        """h: the vector to encode in place of the pseudo-gradient g. A new fp32 [P] on the cpu."""
        return self._rule.add(gradient, self.stored)

    def record_error(self, wanted: Tensor, decoded: Tensor) -> None:
        """Compute the next residual. `wanted` is the result of `add` and is overwritten; `decoded` is Q(h)."""
        self._next = self._rule.residual_after(wanted, decoded, self.stored)

    def round_over(self, number: int, *, included: bool) -> None:
        """Keep the new residual if the round included the contribution. `number` counts this vector's rounds.

        Otherwise discard it: the local parameters still hold all of the contribution.
        """
        if included and self._next is not None:
            self.stored = self._next
        self._next = None
        if self._rule.is_reset_after(number):
            self.stored = self._zero()

    def forget(self) -> None:
        """Set the residual to zero."""
        self.stored, self._next = self._zero(), None

    def _zero(self) -> Tensor:
        return self._rule.pack(torch.zeros(self._parameters))

"""From a pseudo-gradient to what is sent of it: encoded, with error feedback where the run has it. Knows no round."""

from __future__ import annotations

from torch import Tensor

from node.diloco.feedback import ErrorFeedback
from node.manifest import SyncConfig
from node.swarm.reduce import Grid

RESIDUAL = "feedback_residual"
"""Its name among a checkpoint's tensors."""


class Outgoing:
    """One node's. Alternates: `encode`, then `landed` once the round is over."""

    def __init__(self, grid: Grid, sync: SyncConfig, parameters: int, saved: dict[str, Tensor]) -> None:
        self._grid = grid
        self._feedback: ErrorFeedback | None = None
        if sync.has_feedback:
            self._feedback = ErrorFeedback(parameters, beta=sync.feedback_beta, residual=saved.get(RESIDUAL))

    def encode(self, gradient: Tensor) -> tuple[list[bytes], float]:
        """The chunks of a pseudo-gradient, fp32 [P], and the L2 norm of what they decode to. ValueError: no numbers."""
        wanted = self._feedback.add(gradient) if self._feedback is not None else gradient
        chunks = [self._grid.codec.encode(wanted[start:end]) for start, end in self._grid.bounds]
        if self._feedback is not None:
            self._feedback.lost(wanted, self._grid.decode(chunks))
        return chunks, self._grid.norm(chunks)

    def landed(self, included: bool) -> None:
        """The round is over, with this contribution or without."""
        if self._feedback is not None:
            self._feedback.advance() if included else self._feedback.keep()

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {RESIDUAL: self._feedback.residual} if self._feedback is not None else {}

"""From a pseudo-gradient to what is sent of it: encoded, with error feedback where the run has it. Knows no round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from node.diloco.feedback import ErrorFeedback
from node.diloco.fragments import elements
from node.manifest import SyncConfig
from node.swarm.reduce import Grid

RESIDUAL = "feedback_residual"
"""A fragment's, with its number, among a checkpoint's tensors."""


class Outgoing:
    """One node's. For each fragment alternates: `encode`, then `landed` once the round is over."""

    def __init__(self, grids: Sequence[Grid], sync: SyncConfig, saved: Mapping[str, Tensor]) -> None:
        self._grids = grids
        self._feedback: list[ErrorFeedback] = []
        if sync.has_feedback:
            self._feedback = [
                ErrorFeedback(
                    elements(grid.ranges), beta=sync.feedback_beta, residual=saved.get(f"{RESIDUAL}.{fragment}")
                )
                for fragment, grid in enumerate(grids)
            ]

    def encode(self, fragment: int, gradient: Tensor) -> tuple[list[bytes], float]:
        """The chunks of a pseudo-gradient, fp32 [P_f], and the L2 norm of what they decode to. ValueError: NaN."""
        grid = self._grids[fragment]
        wanted = self._feedback[fragment].add(gradient) if self._feedback else gradient
        chunks = [grid.codec.encode(wanted[start:end]) for start, end in grid.bounds]
        arrives = grid.decode(chunks)
        if self._feedback:
            self._feedback[fragment].lost(wanted, arrives)
        return chunks, grid.length(arrives)

    def landed(self, fragment: int, included: bool) -> None:
        """The fragment's round is over, with this contribution or without."""
        if self._feedback:
            self._feedback[fragment].advance() if included else self._feedback[fragment].keep()

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {f"{RESIDUAL}.{i}": feedback.residual for i, feedback in enumerate(self._feedback)}

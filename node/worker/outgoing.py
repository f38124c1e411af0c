"""From local parameters to what is sent of them: encoded pseudo-gradients, with error feedback where the run has it.

The work is done on a thread beside the training. Knows no round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from node.diloco.feedback import ErrorFeedback
from node.diloco.fragments import elements, take
from node.diloco.outer import pseudo_gradient
from node.manifest import SyncConfig
from node.swarm.reduce import Grid

RESIDUAL = "feedback_residual"
"""A fragment's, with its number, among a checkpoint's tensors."""

LARGEST = 1e30
"""Of parameters that still train; what they differ by can be encoded."""


def are_numbers(sent: Tensor) -> bool:
    """Whether local parameters, fp32 [P_f], can be sent; one pass over them."""
    return not sent.numel() or bool(torch.stack(torch.aminmax(sent)).abs().max() <= LARGEST)


class Outgoing:
    """One node's. For each fragment alternates: `begin`, then `landed` once the round is over."""

    def __init__(self, grids: Sequence[Grid], sync: SyncConfig, saved: Mapping[str, Tensor]) -> None:
        self._grids = grids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._running: Future[None] | None = None
        self.seconds = 0.0
        """That the newest encoding took."""
        self._feedback: list[ErrorFeedback] = []
        if sync.has_feedback:
            self._feedback = [
                ErrorFeedback(
                    elements(grid.ranges), beta=sync.feedback_beta, residual=saved.get(f"{RESIDUAL}.{fragment}")
                )
                for fragment, grid in enumerate(grids)
            ]

    def begin(
        self, fragment: int, anchor: Tensor, sent: Tensor, then: Callable[[Sequence[bytes], float], None]
    ) -> None:
        """Encode the pseudo-gradient, anchor - sent, fp32 [P_f], beside the training.

        `anchor`: all of it, [P] on the cpu; `sent` on the device that trains.

        `then` is called on the thread that encodes, with the chunks and the L2 norm of what they decode to.
        """
        self._running = self._thread.submit(self._encode, fragment, anchor, sent, then, torch.get_num_threads())

    def _encode(
        self,
        fragment: int,
        anchor: Tensor,
        sent: Tensor,
        then: Callable[[Sequence[bytes], float], None],
        threads: int,
    ) -> None:
        began_s = time.monotonic()
        torch.set_num_threads(threads)  # Of this thread; the trainer's may have changed.
        grid = self._grids[fragment]
        before = take(anchor, grid.ranges)
        if self._feedback:
            wanted = self._feedback[fragment].add(pseudo_gradient(before, sent.cpu()))
            chunks = [grid.codec.encode(wanted[start:end]) for start, end in grid.bounds]
        else:  # Where the parameters are, a chunk at a time: only what is encoded goes to the host.
            chunks = [
                grid.codec.encode(pseudo_gradient(before[start:end].to(sent.device), sent[start:end]))
                for start, end in grid.bounds
            ]
        arrives = grid.decode(chunks)
        if self._feedback:
            self._feedback[fragment].lost(wanted, arrives)
        norm = grid.length(arrives)
        self.seconds = time.monotonic() - began_s
        then(chunks, norm)

    def check(self) -> None:
        """Raises what the encoding raised, if it has ended."""
        if self._running is not None and self._running.done():
            running, self._running = self._running, None
            running.result()

    def wait(self) -> None:
        """Until nothing is being encoded."""
        if self._running is not None:
            wait((self._running,))

    def landed(self, fragment: int, included: bool) -> None:
        """The fragment's round is over, with this contribution or without."""
        self.wait()  # The others may have gone on without this node.
        if self._feedback:
            self._feedback[fragment].advance() if included else self._feedback[fragment].keep()

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {f"{RESIDUAL}.{i}": feedback.residual for i, feedback in enumerate(self._feedback)}

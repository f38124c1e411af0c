"""Encodes pseudo-gradients on a background thread, with error feedback if the run uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from node.config.manifest import SyncConfig
from node.diloco.feedback import ErrorFeedback
from node.diloco.fragments import elements, take
from node.diloco.outer import pseudo_gradient
from node.swarm.allreduce.reducer import ChunkLayout
from node.training.algorithm import feedback_of

RESIDUAL = "feedback_residual"
"""Prefix of a residual's name in a checkpoint. The number of the fragment follows."""
MAX_PARAMETER = 1e13
"""Largest parameter that is encoded. The norm of 1e11 of them is below the largest one of a join."""

OnEncoded = Callable[[Sequence[bytes], float], None]
"""Receives the encoded chunks and the L2 norm of the decoded vector."""


def is_encodable(parameters: Tensor) -> bool:
    """Whether each parameter, fp32 [P_f], is a number that is small enough to be encoded. Takes one pass."""
    return not parameters.numel() or bool(torch.stack(torch.aminmax(parameters)).abs().max() <= MAX_PARAMETER)


def _encode_chunks(layout: ChunkLayout, old: Tensor, local: Tensor) -> list[bytes]:
    """Encode old - local on the device of `local` chunk by chunk, so that only encoded data moves to the host.

    A device that `can_encode` gives the same bits as the host.
    """
    return [
        layout.codec.encode(pseudo_gradient(old[start:end].to(local.device), local[start:end]))
        for start, end in layout.bounds
    ]


class Encoder:
    """Encodes contributions. For each fragment, call `begin`, then `round_over` when its round is committed."""

    def __init__(self, layouts: Sequence[ChunkLayout], sync: SyncConfig, saved: Mapping[str, Tensor]) -> None:
        """`saved` holds the result of `tensors`."""
        self._layouts = layouts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._running: Future[None] | None = None
        self.last_encoding_s = 0.0
        self._feedback: list[ErrorFeedback] = []
        if (rule := feedback_of(sync)) is not None:
            self._feedback = [
                ErrorFeedback(elements(layout.ranges), rule, saved.get(f"{RESIDUAL}.{fragment}"))
                for fragment, layout in enumerate(layouts)
            ]

    def begin(self, fragment: int, anchor: Tensor, local: Tensor, on_encoded: OnEncoded) -> None:
        """Encode anchor - local on the background thread, which then calls `on_encoded`.

        `anchor` has all parameters, fp32 [P] on the cpu. `local` is the fragment, fp32 [P_f] on the training device.
        """
        self._running = self._thread.submit(self._encode, fragment, anchor, local, on_encoded, torch.get_num_threads())

    def _encode(self, fragment: int, anchor: Tensor, local: Tensor, on_encoded: OnEncoded, threads: int) -> None:
        began_at = time.monotonic()
        torch.set_num_threads(threads)  # torch keeps the number per thread; the trainer's may have changed.
        layout = self._layouts[fragment]
        old = take(anchor, layout.ranges)
        if self._feedback:
            target = self._feedback[fragment].add(pseudo_gradient(old, local.cpu()))
            chunks = [layout.codec.encode(target[start:end]) for start, end in layout.bounds]
        else:
            try:
                chunks = _encode_chunks(layout, old, local)
            except torch.OutOfMemoryError:  # Another program may have taken the device's memory.
                chunks = _encode_chunks(layout, old, local.cpu())
        if self._feedback:
            decoded, norm = layout.decode_and_measure(chunks)
            self._feedback[fragment].record_error(target, decoded)
        else:
            norm = layout.norm(chunks)
        self.last_encoding_s = time.monotonic() - began_at
        on_encoded(chunks, norm)

    def check(self) -> None:
        """Raise the error of an encoding that has failed."""
        if self._running is not None and self._running.done():
            running, self._running = self._running, None
            running.result()

    def wait(self) -> None:
        """Wait until nothing is being encoded."""
        if self._running is not None:
            wait((self._running,))

    def round_over(self, fragment: int, round: int, included: bool) -> None:
        """Keep the new residual if the committed round `included` this node's contribution, else discard it."""
        self.wait()  # The others may commit the round without this node while this node still encodes.
        if self._feedback:
            self._feedback[fragment].round_over(round // len(self._feedback), included=included)

    def forget(self, fragment: int) -> None:
        """Forget the residual: an earlier process has sent it, and the newest one was lost with that process."""
        if self._feedback:
            self._feedback[fragment].forget()

    def tensors(self) -> dict[str, Tensor]:
        """The residuals by name, for a checkpoint."""
        return {f"{RESIDUAL}.{i}": feedback.stored for i, feedback in enumerate(self._feedback)}

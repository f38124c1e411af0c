"""Prepares batches in advance on a thread, so that the device does not wait for text.

While a source does not answer, training continues from the buffer and the thread retries with growing pauses. Batches
that were prepared and not taken are prepared again after a restart, so each batch is used exactly once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from node.errors import Unreachable
from node.training.packing import RowPacker

BUFFER_BYTES = 64 * 1024 * 1024
MOST_BATCHES = 64
LEAST_BATCHES = 4
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
WAIT_S = 0.5
CLOSE_S = 2.0

logger = logging.getLogger(__name__)

Item = tuple[Tensor, dict[str, Any]] | Exception
"""A batch and the state after it, or the error that ended the thread."""


class Prefetcher:
    """A reader of packed text, which buffers batches. The state None is the text's beginning."""

    def __init__(
        self,
        make: Callable[[dict[str, Any] | None, Sequence[float]], RowPacker],
        batch_size: int,
        sequence_length: int,
        state: dict[str, Any] | None = None,
        weights: Sequence[float] = (),
    ) -> None:
        """`make(state, weights)` opens the source at a state, with a mix of its parts."""
        self._make, self._shape, self._weights = make, (batch_size, sequence_length), tuple(weights)
        batch_bytes = 8 * batch_size * (sequence_length + 1)
        self._depth = max(LEAST_BATCHES, min(MOST_BATCHES, BUFFER_BYTES // batch_bytes))
        self.state = state or {}
        """The state after the newest batch that was taken; empty before the first one."""
        self.problem = ""
        """A sentence that says why no new text arrives; empty if text arrives."""
        self._begin()

    def _begin(self) -> None:
        """Start a thread that prepares the batches after `state`."""
        self._ready: queue.Queue[Item] = queue.Queue(self._depth)
        self._stop = threading.Event()
        args = (self.state or None, self._weights, self._ready, self._stop)
        self._thread = threading.Thread(target=self._fill, args=args, name="data", daemon=True)
        self._thread.start()

    def start_round(self, round_: int) -> None:
        """Do nothing, as the text continues across rounds."""

    def use_weights(self, weights: Sequence[float]) -> None:
        """Mix the sources by these weights from the next batch on. Prepared batches are prepared again."""
        if tuple(weights) != self._weights:
            self.close()
            self._weights = tuple(weights)
            self._begin()

    def next_batch(self) -> Tensor | None:
        """Return the next batch, int64 cpu [B, T + 1], or None if there is none within WAIT_S.

        Raises the exception with which the source failed.
        """
        try:
            item = self._ready.get(timeout=WAIT_S)
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            self._ready.put(item)
            raise item
        batch, self.state = item
        return batch

    def close(self) -> None:
        """Stop the thread. A thread that still waits for a source after CLOSE_S ends by itself later."""
        self._stop.set()
        self._thread.join(CLOSE_S)

    def _fill(
        self,
        state: dict[str, Any] | None,
        weights: Sequence[float],
        ready: queue.Queue[Item],
        stop: threading.Event,
    ) -> None:
        pause_s = FIRST_PAUSE_S
        source: RowPacker | None = None
        while not stop.is_set():
            try:
                source = source or self._make(state, weights)
                item = source.next_batch(*self._shape), source.state
            except Unreachable as exc:
                self.problem = f"The text cannot be reached ({exc})."
                logger.warning(
                    "%s Training continues from the buffer. The next try is in %.0f s.", self.problem, pause_s
                )
                stop.wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                continue
            except Exception as exc:  # noqa: BLE001 - raised on the thread that takes batches
                _put(item=exc, ready=ready, stop=stop)
                return
            pause_s, self.problem = FIRST_PAUSE_S, ""
            _put(item=item, ready=ready, stop=stop)


def _put(item: Item, ready: queue.Queue[Item], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            ready.put(item, timeout=WAIT_S)
            return
        except queue.Full:
            continue

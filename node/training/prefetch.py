"""Batches made ahead of need, on a thread of its own, so that the device does not wait. Knows no source and no model.

While a source does not answer, training goes on from what is ready; the source is asked again after longer and longer
pauses. What was made and not taken is made again after a restart, so nothing is skipped and nothing comes twice.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from node.errors import Unreachable

BUFFER_BYTES = 64 * 1024 * 1024
MOST_BATCHES = 64
LEAST_BATCHES = 4
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
WAIT_S = 0.5
CLOSE_S = 2.0

logger = logging.getLogger(__name__)


class Rows(Protocol):
    @property
    def state(self) -> dict[str, Any]: ...

    # Asked again after Unreachable, it goes on with what it had.
    def next_batch(self, batch_size: int, sequence_length: int) -> Tensor: ...


class Prefetcher:
    """`make(state)` gives the rows from a place on."""

    def __init__(
        self,
        make: Callable[[dict[str, Any] | None], Rows],
        batch_size: int,
        sequence_length: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._make, self._shape = make, (batch_size, sequence_length)
        batch_bytes = 8 * batch_size * (sequence_length + 1)
        depth = max(LEAST_BATCHES, min(MOST_BATCHES, BUFFER_BYTES // batch_bytes))
        self._ready: queue.Queue[tuple[Tensor, dict[str, Any]] | Exception] = queue.Queue(depth)
        self._stop = threading.Event()
        self.state = state
        """After what has been taken; None before the first batch of all."""
        self.problem = ""
        """Why nothing new comes just now; one sentence, or empty."""
        self._thread = threading.Thread(target=self._fill, args=(state,), name="data", daemon=True)
        self._thread.start()

    def take(self) -> Tensor | None:
        """The next batch, int64 cpu [B, T + 1]; None where there is none yet, after a moment.

        Raises what making it raised.
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
        """Where the thread waits for a source it is not waited for longer than CLOSE_S; it ends by itself, then."""
        self._stop.set()
        self._thread.join(CLOSE_S)

    def _fill(self, state: dict[str, Any] | None) -> None:
        pause_s = FIRST_PAUSE_S
        rows: Rows | None = None
        while not self._stop.is_set():
            try:
                rows = rows or self._make(state)
                batch = rows.next_batch(*self._shape)
                made, pause_s, self.problem = (batch, rows.state), FIRST_PAUSE_S, ""
            except Unreachable as exc:
                self.problem = f"The text does not come ({exc})."
                logger.warning("%s Training goes on with what is ready; next try in %.0f s.", self.problem, pause_s)
                self._stop.wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                continue
            except Exception as exc:  # noqa: BLE001 - the thread that takes is the one to raise it
                self._put(exc)
                return
            self._put(made)

    def _put(self, item: tuple[Tensor, dict[str, Any]] | Exception) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=WAIT_S)
                return
            except queue.Full:
                continue

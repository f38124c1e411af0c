"""Transfers that share lines fairly (max-min fairness), in virtual time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass

from tests.simulation.virtual_loop import VirtualLoop

Side = tuple[str, str]
"""One direction of a node's line: a peer id, and `up` or `down`."""
LEFT_BYTES = 1e-3
"""A transfer with less than this to send is complete. Rates are floating-point numbers."""


@dataclass(eq=False, slots=True)
class Transfer:
    """One message that is being transferred."""

    left_bytes: float
    sides: tuple[Side, ...]
    """The limited sides of lines that it crosses."""
    on_done: Callable[[], None]
    bytes_s: float = 0.0


class Bandwidth:
    """All transfers of a network."""

    def __init__(self, loop: VirtualLoop, context: Context) -> None:
        """`context` is the context of the loop's callbacks, which belong to no node."""
        self._loop, self._context = loop, context
        self._limits: dict[Side, float] = {}
        self._transfers: dict[Transfer, None] = {}
        """The transfers, in the order of their start."""
        self._updated_at_s = 0.0
        self._is_due = False
        self._version = 0

    def start(self, size_bytes: int, limits: Mapping[Side, float], on_done: Callable[[], None]) -> Transfer:
        """Begin a transfer. `limits` has the bytes/s of each side of a line that it crosses."""
        transfer = Transfer(size_bytes, tuple(limits), on_done)
        self._limits.update(limits)
        self._transfers[transfer] = None
        self._update_soon()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer early, if it is not over."""
        if transfer in self._transfers:
            del self._transfers[transfer]
            self._update_soon()

    def _update_soon(self) -> None:
        """Schedule one update for all transfers that start or end at this moment."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._update, context=self._context)

    def _update(self, version: int | None = None) -> None:
        """Complete the transfers that have arrived, and divide the lines among the others."""
        if version is not None and version != self._version:
            return
        self._is_due = False
        now_s = self._loop.time()
        elapsed_s, self._updated_at_s = now_s - self._updated_at_s, now_s
        for transfer in list(self._transfers):
            transfer.left_bytes -= elapsed_s * transfer.bytes_s
            if transfer.left_bytes < LEFT_BYTES:
                del self._transfers[transfer]
                transfer.on_done()
        self._divide()
        self._version += 1
        if self._transfers:
            next_s = min(transfer.left_bytes / transfer.bytes_s for transfer in self._transfers)
            self._loop.call_later(next_s, self._update, self._version, context=self._context)

    def _divide(self) -> None:
        """Progressive filling: the most crowded side fixes the rate of its transfers first (Bertsekas and Gallager)."""
        by_side: defaultdict[Side, dict[Transfer, None]] = defaultdict(dict)
        for transfer in self._transfers:
            for side in transfer.sides:
                by_side[side][transfer] = None
        left = {side: self._limits[side] for side in by_side}
        while by_side:
            tightest = min(by_side, key=lambda side: left[side] / len(by_side[side]))
            bytes_s = left[tightest] / len(by_side[tightest])
            for transfer in by_side.pop(tightest):
                transfer.bytes_s = bytes_s
                for side in transfer.sides:
                    if side in by_side:
                        left[side] = max(0.0, left[side] - bytes_s)
                        del by_side[side][transfer]
                        if not by_side[side]:
                            del by_side[side]

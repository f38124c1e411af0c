"""The prefetcher keeps the order of batches over restarts and failures of its source."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from node.errors import MachineError, Unreachable
from node.training import prefetch
from node.training.packing import RowPacker
from node.training.prefetch import Prefetcher

B, T = 2, 4


class CountingSource:
    """A source whose batch k is filled with k. `failures` maps a batch to errors, each of which is raised once."""

    def __init__(self, state: dict[str, Any] | None, failures: dict[int, list[Exception]]) -> None:
        self._next, self._failures = (state or {"next": 0})["next"], failures

    @property
    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def next_batch(self, batch_size: int, sequence_length: int) -> Tensor:
        if self._failures.get(self._next):
            raise self._failures[self._next].pop(0)
        self._next += 1
        return torch.full((batch_size, sequence_length + 1), self._next - 1)


def prefetcher(failures: dict[int, list[Exception]] | None = None, state: dict[str, Any] | None = None) -> Prefetcher:
    return Prefetcher(lambda state, _: cast(RowPacker, CountingSource(state, failures or {})), B, T, state)


def take(source: Prefetcher, count: int) -> list[int]:
    """Wait for the next `count` batches, and return their numbers."""
    numbers: list[int] = []
    deadline = time.monotonic() + 20
    while len(numbers) < count:
        assert time.monotonic() < deadline
        if (batch := source.next_batch()) is not None:
            numbers.append(int(batch[0, 0]))
    return numbers


def test_a_new_prefetcher_continues_in_order_after_the_batches_that_were_taken() -> None:
    first = prefetcher()
    assert first.state == {}
    assert take(first, 5) == [0, 1, 2, 3, 4]
    deadline = time.monotonic() + 5
    while first._ready.qsize() < prefetch.LEAST_BATCHES and time.monotonic() < deadline:
        time.sleep(0.01)
    first.close()
    assert not first._thread.is_alive()
    assert first.state == {"next": 5}, "prepared batches do not count"
    second = prefetcher(state=first.state)
    assert take(second, 2) == [5, 6]
    second.close()


def test_prefetcher_serves_its_buffer_while_the_source_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "FIRST_PAUSE_S", 0.5)
    source = prefetcher({6: [Unreachable("down"), Unreachable("down")]})
    began = time.monotonic()
    while not source.problem:
        assert time.monotonic() < began + 5
        time.sleep(0.01)
    assert "down" in source.problem
    ready = [source.next_batch() for _ in range(6)]
    assert [None if batch is None else int(batch[0, 0]) for batch in ready] == [0, 1, 2, 3, 4, 5], "they were ready"
    assert source.next_batch() is None, "it does not block for long"
    assert take(source, 1) == [6], "no batch is skipped or repeated"
    assert time.monotonic() - began > 0.5 + 1.0 - 0.2, "the second pause is twice the first"
    assert take(source, 3) == [7, 8, 9]
    assert source.problem == ""
    source.close()


def test_prefetcher_raises_a_permanent_error_at_every_call() -> None:
    source = prefetcher({2: [MachineError("gone: bring it back.")]})
    assert take(source, 2) == [0, 1]
    for _ in range(2):
        with pytest.raises(MachineError, match="gone"):
            source.next_batch()
    source.close()

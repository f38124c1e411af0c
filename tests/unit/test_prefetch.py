"""Batches made ahead: in order, from the place that was taken, through failures of the source, and to the end."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from node.errors import MachineError, Unreachable
from node.training import prefetch
from node.training.prefetch import Prefetcher

B, T = 2, 4


class Counting:
    """Batch k is full of k. `failures`: errors to raise, by batch; each is raised once."""

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
    return Prefetcher(lambda state: Counting(state, failures or {}), B, T, state)


def take(source: Prefetcher) -> int:
    """The next batch's number, however long it takes."""
    deadline = time.monotonic() + 20
    while (batch := source.take()) is None:
        assert time.monotonic() < deadline
    return int(batch[0, 0])


def numbers(source: Prefetcher, count: int) -> list[int]:
    return [take(source) for _ in range(count)]


def test_batches_come_in_order_and_a_new_one_goes_on_behind_what_was_taken() -> None:
    first = prefetcher()
    assert numbers(first, 5) == [0, 1, 2, 3, 4]
    deadline = time.monotonic() + 5
    while first._ready.qsize() < prefetch.LEAST_BATCHES and time.monotonic() < deadline:
        time.sleep(0.01)
    first.close()
    assert first.state == {"next": 5}, "what was made ahead does not count"
    second = prefetcher(state=first.state)
    assert numbers(second, 2) == [5, 6]
    second.close()


def test_training_goes_on_from_the_buffer_while_the_source_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "FIRST_PAUSE_S", 0.5)
    source = prefetcher({6: [Unreachable("down"), Unreachable("down")]})
    began = time.monotonic()
    while not source.problem:
        assert time.monotonic() < began + 5
        time.sleep(0.01)
    assert "down" in source.problem
    ready = [source.take() for _ in range(6)]
    assert [None if batch is None else int(batch[0, 0]) for batch in ready] == [0, 1, 2, 3, 4, 5], "they were ready"
    assert source.take() is None, "whoever waits can do something else meanwhile"
    assert take(source) == 6, "nothing is skipped, nothing comes twice"
    assert time.monotonic() - began > 0.5 + 1.0 - 0.2, "the second pause is twice the first"
    assert numbers(source, 3) == [7, 8, 9]
    assert source.problem == ""
    source.close()


def test_what_does_not_pass_is_raised_where_batches_are_taken_again_and_again() -> None:
    source = prefetcher({2: [MachineError("gone: bring it back.")]})
    assert numbers(source, 2) == [0, 1]
    for _ in range(2):
        with pytest.raises(MachineError, match="gone"):
            source.take()
    source.close()


def test_its_thread_ends_with_it() -> None:
    source = prefetcher()
    take(source)
    source.close()
    assert not source._thread.is_alive()

"""The pool of vectors: memory is reused once nobody refers to it, and never before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from node.diloco.buffers import KEPT, SMALLEST_BYTES, VectorPool
from node.diloco.outer import OuterOptimizer, genesis, outer_step

pytestmark = pytest.mark.timeout(60)

ELEMENTS = SMALLEST_BYTES // 4
NESTEROV = OuterOptimizer()


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda vector: vector[5:9],
    "numpy": lambda vector: vector.numpy()[5:9],
    "memoryview": lambda vector: vector.numpy().data[5:9],
    "detached": lambda vector: vector.detach()[5:9],
    "reshaped": lambda vector: vector.view(2, -1)[0, 5:9],
}


@pytest.mark.parametrize("view", VIEWS)
def test_memory_stays_in_use_while_any_view_of_the_vector_exists(view: str) -> None:
    pool = VectorPool()
    vector = pool.empty(ELEMENTS).fill_(3.0)
    kept = VIEWS[view](vector)
    del vector
    pool.empty(ELEMENTS).fill_(7.0)
    assert [float(value) for value in kept] == [3.0] * 4


def test_memory_of_another_size_is_not_reused() -> None:
    pool = VectorPool()
    vector = pool.empty(ELEMENTS)
    address = vector.data_ptr()
    del vector
    larger = pool.empty(ELEMENTS + 1)
    assert larger.numel() == ELEMENTS + 1
    assert pool.empty(ELEMENTS).data_ptr() == address


def test_only_the_memory_of_the_last_freed_vectors_is_kept() -> None:
    pool = VectorPool()
    many = [pool.empty(ELEMENTS) for _ in range(KEPT + 2)]
    newest = {vector.data_ptr() for vector in many[-KEPT:]}
    while many:
        del many[0]
    assert len(pool._free) == KEPT
    assert pool.empty(ELEMENTS).data_ptr() in newest


def test_small_vectors_are_not_pooled() -> None:
    pool = VectorPool()
    vector = pool.empty(ELEMENTS - 1)
    assert (vector.dtype, vector.numel(), vector.device.type) == (torch.float32, ELEMENTS - 1, "cpu")
    del vector
    assert pool._free == []


def test_vector_for_which_there_is_no_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="of memory for a vector"):
        VectorPool().empty(2**52)


def test_threads_that_create_and_free_vectors_never_share_memory() -> None:
    pool, wrong = VectorPool(), list[int]()

    def work(number: int) -> None:
        for _ in range(60):
            vector = pool.empty(ELEMENTS).fill_(number)
            if not bool((vector == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_outer_steps_leave_each_state_in_use_unchanged() -> None:
    state = genesis(torch.linspace(-1, 1, ELEMENTS))
    states, copies = [], []
    for number in range(6):
        state = outer_step(state, torch.full((ELEMENTS,), 0.1 * number), NESTEROV, lr=0.7, tokens=1)
        if number % 2:  # The others are freed.
            states.append(state)
            copies.append((state.anchor.clone(), state.momentum.clone()))
    for kept, (anchor, momentum) in zip(states, copies, strict=True):
        assert torch.equal(kept.anchor, anchor)
        assert torch.equal(kept.momentum, momentum)


def test_outer_steps_reuse_the_memory_of_states_that_are_not_in_use() -> None:
    state, addresses = genesis(torch.zeros(ELEMENTS)), set()
    for _ in range(12):
        state = outer_step(state, torch.ones(ELEMENTS), NESTEROV, lr=0.7, tokens=1)
        addresses |= {state.anchor.data_ptr(), state.momentum.data_ptr()}
    assert len(addresses) <= 2 * 2 + KEPT

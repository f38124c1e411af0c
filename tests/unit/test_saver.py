"""Checkpoints that are written beside the training: one at a time, served once they are there, errors told."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.diloco.outer import genesis
from node.errors import MachineError
from node.swarm.chain import Outer, tip_at
from node.swarm.faults import Faults
from node.training.checkpoint import Checkpoint, CheckpointStore

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.worker.saver import SETTLE_S, Calendar, Saver
    from node.worker.session import CheckpointSource

P = 100
TIP = tip_at(genesis(torch.ones(P)), "ab" * 32, None, Outer(0.7, 0.9, 10), {}, 0.0)
CHECKPOINT = Checkpoint(
    manifest_hash="ab" * 32, head=TIP.head, round=-1, tokens=0, state_digest=TIP.digest,
    leaves=tuple(leaf.hex() for leaf in TIP.leaves), anchor=TIP.state.anchor, momentum=TIP.state.momentum, local=None,
    optimizer={}, inner_step=0, text={},
)  # fmt: skip


class SlowStore(CheckpointStore):
    """A disk that takes its time, and may be full."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep=2)
        self.may_go_on = threading.Event()
        self.is_full = False

    def save(self, checkpoint: Checkpoint) -> Path:
        assert self.may_go_on.wait(10)
        if self.is_full:
            raise MachineError("the disk is full", code="disk_full")
        return super().save(checkpoint)


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    return SlowStore(tmp_path / "checkpoints")


@pytest.fixture
def source(store: SlowStore, tmp_path: Path) -> CheckpointSource:
    return CheckpointSource(store, P, tmp_path / "cache")


@pytest.fixture
def saver(store: SlowStore, source: CheckpointSource) -> Iterator[Saver]:
    yield (made := Saver(store, source, Faults()))
    store.may_go_on.set()
    store.is_full = False
    assert made.wait(10)


def test_training_goes_on_while_it_is_written_and_it_is_served_only_then(
    saver: Saver, store: SlowStore, source: CheckpointSource
) -> None:
    saver.begin(CHECKPOINT, TIP)
    saver.check()
    assert saver.is_busy and source.find() is None
    assert not saver.wait(0.01)
    store.may_go_on.set()
    assert saver.wait(10)
    assert not saver.is_busy and store.rounds() == [-1]
    snapshot = source.find()
    assert snapshot is not None and snapshot.digest == TIP.digest


def test_a_full_disk_is_told_at_the_next_look_once(saver: Saver, store: SlowStore, source: CheckpointSource) -> None:
    store.is_full = True
    store.may_go_on.set()
    saver.begin(CHECKPOINT, TIP)
    with pytest.raises(MachineError, match="disk is full"):
        saver.wait(10)
    saver.check()
    saver.begin(CHECKPOINT, TIP)
    while saver.is_busy:
        time.sleep(0.01)
    with pytest.raises(MachineError):
        saver.begin(CHECKPOINT, TIP)
    assert source.find() is None


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def calendar(clock: Clock, *, turns: int = 1) -> Calendar:
    return Calendar(0, 60.0, turns, clock)


def test_all_nodes_save_the_same_rounds_a_moment_after_they_end() -> None:
    clock = Clock()
    saves = calendar(clock)
    for round_ in (1, 2):
        saves.round_over(round_)
        assert not saves.is_wanted
    saves.round_over(3)
    assert saves.is_wanted and not saves.is_due
    clock.now_s += SETTLE_S
    assert saves.is_due
    saves.taken(3)
    assert not saves.is_wanted and not saves.is_due


def test_a_fragments_rounds_count_less() -> None:
    clock = Clock()
    saves = calendar(clock, turns=4)
    due = []
    for round_ in range(1, 32):
        saves.round_over(round_)
        if saves.is_wanted:
            due.append(round_)
            saves.taken(round_)
    assert due == [15, 31]


def test_long_rounds_and_late_starts_are_saved_in_time() -> None:
    clock = Clock()
    saves = calendar(clock)
    clock.now_s += 60
    saves.round_over(1)
    assert saves.is_wanted, "a minute has passed"
    saves = Calendar(5, 1e9, 1, clock)
    saves.round_over(8)
    assert not saves.is_wanted
    saves.round_over(9)
    assert saves.is_wanted, "four rounds have passed"

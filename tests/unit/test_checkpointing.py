"""Checkpoints are written in the background, one at a time, on the same schedule on all nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from node.diloco.outer import OuterOptimizer, genesis
from node.errors import MachineError
from node.swarm.chain.chain import OuterRule, make_tip
from node.swarm.faults import Faults
from node.training.checkpoint import Checkpoint, CheckpointStore
from node.worker.checkpointing import SETTLE_S, Checkpointer, CheckpointSchedule, CheckpointSource
from tests.unit.clocks import Clock

P = 100
TIP = make_tip(genesis(torch.ones(P)), "ab" * 32, None, OuterRule(0.7, OuterOptimizer(), 10), {}, 0.0)
CHECKPOINT = Checkpoint(
    manifest_hash="ab" * 32, head=TIP.head, round=-1, tokens=0, state_digest=TIP.digest,
    leaves=tuple(leaf.hex() for leaf in TIP.leaves), anchor=TIP.state.anchor, momentum=TIP.state.momentum,
)  # fmt: skip


class SlowStore(CheckpointStore):
    """A store on a slow disk, which may be full."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep=2)
        self.may_write = threading.Event()
        self.is_full = False

    def save(self, checkpoint: Checkpoint, check: Callable[[], None] = lambda: None) -> Path:
        assert self.may_write.wait(10)
        if self.is_full:
            raise MachineError("the disk is full", code="disk_full")
        return super().save(checkpoint, check)


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    return SlowStore(tmp_path / "checkpoints")


@pytest.fixture
def source(store: SlowStore, tmp_path: Path) -> CheckpointSource:
    return CheckpointSource(store, P, tmp_path / "cache")


@pytest.fixture
def checkpointer(store: SlowStore, source: CheckpointSource) -> Iterator[Checkpointer]:
    yield (made := Checkpointer(store, source, Faults()))
    store.may_write.set()
    store.is_full = False
    assert made.wait(10)


def test_a_checkpoint_is_served_only_after_it_is_written(
    checkpointer: Checkpointer, store: SlowStore, source: CheckpointSource
) -> None:
    checkpointer.begin(CHECKPOINT, TIP)
    checkpointer.check()
    assert checkpointer.is_busy and source.find() is None
    assert not checkpointer.wait(0.01)
    store.may_write.set()
    assert checkpointer.wait(10)
    assert not checkpointer.is_busy and store.rounds() == [-1]
    snapshot = source.find()
    assert snapshot is not None and snapshot.digest == TIP.digest


def test_a_failed_background_save_is_raised_once_at_the_next_call(
    checkpointer: Checkpointer, store: SlowStore, source: CheckpointSource
) -> None:
    store.is_full = True
    store.may_write.set()
    checkpointer.begin(CHECKPOINT, TIP)
    with pytest.raises(MachineError, match="disk is full"):
        checkpointer.wait(10)
    checkpointer.check()
    checkpointer.begin(CHECKPOINT, TIP)
    while checkpointer.is_busy:
        time.sleep(0.01)
    with pytest.raises(MachineError):
        checkpointer.begin(CHECKPOINT, TIP)
    assert source.find() is None


def test_a_cancelled_checkpoint_is_neither_written_nor_reported_nor_served(
    checkpointer: Checkpointer, store: SlowStore, source: CheckpointSource
) -> None:
    checkpointer.begin(CHECKPOINT, TIP)
    checkpointer.cancel()
    store.may_write.set()
    assert checkpointer.wait(10) and not checkpointer.check()
    assert store.rounds() == [] and source.find() is None
    checkpointer.begin(CHECKPOINT, TIP)
    assert checkpointer.wait(10)
    assert store.rounds() == [-1] and source.find() is not None


def test_a_checkpoint_is_due_shortly_after_its_round_ends() -> None:
    clock = Clock()
    schedule = CheckpointSchedule(0, 60.0, 1, clock)
    schedule.round_over(3)
    assert schedule.is_wanted and not schedule.is_due(0.0)
    clock.now_s += SETTLE_S
    assert schedule.is_due(0.0)
    schedule.taken(3)
    assert not schedule.is_wanted and not schedule.is_due(0.0)


def test_a_checkpoint_is_due_within_a_long_round() -> None:
    clock = Clock()
    schedule = CheckpointSchedule(0, 60.0, 1, clock)
    clock.now_s += 59
    assert not schedule.is_due(0.0)
    clock.now_s += 1
    assert schedule.is_due(3.0) and not schedule.is_due(4.0), "4 s of writing are more than a twentieth of 60 s"
    schedule.taken(0)
    assert not schedule.is_due(0.0)


@pytest.mark.parametrize(("fragments", "expected"), [(1, [3, 7, 11, 15, 19, 23, 27, 31]), (4, [15, 31])])
def test_checkpoint_schedule_chooses_the_same_rounds_on_all_nodes(fragments: int, expected: list[int]) -> None:
    schedule = CheckpointSchedule(0, 60.0, fragments, Clock())
    saved = []
    for round_ in range(1, 32):
        schedule.round_over(round_)
        if schedule.is_wanted:
            saved.append(round_)
            schedule.taken(round_)
    assert saved == expected


def test_a_checkpoint_is_wanted_after_a_minute_or_four_rounds() -> None:
    clock = Clock()
    schedule = CheckpointSchedule(0, 60.0, 1, clock)
    clock.now_s += 60
    schedule.round_over(1)
    assert schedule.is_wanted
    schedule = CheckpointSchedule(5, 1e9, 1, clock)
    schedule.round_over(8)
    assert not schedule.is_wanted
    schedule.round_over(9)
    assert schedule.is_wanted


def test_a_written_checkpoint_is_reported_once(checkpointer: Checkpointer, store: SlowStore) -> None:
    assert not checkpointer.check()
    checkpointer.begin(CHECKPOINT, TIP)
    store.may_write.set()
    while not (ended := checkpointer.check()):
        time.sleep(0.01)
    assert ended and not checkpointer.check()

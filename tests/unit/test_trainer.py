"""The worker's trainer with a real model and checkpoints, and a swarm that commits what the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from node.config.manifest import Manifest, RunConfig
from node.config.schema import CheckpointConfig
from node.diloco.outer import genesis
from node.errors import TrainingError
from node.swarm.chain.chain import make_tip
from node.swarm.consensus.commit import Committed
from node.swarm.faults import faults_from
from node.swarm.member import MemberSnapshot
from node.swarm.member_thread import Mailbox
from node.training.checkpoint import CheckpointStore
from node.training.inner import MOST_SKIPPED, Execution
from node.training.model import build_model, flatten
from node.training.replica import Replica
from node.training.text import BuiltinDataset
from node.worker import trainer as module
from node.worker.checkpointing import CheckpointSource
from node.worker.counters import WorkCounters
from node.worker.encoder import RESIDUAL
from node.worker.inner_trainer import InnerTrainer
from node.worker.loop import train
from node.worker.session import Session, StartingPoint, rules_of
from node.worker.trainer import MAX_RESETS, Trainer

STEPS, TOKENS_PER_STEP = 8, 8
MODEL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1,
}  # fmt: skip


class Scene:
    """A trainer without supervisor, and its swarm."""

    def __init__(self, folder: Path, **run: Any) -> None:
        self.run = RunConfig.model_validate(
            {
                "model": MODEL,
                "inner": {"batch_size": 1, "sequence_length": TOKENS_PER_STEP},
                "round": {"policy": "steps", "inner_steps": STEPS, "min_peers": 1},
                "evaluation": {"batches": 0},
                "sample": {"prompts": []},
                **run,
            }
        )
        model = build_model(self.run.model, seed=1)
        anchor = flatten(model)
        manifest = Manifest(run_id="ab" * 16, initial_digest="cd" * 32, parameters=anchor.numel(), run=self.run)
        rules = rules_of(manifest)
        moments = rules.outer.optimizer.moments
        store = CheckpointStore(folder / "checkpoints", 2)
        source = CheckpointSource(store, anchor.numel(), folder / "cache", moments)
        tip = make_tip(genesis(anchor, moments), manifest.hash, None, rules.outer, {}, time.monotonic())
        self.offers: list[Any] = []
        self.swarm = SimpleNamespace(
            mailbox=Mailbox(), view=MemberSnapshot(), faults=faults_from({}), offer=self.offers.append
        )
        swarm: Any = self.swarm
        self.replica = Replica(model, self.run.inner, torch.device("cpu"), Execution())
        data = BuiltinDataset(self.run)
        self.counters = WorkCounters(time.monotonic)
        self.inner = InnerTrainer(
            self.run, self.replica, lambda state: data.reader("r", "p", state), [], self.counters, data.tokenizer
        )
        self.reporter = MagicMock(is_due=False)
        self.reporter.training.evaluation_loss = self.reporter.training.loss = None
        self.session = Session(manifest, rules, swarm, store, source, StartingPoint(tip), folder)
        self.trainer = self.started(self.session)

    def started(self, session: Session) -> Trainer:
        duties = MagicMock()
        duties.needs_checkpoint.return_value = False
        return Trainer(
            session, self.inner, CheckpointConfig(), self.reporter, self.counters, MagicMock(), duties,
            lambda: None, lambda: None,
        )  # fmt: skip

    def restart(self) -> None:
        """Save, and start again from the checkpoint with the same tip."""
        self.trainer.save()
        saved = self.session.store.newest(repair=True)
        self.trainer = self.started(replace(self.session, start=StartingPoint(self.trainer.tip, saved)))

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.trainer.inner_step()

    def send(self) -> None:
        self.trainer.send_pseudo_gradient()
        self.trainer._encoder.wait()

    def commit(self, *, included: bool = True, offered: bool = True, recorded: int = STEPS * TOKENS_PER_STEP) -> None:
        """Let the swarm commit the next round with an unchanged anchor and `recorded` tokens of this node."""
        old, tokens = self.trainer.tip, STEPS * TOKENS_PER_STEP
        state = replace(old.state, round=old.round + 1, tokens=old.state.tokens + tokens)
        head = f"{old.round + 1:064x}"
        tip = replace(
            old, state=state, head=head, digest=head, round_s=1.0, last_round_tokens=tokens,
            anchor_at_s=time.monotonic(), last_weights={self.swarm.view.peer_id: recorded} if included else {},
        )  # fmt: skip
        plan = SimpleNamespace(amendment=None, members=(), joins=())
        outcome: Any = SimpleNamespace(round=state.round, plan=plan, included=())
        self.swarm.mailbox.put(Committed(tip, outcome, included, offered, {}))

    def residual(self) -> float:
        return float(self.trainer._encoder.tensors()[f"{RESIDUAL}.0"].norm())


@pytest.fixture
def make_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    monkeypatch.setattr(module, "RoundLog", MagicMock())
    monkeypatch.setattr(module, "CreditFile", MagicMock())
    return lambda **run: Scene(tmp_path, **run)


@pytest.mark.parametrize(("later_steps", "written"), [(0, [True]), (1, [False, True])])
def test_stop_finishes_the_checkpoint_that_is_being_written_unless_the_node_has_trained_since(
    make_scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, later_steps: int, written: list[bool]
) -> None:
    scene, write = make_scene(), CheckpointStore.save
    is_stopping, whole = threading.Event(), list[bool]()

    def write_after_the_stop(store: CheckpointStore, *given: Any) -> Path:
        whole.append(False)
        assert is_stopping.wait(10)
        path = write(store, *given)
        whole[-1] = True
        return path

    monkeypatch.setattr(CheckpointStore, "save", write_after_the_stop)
    wait = scene.trainer._wait_for_checkpoint

    def stop_and_wait() -> None:
        is_stopping.set()
        wait()

    monkeypatch.setattr(scene.trainer, "_wait_for_checkpoint", stop_and_wait)
    scene.steps(1)
    scene.trainer._begin_checkpoint()
    scene.steps(later_steps)
    scene.trainer.save()
    assert whole == written


@pytest.mark.parametrize("mode", ["blocking", "overlapped"])
def test_no_inner_step_is_made_after_the_last_round_is_committed(make_scene: Callable[..., Scene], mode: str) -> None:
    rounds, in_flight = 3, 2
    scene = make_scene(total_tokens=rounds * STEPS * TOKENS_PER_STEP, sync={"mode": mode})
    trainer: Any = scene.trainer
    step, send = trainer.inner_step, trainer.send_pseudo_gradient

    def step_and_commit() -> None:
        step()
        if trainer.has_contribution_in_flight and trainer._progress.steps == in_flight:
            scene.commit()

    def send_and_commit() -> None:
        is_blocking = mode == "blocking" or trainer.tip.round_s is None
        send()
        trainer._encoder.wait()
        if is_blocking:
            scene.commit()

    trainer.inner_step, trainer.send_pseudo_gradient = step_and_commit, send_and_commit
    train(trainer)
    assert trainer.tip.round == rounds - 1 and len(scene.offers) == rounds
    after_last = 0 if mode == "blocking" else in_flight
    assert scene.counters.totals.inner_steps == rounds * STEPS + after_last


def test_residual_of_a_contribution_that_was_sent_before_a_restart_is_not_added_again(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(sync={"codec": "topk", "feedback": "classic"})
    scene.steps(STEPS)
    scene.send()
    scene.commit()
    scene.trainer.apply_committed_rounds()
    assert scene.residual() > 0
    scene.steps(STEPS)
    scene.send()
    scene.restart()
    scene.commit(offered=False)
    scene.trainer.apply_committed_rounds()
    assert scene.residual() == 0


def test_tokens_after_the_sending_do_not_count_as_merged_if_the_node_restarts(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(sync={"mode": "overlapped"})
    scene.steps(STEPS)
    scene.send()
    scene.steps(3)
    scene.restart()
    scene.steps(1)
    scene.commit(offered=False)
    scene.trainer.apply_committed_rounds()
    totals = scene.counters.totals
    assert (totals.tokens_merged, totals.tokens_discarded) == (STEPS * TOKENS_PER_STEP, 4 * TOKENS_PER_STEP)


def test_stop_writes_no_second_checkpoint_of_the_same_state(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    begin = MagicMock(wraps=scene.trainer._checkpointer.begin)
    scene.trainer._checkpointer.begin = begin  # type: ignore[method-assign]
    scene.steps(2)
    scene.trainer.save()
    scene.trainer.save()
    assert begin.call_count == 1
    scene.trainer._reset_to_anchor("For a test")
    scene.trainer.save()
    scene.steps(1)
    scene.trainer.save()
    assert begin.call_count == 3


def test_diverged_node_returns_to_the_anchor_whenever_its_last_skipped_step_comes(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(round={"policy": "steps", "inner_steps": 1000, "min_peers": 1})
    anchor = scene.trainer.tip.state.anchor
    bad = torch.full_like(anchor, 1e12)  # The loss is infinite.
    scene.steps(5)
    scene.replica.load(bad)
    scene.steps(MOST_SKIPPED - 1)
    scene.commit(included=False)  # The node carries its work over to the next round.
    scene.trainer.apply_committed_rounds()
    scene.steps(1)
    assert torch.equal(scene.replica.parameters, anchor)
    for _ in range(MAX_RESETS - 1):
        scene.replica.load(bad)
        scene.steps(MOST_SKIPPED)
        assert torch.equal(scene.replica.parameters, anchor)
    scene.replica.load(bad)
    with pytest.raises(TrainingError, match="diverged"):
        scene.steps(MOST_SKIPPED)

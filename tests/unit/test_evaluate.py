"""Evaluation: the mean over tokens, and nothing changed by it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from node.manifest import InnerConfig, ModelConfig, RunConfig
from node.training.evaluate import evaluate
from node.training.inner import Execution, InnerLoop
from node.training.model import build_model, flatten, next_token_loss
from node.training.replica import Replica

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.diloco.outer import genesis
    from node.swarm.chain import Outer, tip_at
    from node.worker.channel import StopAsked
    from node.worker.evaluation import Evaluation
    from node.worker.ledger import Ledger
    from node.worker.local import Local

CPU = torch.device("cpu")
TINY = ModelConfig(hidden_size=16, intermediate_size=40, num_hidden_layers=1)


def loss_of(model: nn.Module, precision: str = "fp32", micro_batch: int = 0) -> Callable[[Tensor], float]:
    return InnerLoop(model, InnerConfig(), CPU, Execution(precision, micro_batch)).loss_of


def test_it_is_the_mean_over_tokens_also_for_uneven_batches() -> None:
    model = build_model(TINY, seed=0)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 258, shape, generator=generator) for shape in ((2, 33), (1, 33), (4, 9))]
    with torch.no_grad():
        total = sum(next_token_loss(model, b).item() * b[:, 1:].numel() for b in batches)
    assert evaluate(loss_of(model), batches) == pytest.approx(total / (64 + 32 + 32), rel=1e-6)
    assert math.isnan(evaluate(loss_of(model), []))


def test_it_changes_nothing() -> None:
    model = build_model(TINY, seed=0)
    before = flatten(model)
    batches = [torch.zeros(2, 9, dtype=torch.int64)]
    assert evaluate(loss_of(model, "bf16"), batches) == pytest.approx(evaluate(loss_of(model), batches), rel=0.02)
    assert model.training
    assert torch.equal(flatten(model), before)
    assert all(p.grad is None for p in model.parameters())


def test_it_ends_with_its_budget_and_has_one_batch_at_least() -> None:
    model = build_model(TINY, seed=0)
    batches = [torch.full((1, 9), token) for token in range(4)]
    times = iter([0.0, 1.0, 2.0, 3.0, 4.0])
    assert evaluate(loss_of(model), batches, budget_s=1.5, clock=lambda: next(times)) == evaluate(
        loss_of(model), batches[:2]
    )
    assert evaluate(loss_of(model), batches, budget_s=0.0) == evaluate(loss_of(model), batches[:1])


def test_a_stop_ends_it_without_a_loss_and_goes_no_further() -> None:
    model = build_model(TINY, seed=0)
    run = RunConfig(model=TINY)
    batches = [torch.randint(0, 258, (2, 9)) for _ in range(5)]
    replica = Replica(model, run.inner, CPU, Execution("fp32", 0))
    local = Local(run, replica, lambda _: pytest.fail("no text is read"), batches, Ledger(time.monotonic))
    tip = tip_at(genesis(flatten(model) + 1.0), "ab" * 32, None, Outer(0.7, 0.9, 10), {}, 0.0)
    own, calls = flatten(model), 0

    def obey() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise StopAsked("pause")

    evaluation = Evaluation(run.evaluation, local)
    evaluation.follow(tip, "me", obey)
    assert calls == 3 and evaluation.newest is None
    assert torch.equal(flatten(model), own), "the local parameters are back"
    evaluation.follow(tip, "me", lambda: None)
    assert evaluation.newest is not None

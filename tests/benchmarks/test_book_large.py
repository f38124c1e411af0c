"""The book's leg with a larger model trains both arms on the same tokens, and the report shows what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from node.diloco.outer import OuterOptimizer
from node.training.corpus import load_corpus
from node.training.inner import evaluate
from tests.benchmarks.book import __main__ as book
from tests.benchmarks.book import large
from tests.benchmarks.figures import Figure, Result


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> large.Setting:
    for name, value in (("INNER_STEPS", 2), ("LENGTH", 32), ("WORKERS", 3)):
        monkeypatch.setattr(large, name, value)
    return large.make_setting(load_corpus(), 4 * 3 * 2 * 32, 32, 2, torch.device("cpu"))


@pytest.mark.timeout(120)
def test_both_arms_train_on_the_same_tokens_and_start_alike(setting: large.Setting) -> None:
    assert setting.steps == 4 and setting.step_tokens == 3 * 2 * 32
    parallel, workers = large.data_parallel(setting), large.diloco(setting, OuterOptimizer("nesterov", 0.9), 0.7)
    assert parallel.curve[-1][0] == workers.curve[-1][0] == 4 * setting.step_tokens
    assert parallel.loss == pytest.approx(5.5, abs=0.3) and workers.loss == pytest.approx(5.5, abs=0.3)
    assert parallel.loss != workers.loss


@pytest.mark.timeout(120)
def test_one_worker_with_a_plain_outer_step_of_rate_one_is_ordinary_training(
    setting: large.Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "WORKERS", 1)
    arm, loop = large.diloco(setting, OuterOptimizer("sgd", 0.0), 1.0), setting.loop(setting.rows)
    text = setting.batches(0, setting.rows)
    for step in range(setting.steps):
        loop.step(next(text), setting.lr(step))
    assert arm.loss == pytest.approx(evaluate(loop.loss_of, setting.held_out), rel=1e-4)


def test_the_report_says_whether_a_gpu_has_run_the_leg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "RESULTS", tmp_path)
    assert "not run" in " ".join(book.larger())
    Result("book_large", [Figure("eight workers", "nats", 1.03, 1.0, "data parallel")], ["on a GPU"]).save(tmp_path)
    text = "\n".join(book.larger())
    assert "+3.0 % of loss" in text and "on a GPU" in text
    assert json.loads((tmp_path / "book_large.json").read_text())["commit"] in text

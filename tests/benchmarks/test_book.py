"""The book of claims: its trainings do what they say, its verdicts follow from the intervals, and it resumes."""

from __future__ import annotations

import fcntl
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from node.diloco.outer import OuterState
from node.training.corpus import load_corpus
from node.training.inner import InnerLoop
from tests.benchmarks.book.__main__ import cells_of, shortened
from tests.benchmarks.book.arm import BATCH, STEPS, Arm
from tests.benchmarks.book.cells import Store, code, name, run
from tests.benchmarks.book.chapters import BASE, CHAPTERS, at_equal_tokens
from tests.benchmarks.book.claims import Claim, Rule, Verdict, cosine, early_loss, gap_gained, judge, perplexity
from tests.benchmarks.book.report import arm_text, effect_text, verdict_text
from tests.benchmarks.book.schedule import active_workers
from tests.benchmarks.book.shards import cluster, shard
from tests.benchmarks.book.trial import LENGTH, Result, Trial, pairwise_cosine, sign_pruned
from tests.benchmarks.processes import ROOT

SHORT = Arm(workers=2, steps=20, inner_steps=10)


def claim(rule: Rule, limit: float = 0.0) -> Claim:
    return Claim("name", "It says.", "paper", "figure", Arm(), Arm(workers=4), rule, limit)


def pairs(*percents: float) -> list[tuple[Result, Result]]:
    """Pairs whose perplexities differ by these percents."""
    return [(Result(2.0 + math.log1p(percent / 100)), Result(2.0)) for percent in percents]


@pytest.mark.parametrize(
    ("rule", "limit", "percents", "verdict"),
    [
        (Rule.BELOW, 0.0, (-1.0, -1.1, -0.9), Verdict.REPRODUCED),
        (Rule.BELOW, 0.0, (1.0, 1.1, 0.9), Verdict.REFUTED),
        (Rule.BELOW, 0.0, (1.0, -1.0, 0.2), Verdict.UNSEEN),
        (Rule.BELOW, 3.0, (2.0, 2.1, 2.2), Verdict.REPRODUCED),
        (Rule.ABOVE, 0.0, (1.0, 1.1, 0.9), Verdict.REPRODUCED),
        (Rule.ABOVE, 0.0, (-1.0, -1.1, -0.9), Verdict.REFUTED),
        (Rule.WITHIN, 0.5, (0.1, -0.1, 0.0), Verdict.REPRODUCED),
        (Rule.WITHIN, 0.5, (2.0, 2.1, 1.9), Verdict.REFUTED),
        (Rule.WITHIN, 0.5, (2.0, -2.1, 0.3), Verdict.UNSEEN),
        (Rule.BELOW, 0.0, (-1.0,), Verdict.NOT_RUN),
    ],
)
def test_verdict_is_certain_only_if_the_whole_interval_is_on_one_side(
    rule: Rule, limit: float, percents: tuple[float, ...], verdict: Verdict
) -> None:
    assert judge(claim(rule, limit), pairs(*percents)).verdict is verdict


def test_training_that_diverged_refutes_a_claim_that_it_is_better() -> None:
    for loss in (math.inf, 800.0):
        both = [(Result(loss), Result(2.0)), (Result(2.0), Result(2.0))]
        assert judge(claim(Rule.BELOW), both).verdict is Verdict.REFUTED
        assert judge(claim(Rule.ABOVE), both).verdict is Verdict.REPRODUCED
        for rule in (Rule.ABOVE, Rule.BELOW):
            assert judge(replace(claim(rule), measure=gap_gained), both).verdict is Verdict.UNSEEN


def test_a_diverged_baseline_decides_no_claim() -> None:
    both = [(Result(2.0), Result(math.inf)), (Result(2.0), Result(2.0))]
    for rule in Rule:
        found = judge(claim(rule), both)
        assert verdict_text(found) == "cannot be seen at this scale: a training diverged"


def test_effect_that_is_certain_but_near_the_limit_is_not_called_invisible() -> None:
    found = judge(claim(Rule.BELOW, 3.0), pairs(2.9, 3.0, 3.1))
    assert found.verdict is Verdict.UNSEEN
    assert verdict_text(found) == "cannot be decided at this scale: the interval contains the limit"
    assert effect_text(found) == "+3.00 ± 0.25 % of perplexity (loss +1.48 ± 0.12 %)"
    found = judge(claim(Rule.BELOW, 3.0), pairs(2.0, 3.0, -5.0))
    assert verdict_text(found) == "cannot be seen at this scale (smallest visible effect 11 % of perplexity)"


def test_claim_of_no_change_says_if_it_is_refuted_because_the_arm_is_better() -> None:
    for percents, text in (((-5.0, -5.1), "**refuted here**: the arm is better"), ((5.0, 5.1), "**refuted here**")):
        assert verdict_text(judge(claim(Rule.WITHIN, 1.0), pairs(*percents))) == text


@pytest.mark.parametrize("measure", [cosine, early_loss, gap_gained])
def test_claim_whose_trainings_were_too_short_to_measure_is_not_run(measure: Callable[[Result, Result], float]) -> None:
    found = judge(replace(claim(Rule.BELOW), measure=measure), pairs(1.0, 2.0))
    assert found.verdict is Verdict.NOT_RUN


def test_effects_have_the_sign_of_the_first_arm() -> None:
    worse, better = Result(2.1), Result(2.0)
    assert perplexity(worse, better) == pytest.approx(100 * (math.exp(0.1) - 1))
    falling = Result(2.0, [(n, 3.0 - n / 4) for n in range(1, 5)])
    flat = Result(2.0, [(n, 2.5) for n in range(1, 4)] + [(4, 2.0)])
    assert early_loss(falling, flat) == pytest.approx(10.0)
    assert gap_gained(falling, flat) == pytest.approx(10.0), "2.75 against 2.5 after a quarter, and equal at the end"


@pytest.mark.parametrize(("first", "second"), [("doubling", "halving"), ("up", "down")])
def test_compute_schedules_that_mirror_each_other_have_equal_tokens(first: str, second: str) -> None:
    one, other = active_workers(first, 8, 32), active_workers(second, 8, 32)
    assert one == other[::-1] and one != other
    assert sum(one) == sum(other)


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of constant, doubling"):
        active_workers("sideways", 8, 32)


@pytest.mark.parametrize("workers", [4, 8])
def test_shards_are_disjoint_hold_the_whole_training_text_and_are_large(workers: int) -> None:
    corpus = load_corpus()
    labels = cluster(corpus.train, workers)
    assert np.array_equal(labels, cluster(corpus.train, workers))
    shards = [shard(corpus, labels, number) for number in range(workers)]
    assert sum(part.train.documents for part in shards) == corpus.train.documents
    assert sum(len(part.train.tokens) for part in shards) == len(corpus.train.tokens)
    sizes = [len(part.train.tokens) for part in shards]
    assert min(sizes) > STEPS * BATCH * LENGTH, "each worker trains on a token at most once"
    assert max(sizes) < sum(sizes) / 2


def test_sign_pruning_first_drops_small_elements_against_the_sign_of_the_row() -> None:
    delta = torch.tensor([3.0, -1.0, 0.5, -2.0, 4.0, 1.0, -5.0, -1.0])
    pruned = sign_pruned(delta, [4, 4], 0.5)
    assert pruned.tolist() == [3.0, 0.0, 0.5, 0.0, 0.0, 0.0, -5.0, -1.0]


def test_pairwise_cosine_is_that_of_all_pairs() -> None:
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    assert pairwise_cosine([x, 3 * x, y]) == pytest.approx(1 / 3, abs=1e-6)


@pytest.mark.nightly
def test_one_worker_whose_outer_step_copies_it_equals_a_worker_without_outer_step() -> None:
    copying = SHORT.but(workers=1, optimizer="sgd", outer_lr=1.0)
    plain = Trial(SHORT.but(kind="plain"), 3).run()
    assert Trial(copying, 3).run().loss == pytest.approx(plain.loss, abs=1e-4)
    assert Trial(SHORT.but(kind="data-parallel", workers=1), 3).run().loss == pytest.approx(plain.loss, abs=1e-6)
    assert Trial(SHORT, 3).run().loss != pytest.approx(plain.loss, abs=1e-4)


@pytest.mark.nightly
def test_inner_schedule_changes_the_rate_of_the_steps_and_not_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: dict[str, list[float]] = {"cosine": [], "wsd": []}
    step = InnerLoop.step

    def noted(inner: InnerLoop, batch: torch.Tensor, lr: float) -> object:
        rates[arm.inner_schedule].append(lr)
        return step(inner, batch, lr)

    monkeypatch.setattr(InnerLoop, "step", noted)
    results = []
    for arm in (SHORT.but(workers=1), SHORT.but(workers=1, inner_schedule="wsd")):
        results.append(Trial(arm, 0).run())
    assert results[0].tokens == results[1].tokens == 20 * 256
    assert results[0].loss != results[1].loss
    peak = SHORT.inner_lr
    assert rates["wsd"][:19] == [peak] * 19, "the decay is the last tenth, and its first step has the peak"
    assert peak > rates["wsd"][19] == pytest.approx(peak * (1 - 0.9 * math.sqrt(0.5)))
    assert all(later < earlier for earlier, later in pairwise(rates["cosine"]))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam"])
def test_outer_optimizers_are_those_of_torch(optimizer: str) -> None:
    arm = SHORT.but(optimizer=optimizer, outer_lr=0.1, momentum=0.6)
    trial = Trial(arm, 0)
    parameter = torch.nn.Parameter(trial.state.anchor.clone())
    theirs: torch.optim.Optimizer = {
        "sgd": lambda: torch.optim.SGD([parameter], lr=0.1),
        "momentum": lambda: torch.optim.SGD([parameter], lr=0.1, momentum=0.6),
        "nesterov": lambda: torch.optim.SGD([parameter], lr=0.1, momentum=0.6, nesterov=True),
        "adam": lambda: torch.optim.Adam([parameter], lr=0.1, betas=(0.9, 0.95), eps=1e-8),
    }[optimizer]()
    generator = torch.Generator().manual_seed(1)
    whole = ((0, parameter.numel()),)
    for _ in range(3):
        parameter.grad = torch.randn(parameter.numel(), generator=generator)
        trial.state = trial.stepped(whole, parameter.grad.clone())
        theirs.step()
    assert isinstance(trial.state, OuterState)
    assert torch.allclose(trial.state.anchor, parameter.detach(), atol=1e-5)


@pytest.mark.nightly
def test_lost_contribution_arrives_one_round_later() -> None:
    """With `carry`, a worker whose contribution is lost has it in its next one, and its tokens weigh as much."""
    trial = Trial(SHORT.but(drop=1.0), 0)
    trial.run()
    assert torch.equal(trial.state.anchor, Trial(SHORT, 0).state.anchor), "all are lost, so the anchor stays"
    assert {worker.steps for worker in trial.workers} == {20}


@pytest.mark.nightly
def test_steps_of_one_worker_before_the_others_start_do_not_weigh_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, weights = Trial(SHORT.but(pretrain=0.5), 0), []
    weight = Trial._weight

    def noted(trial: Trial, worker: object) -> int:
        weights.append(weight(trial, worker))  # type: ignore[arg-type]
        return weights[-1]

    monkeypatch.setattr(Trial, "_weight", noted)
    trial.run()
    assert weights == [10 * BATCH * LENGTH] * 2


@pytest.mark.nightly
def test_workers_that_start_from_a_trained_model_have_its_inner_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(SHORT.but(workers=3, pretrain=0.5), 0)
    started: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    start = Trial._start_others

    def noted(trial: Trial) -> None:
        start(trial)
        started.extend((worker.parameters, worker.inner.state_tensors()) for worker in trial.workers)

    monkeypatch.setattr(Trial, "_start_others", noted)
    trial.run()
    (parameters, state), *others = started
    assert len(others) == 2 and state["step"].item() == 10 and state["exp_avg"].abs().sum() > 0
    for its_parameters, its_state in others:
        assert torch.equal(its_parameters, parameters)
        assert all(torch.equal(its_state[key], state[key]) for key in state)


@pytest.mark.nightly
def test_mean_is_clipped_only_if_the_arm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lost round, a contribution has twice the norm of the others."""
    lost = SHORT.but(workers=4, steps=40, drop=0.5, weights="uniform", drop_rule="stay")
    clipped: list[int] = []

    def halves(norms: list[float], _: object) -> list[float]:
        clipped.append(len(norms))
        return [0.5] * len(norms)

    monkeypatch.setattr("tests.benchmarks.book.trial.clip_scales", halves)
    anchors = [Trial(lost.but(clip=clip), 0) for clip in (True, False)]
    for trial in anchors:
        trial.run()
    assert len(clipped) == 4 and not torch.equal(anchors[0].state.anchor, anchors[1].state.anchor)


@pytest.mark.nightly
def test_workers_with_equal_tokens_share_one_batch() -> None:
    for workers in (1, 2):
        arm = at_equal_tokens(workers).but(steps=30)
        assert Trial(arm, 0).run().tokens == 30 * 32 * LENGTH
        assert arm.cost_s < BASE.but(steps=30).cost_s


@pytest.mark.nightly
def test_slow_workers_make_fewer_steps_in_rounds_of_equal_time() -> None:
    speeds = (1.0, 0.25)
    by_time = Trial(SHORT.but(speeds=speeds), 0).run()
    assert by_time.tokens == (20 + 5) * 256
    by_steps = Trial(SHORT.but(speeds=speeds, policy="steps", steps=40), 0).run()
    assert by_steps.tokens == 2 * 10 * 256, "both make as many steps as the slower one"


def test_every_claim_has_its_own_name_and_two_different_arms() -> None:
    claims = [one for chapter in CHAPTERS.values() for one in chapter]
    assert len(claims) >= 22 and len({one.name for one in claims}) == len(claims)
    assert all(one.arm != one.other and one.source and one.paper for one in claims)
    workers = {one.arm.workers for one in CHAPTERS["workers"]} | {one.other.workers for one in CHAPTERS["workers"]}
    assert {1, 2, 4, 8, 16, 32} <= workers
    assert {5, 480} <= {one.arm.inner_steps for one in CHAPTERS["steps"]}


def test_store_drops_a_line_that_was_written_half(tmp_path: Path) -> None:
    file = tmp_path / "book.jsonl"
    store = Store(file)
    store.put((SHORT, 0), Result(1.5, [(256, 2.0)], [0.5], 256))
    with file.open("a") as out:
        out.write('{"cell": "half')
    again = Store(file)
    kept = again.get((SHORT, 0))
    assert kept is not None and kept.loss == 1.5
    assert again.get((SHORT, 1)) is None and again.get((SHORT.but(workers=3), 0)) is None
    again.put((SHORT, 1), Result(1.6))
    assert all(Store(file).get((SHORT, seed)) is not None for seed in (0, 1))


def test_store_tells_which_code_trained_its_cells(tmp_path: Path) -> None:
    file = tmp_path / "book.jsonl"
    Store(file).put((SHORT, 0), Result(1.5))
    file.write_text(file.read_text().replace(code(), "00000000"))
    store = Store(file)
    store.put((SHORT, 1), Result(1.5))
    versions = store.versions([(SHORT, 0), (SHORT, 1), (SHORT, 2), (SHORT, 1)])
    assert {version: count for (version, _), count in versions.items()} == {"00000000": 1, code(): 1}


@pytest.mark.nightly
def test_cell_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    store = Store(tmp_path / "book.jsonl")
    bad = SHORT.but(codec="none of ours")
    failed = run([(bad, 0), (SHORT, 0)], store, jobs=1)
    assert [cell for cell, _ in failed] == [(bad, 0)] and "none of ours" in str(failed[0][1])
    assert store.get((SHORT, 0)) is not None


def test_second_book_that_writes_to_the_same_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "book.jsonl"
    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            run([(SHORT, 0)], Store(file), jobs=1)


@pytest.mark.nightly
def test_wrong_sign_of_the_pseudo_gradient_is_noticed() -> None:
    assert Trial(SHORT.but(sign=-1.0), 0).run().loss > 1.2 * Trial(SHORT, 0).run().loss


@pytest.mark.nightly
def test_training_that_diverges_has_an_infinite_loss() -> None:
    assert Trial(SHORT.but(sign=-1.0, outer_lr=1e20), 0).run().loss == math.inf


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_killed_book_goes_on_with_the_cells_that_are_left(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.book", "compute", "--seeds", "2", "--steps", "30", "--jobs", "1"]
    environment = {**os.environ, "BENCHMARK_RESULTS": str(tmp_path)}
    file = tmp_path / "book.jsonl"
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        until_s = time.monotonic() + 120
        while not (file.exists() and file.stat().st_size) and time.monotonic() < until_s:
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert children and not psutil.wait_procs(children, timeout=10)[1], "they train on beside the next book"
    before = file.read_text()
    assert before, "no cell was finished"
    file.write_text(before.replace(code(), "00000000"))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 2 and "other code trained" in done.stderr, (
        "cells of other code are not mixed in unnoticed"
    )
    file.write_text(before)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert file.read_text().startswith(before), "finished cells are not trained again"
    book = (tmp_path / "book-quick.md").read_text()
    assert len(re.findall(r"^\| `", book, re.M)) == sum(len(chapter) for chapter in CHAPTERS.values())
    assert "| 2 |" in book and (tmp_path / "book-quick.svg").exists()
    assert not (tmp_path / "book.md").exists(), "a quick trial does not replace the book"


def test_shortened_claims_do_not_share_cells_with_the_whole_ones() -> None:
    one = CHAPTERS["workers"][0]
    short = shortened(one, 60, 2)
    assert name((short.arm, 0)) != name((one.arm, 0)) and short.seeds == 2
    cells = cells_of({"workers": [short]}, ["workers"])
    assert len(cells) == 4 and [seed for _, seed in cells] == [0, 0, 1, 1]
    assert cells[0][0].cost_s > cells[1][0].cost_s, "long cells come first"


def test_report_names_what_differs_from_the_base() -> None:
    assert arm_text(BASE) == "base"
    assert arm_text(BASE.but(workers=4, momentum=0.125)) == "workers 4, momentum 0.125"
    assert arm_text(BASE.but(kind="plain", workers=8)) == "plain"

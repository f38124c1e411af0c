"""Samples of the model's text: what is sampled and kept, what it costs, and that training does not change."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from node.config.manifest import InnerConfig, ModelConfig, RunConfig, SampleConfig
from node.diloco.outer import OuterOptimizer, genesis
from node.status import Sample
from node.swarm.chain.chain import OuterRule, Tip, make_tip
from node.training.inner import Execution
from node.training.model import build_model, flatten
from node.training.replica import Replica
from node.training.sampling import sample_tokens
from node.training.tokenizer import END, ByteTokenizer
from node.worker.counters import WorkCounters
from node.worker.evaluation import Evaluation
from node.worker.inner_trainer import InnerTrainer
from node.worker.sampler import MOST_ROUND_SHARE, MOST_ROUNDS, MOST_SHARE, SAMPLES_FILE, TextSampler, thinned
from node.worker.supervisor_link import StopAsked
from tests.unit.greedy_sample import likeliest_tokens

CPU = torch.device("cpu")
TINY = ModelConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    max_position_embeddings=64,
)  # fmt: skip
SAMPLE = SampleConfig(prompts=("def f(", "x"), tokens=12)
RUN = RunConfig(model=TINY, inner=InnerConfig(sequence_length=32), sample=SAMPLE)
OUTER = OuterRule(0.7, OuterOptimizer(), 10)


def trainer_of(run: RunConfig = RUN, model: torch.nn.Module | None = None) -> InnerTrainer:
    replica = Replica(model or build_model(TINY, seed=1), run.inner, CPU, Execution("fp32", 0))
    counters = WorkCounters(time.monotonic)
    return InnerTrainer(run, replica, lambda _: pytest.fail("no text is read"), (), counters, ByteTokenizer())


class FakeTrainer:
    """Gives the texts that a test sets, and notes the time that it may take."""

    def __init__(self, *texts: str | None, can_sample: bool = True) -> None:
        self.texts, self.budgets = list(texts), list[float]()
        self.replica = SimpleNamespace(can_sample=can_sample)

    def continue_prompts(self, _anchor: Tensor, budget_s: float, _before: Callable[[], None]) -> list[str | None]:
        self.budgets.append(budget_s)
        return self.texts


def tip_at(round_: int, anchor: Tensor | None = None, round_s: float | None = 1000.0) -> Tip:
    state = genesis(flatten(build_model(TINY, seed=5)) if anchor is None else anchor)
    state = replace(state, round=round_)
    return replace(make_tip(state, "ab" * 32, None, OUTER, {}, 0.0), round_s=round_s)


def options(**changes: Any) -> dict[str, Any]:
    usual = {"most": 24, "end": END, "vocabulary": 258, "temperature": 0.0, "is_over": lambda: False}
    return usual | changes


def test_greedy_sample_takes_the_likeliest_tokens() -> None:
    model = build_model(TINY, seed=5).eval()
    tokens = [256, *b"def f("]
    expected = likeliest_tokens(model, tokens, 24, END)
    assert sample_tokens(model, tokens, **options()) == (expected, True)
    found, _ = sample_tokens(model, tokens, **options(end=expected[5]))
    assert found == expected[: expected.index(expected[5])], "the end of the text is not part of it"


def test_random_sample_is_the_same_each_time_and_leaves_the_random_state_alone() -> None:
    model, before = build_model(TINY, seed=5).eval(), torch.get_rng_state()
    first = sample_tokens(model, [256], **options(temperature=1.0))
    assert sample_tokens(model, [256], **options(temperature=1.0)) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(first[0])) > 5, "it is random"
    assert all(token < 90 for token in sample_tokens(model, [1], **options(temperature=5.0, vocabulary=90))[0])


def test_sample_ends_with_the_time_or_with_a_broken_model() -> None:
    model = build_model(TINY, seed=5).eval()
    looks = iter([False] * 7 + [True])
    found, is_complete = sample_tokens(model, [256], **options(temperature=1.0, end=-1, is_over=lambda: next(looks)))
    assert (len(found), is_complete) == (7, False)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    assert sample_tokens(model, [256], **options(temperature=1.0)) == ([], False)


def test_sample_is_of_the_anchor_and_training_goes_on_as_before(tmp_path: Path) -> None:
    inner = trainer_of()
    own, state = inner.replica.parameters, torch.get_rng_state()
    sampler = TextSampler(SAMPLE, inner, tmp_path)
    sampler.round_over(tip_at(0), lambda: None)
    assert torch.equal(inner.replica.parameters, own) and torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in inner.replica._model.modules())
    assert [(one.round, one.prompt) for one in sampler.newest] == [(0, "def f("), (0, "x")]
    assert TextSampler(SAMPLE, inner, tmp_path).newest == sampler.newest, "after a restart"
    (tmp_path / "other").mkdir()
    other = TextSampler(SAMPLE, inner, tmp_path / "other")
    other.round_over(tip_at(0, flatten(build_model(TINY, seed=6))), lambda: None)
    assert [one.text for one in other.newest] != [one.text for one in sampler.newest], "another anchor, another text"


@pytest.mark.parametrize(
    ("round_", "round_s", "prompts", "is_sampled"),
    [
        (0, 9.9, 1, True),
        (9, 9.9, 1, False),
        (10, 9.9, 1, True),
        (20, 9.9, 1, True),
        (0, None, 1, False),
        (0, 9.9, 0, False),
    ],
)
def test_first_and_every_tenth_round_is_sampled(
    tmp_path: Path, round_: int, round_s: float | None, prompts: int, is_sampled: bool
) -> None:
    cfg = SampleConfig(prompts=SAMPLE.prompts[:prompts])
    tip = tip_at(round_, torch.zeros(3), round_s)
    for can_sample in (True, False):
        inner: Any = FakeTrainer("text", can_sample=can_sample)
        TextSampler(cfg, inner, tmp_path).round_over(tip, lambda: None)
        assert inner.budgets == ([pytest.approx(MOST_ROUND_SHARE * 9.9)] if is_sampled and can_sample else []), (
            "a sharded model has none"
        )


def test_samples_of_every_round_take_a_small_share_of_each(tmp_path: Path) -> None:
    inner: Any = FakeTrainer("text", "text")
    cfg = SAMPLE.model_copy(update={"every_rounds": 2})
    TextSampler(cfg, inner, tmp_path).round_over(tip_at(2, torch.zeros(3), 50.0), lambda: None)
    assert inner.budgets == [pytest.approx(2 * MOST_SHARE * 50.0)]


def test_slow_node_makes_no_sample_and_loses_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token takes 1 s, and each of two prompts has 2 s, then 20 s."""
    inner, now_s = trainer_of(), 0.0

    def tick() -> None:
        nonlocal now_s
        now_s += 1.0

    monkeypatch.setattr("node.worker.inner_trainer.time.monotonic", lambda: now_s)
    sampler = TextSampler(SAMPLE, inner, tmp_path)
    sampler.round_over(tip_at(0, round_s=4.0 / MOST_ROUND_SHARE), tick)
    assert now_s <= 5.0
    assert sampler.newest == () and not (tmp_path / SAMPLES_FILE).exists()
    sampler.round_over(tip_at(0, round_s=40.0 / MOST_ROUND_SHARE), tick)
    assert len(sampler.newest) == 2, "the time suffices in a longer round"


def test_stop_ends_a_sample_at_once_and_restores_the_parameters(tmp_path: Path) -> None:
    inner, calls = trainer_of(), 0
    own = inner.replica.parameters

    def obey() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise StopAsked("pause")

    sampler = TextSampler(SAMPLE, inner, tmp_path)
    sampler.round_over(tip_at(0), obey)
    assert (calls, sampler.newest) == (3, ())
    assert torch.equal(inner.replica.parameters, own)


def test_prompt_that_fills_the_model_has_no_sample_and_one_near_the_end_a_short_one(tmp_path: Path) -> None:
    run = RUN.model_copy(update={"sample": SampleConfig(prompts=("x" * 63, "y" * 60), tokens=12)})
    sampler = TextSampler(run.sample, trainer_of(run), tmp_path)
    sampler.round_over(tip_at(0), lambda: None)
    assert [one.prompt for one in sampler.newest] == ["y" * 60]


def test_text_of_the_model_is_kept_as_printable_text(tmp_path: Path) -> None:
    inner: Any = FakeTrainer("a\x1b[31m\u202e\nb\tc" + "x" * 5000, None)
    sampler = TextSampler(SAMPLE, inner, tmp_path)
    sampler.round_over(tip_at(0, torch.zeros(3)), lambda: None)
    (sample,) = sampler.newest
    assert sample.text.startswith("a\ufffd[31m\ufffd\nb\tcx") and len(sample.text) == 2000


def test_samples_of_a_lost_chain_are_replaced_and_old_ones_are_thinned_out(tmp_path: Path) -> None:
    old = [Sample(round=round_, prompt="p", text="t") for round_ in (0, 10, 20, 30)]
    (tmp_path / SAMPLES_FILE).write_text(json.dumps({"samples": [one.model_dump() for one in old]}))
    inner: Any = FakeTrainer("new", "new")
    TextSampler(SAMPLE, inner, tmp_path).round_over(tip_at(20, torch.zeros(3)), lambda: None)
    stored = json.loads((tmp_path / SAMPLES_FILE).read_text())["samples"]
    assert [(one["round"], one["text"]) for one in stored] == [(0, "t"), (10, "t"), (20, "new"), (20, "new")]
    many: list[Sample] = []
    for round_ in range(1000):
        many = thinned([*many, Sample(round=round_, prompt="p", text="t")])
        assert len(many) <= MOST_ROUNDS and (many[0].round, many[-1].round) == (0, round_)
    for round_ in (3, 10, 31, 100, 316):
        assert any(0.8 < one.round / round_ < 1.25 for one in many), "rounds of any size are there to compare"


@pytest.mark.parametrize("content", ["", "[]", '{"samples": [1]}', '{"samples": [{"round": "x"}]}'])
def test_damaged_file_of_samples_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / SAMPLES_FILE).write_text(content)
    inner: Any = FakeTrainer("new", "new")
    sampler = TextSampler(SAMPLE, inner, tmp_path)
    assert sampler.newest == ()
    sampler.round_over(tip_at(0, torch.zeros(3)), lambda: None)
    assert len(TextSampler(SAMPLE, inner, tmp_path).newest) == 2


def test_compiled_layers_are_not_compiled_again_for_each_length() -> None:
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        compiled.append(graph)
        return graph.forward

    model = build_model(TINY, seed=5)
    for layer in model.get_submodule("model.layers").children():
        layer.compile(backend=backend)
    texts = trainer_of(model=model).continue_prompts(flatten(model), 1000.0, lambda: None)
    assert all(texts) and compiled == []


@pytest.mark.parametrize("prompts", [("a\nb",), (" ",), ("a\u202e",), ("x" * 201,), ("x",) * 5])
def test_bad_prompts_are_refused(prompts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="prompt"):
        SampleConfig(prompts=prompts)


def test_evaluation_and_sample_are_left_out_while_another_program_has_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = trainer_of()
    inner._held_out = [torch.zeros(2, 9, dtype=torch.int64)]
    own = inner.replica.parameters

    def fill_memory() -> None:
        raise torch.OutOfMemoryError

    evaluation = Evaluation(inner)
    evaluation.round_over(tip_at(0), "me", fill_memory)
    TextSampler(SAMPLE, inner, tmp_path).round_over(tip_at(0), fill_memory)
    assert evaluation.loss is None and len(caplog.records) == 2
    assert inner.replica.parameters.equal(own)


def test_parameters_are_restored_if_the_memory_ends_while_the_anchor_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = trainer_of()
    inner._held_out = [torch.zeros(2, 9, dtype=torch.int64)]
    own, load = inner.replica.parameters, inner.replica.load
    first = iter([True])

    def load_a_part(flat: Tensor) -> None:
        load(flat)
        if next(first, False):
            raise torch.OutOfMemoryError

    monkeypatch.setattr(inner.replica, "load", load_a_part)
    evaluation = Evaluation(inner)
    evaluation.round_over(tip_at(0), "me", lambda: None)
    assert evaluation.loss is None and inner.replica.parameters.equal(own)

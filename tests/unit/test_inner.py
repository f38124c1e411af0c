"""Tests of the inner step, of micro-batches, half precision and resuming, and of evaluation."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import node.training.model as model_module
from node.config.manifest import InnerConfig, ModelConfig, RunConfig
from node.config.schema import DevicesConfig
from node.diloco.outer import OuterOptimizer, genesis
from node.errors import MachineError, TrainingError
from node.swarm.chain.chain import OuterRule, make_tip
from node.training.inner import FIRST_SCALE, MOST_SKIPPED, Execution, InnerLoop, evaluate
from node.training.model import LossKind, build_model, flatten, load_flat_, next_token_loss, prepare_layers
from node.training.optimizers import is_for_muon
from node.training.replica import Replica
from node.training.tokenizer import ByteTokenizer
from node.worker.counters import WorkCounters
from node.worker.evaluation import Evaluation
from node.worker.inner_trainer import InnerTrainer
from node.worker.supervisor_link import StopAsked

CPU = torch.device("cpu")
TINY = ModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
CFG = InnerConfig(clip_norm=0.5)
MUON = CFG.model_copy(update={"optimizer": "muon"})


def batches(count: int, rows: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 258, (rows, 33), generator=generator) for _ in range(count)]


def loop(
    micro_batch: int = 0, precision: str = "fp32", cfg: InnerConfig = CFG, *, loss: LossKind = "whole"
) -> tuple[nn.Module, InnerLoop]:
    model = build_model(TINY, seed=1)
    return model, InnerLoop(model, cfg, CPU, Execution(precision, micro_batch, loss))


def test_fewer_threads_compute_fewer_rows_at_once() -> None:
    """A pass that takes much longer than before would look like a hang, and the worker would be killed."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        inner, whole = loop(micro_batch=4)[1], loop()[1]
        rows = []
        for threads in (2, 1, 16, 8):
            inner.use_threads(threads)
            assert torch.get_num_threads() == threads
            rows.append(inner.micro_batch)
        assert rows == [1, 1, 4, 4]
        whole.use_threads(2)
        assert whole.micro_batch == 0, "it computes all rows of a batch at once"
    finally:
        torch.set_num_threads(before)


def test_inner_optimizer_equals_torch_adamw_with_decay_on_matrices_only() -> None:
    model, inner = loop()
    other = build_model(TINY, seed=1)
    matrices = [p for p in other.parameters() if p.dim() >= 2]
    vectors = [p for p in other.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1.0, betas=(0.9, 0.95)
    )
    for k, batch in enumerate(batches(5)):
        lr = 1e-3 * (k + 1)
        result = inner.step(batch, lr)
        loss = next_token_loss(other, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-3)
        assert result.tokens == 6 * 32
    assert result.grad_norm > 0.5, "otherwise nothing was clipped"
    torch.testing.assert_close(flatten(model), flatten(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("micro_batch", "how"),
    [(1, "whole"), (2, "whole"), (4, "whole"), (6, "whole"), (100, "whole"), (0, "chunked"), (4, "chunked")],
)
def test_micro_batches_and_a_chunked_loss_do_not_change_the_inner_step(
    micro_batch: int, how: LossKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "LOSS_TOKENS", 50)
    (whole_model, whole), (model, inner) = loop(), loop(micro_batch, loss=how)
    for batch in batches(3):
        expected, got = whole.step(batch, 1e-3), inner.step(batch, 1e-3)
        assert got.loss == pytest.approx(expected.loss, rel=1e-5)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert got.tokens == expected.tokens
    torch.testing.assert_close(flatten(model), flatten(whole_model), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cfg", [CFG, MUON], ids=["adamw", "muon"])
def test_resumed_inner_loop_gives_the_same_bits(cfg: InnerConfig) -> None:
    model, inner = loop(2, cfg=cfg)
    data = batches(6)
    for batch in data[:3]:
        inner.step(batch, 1e-3)
    parameters, state = flatten(model), inner.state_tensors()
    saved = {key: t.clone() for key, t in state.items()}
    for batch in data[3:]:
        inner.step(batch, 1e-3)
    resumed_model, resumed = loop(2, cfg=cfg)
    resumed.step(data[0], 1.0)  # Loading must overwrite the result of this step.
    load_flat_(resumed_model, parameters)
    resumed.load_state_tensors(state)
    for batch in data[3:]:
        resumed.step(batch, 1e-3)
    assert torch.equal(flatten(resumed_model), flatten(model))
    for key, tensor in inner.state_tensors().items():
        assert torch.equal(resumed.state_tensors()[key], tensor)
    assert all(torch.equal(state[key], saved[key]) for key in saved), "the state is a copy, saved and loaded"


def test_optimizer_state_before_the_first_step_is_zero_and_can_be_loaded() -> None:
    (model, inner), (other_model, other) = loop(), loop()
    state = inner.state_tensors()
    assert {key: tuple(t.shape) for key, t in state.items()} == {
        "exp_avg": flatten(model).shape, "exp_avg_sq": flatten(model).shape, "step": (1,)
    }  # fmt: skip
    assert not any(t.any() for t in state.values())
    other.load_state_tensors(state)
    for batch in batches(2):
        inner.step(batch, 1e-3)
        other.step(batch, 1e-3)
    assert torch.equal(flatten(model), flatten(other_model))
    assert inner.state_tensors()["step"].item() == 2
    with pytest.raises(ValueError, match="does not fit"):
        inner.load_state_tensors(state | {"exp_avg": torch.zeros(3)})


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_an_inner_step_with_a_loss_or_gradient_that_is_not_finite_changes_nothing(what: str) -> None:
    model, inner = loop()
    batch = batches(1)[0]
    inner.step(batch, 1e-3)
    weight = model.get_parameter("model.norm.weight")
    handle = weight.register_hook(lambda g: g * float("inf")) if what == "gradient" else None
    with torch.no_grad():
        weight[0] = float("nan") if what == "loss" else 1.0
    before, state = flatten(model), inner.state_tensors()
    assert inner.step(batch, 1e-3).tokens == 0
    torch.testing.assert_close(flatten(model), before, rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(a, b) for a, b in zip(inner.state_tensors().values(), state.values(), strict=True))
    if handle is not None:
        handle.remove()
    with torch.no_grad():
        weight[0] = 1.0
    assert inner.step(batch, 1e-3).loss > 0, "no gradient of the failed step is left"


def test_many_inner_steps_in_a_row_without_a_finite_loss_are_an_error() -> None:
    _, inner = loop()
    batch = batches(1)[0]
    for _ in range(MOST_SKIPPED - 1):
        assert inner.step(batch, 1e-3, lambda rows: math.nan).tokens == 0
    assert inner.step(batch, 1e-3).tokens, "a finite step resets the count"
    for _ in range(MOST_SKIPPED - 1):
        inner.step(batch, 1e-3, lambda rows: math.inf)
    with pytest.raises(TrainingError, match=r"diverged.*lr"):
        inner.step(batch, 1e-3, lambda rows: math.inf)


def test_training_after_many_skipped_steps_in_fp16_begins_with_the_first_loss_scale() -> None:
    """Each skipped step halves the scale. At the last one, all gradients of a model that was reset would be zero."""
    model, inner = loop(precision="fp16")
    batch = batches(1)[0]
    expected = inner.step(batch, 0.0).grad_norm
    handle = model.get_parameter("model.norm.weight").register_hook(lambda g: g * float("inf"))
    for _ in range(MOST_SKIPPED - 1):
        inner.step(batch, 0.0)
    with pytest.raises(TrainingError):
        inner.step(batch, 0.0)
    handle.remove()
    assert inner.step(batch, 0.0).grad_norm == pytest.approx(expected, rel=0.05)
    assert inner.state_tensors()["scale"].tolist()[0] == FIRST_SCALE


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_model_learns_in_half_precision_while_its_parameters_stay_in_fp32(precision: str) -> None:
    model, inner = loop(precision=precision)
    batch = batches(1)[0]
    losses = [inner.step(batch, 3e-3).loss for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_loss_scale_of_fp16_does_not_change_gradient_norm_and_parameters() -> None:
    (plain_model, plain), (model, inner) = loop(), loop(precision="fp16")
    for batch in batches(3):
        expected, got = plain.step(batch, 1e-3), inner.step(batch, 1e-3)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    moved = flatten(plain_model) - flatten(build_model(TINY, seed=1))
    assert (flatten(model) - flatten(plain_model)).norm() < 0.2 * moved.norm()


def test_gradient_that_overflows_in_fp16_lowers_the_loss_scale_and_skips_the_step() -> None:
    model, inner = loop(precision="fp16")
    batch = batches(1)[0]
    handle = model.get_parameter("model.norm.weight").register_hook(lambda g: g * float("inf"))
    assert [inner.step(batch, 1e-3).tokens for _ in range(3)] == [0, 0, 0]
    handle.remove()
    assert inner.step(batch, 1e-3).tokens > 0
    assert inner.state_tensors()["scale"].tolist() == [FIRST_SCALE / 8, 1]
    other = loop(precision="fp16")[1]
    other.load_state_tensors(inner.state_tensors())
    assert other.state_tensors()["scale"].tolist() == [FIRST_SCALE / 8, 1]


def test_running_out_of_memory_halves_the_micro_batch_and_does_not_change_the_step() -> None:
    def out_of_memory_above_two(rows: int) -> float:
        if rows > 2:
            raise torch.OutOfMemoryError("injected")
        return 1.0

    (whole_model, whole), (model, inner) = loop(), loop()
    for batch in batches(3):
        whole.step(batch, 1e-3)
        assert inner.step(batch, 1e-3, out_of_memory_above_two).tokens == 6 * 32
    assert inner.micro_batch == 1, "6, 3, 1"
    torch.testing.assert_close(flatten(model), flatten(whole_model), rtol=1e-3, atol=1e-5)


def test_too_little_memory_for_one_sequence_is_an_error_with_a_remedy() -> None:
    def out_of_memory(rows: int) -> float:
        raise torch.OutOfMemoryError("injected")

    model, inner = loop()
    before = flatten(model)
    with pytest.raises(MachineError, match=r"single sequence.*activation_checkpointing"):
        inner.step(batches(1)[0], 1e-3, out_of_memory)
    assert torch.equal(flatten(model), before)


@pytest.mark.parametrize(
    ("devices", "how"),
    [
        (DevicesConfig(activation_checkpointing=True), Execution()),
        pytest.param(
            DevicesConfig(),
            Execution("fp32", 3, "compiled", compiled=True),
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++"),
            ],
        ),
    ],
    ids=["recomputed", "compiled"],
)
@pytest.mark.filterwarnings("ignore")  # Ignore the warnings of torch's compiler.
@pytest.mark.timeout(400)  # The compiler takes 25 s of CPU time.
def test_recomputed_or_compiled_layers_do_not_change_the_inner_step(
    devices: DevicesConfig, how: Execution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiler's cache on the disk ignores ATEN_CPU_CAPABILITY: it returns code for another instruction set.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    whole_model, whole = loop()
    model = build_model(TINY, seed=1)
    prepare_layers(model, devices)
    inner = InnerLoop(model, CFG, CPU, how)
    for batch in batches(3):
        whole.step(batch, 1e-3), inner.step(batch, 1e-3)
    torch.testing.assert_close(flatten(model), flatten(whole_model), rtol=1e-4, atol=1e-6)


def test_muon_optimizes_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    model, inner = loop(cfg=MUON)
    batch = batches(1)[0]
    losses = [inner.step(batch, 1e-3).loss for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5
    state = inner.state_tensors()
    matrices = sum(p.numel() for name, p in model.named_parameters() if is_for_muon(name, p))
    others = sum(p.numel() for p in model.parameters()) - matrices
    assert matrices > 0 < others
    assert {key: value.numel() for key, value in state.items()} == {
        "step": 1, "exp_avg": others, "exp_avg_sq": others, "momentum_buffer": matrices,
    }  # fmt: skip


# evaluation


def loss_function(model: nn.Module, precision: str = "fp32") -> Callable[[Tensor], float]:
    return InnerLoop(model, InnerConfig(), CPU, Execution(precision)).loss_of


def test_evaluation_loss_is_the_mean_over_all_tokens_even_for_uneven_batches() -> None:
    model = build_model(TINY, seed=0)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(0, 258, shape, generator=generator) for shape in ((2, 33), (1, 33), (4, 9))]
    with torch.no_grad():
        total = sum(next_token_loss(model, b).item() * b[:, 1:].numel() for b in data)
    assert evaluate(loss_function(model), data) == pytest.approx(total / (64 + 32 + 32), rel=1e-6)
    assert math.isnan(evaluate(loss_function(model), []))


def test_evaluation_changes_neither_parameters_nor_gradients() -> None:
    model = build_model(TINY, seed=0)
    before = flatten(model)
    data = [torch.zeros(2, 9, dtype=torch.int64)]
    half, full = evaluate(loss_function(model, "bf16"), data), evaluate(loss_function(model), data)
    assert half == pytest.approx(full, rel=0.02)
    assert model.training
    assert torch.equal(flatten(model), before)
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_ends_when_its_time_is_up_but_not_before_one_batch() -> None:
    loss_of = loss_function(build_model(TINY, seed=0))
    data = [torch.full((1, 9), token) for token in range(4)]
    times = iter([0.0, 1.0, 2.0, 3.0, 4.0])
    assert evaluate(loss_of, data, budget_s=1.5, clock=lambda: next(times)) == evaluate(loss_of, data[:2])
    assert evaluate(loss_of, data, budget_s=0.0) == evaluate(loss_of, data[:1])


def test_stopped_evaluation_gives_no_loss_and_restores_the_parameters() -> None:
    model = build_model(TINY, seed=0)
    run = RunConfig(model=TINY)
    data = [torch.randint(0, 258, (2, 9)) for _ in range(5)]
    replica = Replica(model, run.inner, CPU, Execution("fp32", 0))
    local = InnerTrainer(
        run, replica, lambda _: pytest.fail("no text is read"), data, WorkCounters(time.monotonic), ByteTokenizer()
    )
    tip = make_tip(genesis(flatten(model) + 1.0), "ab" * 32, None, OuterRule(0.7, OuterOptimizer(), 10), {}, 0.0)
    own, calls = flatten(model), 0

    def obey() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise StopAsked("pause")

    evaluation = Evaluation(local)
    evaluation.round_over(tip, "me", obey)
    assert calls == 3 and evaluation.loss is None
    assert torch.equal(flatten(model), own)
    evaluation.round_over(tip, "me", lambda: None)
    assert evaluation.loss is not None

"""The inner step: AdamW as torch does it, accumulation without effect, and resuming to the bit."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import node.training.model as model_module
from node.errors import MachineError, TrainingError
from node.manifest import InnerConfig, ModelConfig
from node.training.inner import FIRST_SCALE, MOST_SKIPPED, Execution, InnerLoop
from node.training.model import build_model, flatten, load_flat_, next_token_loss, prepare
from node.training.optimizers import is_for_muon

CPU = torch.device("cpu")
TINY = ModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
CFG = InnerConfig(clip_norm=0.5)


def batches(count: int, rows: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 258, (rows, 33), generator=generator) for _ in range(count)]


def loop(micro_batch: int = 0, precision: str = "fp32", cfg: InnerConfig = CFG) -> tuple[nn.Module, InnerLoop]:
    model = build_model(TINY, seed=1)
    return model, InnerLoop(model, cfg, CPU, Execution(precision, micro_batch))


def test_it_is_torch_adamw_with_decay_on_matrices_only() -> None:
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
    assert result.grad_norm > 0.5, "else nothing was clipped here"
    torch.testing.assert_close(flatten(model), flatten(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 6, 100])
def test_micro_batches_make_the_same_step_as_the_whole_batch(micro_batch: int) -> None:
    (whole_model, whole), (model, inner) = loop(), loop(micro_batch)
    for batch in batches(3):
        expected, got = whole.step(batch, 1e-3), inner.step(batch, 1e-3)
        assert got.loss == pytest.approx(expected.loss, rel=1e-5)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert got.tokens == expected.tokens
    torch.testing.assert_close(flatten(model), flatten(whole_model), rtol=1e-3, atol=1e-5)


def test_resuming_gives_the_same_bits() -> None:
    model, inner = loop(micro_batch=2)
    data = batches(6)
    for batch in data[:3]:
        inner.step(batch, 1e-3)
    parameters, state = flatten(model), inner.state_tensors()
    for batch in data[3:]:
        inner.step(batch, 1e-3)
    resumed_model, resumed = loop(micro_batch=2)
    resumed.step(data[0], 1.0)  # something to overwrite
    load_flat_(resumed_model, parameters)
    resumed.load_state_tensors(state)
    for batch in data[3:]:
        resumed.step(batch, 1e-3)
    assert torch.equal(flatten(resumed_model), flatten(model))
    for key, tensor in inner.state_tensors().items():
        assert torch.equal(resumed.state_tensors()[key], tensor)


def test_state_before_the_first_step_is_zero_and_loads() -> None:
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


def test_the_state_is_a_copy() -> None:
    _, inner = loop()
    first, second = batches(2)
    inner.step(first, 1e-3)
    state = inner.state_tensors()
    kept = {key: t.clone() for key, t in state.items()}
    inner.step(second, 1e-3)
    inner.load_state_tensors(state)
    inner.step(second, 1e-3)
    assert all(torch.equal(state[key], kept[key]) for key in kept)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(what: str) -> None:
    model, inner = loop()
    batch = batches(1)[0]
    inner.step(batch, 1e-3)
    weight = model.get_parameter("model.norm.weight")
    handle = weight.register_hook(lambda g: g * float("inf")) if what == "gradient" else None
    spoiled = float("nan") if what == "loss" else 1.0
    with torch.no_grad():
        weight[0] = spoiled
    before, state = flatten(model), inner.state_tensors()
    assert inner.step(batch, 1e-3).tokens == 0
    torch.testing.assert_close(flatten(model), before, rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(a, b) for a, b in zip(inner.state_tensors().values(), state.values(), strict=True))
    if handle is not None:
        handle.remove()
    with torch.no_grad():
        weight[0] = 1.0
    assert inner.step(batch, 1e-3).loss > 0, "no gradient of the failed step is left"


def test_many_steps_in_a_row_that_are_not_finite_end_it() -> None:
    _, inner = loop()
    batch = batches(1)[0]
    for _ in range(MOST_SKIPPED - 1):
        assert inner.step(batch, 1e-3, lambda rows: math.nan).tokens == 0
    assert inner.step(batch, 1e-3).tokens, "one that is finite begins the count again"
    for _ in range(MOST_SKIPPED - 1):
        inner.step(batch, 1e-3, lambda rows: math.inf)
    with pytest.raises(TrainingError, match=r"diverged.*lr"):
        inner.step(batch, 1e-3, lambda rows: math.inf)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_learns_in_half_precision_with_parameters_in_fp32(precision: str) -> None:
    model, inner = loop(precision=precision)
    batch = batches(1)[0]
    losses = [inner.step(batch, 3e-3).loss for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_scale_of_fp16_is_in_the_step_alone() -> None:
    """Gradients, and so parameters and what is sent of them, are those without a scale, but for rounding."""
    (plain_model, plain), (model, inner) = loop(), loop(precision="fp16")
    for batch in batches(3):
        expected, got = plain.step(batch, 1e-3), inner.step(batch, 1e-3)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    moved = flatten(plain_model) - flatten(build_model(TINY, seed=1))
    assert (flatten(model) - flatten(plain_model)).norm() < 0.2 * moved.norm()


def test_a_gradient_that_overflows_in_fp16_lowers_the_scale_and_costs_a_step() -> None:
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


def test_out_of_memory_halves_the_micro_batch_and_the_step_is_the_same() -> None:
    def room_for_two(rows: int) -> float:
        if rows > 2:
            raise torch.OutOfMemoryError("injected")
        return 1.0

    (whole_model, whole), (model, inner) = loop(), loop()
    for batch in batches(3):
        whole.step(batch, 1e-3)
        assert inner.step(batch, 1e-3, room_for_two).tokens == 6 * 32
    assert inner.micro_batch == 1, "6, 3, 1"
    torch.testing.assert_close(flatten(model), flatten(whole_model), rtol=1e-3, atol=1e-5)


def test_no_memory_for_one_row_ends_it_with_the_mend() -> None:
    def no_room(rows: int) -> float:
        raise torch.OutOfMemoryError("injected")

    model, inner = loop()
    before = flatten(model)
    with pytest.raises(MachineError, match=r"single sequence.*activation_checkpointing"):
        inner.step(batches(1)[0], 1e-3, no_room)
    assert torch.equal(flatten(model), before)


@pytest.mark.parametrize("how", [Execution(chunked_loss=True), Execution(chunked_loss=True, micro_batch=4)])
def test_a_chunked_loss_makes_the_same_step(how: Execution, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "LOSS_TOKENS", 50)
    whole_model, whole = loop()
    model = build_model(TINY, seed=1)
    inner = InnerLoop(model, CFG, CPU, how)
    for batch in batches(3):
        expected, got = whole.step(batch, 1e-3), inner.step(batch, 1e-3)
        assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    torch.testing.assert_close(flatten(model), flatten(whole_model), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("recompute", "compiled"),
    [
        (True, False),
        pytest.param(
            False, True, marks=pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.timeout(400)  # The compiler takes 25 s of CPU time.
def test_recomputed_and_compiled_layers_make_the_same_step(
    recompute: bool, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiler's cache on the disk ignores ATEN_CPU_CAPABILITY: it returns code for another instruction set.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    whole_model, whole = loop()
    model = build_model(TINY, seed=1)
    prepare(model, recompute=recompute, compiled=compiled)
    inner = InnerLoop(model, CFG, CPU)
    for batch in batches(3):
        whole.step(batch, 1e-3), inner.step(batch, 1e-3)
    torch.testing.assert_close(flatten(model), flatten(whole_model), rtol=1e-4, atol=1e-6)


def test_muon_has_the_layers_matrices_and_adamw_the_rest() -> None:
    model, inner = loop(cfg=CFG.model_copy(update={"optimizer": "muon"}))
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


def test_muon_goes_on_to_the_bit() -> None:
    cfg = CFG.model_copy(update={"optimizer": "muon"})
    (model, inner), steps = loop(cfg=cfg), batches(6)
    for batch in steps[:3]:
        inner.step(batch, 1e-3)
    other_model, other = loop(cfg=cfg)
    load_flat_(other_model, flatten(model))
    other.load_state_tensors(inner.state_tensors())
    for batch in steps[3:]:
        inner.step(batch, 1e-3), other.step(batch, 1e-3)
    assert torch.equal(flatten(model), flatten(other_model))

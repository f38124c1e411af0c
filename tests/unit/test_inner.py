"""The inner step: AdamW as torch does it, accumulation without effect, and resuming to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from node.errors import TrainingError
from node.manifest import InnerConfig, ModelConfig
from node.training.inner import InnerLoop
from node.training.model import build_model, flatten, load_flat_, next_token_loss

CPU = torch.device("cpu")
TINY = ModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
CFG = InnerConfig(clip_norm=0.5)


def batches(count: int, rows: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 258, (rows, 33), generator=generator) for _ in range(count)]


def loop(micro_batch: int = 0, precision: str = "fp32", cfg: InnerConfig = CFG) -> tuple[nn.Module, InnerLoop]:
    model = build_model(TINY, seed=1)
    return model, InnerLoop(model, cfg, CPU, precision, micro_batch)


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
    with pytest.raises(TrainingError, match=r"diverged.*lr"):
        inner.step(batch, 1e-3)
    torch.testing.assert_close(flatten(model), before, rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(a, b) for a, b in zip(inner.state_tensors().values(), state.values(), strict=True))
    if handle is not None:
        handle.remove()
    with torch.no_grad():
        weight[0] = 1.0
    assert inner.step(batch, 1e-3).loss > 0, "no gradient of the failed step is left"


def test_it_learns_in_bf16_with_parameters_in_fp32() -> None:
    model, inner = loop(precision="bf16")
    batch = batches(1)[0]
    losses = [inner.step(batch, 3e-3).loss for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5
    assert {p.dtype for p in model.parameters()} == {torch.float32}

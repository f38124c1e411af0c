"""What the node asks of an NVIDIA GPU. Each test is skipped on a machine without one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from node.config.manifest import RunConfig
from node.config.schema import Config, DevicesConfig
from node.diloco.codec import CODECS, make_codec
from node.errors import MachineError
from node.training.cuda import Cuda
from node.training.device import choose_device, describe, free_device_bytes
from node.training.fit import choose_execution, execution, peak_bytes
from node.training.inner import Execution, InnerLoop
from node.training.model import build_model, prepare_layers, unit_elements
from node.training.replica import Replica
from tests.swarm.harness import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU")
GPU = torch.device("cuda", 0)
MODEL = {
    "hidden_size": 512, "intermediate_size": 1344, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 512,
}  # fmt: skip


def run_of(rows: int = 8, **model: object) -> RunConfig:
    return RunConfig.model_validate(
        tiny(model=MODEL | model, inner={"batch_size": rows, "sequence_length": 512, "lr": 1e-3})
    )


def batch_of(run: RunConfig, rows: int = 0) -> torch.Tensor:
    """Random tokens, int64 cpu [rows, T + 1]."""
    return torch.randint(run.model.vocab_size, (rows or run.inner.batch_size, run.inner.sequence_length + 1))


@pytest.fixture
def whole_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0, GPU)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e-30, 0.0])
def test_a_gpu_encodes_to_the_same_bytes_as_the_host(name: str, scale: float) -> None:
    vector = scale * torch.randn(1_000_003, generator=torch.Generator().manual_seed(1))
    vector[:5] = torch.tensor([0.0, -0.0, 1e-38, -1e20, 1e20]) * (scale != 0.0)
    codec = make_codec(name)
    on_gpu, on_host = codec.encode(vector.to(GPU)), codec.encode(vector)
    if scale == 0.0 and name.startswith("topk"):  # It may keep others of equal elements.
        assert torch.equal(codec.decode(on_gpu, len(vector)), codec.decode(on_host, len(vector)))
    else:
        assert on_gpu == on_host


def test_the_sensors_of_a_gpu_have_plausible_figures() -> None:
    chosen = choose_device(DevicesConfig(), 1)
    info = describe(chosen.device)
    assert info.kind == "cuda" and "NVIDIA" in info.name
    assert info.power_watts is not None and 5 < info.power_watts < 2000
    assert info.temperature_celsius is not None and 5 < info.temperature_celsius < 120
    assert info.energy_joules is None or info.energy_joules > 0
    assert info.utilization_ratio is not None and 0 <= info.utilization_ratio <= 1
    assert info.memory_size_bytes is not None and info.memory_size_bytes > 2**30
    assert info.memory_used_bytes is not None and 0 < info.memory_used_bytes <= info.memory_size_bytes
    assert Cuda().power_id(GPU).startswith("GPU-")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_inner_steps_on_a_gpu_lower_the_loss_in_each_precision(precision: str) -> None:
    run = run_of()
    inner = InnerLoop(build_model(run.model, seed=0), run.inner, GPU, Execution(precision, 4))
    batch = batch_of(run)
    losses = [inner.step(batch, 1e-3).loss for _ in range(12)]
    assert losses[-1] < losses[0] - 0.5 and all(map(math.isfinite, losses))


def test_a_step_in_bf16_on_a_gpu_has_nearly_the_loss_of_the_cpu_in_fp32() -> None:
    run = run_of(2)
    batch = batch_of(run)
    on_cpu = InnerLoop(build_model(run.model, seed=0), run.inner, torch.device("cpu")).loss_of(batch)
    on_gpu = InnerLoop(build_model(run.model, seed=0), run.inner, GPU, Execution("bf16")).loss_of(batch)
    assert on_gpu == pytest.approx(on_cpu, rel=3e-3)


@pytest.mark.filterwarnings("ignore")  # Ignore the warnings of torch's compiler.
def test_compiled_layers_have_the_loss_of_layers_that_are_not_compiled() -> None:
    run, devices = run_of(), DevicesConfig(micro_batch=4)
    plain, compiled = build_model(run.model, seed=0), build_model(run.model, seed=0)
    how = choose_execution(compiled, run, choose_device(devices, 1), devices)
    assert how.compiled and how.loss == "compiled"
    replicas = [
        Replica(plain, run.inner, GPU, Execution("bf16", 4)), Replica(compiled, run.inner, GPU, how)
    ]  # fmt: skip
    replicas[1].warm_up(4, run.inner.sequence_length)
    batch = batch_of(run)
    for _ in range(3):
        first, second = (replica.step(batch, 1e-3).loss for replica in replicas)
        assert second == pytest.approx(first, rel=3e-3)
    assert replicas[1].loss_of(batch) == pytest.approx(replicas[0].loss_of(batch), rel=3e-3)
    tokens, _ = replicas[1].inner.sample(
        [1, 2, 3], most=5, end=None, vocabulary=258, temperature=1.0, is_over=lambda: False
    )
    assert len(tokens) == 5


def test_the_memory_share_is_kept_and_a_step_halves_its_micro_batch_to_fit(whole_memory: None) -> None:
    run = run_of(256, num_hidden_layers=8)
    size = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(GPU)
    chosen = choose_device(DevicesConfig(), 1, gpu_memory_ratio=(held + 4e9) / size)
    assert free_device_bytes(chosen.device, 4e9 / size) == pytest.approx(4e9)
    inner = InnerLoop(build_model(run.model, seed=0), run.inner, GPU, Execution("bf16", 256))
    assert inner.step(batch_of(run), 1e-4).tokens == 256 * 512
    assert 1 <= inner.micro_batch < 256
    assert torch.cuda.memory_reserved(GPU) < held + 4.1e9


def test_a_device_without_room_for_one_sequence_is_named_with_the_remedy(whole_memory: None) -> None:
    run = run_of(1, num_hidden_layers=8, max_position_embeddings=8192)
    run = run.model_copy(update={"inner": run.inner.model_copy(update={"sequence_length": 8192})})
    torch.cuda.empty_cache()
    inner = InnerLoop(build_model(run.model, seed=0), run.inner, GPU, Execution("bf16"))
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(GPU) + 3e8) / torch.cuda.get_device_properties(GPU).total_memory, GPU
    )
    with pytest.raises(MachineError, match="memory does not suffice for a single sequence") as raised:
        inner.step(batch_of(run), 1e-4)
    assert raised.value.code == "out_of_memory"


@pytest.mark.filterwarnings("ignore")  # Ignore the warnings of torch's compiler.
@pytest.mark.parametrize("what", ["plain", "recomputed", "compiled"])
def test_peak_memory_of_a_step_is_close_to_the_formula(what: str) -> None:
    run = run_of(32, hidden_size=1024, intermediate_size=2688, num_attention_heads=16, num_key_value_heads=16)
    devices = DevicesConfig(activation_checkpointing=what == "recomputed", compile=what == "compiled", micro_batch=32)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    model = build_model(run.model, seed=0)
    prepare_layers(model, devices)
    how = execution(run, choose_device(devices, 1), devices, 32, compiled=what == "compiled")
    replica = Replica(model, run.inner, GPU, how)
    replica.step(batch_of(run), 1e-4)
    parameters = sum(unit_elements(run.model))
    sent = replica.take(((0, parameters),), on_host=False)
    replica.step(batch_of(run), 1e-4)
    assert sent.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(GPU) - before
    formula = peak_bytes(run, Config(devices=devices), how)
    print(f"{what}: peak {peak / 1e9:.3f} GB, formula {formula / 1e9:.3f} GB")
    assert peak == pytest.approx(formula, rel=0.1)


def test_the_optimizer_state_of_a_gpu_survives_a_checkpoint() -> None:
    run = run_of()
    first, second = (
        Replica(build_model(run.model, seed=seed), run.inner, GPU, Execution("bf16", 4)) for seed in (0, 1)
    )
    batch = batch_of(run)
    first.step(batch, 1e-3)
    second.load(first.parameters)
    second.load_optimizer_state(first.optimizer_state())
    assert second.step(batch, 1e-3).loss == pytest.approx(first.step(batch, 1e-3).loss, rel=1e-4)
    torch.testing.assert_close(second.parameters, first.parameters, rtol=1e-3, atol=1e-5)


def test_all_memory_is_given_back_when_a_replica_is_freed() -> None:
    run = run_of()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(GPU)
    replica = Replica(build_model(run.model, seed=0), run.inner, GPU, Execution("bf16", 4))
    replica.step(batch_of(run), 1e-3)
    assert torch.cuda.memory_allocated(GPU) > before + 10_000_000
    del replica
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated(GPU) <= before + 100_000

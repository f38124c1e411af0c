"""The formulas for the memory of a run agree with what torch uses, and a run that does not fit is refused."""

from __future__ import annotations

import gc
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from node.config.manifest import RunConfig
from node.config.schema import Config, DevicesConfig, NodeConfig
from node.diloco.codec import make_codec
from node.diloco.outer import OuterOptimizer, genesis, outer_step, pseudo_gradient
from node.errors import MachineError
from node.swarm.allreduce.reducer import chunk_layouts
from node.training import fit
from node.training.algorithm import feedback_of
from node.training.device import ComputeDevice
from node.training.fit import (
    DEVICE_BYTES,
    GB,
    HOST_BYTES,
    RESIDUALS,
    check_fit,
    choose_execution,
    estimate_requirements,
    pass_bytes,
)
from node.training.inner import Execution
from node.training.model import NextTokenLoss, autocast, build_model, prepare_layers, unit_elements
from node.training.replica import Replica
from node.worker.encoder import Encoder
from tests.swarm.harness import tiny

CPU = torch.device("cpu")
CPU_DEVICE = ComputeDevice(CPU, "fp32", "a CPU")


def run_of(length: int = 256, **model: Any) -> RunConfig:
    model = {"hidden_size": 256, "intermediate_size": 672, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 4, "max_position_embeddings": 2048, **model}  # fmt: skip
    return RunConfig.model_validate(tiny(model=model, inner={"batch_size": 4, "sequence_length": length}))


def kept_bytes(model: nn.Module, run: RunConfig, precision: str) -> int:
    """The bytes that autograd keeps for the backward pass of one sequence, without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = torch.randint(run.model.vocab_size, (1, run.inner.sequence_length + 1))
    loss_of = NextTokenLoss(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(CPU, precision):
        loss = loss_of(batch)
    loss.backward()
    half = 2 * sum(p.numel() for p in model.parameters() if p.dim() == 2) if precision != "fp32" else 0
    return sum(kept.values()) - half  # The weights in half precision count as parameters.


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [{}, {"num_key_value_heads": 1}, {"vocab_size": 8000}])
def test_memory_of_activations_is_estimated_within_a_third(precision: str, model: dict[str, Any]) -> None:
    run = run_of(**model)
    found = kept_bytes(build_model(run.model, seed=0), run, precision)
    of_loss = (fit.LOGIT_BYTES - 4) * run.model.vocab_size * run.inner.sequence_length  # Freed before the others.
    estimated = pass_bytes(run, DevicesConfig(chunked_loss="off"), precision) - of_loss
    assert estimated == pytest.approx(found, rel=0.34)


def test_recomputing_keeps_less_than_a_third_of_the_activations_in_memory() -> None:
    run, devices = run_of(num_hidden_layers=12), DevicesConfig(activation_checkpointing=True)
    model = build_model(run.model, seed=0)
    plain = kept_bytes(model, run, "fp32")
    prepare_layers(model, devices)
    assert kept_bytes(model, run, "fp32") < plain / 3
    assert pass_bytes(run, devices, "fp32") < pass_bytes(run, DevicesConfig(), "fp32") / 3


def live_bytes() -> int:
    """The bytes of all tensors of this process."""
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if type(obj) in (torch.Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_stated_bytes_per_parameter_match_the_memory_in_use_on_device_and_host() -> None:
    run = run_of(hidden_size=512, intermediate_size=1344, num_hidden_layers=2)
    before = live_bytes()
    model = build_model(run.model, seed=0)
    parameters = sum(p.numel() for p in model.parameters())
    replica = Replica(model, run.inner, CPU, Execution())
    replica.step(torch.randint(258, (1, 33)), 1e-3)
    sent = replica.take(((0, parameters),))
    device = (live_bytes() - before) / parameters
    assert device == pytest.approx(DEVICE_BYTES - 4, rel=0.02), "all but the gradients, which exist only in a step"

    before = live_bytes()
    state = genesis(torch.zeros(parameters))
    gradient = pseudo_gradient(state.anchor, sent)
    stepped = outer_step(state, gradient, OuterOptimizer(), lr=0.7, tokens=1)
    snapshot, moments = replica.parameters, replica.optimizer_state()
    host = (live_bytes() - before) / parameters
    assert host <= HOST_BYTES
    assert host == pytest.approx(32, rel=0.02), "old and new anchor and momentum, pseudo-gradient, checkpoint"
    assert set(moments) == {"step", "exp_avg", "exp_avg_sq"}
    assert stepped.anchor.shape == snapshot.shape


@pytest.mark.parametrize(
    ("sync", "size"),
    [({"codec": "int4", "feedback": "loco"}, 1.01), ({"codec": "topk", "feedback": "classic"}, 4.0)],
    ids=["loco", "classic"],
)
def test_stated_bytes_per_parameter_match_the_memory_of_error_feedback(sync: dict[str, str], size: float) -> None:
    """The memory is measured while the pseudo-gradient is encoded, and between two rounds."""
    run = RunConfig.model_validate(tiny(sync=sync))
    parameters = 2_000_000
    anchor = torch.zeros(parameters)
    sent = torch.randn(parameters, generator=torch.Generator().manual_seed(0)) * 1e-3
    before, while_encoding = live_bytes(), []
    outgoing = Encoder(chunk_layouts(make_codec(run.sync.codec), [((0, parameters),)]), run.sync, {})

    def then(chunks: Sequence[bytes], norm: float) -> None:
        while_encoding.append((live_bytes() - before + sum(map(len, chunks))) / parameters)

    outgoing.begin(0, anchor, sent, then)
    outgoing.wait()
    outgoing.check()
    rule = feedback_of(run.sync)
    assert rule is not None
    residual = rule.bytes_per_parameter
    assert residual == pytest.approx(size, rel=0.005)
    between = (live_bytes() - before) / parameters
    assert between == pytest.approx(2 * residual, rel=0.02), "the residual before the round, and after it"
    # There is no new anchor and no new momentum yet, and their memory suffices for the decoded contribution.
    assert while_encoding[0] <= 2 * residual + HOST_BYTES - 8 - 12
    outgoing.round_over(0, 0, included=True)
    assert (live_bytes() - before) / parameters == pytest.approx(residual, rel=0.02)
    fp16 = RunConfig.model_validate(tiny(sync={"codec": "fp16"}))
    with_feedback, without = (estimate_requirements(one, Config(), "fp32") for one in (run, fp16))
    count = sum(unit_elements(run.model))
    assert with_feedback.host_bytes - without.host_bytes == pytest.approx(RESIDUALS * residual * count)
    assert with_feedback.least_disk_bytes > without.least_disk_bytes


def test_second_moments_of_adam_are_part_of_the_requirements() -> None:
    adam, nesterov = (
        estimate_requirements(RunConfig.model_validate(tiny(outer={"optimizer": name})), Config(), "fp32")
        for name in ("adam", "nesterov")
    )
    count = sum(unit_elements(RunConfig.model_validate(tiny()).model))
    assert adam.host_bytes - nesterov.host_bytes == 8 * count
    assert adam.disk_bytes - nesterov.disk_bytes == 4 * (Config().checkpoint.keep + 1) * count


def test_refusal_of_a_run_names_the_needed_and_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = Config(node=NodeConfig(data_dir=tmp_path / "not" / "there")), run_of()
    check_fit(run, config, CPU_DEVICE)
    needs = estimate_requirements(run, config, "fp32")
    free_bytes = needs.host_bytes + needs.device_bytes + 0.9 * needs.row_bytes
    own_bytes = int(0.3 * free_bytes)
    monkeypatch.setattr(fit, "own_memory_bytes", lambda: own_bytes)
    monkeypatch.setattr(fit, "available_memory_bytes", lambda: needs.host_bytes + needs.device_bytes + needs.row_bytes)
    check_fit(run, config, CPU_DEVICE)
    monkeypatch.setattr(fit, "available_memory_bytes", lambda: free_bytes - own_bytes)
    message = r"needs [\d.]+ GB of memory here, and [\d.]+ GB are free: end what"
    with pytest.raises(MachineError, match=message) as caught:
        check_fit(run, config, CPU_DEVICE)
    wanted, free = (float(x) for x in re.findall(r"([\d.]+) GB", str(caught.value)))
    assert wanted >= free > 0.5
    assert caught.value.exit_code == 3


def test_run_that_exceeds_the_memory_of_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, run = ComputeDevice(torch.device("cuda", 0), "bf16", "a small GPU"), run_of()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10_000_000, 8_000_000_000))
    with pytest.raises(MachineError, match=r"GB of GPU memory here.*smaller model"):
        check_fit(run, Config(), gpu)


def test_stored_checkpoints_and_results_count_towards_the_needed_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = Config(node=NodeConfig(data_dir=tmp_path)), run_of()
    disk = estimate_requirements(run, config, "fp32").disk_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("", (), {"free": 0.7 * disk})())
    with pytest.raises(MachineError, match="of disk"):
        check_fit(run, config, CPU_DEVICE)
    (tmp_path / "checkpoints" / "round-00000001").mkdir(parents=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "shards.bin").write_bytes(bytes(int(0.2 * disk)))
    (tmp_path / "checkpoints" / "round-00000001" / "outer.safetensors").write_bytes(bytes(int(0.2 * disk)))
    with pytest.raises(MachineError, match="of disk"):
        check_fit(run, config, CPU_DEVICE)
    (tmp_path / "cache" / "results-ab.bin").write_bytes(bytes(int(0.2 * disk)))
    check_fit(run, config, CPU_DEVICE)


@pytest.mark.parametrize(("rows", "expected"), [(8.0, 4), (4.1, 4), (3.9, 2), (0.2, 1)])
def test_micro_batch_on_a_cpu_is_chosen_to_fit_into_memory(
    rows: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, devices = run_of(), DevicesConfig()
    model = build_model(run.model, seed=0)
    monkeypatch.setattr(fit, "available_memory_bytes", lambda: rows * pass_bytes(run, devices, "fp32") / fit.CPU_RATIO)
    monkeypatch.setattr(fit, "_measure_row_s", lambda *_: 0.0)  # However slow this machine is.
    assert choose_execution(model, run, CPU_DEVICE, devices).micro_batch == expected
    assert choose_execution(model, run, CPU_DEVICE, DevicesConfig(micro_batch=3)).micro_batch == 3


def test_pass_on_a_cpu_is_short_enough_for_the_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    run, devices = run_of(), DevicesConfig()
    model = build_model(run.model, seed=0)
    assert run.inner.batch_size >= 4
    for row_s, expected in ((fit.MOST_PASS_S / 2.5, 2), (fit.MOST_PASS_S * 3, 1), (1e-6, run.inner.batch_size)):
        monkeypatch.setattr(fit, "_measure_row_s", lambda *_, row_s=row_s: row_s)
        assert choose_execution(model, run, CPU_DEVICE, devices).micro_batch == expected
    monkeypatch.setattr(fit, "_measure_row_s", lambda *_: 20.0)
    with pytest.raises(MachineError, match="One sequence of this run takes 20 s on this machine"):
        choose_execution(model, run, CPU_DEVICE, devices)


def test_loss_over_a_large_vocabulary_is_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = run_of(), run_of(vocab_size=50_000, length=2048)
    assert choose_execution(build_model(small.model, seed=0), small, CPU_DEVICE, DevicesConfig()).loss == "whole"
    monkeypatch.setattr(fit, "_measure_row_s", lambda *_: 0.1)
    monkeypatch.setattr(fit, "InnerLoop", lambda *_: None)  # It cannot take a model without data.
    with torch.device("meta"):
        model = build_model(large.model, seed=0)
    assert choose_execution(model, large, CPU_DEVICE, DevicesConfig()).loss == "chunked"
    assert choose_execution(model, large, CPU_DEVICE, DevicesConfig(chunked_loss="off")).loss == "whole"
    assert 1 * GB < 12 * 50_000 * 4 * 2048

"""What a run needs: the formulas against what torch really keeps, and the refusal with its figures."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from node.config import Config, DevicesConfig, NodeConfig
from node.diloco.codec import make_codec
from node.diloco.outer import genesis, outer_step, pseudo_gradient
from node.errors import MachineError
from node.manifest import RunConfig
from node.training import fit
from node.training.device import Chosen
from node.training.fit import (
    DEVICE_BYTES,
    FEEDBACK_BYTES,
    GB,
    HOST_BYTES,
    check_fit,
    needs_of,
    row_bytes,
    settle_execution,
)
from node.training.inner import Execution
from node.training.model import NextTokenLoss, autocast, build_model, prepare, unit_elements
from node.training.replica import Replica
from tests.swarm.harness import tiny

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.swarm.reduce import grids_of
    from node.worker.outgoing import Outgoing

CPU = torch.device("cpu")
CHOSEN = Chosen(CPU, "fp32", "a CPU")


def run_of(length: int = 256, **model: Any) -> RunConfig:
    model = {"hidden_size": 256, "intermediate_size": 672, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 4, "max_position_embeddings": 2048, **model}  # fmt: skip
    return RunConfig.model_validate(tiny(model=model, inner={"batch_size": 4, "sequence_length": length}))


def kept_bytes(model: nn.Module, run: RunConfig, precision: str, *, chunked: bool = False) -> int:
    """What autograd keeps for the way back, beside the parameters, after the forward pass of one sequence."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = torch.randint(run.model.vocab_size, (1, run.inner.sequence_length + 1))
    loss_of = NextTokenLoss(model, chunked=chunked)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(CPU, precision):
        loss = loss_of(batch)
    loss.backward()
    half = 2 * sum(p.numel() for p in model.parameters() if p.dim() == 2) if precision != "fp32" else 0
    return sum(kept.values()) - half  # The weights in half precision are counted with the parameters.


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [{}, {"num_key_value_heads": 1}, {"vocab_size": 8000}])
def test_activations_are_estimated_within_a_third(precision: str, model: dict[str, Any]) -> None:
    run = run_of(**model)
    found = kept_bytes(build_model(run.model, seed=0), run, precision)
    of_loss = (fit.LOGIT_BYTES - 4) * run.model.vocab_size * run.inner.sequence_length  # Gone before the way back ends.
    estimated = row_bytes(run, DevicesConfig(chunked_loss="off"), precision) - of_loss
    assert estimated == pytest.approx(found, rel=0.34)


def test_recomputing_keeps_a_fraction() -> None:
    run, devices = run_of(num_hidden_layers=12), DevicesConfig(activation_checkpointing=True)
    model = build_model(run.model, seed=0)
    plain = kept_bytes(model, run, "fp32")
    prepare(model, recompute=True, compiled=False)
    assert kept_bytes(model, run, "fp32") < plain / 3
    assert row_bytes(run, devices, "fp32") < row_bytes(run, DevicesConfig(), "fp32") / 3


def live_bytes() -> int:
    """Of all tensors of this process."""
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if type(obj) in (torch.Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_bytes_a_parameter_on_the_device_and_on_the_host() -> None:
    run = run_of(hidden_size=512, intermediate_size=1344, num_hidden_layers=2)
    before = live_bytes()
    model = build_model(run.model, seed=0)
    parameters = sum(p.numel() for p in model.parameters())
    replica = Replica(model, run.inner, CPU, Execution())
    replica.step(torch.randint(258, (1, 33)), 1e-3)
    sent = replica.take(((0, parameters),))
    device = (live_bytes() - before) / parameters
    assert device == pytest.approx(DEVICE_BYTES - 4, rel=0.02), "all but the gradients, which live in a step only"

    before = live_bytes()
    state = genesis(torch.zeros(parameters))
    gradient = pseudo_gradient(state.anchor, sent)
    stepped = outer_step(state, gradient, lr=0.7, momentum=0.9, tokens=1)
    snapshot, moments = replica.parameters, replica.moments()
    host = (live_bytes() - before) / parameters
    assert host <= HOST_BYTES
    assert host == pytest.approx(32, rel=0.02), "old and new anchor and momentum, pseudo-gradient, a checkpoint's own"
    assert set(moments) == {"step", "exp_avg", "exp_avg_sq"}
    assert stepped.anchor.shape == snapshot.shape


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_bytes_a_parameter_of_what_is_sent_with_error_feedback(codec: str) -> None:
    """Beside anchor and momentum: while the pseudo-gradient is encoded, and between two rounds."""
    run = RunConfig.model_validate(tiny(sync={"codec": codec, "feedback": "on"}))
    parameters = 2_000_000
    anchor = torch.zeros(parameters)
    sent = torch.randn(parameters, generator=torch.Generator().manual_seed(0)) * 1e-3
    before, while_encoding = live_bytes(), []
    outgoing = Outgoing(grids_of(make_codec(codec), [((0, parameters),)]), run.sync, {})

    def then(chunks: Sequence[bytes], norm: float) -> None:
        while_encoding.append((live_bytes() - before + sum(map(len, chunks))) / parameters)

    outgoing.begin(0, anchor, sent, then)
    outgoing.wait()
    outgoing.check()
    between = (live_bytes() - before) / parameters
    assert between == pytest.approx(FEEDBACK_BYTES, rel=0.02), "the residual before the round, and after it"
    # There is no new anchor and no new momentum yet, and their room is enough for what is decoded of one's own.
    assert while_encoding[0] <= FEEDBACK_BYTES + HOST_BYTES - 8 - 12
    outgoing.landed(0, included=True)
    assert (live_bytes() - before) / parameters == pytest.approx(FEEDBACK_BYTES / 2, rel=0.02)
    with_feedback, without = (
        needs_of(RunConfig.model_validate(tiny(sync={"codec": codec, "feedback": how})), Config(), "fp32")
        for how in ("on", "off")
    )
    count = sum(unit_elements(run.model))
    assert with_feedback.host_bytes - without.host_bytes == FEEDBACK_BYTES * count
    assert with_feedback.disk_bytes > without.disk_bytes


def test_the_refusal_names_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = Config(node=NodeConfig(data_dir=tmp_path / "not" / "there")), run_of()
    check_fit(run, config, CHOSEN)
    needs = needs_of(run, config, "fp32")
    monkeypatch.setattr(
        fit, "available_memory_bytes", lambda: needs.host_bytes + needs.device_bytes + 0.9 * needs.row_bytes
    )
    with pytest.raises(
        MachineError, match=r"needs [\d.]+ GB of memory here, and [\d.]+ GB are free: end what"
    ) as caught:
        check_fit(run, config, CHOSEN)
    wanted, free = (float(x) for x in re.findall(r"([\d.]+) GB", str(caught.value)))
    assert wanted >= free > 0.5
    assert caught.value.exit_code == 3


def test_a_gpu_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, run = Chosen(torch.device("cuda", 0), "bf16", "a small GPU"), run_of()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10e6, 8e9))
    with pytest.raises(MachineError, match=r"GB of GPU memory here.*smaller model"):
        check_fit(run, Config(), chosen)


def test_the_disk_counts_what_is_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = Config(node=NodeConfig(data_dir=tmp_path)), run_of()
    disk = needs_of(run, config, "fp32").disk_bytes
    monkeypatch.setattr(fit.shutil, "disk_usage", lambda _: type("", (), {"free": 0.7 * disk})())
    with pytest.raises(MachineError, match="of disk"):
        check_fit(run, config, CHOSEN)
    (tmp_path / "checkpoints" / "round-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "round-00000001" / "outer.safetensors").write_bytes(bytes(int(0.4 * disk)))
    check_fit(run, config, CHOSEN)


@pytest.mark.parametrize(("rows", "expected"), [(8.0, 4), (4.1, 4), (3.9, 2), (0.2, 1)])
def test_a_cpu_takes_as_many_sequences_as_its_memory_allows(
    rows: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, devices = run_of(), DevicesConfig()
    monkeypatch.setattr(fit, "available_memory_bytes", lambda: rows * row_bytes(run, devices, "fp32") / fit.CPU_RATIO)
    assert settle_execution(build_model(run.model, seed=0), run, CHOSEN, devices).micro_batch == expected
    assert settle_execution(build_model(run.model, seed=0), run, CHOSEN, DevicesConfig(micro_batch=3)).micro_batch == 3


def test_logits_of_a_large_vocabulary_are_made_in_parts() -> None:
    small, large = run_of(), run_of(vocab_size=50_000, length=2048)
    assert not settle_execution(build_model(small.model, seed=0), small, CHOSEN, DevicesConfig()).chunked_loss
    with torch.device("meta"):
        model = build_model(large.model, seed=0)
    assert settle_execution(model, large, CHOSEN, DevicesConfig()).chunked_loss
    assert not settle_execution(model, large, CHOSEN, DevicesConfig(chunked_loss="off")).chunked_loss
    assert 1 * GB < 12 * 50_000 * 4 * 2048

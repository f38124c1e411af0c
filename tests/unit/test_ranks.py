"""Several processes that share an inner step: what they come to is what one alone comes to."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config import Config, DevicesConfig
from node.daemon.child import WORKER_ENVIRONMENT
from node.errors import ConfigError, MachineError, NodeError
from node.manifest import RunConfig
from tests.swarm.harness import environment, tiny

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from node.worker.helpers import check_ranks
    from node.worker.micro_batch import MicroBatchLimit

pytestmark = pytest.mark.timeout(400)
"""Two or three runs of two processes that load torch: on a machine that does other things, too, a minute each."""

SCRIPT = """
import json, os, sys, torch
from node.config import Config
from node.manifest import RunConfig
from node.swarm.faults import parse_faults
from node.training.device import choose_device
from node.training.fit import shape_execution
from node.training.model import build_model
from node.worker.helpers import gather
from node.worker.spoilt import spoilt

told = json.loads(sys.argv[1])
run, config = RunConfig.model_validate(told["run"]), Config.model_validate(told["config"])
chosen = choose_device(config.devices, 0)
model = build_model(run.model, seed=0)
shape_execution(model, config.devices)


def end(error):
    print(error, file=sys.stderr, flush=True)
    os._exit(error.exit_code)


replica, helpers = gather(run, config, chosen, model, end)
faults = parse_faults(told["faults"])
generator = torch.Generator().manual_seed(0)
rows, length = run.inner.batch_size, run.inner.sequence_length + 1
batches = [torch.randint(0, 258, (rows, length), generator=generator) for _ in range(told["steps"])]
losses = []
for number, batch in enumerate(batches):
    try:
        losses.append(replica.step(batch, 2e-3, lambda rows: spoilt(faults, number, rows)).loss)
    except RuntimeError as exc:
        helpers.explain(exc)
    if number == told["steps"] // 2:  # As at a round's end: part of it changed, moments and all through a checkpoint.
        flat, moments = replica.parameters, replica.moments()
        ranges = ((100, 5000), (6000, 7001))
        replica.change(ranges, lambda part, at, place: part * 0.999)
        taken = replica.take(ranges)
        replica.load(flat)
        expected = torch.cat([flat[low:high] for low, high in ranges]) * 0.999
        assert torch.allclose(taken, expected), (taken - expected).abs().max()
        replica.load_moments(moments)
        replica.loss_of(batches[0])  # As evaluation: other parameters for a while.
        replica.load(torch.zeros_like(flat))
        replica.loss_of(batches[0])
        replica.load(flat)
        assert all(torch.equal(value, replica.moments()[name]) for name, value in moments.items())
evaluated = replica.loss_of(batches[0])
digest = replica.parameters.double()
if helpers is not None:
    helpers.close()
print(json.dumps({"losses": losses, "evaluated": evaluated, "norm": digest.norm().item(), "sum": digest.sum().item()}))
"""


def run_script(
    folder: Path, faults: tuple[str, str] = ("", ""), *, steps: int = 12, devices: dict[str, Any], **inner: Any
) -> subprocess.CompletedProcess[str]:
    """`faults`: of rank 0, and of the others."""
    run = tiny(inner={"batch_size": 6, "sequence_length": 32, **inner})
    config = Config.model_validate({"node": {"data_dir": str(folder)}, "devices": devices})
    told = {
        "run": RunConfig.model_validate(run).model_dump(mode="json"),
        "config": config.model_dump(mode="json"),
        "steps": steps,
        "faults": faults[0],
    }
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(told)],
        env=environment({**WORKER_ENVIRONMENT, "DILOCO_FAULTS": faults[1]}), capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip


def train(
    ranks: int, sharding: str = "data-parallel", *, faults: tuple[str, str] = ("", ""), steps: int = 12, **inner: Any
) -> Any:
    devices = {"ranks": ranks, "sharding": sharding}
    with tempfile.TemporaryDirectory() as folder:
        return outcome(run_script(Path(folder), faults, steps=steps, devices=devices, **inner))


@cache
def one_alone() -> Any:
    return train(1)


def outcome(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_alike(one: Any, other: Any) -> None:
    """Sums in another order differ by rounding, and each step carries that on."""
    assert len(one["losses"]) == len(other["losses"]) > 10
    torch.testing.assert_close(torch.tensor(one["losses"]), torch.tensor(other["losses"]), rtol=1e-4, atol=0)
    assert one["evaluated"] < one["losses"][0], "else nothing was learnt"
    assert other["evaluated"] == pytest.approx(one["evaluated"], rel=1e-4)
    assert other["norm"] == pytest.approx(one["norm"], rel=1e-4)


@pytest.mark.parametrize("sharding", ["data-parallel", "fsdp"])
def test_two_ranks_make_the_steps_of_one(sharding: str) -> None:
    assert_alike(one_alone(), train(2, sharding))


def test_two_ranks_make_muons_steps_of_one() -> None:
    assert_alike(train(1, optimizer="muon"), train(2, optimizer="muon"))


def test_ranks_with_uneven_parts_of_the_batch_weigh_them_by_rows() -> None:
    assert_alike(train(1, batch_size=5), train(2, batch_size=5))


@pytest.mark.parametrize("faults", [("inner@*=memory:1", ""), ("", "inner@*=memory:1")])
def test_one_rank_out_of_memory_halves_for_all(faults: tuple[str, str]) -> None:
    assert_alike(one_alone(), train(2, faults=faults))


@pytest.mark.parametrize("faults", [("inner@*=memory:1", ""), ("", "inner@*=memory:1")])
def test_a_shard_out_of_memory_ends_all_ranks_which_begin_again_with_half(
    faults: tuple[str, str], tmp_path: Path
) -> None:
    """The other rank stands in a collective meanwhile, whichever of the two it is."""
    devices = {"ranks": 2, "sharding": "fsdp", "micro_batch": 3}
    done = run_script(tmp_path, faults, devices=devices)
    assert done.returncode == NodeError.exit_code, done.stderr
    assert "Out of memory with 3 sequences at once" in done.stderr and "with 1;" in done.stderr
    assert_alike(one_alone(), outcome(run_script(tmp_path, faults, devices=devices)))


@pytest.mark.parametrize("faults", [("inner@*=memory:0", ""), ("", "inner@*=memory:0")])
def test_a_shard_without_memory_for_one_sequence_is_for_this_machine(faults: tuple[str, str], tmp_path: Path) -> None:
    done = run_script(tmp_path, faults, devices={"ranks": 2, "sharding": "fsdp"})
    assert done.returncode == MachineError.exit_code, done.stderr
    assert "devices.activation_checkpointing" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_a_micro_batch_found_holds_for_the_settings_that_it_was_found_with(tmp_path: Path) -> None:
    run, devices = RunConfig.model_validate(tiny()), DevicesConfig(ranks=2, sharding="fsdp", micro_batch=8)
    found = MicroBatchLimit(tmp_path / "cache", run, devices, "a GPU")
    assert found.rows == 0
    found.lower(4)
    assert found.rows == MicroBatchLimit(tmp_path / "cache", run, devices, "a GPU").rows == 4
    longer = RunConfig.model_validate(tiny(inner={"sequence_length": 32}))
    assert MicroBatchLimit(tmp_path / "cache", longer, devices, "a GPU").rows == 0
    assert MicroBatchLimit(tmp_path / "cache", run, devices, "another GPU").rows == 0
    less = devices.model_copy(update={"activation_checkpointing": True})
    assert MicroBatchLimit(tmp_path / "cache", run, less, "a GPU").rows == 0
    (tmp_path / "cache" / "micro-batch.json").write_text('{"rows": ')
    assert found.rows == 0


def test_what_cannot_be_shared_out_is_said() -> None:
    run = RunConfig.model_validate(tiny(inner={"batch_size": 4}))
    check_ranks(run, DevicesConfig(ranks=4), "fp16")
    for devices, precision, word in (
        (DevicesConfig(ranks=5), "fp32", "set it to 4"),
        (DevicesConfig(ranks=3, sharding="fsdp"), "fp32", "divide"),
        (DevicesConfig(ranks=2, sharding="fsdp"), "fp16", "data-parallel"),
    ):
        with pytest.raises(ConfigError, match=word):
            check_ranks(run, devices, precision)

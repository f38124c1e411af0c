"""Several ranks that share an inner step reach the result of a single process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config.manifest import RunConfig
from node.config.schema import DevicesConfig
from node.errors import ConfigError, MachineError, NodeError
from node.worker.rank_processes import MicroBatchLimit, check_ranks
from tests.swarm.harness import ROOT, tiny
from tests.unit.rank_run import Done, run_ranks

pytestmark = pytest.mark.timeout(400)
"""The first test waits until the fork server has imported torch. A test makes up to three runs."""


def run_script(
    folder: Path, faults: tuple[str, str] = ("", ""), *, steps: int = 12, devices: dict[str, Any], **inner: Any
) -> Done:
    """Run the ranks. `faults` has the plan of rank 0 and the plan of the other ranks."""
    run = tiny(inner={"batch_size": 6, "sequence_length": 32, **inner})
    with tempfile.TemporaryDirectory() as output:
        return run_ranks(folder, Path(output), faults, steps=steps, run=run, devices=devices)


def train(
    ranks: int,
    sharding: str = "data-parallel",
    *,
    faults: tuple[str, str] = ("", ""),
    steps: int = 12,
    micro_batch: int = 0,
    **inner: Any,
) -> Any:
    devices = {"ranks": ranks, "sharding": sharding, "micro_batch": micro_batch}
    with tempfile.TemporaryDirectory() as folder:
        return outcome(run_script(Path(folder), faults, steps=steps, devices=devices, **inner))


@cache
def one_rank() -> Any:
    return train(1)


def outcome(done: Done) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_alike(one: Any, other: Any) -> None:
    """Compare with a tolerance: sums in another order differ by rounding, which accumulates over the steps."""
    assert len(one["losses"]) == len(other["losses"]) > 10
    torch.testing.assert_close(torch.tensor(one["losses"]), torch.tensor(other["losses"]), rtol=1e-4, atol=0)
    assert one["evaluated"] < one["losses"][0], "otherwise nothing was learnt"
    assert other["evaluated"] == pytest.approx(one["evaluated"], rel=1e-4)
    assert other["norm"] == pytest.approx(one["norm"], rel=1e-4)


@pytest.mark.parametrize("sharding", ["data-parallel", "fsdp"])
def test_two_ranks_make_the_same_inner_steps_as_one(sharding: str) -> None:
    assert_alike(one_rank(), train(2, sharding))


@pytest.mark.parametrize("inner", [{"optimizer": "muon"}, {"batch_size": 5}], ids=["muon", "uneven parts of a batch"])
def test_two_ranks_make_the_same_inner_steps_as_one_with_muon_or_uneven_batches(inner: dict[str, Any]) -> None:
    assert_alike(train(1, **inner), train(2, **inner))


@pytest.mark.parametrize(("sharding", "rows"), [("data-parallel", 5), ("fsdp", 6)])
def test_a_step_that_is_ended_after_a_micro_batch_ends_on_all_ranks(sharding: str, rows: int) -> None:
    """`rank_run` ends one step of each run. With five rows, the ranks make three and two micro-batches."""
    assert_alike(train(1, batch_size=rows), train(2, sharding, micro_batch=1, batch_size=rows))


@pytest.mark.parametrize("faults", [("inner@*=memory:1", ""), ("", "inner@*=memory:1")])
def test_one_rank_that_runs_out_of_memory_halves_the_micro_batch_of_all_ranks(faults: tuple[str, str]) -> None:
    assert_alike(one_rank(), train(2, faults=faults))


@pytest.mark.parametrize("faults", [("inner@*=memory:1", ""), ("", "inner@*=memory:1")])
def test_shard_out_of_memory_ends_all_ranks_and_halves_the_micro_batch(faults: tuple[str, str], tmp_path: Path) -> None:
    """While one rank fails, the other rank waits in a collective operation."""
    devices = {"ranks": 2, "sharding": "fsdp", "micro_batch": 3}
    done = run_script(tmp_path, faults, devices=devices)
    assert done.returncode == NodeError.exit_code, done.stderr
    assert "Out of memory with 3 sequences at once" in done.stderr and "again with 1 sequences" in done.stderr
    assert_alike(one_rank(), outcome(run_script(tmp_path, faults, devices=devices)))


@pytest.mark.parametrize("faults", [("inner@*=memory:0", ""), ("", "inner@*=memory:0")])
def test_too_little_memory_for_one_sequence_per_shard_is_a_machine_error(
    faults: tuple[str, str], tmp_path: Path
) -> None:
    done = run_script(tmp_path, faults, devices={"ranks": 2, "sharding": "fsdp"})
    assert done.returncode == MachineError.exit_code, done.stderr
    assert "devices.activation_checkpointing" in done.stderr
    assert not (tmp_path / "cache" / "micro-batch.json").exists()


def test_a_micro_batch_that_was_found_applies_only_to_the_same_settings(tmp_path: Path) -> None:
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


def test_batch_sizes_and_precisions_that_ranks_cannot_share_are_refused() -> None:
    run = RunConfig.model_validate(tiny(inner={"batch_size": 4}))
    check_ranks(run, DevicesConfig(ranks=4), "fp16")
    for devices, precision, word in (
        (DevicesConfig(ranks=5), "fp32", "set it to 4"),
        (DevicesConfig(ranks=3, sharding="fsdp"), "fp32", "divide"),
        (DevicesConfig(ranks=2, sharding="fsdp"), "fp16", "data-parallel"),
    ):
        with pytest.raises(ConfigError, match=word):
            check_ranks(run, devices, precision)


def test_ranks_can_be_made_again_in_one_process(tmp_path: Path) -> None:
    """Amended settings may need other batches, and so new ranks in the process of rank 0."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    lines = (
        "import sys, torch; from pathlib import Path; from node.training.ranks import Ranks",
        "for folder in sys.argv[1:]: Ranks(0, 1, Path(folder), torch.device('cpu'), is_sharded=False)",
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines), str(tmp_path / "before"), str(tmp_path / "after")],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

"""Runs the inner steps of one node on several ranks, without a swarm, for `test_ranks`.

Rank 0 is forked from a server that has imported torch, and the other ranks are forked from rank 0, so none of them has
to import torch again.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from node.config.manifest import RunConfig
from node.config.schema import Config
from node.daemon.worker_process import WORKER_ENVIRONMENT
from node.errors import NodeError
from node.swarm.faults import parse_faults
from node.training.device import choose_device
from node.training.model import build_model, prepare_layers
from node.training.replica import Replica
from node.worker import rank_processes
from node.worker.step_faults import loss_factor

TIMEOUT_S = 200.0
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [__name__, "transformers.models.llama.modeling_llama", "torch.distributed.fsdp", "torch.distributed.tensor"]
)


@dataclass(frozen=True)
class Done:
    """The exit code and the output of rank 0."""

    returncode: int
    stdout: str
    stderr: str


def run_ranks(
    data: Path, output: Path, faults: tuple[str, str], *, steps: int, run: dict[str, Any], devices: dict[str, Any]
) -> Done:
    """Make `steps` inner steps. `data` and `output` are folders. `faults` has the plans of rank 0 and of the others."""
    config = Config.model_validate({"node": {"data_dir": str(data)}, "devices": devices})
    order = {
        "run": RunConfig.model_validate(run).model_dump(mode="json"),
        "config": config.model_dump(mode="json"),
        "steps": steps,
        "faults": faults,
        "output": str(output),
    }
    process = _forks.Process(target=_rank_0, args=(order,))
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    stdout, stderr = ((output / name).read_text() for name in ("stdout", "stderr"))
    return Done(process.exitcode if process.exitcode is not None else -1, stdout, stderr)


class ForkedRank:
    """A rank other than 0, forked from rank 0. It has the methods of `subprocess.Popen` that `RankProcesses` uses."""

    def __init__(self, settings: rank_processes.RankSettings, faults: str) -> None:
        self._exit_code: int | None = None
        self._reaping = threading.Lock()  # The main thread and the one that watches the ranks both poll.
        self._pid = os.fork()
        if self._pid == 0:
            os.environ["DILOCO_FAULTS"] = faults
            sys.stdin = SimpleNamespace(buffer=io.BytesIO(settings.model_dump_json().encode()))
            status = 1
            try:
                status = rank_processes.main()
            except Exception:  # noqa: BLE001 - the process root
                traceback.print_exc()
            finally:
                _end(status)

    def poll(self) -> int | None:
        with self._reaping:
            if self._exit_code is None:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    self._exit_code = os.waitstatus_to_exitcode(status)
            return self._exit_code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.01)


def _rank_0(order: dict[str, Any]) -> NoReturn:
    own_faults, other_faults = order["faults"]
    for name, number in (("stdout", 1), ("stderr", 2)):
        fd = os.open(Path(order["output"]) / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(WORKER_ENVIRONMENT, DILOCO_FAULTS=own_faults)
    rank_processes._start_rank = partial(ForkedRank, faults=other_faults)  # type: ignore[assignment]
    _train(order)
    _end(0)


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Ended(Exception):
    """An order that ends a step."""


def _end_a_step(replica: Replica, batch: torch.Tensor) -> None:
    """End a step after its first micro-batch, and assert that it has changed nothing."""
    before = replica.parameters, *replica.optimizer_state().values()
    micro_batches = 0

    def end() -> None:
        nonlocal micro_batches
        micro_batches += 1
        raise Ended

    try:
        replica.step(batch, 2e-3, after_micro_batch=end)
    except Ended:
        after = replica.parameters, *replica.optimizer_state().values()
        assert micro_batches == 1
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    else:
        raise AssertionError("The step was not ended.")


def _train(order: dict[str, Any]) -> None:
    """Print losses and final parameters as JSON."""
    run, config = RunConfig.model_validate(order["run"]), Config.model_validate(order["config"])
    steps = order["steps"]
    chosen = choose_device(config.devices, 0)
    model = build_model(run.model, seed=0)
    prepare_layers(model, config.devices)

    def end(error: NodeError) -> None:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    replica, helpers = rank_processes.start_replica(run, config, chosen, model, end)
    faults = parse_faults(order["faults"][0])
    generator = torch.Generator().manual_seed(0)
    rows, length = run.inner.batch_size, run.inner.sequence_length + 1
    batches = [torch.randint(0, 258, (rows, length), generator=generator) for _ in range(steps)]
    losses = []
    for number, batch in enumerate(batches):
        if number == steps // 2:
            _end_a_step(replica, batch)
        try:
            losses.append(replica.step(batch, 2e-3, partial(loss_factor, faults, number)).loss)
        except RuntimeError as exc:
            assert helpers is not None
            helpers.explain(exc)
        if number == steps // 2:  # This happens at the end of a round: a part changes, and a checkpoint is restored.
            flat, moments = replica.parameters, replica.optimizer_state()
            ranges = ((100, 5000), (6000, 7001))
            replica.change(ranges, lambda part, at, place: part * 0.999)
            taken = replica.take(ranges)
            replica.load(flat)
            expected = torch.cat([flat[low:high] for low, high in ranges]) * 0.999
            assert torch.allclose(taken, expected), (taken - expected).abs().max()
            replica.load_optimizer_state(moments)
            replica.loss_of(batches[0])  # Evaluation loads other parameters for a while.
            replica.load(torch.zeros_like(flat))
            replica.loss_of(batches[0])
            replica.load(flat)
            assert all(torch.equal(value, replica.optimizer_state()[name]) for name, value in moments.items())
    evaluated = replica.loss_of(batches[0])
    digest = replica.parameters.double()
    if helpers is not None:
        helpers.close()
    figures = {"losses": losses, "evaluated": evaluated, "norm": digest.norm().item(), "sum": digest.sum().item()}
    print(json.dumps(figures))

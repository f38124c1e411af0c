"""The other ranks of a node with several devices: their processes, started and watched by the worker, rank 0.

    python -m node.worker.helpers      one of them; what it needs to know comes in on stdin

They have no swarm and no text. When one dies the worker ends, too, and the supervisor starts them all again, where it
was the memory of a sharded model with half the micro-batch; when the worker dies, the kernel ends them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from node.config import Config, DevicesConfig, LimitsConfig
from node.errors import ConfigError, MachineError, NodeError
from node.manifest import RunConfig
from node.swarm.faults import faults_from
from node.training.device import Chosen, choose_device
from node.training.fit import settle_execution, shape_execution
from node.training.inner import Execution, no_room_for_one
from node.training.model import build_model
from node.training.ranks import Ranks
from node.training.replica import Replica
from node.worker.micro_batch import MicroBatchLimit
from node.worker.parent import die_with_parent
from node.worker.spoilt import NO_ROUND, spoilt

WATCH_S = 0.5
END_S = 5.0
OUT_OF_MEMORY = errno.ENOMEM
"""Exit code of a rank without memory."""

End = Callable[[NodeError], None]
"""Ends this process, from any thread: the main one may hang. MachineError: for good; else all begin again."""

logger = logging.getLogger(__name__)


def check_ranks(run: RunConfig, devices: DevicesConfig, precision: str) -> None:
    """ConfigError where this run's steps cannot be shared out so."""
    rows, ranks = run.inner.batch_size, devices.ranks
    if rows < ranks:
        raise ConfigError(
            f"devices.ranks {ranks} is more than the {rows} sequences of an inner step: set it to {rows}."
        )
    if devices.sharding != "fsdp" or ranks == 1:
        return
    if rows % ranks:
        raise ConfigError(f"With fsdp, devices.ranks {ranks} has to divide the {rows} sequences of an inner step.")
    if precision == "fp16" or run.inner.optimizer == "muon":
        what = "devices.precision fp16" if precision == "fp16" else "Muon"
        raise ConfigError(f"{what} and fsdp do not go together: set devices.sharding to data-parallel.")


class Helpers:
    """Ranks 1 and up. `end` is called on a thread when one of them has ended by itself."""

    def __init__(
        self,
        run: RunConfig,
        devices: DevicesConfig,
        how: Execution,
        *,
        limits: LimitsConfig,
        folder: Path,
        micro_batch: MicroBatchLimit,
        end: End,
    ) -> None:
        self._end, self._folder, self._micro_batch = end, folder, micro_batch
        self._rows, self._is_sharded = how.micro_batch, devices.sharding == "fsdp"
        self._is_over = threading.Event()
        told = {
            "run": run.model_dump(mode="json"),
            "devices": devices.model_dump(mode="json"),
            "how": asdict(how),
            "folder": str(folder),
            "limits": limits.model_dump(mode="json"),
            "parent": os.getpid(),
        }
        self._processes = [self._start(told | {"rank": rank}) for rank in range(1, devices.ranks)]
        threading.Thread(target=self._watch, name="helpers", daemon=True).start()

    def _start(self, told: dict[str, Any]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "node.worker.helpers"], stdin=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(told).encode())
        process.stdin.close()
        return process

    def _death(self) -> NodeError | None:
        """Which rank has ended by itself, how, and what follows; None while all live."""
        for rank, process in enumerate(self._processes, start=1):
            if (code := process.poll()) is not None:
                who = f"rank {rank} of {len(self._processes) + 1}"
                if code == OUT_OF_MEMORY:
                    return self._less(who)
                return NodeError(f"Of this node's processes {who} ended with code {code}: all of them begin again.")
        return None

    def _less(self, who: str) -> NodeError:
        """That rank has no memory for so many sequences: next time half as many."""
        if self._rows <= 1:
            return no_room_for_one()
        try:
            self._micro_batch.lower(self._rows // 2)
        except MachineError as exc:
            return exc
        return NodeError(
            f"Out of memory with {self._rows} sequences at once, in {who} of this node: all of them begin again, "
            f"with {self._rows // 2}; set devices.micro_batch to that."
        )

    def _watch(self) -> None:
        while not self._is_over.wait(WATCH_S):
            if (death := self._death()) is not None and not self._is_over.is_set():
                self._end(death)
                return

    def explain(self, error: RuntimeError) -> NoReturn:
        """A call between the ranks has failed: where one has died, or has no memory, that is why, and ends it."""
        if isinstance(error, torch.OutOfMemoryError) and self._is_sharded:
            self._end(self._less(f"rank 0 of {len(self._processes) + 1}"))
        time.sleep(WATCH_S)
        if (death := self._death()) is not None:
            self._end(death)
        raise error

    def close(self) -> None:
        """End them now."""
        self._is_over.set()
        for process in self._processes:
            process.kill()
            process.wait(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def gather(
    run: RunConfig, config: Config, chosen: Chosen, model: nn.Module, end: End
) -> tuple[Replica, Helpers | None]:
    """The node's replica, whose calls all its ranks make; and their processes, where there are several."""
    found = MicroBatchLimit(config.node.data_dir / "cache", run, config.devices, chosen.name)
    devices = config.devices
    if rows := found.rows:
        devices = devices.model_copy(update={"micro_batch": rows})
    how = settle_execution(model, run, chosen, devices)
    if devices.ranks == 1:
        return _compiled(Replica(model, run.inner, chosen.device, how), run, devices, how), None
    folder = Path(tempfile.mkdtemp(prefix="diloco-ranks-"))
    helpers = Helpers(run, devices, how, limits=config.limits, folder=folder, micro_batch=found, end=end)
    try:
        replica = _part_of(run, devices, how, chosen, model, rank=0, folder=folder)
        return _compiled(replica, run, devices, how), helpers
    except RuntimeError as exc:
        try:
            helpers.explain(exc)
        finally:
            helpers.close()
    except BaseException:
        helpers.close()
        raise


def _compiled(replica: Replica, run: RunConfig, devices: DevicesConfig, how: Execution) -> Replica:
    """It, with compiling done where that is asked for: a first step that takes minutes would look like a hang."""
    if devices.compile:
        replica.warm_up(how.micro_batch, run.inner.sequence_length)
    return replica


def _part_of(
    run: RunConfig, devices: DevicesConfig, how: Execution, chosen: Chosen, model: nn.Module, *, rank: int, folder: Path
) -> Replica:
    """A rank's part; returns when all ranks have come."""
    ranks = Ranks(rank, devices.ranks, folder, chosen.device, is_sharded=devices.sharding == "fsdp")
    return Replica(model, run.inner, chosen.device, how, ranks)


def main() -> int:
    told = json.loads(sys.stdin.buffer.read())
    die_with_parent(told["parent"])
    run, devices = RunConfig.model_validate(told["run"]), DevicesConfig.model_validate(told["devices"])
    limits = LimitsConfig.model_validate(told["limits"])
    chosen = choose_device(devices, limits.cpu_threads, told["rank"], gpu_memory_ratio=limits.gpu_memory_ratio)
    model = build_model(run.model, seed=0)
    shape_execution(model, devices)
    how = Execution(**told["how"])
    replica = _part_of(run, devices, how, chosen, model, rank=told["rank"], folder=Path(told["folder"]))
    faults = faults_from(os.environ)
    try:
        replica.follow(lambda rows: spoilt(faults, NO_ROUND, rows))
    except torch.OutOfMemoryError:
        if devices.sharding == "fsdp":
            return OUT_OF_MEMORY
        raise
    except Exception:
        if os.getppid() == told["parent"]:
            time.sleep(WATCH_S)  # Where rank 0 has failed, it is to have the word.
        raise
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

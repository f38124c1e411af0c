"""The processes of a node's ranks 1 and up, if it has several devices. The worker is rank 0 and starts these processes.

    python -m node.worker.rank_processes      runs one rank, which reads its settings from stdin

These ranks have no swarm and no text. If one of them dies, the worker ends and the supervisor starts all ranks again.
If the worker dies, the kernel ends the other ranks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
from pydantic import BaseModel
from torch import nn

from node.config.manifest import RunConfig
from node.config.schema import Config, DevicesConfig
from node.errors import ConfigError, MachineError, NodeError
from node.host.files import write_whole
from node.host.parent_death import die_with_parent, ignore_stop_signals
from node.swarm.faults import faults_from
from node.training.device import ComputeDevice, choose_device
from node.training.fit import choose_execution, execution
from node.training.inner import Execution, out_of_memory_error
from node.training.model import build_model, prepare_layers
from node.training.ranks import Ranks
from node.training.replica import NO_COMPILER, Replica
from node.worker.step_faults import ANY_ROUND, loss_factor

WATCH_S = 0.5
END_S = 5.0
OUT_OF_MEMORY = errno.ENOMEM
"""Exit code of a rank that runs out of memory."""

EndProcess = Callable[[NodeError], None]
"""Ends this process. Callable from any thread. The supervisor restarts all ranks, except after a MachineError."""

logger = logging.getLogger(__name__)


def check_ranks(run: RunConfig, devices: DevicesConfig, precision: str) -> None:
    """Raise ConfigError if the ranks cannot share the run's inner steps."""
    rows, ranks = run.inner.batch_size, devices.ranks
    if rows < ranks:
        raise ConfigError(
            f"devices.ranks {ranks} is more than the {rows} sequences of an inner step: set it to {rows}."
        )
    if devices.sharding != "fsdp" or ranks == 1:
        return
    if rows % ranks:
        raise ConfigError(f"With fsdp, devices.ranks {ranks} must divide the {rows} sequences of an inner step.")
    if precision == "fp16" or run.inner.optimizer == "muon":
        what = "devices.precision fp16" if precision == "fp16" else "Muon"
        raise ConfigError(f"{what} cannot be used with fsdp: set devices.sharding to data-parallel.")


class MicroBatchLimit:
    """The largest micro-batch that fits, stored in the data folder for one run, device and configuration.

    A rank of a sharded model that runs out of memory leaves the others in a collective that never ends. So all ranks
    restart with a smaller micro-batch.
    """

    def __init__(self, cache: Path, run: RunConfig, devices: DevicesConfig, device_name: str) -> None:
        self._file = cache / "micro-batch.json"
        settings = [run.model.model_dump(), run.inner.sequence_length, devices.model_dump(), device_name]
        self._settings_hash = hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    @property
    def rows(self) -> int:
        """Sequences per micro-batch; 0 if unknown."""
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            return int(stored["rows"]) if stored["of"] == self._settings_hash else 0
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as exc:
            logger.warning("The stored micro-batch %s is not used, as it cannot be read (%s).", self._file, exc)
            return 0

    def lower(self, rows: int) -> None:
        """Store a limit, which applies from the next start on. Raises MachineError if the disk does not take it."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, json.dumps({"rows": rows, "of": self._settings_hash}))
        except OSError as exc:
            raise MachineError(f"{self._file} could not be written ({exc.strerror}): free some space there.") from exc


class RankSettings(BaseModel):
    """The settings that a rank's process reads from stdin. `folder` is for the rendezvous of the ranks."""

    run: RunConfig
    config: Config
    how: Execution
    folder: Path
    parent: int
    rank: int

    def make_replica(self, device: ComputeDevice, model: nn.Module) -> Replica:
        """Make the replica of this rank. Blocks until all ranks have joined."""
        devices = self.config.devices
        ranks = Ranks(self.rank, devices.ranks, self.folder, device.device, is_sharded=devices.sharding == "fsdp")
        return Replica(model, self.run.inner, device.device, self.how, ranks)


class RankProcesses:
    """The processes of ranks 1 and up. A watching thread calls `end_process` when one of them ends by itself."""

    def __init__(self, settings: RankSettings, micro_batch: MicroBatchLimit, end_process: EndProcess) -> None:
        """`settings` are those of rank 0."""
        devices = settings.config.devices
        self._folder, self._micro_batch, self._end_process = settings.folder, micro_batch, end_process
        self._rows, self._is_sharded = settings.how.micro_batch, devices.sharding == "fsdp"
        self._is_closed = threading.Event()
        self._processes = [_start_rank(settings.model_copy(update={"rank": rank})) for rank in range(1, devices.ranks)]
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_closed.wait(WATCH_S):
            if (failure := self._find_failure()) is not None and not self._is_closed.is_set():
                self._end_process(failure)
                return

    def _find_failure(self) -> NodeError | None:
        """Return the error with which to end this process if a rank has ended by itself."""
        for rank, process in enumerate(self._processes, start=1):
            if (code := process.poll()) is not None:
                who = f"rank {rank} of {len(self._processes) + 1}"
                if code == OUT_OF_MEMORY:
                    return self._halve_micro_batch(who)
                return NodeError(f"This node's {who} ended with code {code}. All ranks start again.")
        return None

    def _halve_micro_batch(self, who: str) -> NodeError:
        """Store a smaller micro-batch. Returns the error with which to end this process."""
        if self._rows <= 1:
            return out_of_memory_error()
        try:
            self._micro_batch.lower(self._rows // 2)
        except MachineError as exc:
            return exc
        return NodeError(
            f"Out of memory with {self._rows} sequences at once, in {who} of this node. All ranks start again with "
            f"{self._rows // 2} sequences at once. Set devices.micro_batch to {self._rows // 2} to prevent this."
        )

    def explain(self, error: RuntimeError) -> NoReturn:
        """Handle a failed call between ranks. Ends the process if a rank died or lacks memory, else raises `error`."""
        if isinstance(error, torch.OutOfMemoryError) and self._is_sharded:
            self._end_process(self._halve_micro_batch(f"rank 0 of {len(self._processes) + 1}"))
        time.sleep(WATCH_S)
        if (failure := self._find_failure()) is not None:
            self._end_process(failure)
        raise error

    def close(self) -> None:
        """Kill the processes."""
        self._is_closed.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # Its driver hangs.
                process.wait(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _start_rank(settings: RankSettings) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "node.worker.rank_processes"], stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    process.stdin.write(settings.model_dump_json().encode())
    process.stdin.close()
    return process


def start_replica(
    run: RunConfig, config: Config, device: ComputeDevice, model: nn.Module, end_process: EndProcess
) -> tuple[Replica, RankProcesses | None]:
    """Start the node's replica, and the processes of its other ranks if it has several ranks."""
    devices = config.devices
    cache = config.node.data_dir / "cache"
    micro_batch = MicroBatchLimit(cache, run, devices, device.name)
    if rows := micro_batch.rows:
        devices = devices.model_copy(update={"micro_batch": rows})
    how = choose_execution(model, run, device, devices)
    if devices.ranks == 1:
        return _start_alone(run, config, device, model, how), None
    folder = cache / "ranks"  # A stop leaves it behind, and the next start empties it.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    settings = RankSettings(run=run, config=config, how=how, folder=folder, parent=os.getpid(), rank=0)
    ranks = RankProcesses(settings, micro_batch, end_process)
    try:
        return _warm_up(settings.make_replica(device, model), run, how, devices.ranks), ranks
    except RuntimeError as exc:
        try:
            ranks.explain(exc)
        finally:
            ranks.close()
    except BaseException:
        ranks.close()
        raise


def _start_alone(run: RunConfig, config: Config, device: ComputeDevice, model: nn.Module, how: Execution) -> Replica:
    """Start the replica of a node with one rank. If only `auto` asked for compiled layers, it does without them."""
    try:
        return _warm_up(Replica(model, run.inner, device.device, how), run, how)
    except MachineError as exc:
        if exc.code != NO_COMPILER or config.devices.compile == "on":
            raise
        cause = str(exc.__cause__).partition("\n")[0]
        logger.warning("This node trains without compiled layers, and slower. %s (%s)", exc, cause)
    how = execution(run, device, config.devices, how.micro_batch)
    return Replica(model, run.inner, device.device, how)


def _warm_up(replica: Replica, run: RunConfig, how: Execution, ranks: int = 1) -> Replica:
    """Compile the layers now if configured, as a first step of half a minute would look like a hang."""
    if how.compiled:
        logger.info("Compiling the layers, which takes half a minute at the first start.")
        micro_batch, batch = replica.inner.micro_batch, run.inner.batch_size
        # The last micro-batch of a step may be smaller, and ranks may have one row more than others.
        rests = {rows % micro_batch for rows in (batch // ranks, -(-batch // ranks))} - {0}
        for rows in (micro_batch, *sorted(rests)):
            replica.warm_up(rows, run.inner.sequence_length)
    return replica


def main() -> int:
    """Run one of the ranks 1 and up."""
    settings = RankSettings.model_validate_json(sys.stdin.buffer.read())
    die_with_parent(settings.parent)
    ignore_stop_signals()
    devices, limits = settings.config.devices, settings.config.limits
    device = choose_device(devices, limits.cpu_threads, settings.rank, gpu_memory_ratio=limits.gpu_memory_ratio)
    model = build_model(settings.run.model, seed=0)
    prepare_layers(model, devices)
    replica = settings.make_replica(device, model)
    faults = faults_from(os.environ)
    try:
        replica.follow(lambda rows: loss_factor(faults, ANY_ROUND, rows))
    except torch.OutOfMemoryError:
        if devices.sharding == "fsdp":
            return OUT_OF_MEMORY
        raise
    except Exception:
        if os.getppid() == settings.parent:
            time.sleep(WATCH_S)  # Let rank 0 report its own failure first.
        raise
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

"""Several nodes train on one GPU. One is killed by SIGKILL in the middle, and all are paused and killed at the end.

    python -m tests.benchmarks.shared_gpu [--nodes 2,4] [--rounds 20]      exit code 3 without a GPU
    python -m tests.benchmarks.shared_gpu --cpu                            a tiny model on the CPU, to test the script

The nodes are real ones on loopback. All must agree on the digest of each round. The memory that a process holds on the
device is read from NVML. A paused or killed node must hold none. Nothing else may use the device meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pynvml
import torch

from node.errors import MachineError
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.processes import end_all_on_sigterm
from tests.benchmarks.small import small_run
from tests.swarm.harness import Node, Swarm, common_rounds, wait_for

RUN = small_run(
    "shared-gpu", batch_size=32, sequence_length=256, round={"policy": "steps", "inner_steps": 40, "min_peers": 1},
    evaluation={"batches": 0}, sync={"mode": "blocking", "codec": "int4"},
)  # fmt: skip
RUN["model"] |= {"hidden_size": 512, "intermediate_size": 1344, "num_hidden_layers": 6, "num_attention_heads": 8}
RUN["model"] |= {"num_key_value_heads": 8}
TINY_RUN = small_run(
    "shared-cpu", round={"policy": "steps", "inner_steps": 20, "min_peers": 1}, evaluation={"batches": 0}
)
FREE_S = 5.0
START_S = 120.0
ROUND_S = 20.0
MB = 1e6
LOG_CHARACTERS = 4000
BEGAN_S = time.monotonic()


class Memory:
    """The device's memory as NVML tells it. Needs no CUDA context."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.before_mb = self.used_mb()
        self.knows_users = False
        """Whether NVML tells the memory of each process, which some virtual machines prevent."""

    def name(self) -> str:
        return str(pynvml.nvmlDeviceGetName(self._handle))

    def used_mb(self) -> float:
        return float(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used) / MB

    def users(self) -> dict[int, float]:
        """The memory of each process that computes on the device, by process id, MB."""
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {one.pid: (one.usedGpuMemory or 0) / MB for one in running}

    def held_mb(self, pids: set[int]) -> float:
        """The memory of these processes. If NVML does not tell it, all memory in use beyond that of the start."""
        users = self.users()
        if self.knows_users:
            return sum(users.get(pid, 0.0) for pid in pids)
        return self.used_mb() - self.before_mb

    def freed_after_s(self, pids: set[int], limit_mb: float, began_s: float) -> float:
        """Wait until these processes hold at most `limit_mb`. Returns the seconds since `began_s`."""
        wait_for(
            lambda: self.held_mb(pids) <= limit_mb,
            30.0,
            f"the device's memory is free: {self.held_mb(pids):.0f} MB, {self.users()}",
        )
        return time.monotonic() - began_s


class HostMemory(Memory):
    """The memory of processes of this machine, in place of a device's."""

    def __init__(self) -> None:
        self.before_mb, self.knows_users = 0.0, True

    def name(self) -> str:
        return "the CPU"

    def used_mb(self) -> float:
        return sum(self.users().values())

    def users(self) -> dict[int, float]:
        found = {}
        for process in psutil.process_iter(["pid", "status", "memory_info"]):
            if process.info["status"] != psutil.STATUS_ZOMBIE and process.info["memory_info"] is not None:
                found[process.pid] = process.info["memory_info"].rss / MB
        return found


@dataclass(slots=True)
class Found:
    """What was seen with one number of nodes."""

    nodes: int
    rounds: int = 0
    """Rounds that all nodes reported with one digest."""
    forks: int = 0
    round_s: float = 0.0
    tokens_s: float = 0.0
    """Of all nodes together, while they trained."""
    held_mb: Sequence[float] = ()
    """Memory of each node's worker on the device."""
    killed_s: float = 0.0
    """Seconds from SIGKILL of one node to the device without its memory."""
    paused_s: float = 0.0
    """The same from the order to pause all nodes."""
    ended_s: float = 0.0
    """The same from SIGKILL of all nodes."""
    left_mb: dict[str, float] = field(default_factory=dict)


def note(text: str) -> None:
    print(f"{time.monotonic() - BEGAN_S:6.1f} s: {text}", flush=True)


@contextmanager
def logs_on_error(swarm: Swarm) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for node in swarm.nodes:
            print(f"{node.name} said:\n{node.said()[-LOG_CHARACTERS:]}", flush=True)
        raise


def worker_pids(node: Node) -> set[int]:
    return {process.pid for process in node.with_word("node.worker")}


def play(folder: Path, count: int, rounds: int, *, on_cpu: bool) -> Found:
    device = [f"--devices.device={'cpu' if on_cpu else 'cuda'}"]
    found, memory = Found(count), HostMemory() if on_cpu else Memory()
    with Swarm(folder, TINY_RUN if on_cpu else RUN) as swarm, logs_on_error(swarm):
        swarm.found(*device).until_training(START_S)
        note("the founder trains")
        nodes = [swarm.nodes[0], *swarm.join(*(f"n{number}" for number in range(1, count)), flags=device)]
        for node in nodes:
            node.until_training(START_S)
        first = nodes[0].status()["run"]["round"]
        all_pids = set().union(*map(worker_pids, nodes))
        memory.knows_users = all_pids <= set(memory.users())
        note(f"{count} nodes train, round {first}; device: {memory.used_mb():.0f} MB, {memory.users()}, {all_pids}")
        began_s = time.monotonic()
        middle = first + rounds // 2
        nodes[0].until_round(middle, ROUND_S * rounds)
        found.round_s = (time.monotonic() - began_s) / (rounds // 2)
        found.tokens_s = sum(node.status()["training"]["tokens_per_second"] for node in nodes)
        found.held_mb = [memory.held_mb(worker_pids(node)) for node in nodes]
        last, before_mb = nodes[-1], memory.held_mb(set())
        pids, kill_s = worker_pids(last), time.monotonic()
        last.end_by_force()
        # Without figures of processes, about the killed node's share of all memory must be free.
        found.killed_s = memory.freed_after_s(pids, before_mb * (1 - 0.5 / count), kill_s)
        note(f"a node was killed, its memory was free after {found.killed_s:.1f} s")
        last.start(*device)
        last.until_training(START_S)
        note("it trains again")
        for node in nodes:
            node.until_round(first + rounds, ROUND_S * rounds)
        common = common_rounds(nodes)
        found.forks = sum(len(digests) > 1 for digests in common.values())
        found.rounds = len(common) - found.forks
        note(f"{found.rounds} rounds, {found.forks} forks")
        pids, pause_s = set().union(*map(worker_pids, nodes)), time.monotonic()
        for node in nodes:
            assert node.act("pause").status_code == 202
        found.paused_s = memory.freed_after_s(pids, 64.0, pause_s)
        found.left_mb["paused"] = memory.held_mb(pids)
        note(f"paused, the device was free after {found.paused_s:.1f} s")
        for node in nodes:
            assert node.act("resume").status_code == 202
        for node in nodes:
            node.until(lambda s: s["phase"] == "training", START_S)
        nodes[0].until_round(first + rounds + 1, ROUND_S * rounds)
        pids, kill_s = set().union(*map(worker_pids, nodes)), time.monotonic()
        for node in nodes:
            node.end_by_force()
        found.ended_s = memory.freed_after_s(pids, 64.0, kill_s)
        found.left_mb["killed"] = memory.held_mb(pids)
    return found


def figures_of(found: Found, rounds: int) -> list[Figure]:
    name = f"{found.nodes} nodes on one GPU"
    return [
        Figure(f"{name}: rounds with one digest", "rounds", found.rounds, rounds, "rounds", low=0.9),
        Figure("  rounds with two digests", "rounds", found.forks, 1, "is too many", high=0.0),
        Figure("  memory left after a pause", "MB", max(0.0, found.left_mb["paused"]), 64, "MB", high=1.0),
        Figure("  device free after the order to pause", "s", found.paused_s, FREE_S, "s promised", high=1.0),
        Figure("  memory left after SIGKILL", "MB", max(0.0, found.left_mb["killed"]), 64, "MB", high=1.0),
        Figure("  device free after SIGKILL", "s", found.ended_s, FREE_S, "s", high=1.0),
        Figure("  a killed node's memory free", "s", found.killed_s, FREE_S, "s", high=1.0),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,4")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print("no GPU here: not measured")
        return MachineError.exit_code
    end_all_on_sigterm()
    figures, notes, samples = [], [], {}
    for count in map(int, options.nodes.split(",")):
        with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
            found = play(Path(name) / "swarm", count, options.rounds, on_cpu=options.cpu)
        figures += figures_of(found, options.rounds)
        held = ", ".join(f"{one:,.0f}" for one in found.held_mb)
        notes.append(
            f"{count} nodes: {found.round_s:.2f} s a round, {found.tokens_s:,.0f} tokens/s together, {held} MB held"
        )
        samples[str(count)] = {"held_mb": found.held_mb, "left_mb": found.left_mb, "round_s": found.round_s}
    name = (HostMemory() if options.cpu else Memory()).name()
    return Result("shared_cpu" if options.cpu else "shared_gpu", figures, [f"on {name}", *notes], samples).conclude()


if __name__ == "__main__":
    sys.exit(main())

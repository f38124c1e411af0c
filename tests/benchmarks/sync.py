"""Measures compute utilisation and bytes over shaped lines, for our modes and codecs and for hivemind's averager.

    python -m tests.benchmarks.sync [--cells 20:4:overlapped:int4,...] [--rounds 3] [--fresh]

Each network namespace has one real process on a line shaped with `tc` (tbf). Bytes are the interfaces' counters. It
needs root. Inner steps sleep and count as compute, because two cores cannot train so many models at once. Encoding,
sending, averaging and stepping are real.

Utilisation is the share of `compute` in all activities of the nodes' /metrics over whole rounds. For hivemind's
averager, which blocks, it is the inner phase (slept, too) divided by that phase plus the time that `step` adds. Its
group is sought before the phase ends, as in hivemind's optimizer. The formula is that of `node.diloco.forecast`. Each
finished cell is stored in results/sync.json and reused, unless --fresh is given.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from node.diloco.forecast import round_bytes, transfer_seconds, utilization
from node.errors import MachineError
from tests.benchmarks.figures import RESULTS, commit
from tests.benchmarks.processes import Helper, end_all_on_sigterm
from tests.homes.home import Home
from tests.homes.world import AttachedHome, World, why_not
from tests.swarm.harness import Node, Swarm

DIRECT = Home("public", lines=None)
PARAMETERS = 15_036_288
INNER_S = 30.0
STEP_S = 0.25
START_S = 240.0
ROUND_S = 900.0
POLL_S = 1.0
CELLS = RESULTS / "sync.json"
DEFAULT = (
    "20:4:overlapped:int4", "100:4:streaming:int4", "20:4:hivemind:fp16", "20:4:blocking:fp16", "100:4:blocking:fp32",
    "20:4:overlapped:int8", "20:4:overlapped:e3m0", "20:8:overlapped:int4", "100:4:hivemind:fp16",
    "100:4:blocking:fp16", "10:4:overlapped:int4", "20:4:overlapped:topk", "20:2:overlapped:int4",
    "500:4:streaming:int4", "100:8:streaming:int4", "20:4:streaming:int4", "100:4:overlapped:fp16",
    "10:4:blocking:fp16", "500:4:blocking:fp16", "100:2:streaming:int4",
)  # fmt: skip
"""The cells to measure, the most important ones first."""
BITS = {"fp32": 32.0, "fp16": 16.0, "int8": 8.0, "int4": 4.0, "e3m0": 4.0, "topk": (0.8828 + 8.0) / 2}
"""Bits of an element, mean of contribution and result. The result of `topk` is in int8."""
FRAGMENTS = 4
MODEL = {
    "hidden_size": 384,
    "intermediate_size": 928,
    "num_hidden_layers": 9,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True)
class Cell:
    """The parameters of one measurement, which is one line of the table."""

    mbit_s: float
    nodes: int
    mode: str
    codec: str
    inner_s: float = INNER_S
    """Length of H inner steps in seconds."""

    def __str__(self) -> str:
        text = f"{self.mbit_s:g}:{self.nodes}:{self.mode}:{self.codec}"
        return text if self.inner_s == INNER_S else f"{text}:{self.inner_s:g}"

    @property
    def payload_bytes(self) -> float:
        """The bytes that a node sends in H inner steps, in any mode."""
        return round_bytes(BITS[self.codec] * PARAMETERS / 8, self.nodes)

    @property
    def formula(self) -> float:
        transfer_s = transfer_seconds(self.payload_bytes, self.mbit_s)
        return utilization(self.inner_s, transfer_s, overlapped=self.mode not in ("blocking", "hivemind"))


@dataclass(frozen=True, slots=True)
class Found:
    """The measurements of a cell."""

    utilization: float
    """Mean utilisation of the nodes."""
    least: float
    round_s: float
    """Seconds of H inner steps and the synchronisation that belongs to them."""
    transfer_s: float
    """Median seconds from the closed group to the commit, summed over all fragments."""
    counted_bytes: float
    """Bytes that a node sends in H inner steps, by the node's counters."""
    interface_bytes: float
    peak_mb: float
    """Peak resident memory of a worker in these rounds in MB, mean over the nodes."""
    agree: bool
    commit: str = ""
    """The commit that was measured."""


def parse(text: str) -> Cell:
    mbit_s, nodes, mode, codec, *inner_s = text.split(":")
    return Cell(float(mbit_s), int(nodes), mode, codec, *map(float, inner_s))


def run_of(cell: Cell) -> dict[str, Any]:
    return {
        "name": "sync",
        "total_tokens": 10**12,
        "model": MODEL,
        "inner": {"batch_size": 1, "sequence_length": 32},
        "round": {"policy": "time", "inner_steps": round(cell.inner_s / STEP_S), "min_peers": cell.nodes},
        "sync": {
            "mode": cell.mode,
            "codec": cell.codec,
            "fragments": FRAGMENTS,
            "feedback": "classic" if cell.codec == "topk" else "none",
        },
        "evaluation": {"batches": 0},
    }


def found_swarm(swarm: Swarm, network: World, count: int) -> tuple[list[Node], list[AttachedHome]]:
    """Start nodes on separate hosts and wait until all train. Their inner steps sleep."""
    hosts = [network.attach(DIRECT) for _ in range(count)]
    env = {"DILOCO_FAULTS": f"inner@*=rest:{STEP_S}"}
    nodes = [swarm.node("founder").live_in(hosts[0]).start(env=env)]
    invite = nodes[0].invite()
    for number, host in enumerate(hosts[1:], 1):
        node = swarm.node(f"node{number}", join=invite).live_in(host)
        nodes.append(node.start(env=env))
    for node in nodes:
        node.until_training(START_S)
    return nodes, hosts


@dataclass(frozen=True, slots=True)
class Counted:
    """The counters of one node at one moment."""

    compute_s: float
    all_s: float
    reduce_bytes: float
    interface_bytes: int
    round: int
    at_s: float


def count(node: Node, home: AttachedHome) -> Counted:
    seconds = node.activity_s()
    return Counted(
        seconds["compute"],
        sum(seconds.values()),
        node.metrics()['network_sent_bytes_total{channel="reduce"}'],
        home.sent_bytes(),
        node.status()["run"]["round"],
        time.monotonic(),
    )


def wait_for_round(nodes: Sequence[Node], number: int, timeout_s: float) -> None:
    """Wait until all nodes have the round. Polls rarely, because an answer takes processor time from measured nodes."""
    end_s = time.monotonic() + timeout_s
    for node in nodes:
        while node.status()["run"]["round"] < number:
            if time.monotonic() > end_s:
                raise TimeoutError(f"{node.name} did not come to round {number} within {timeout_s:.0f} s")
            time.sleep(POLL_S)


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[0])


def ours(cell: Cell, rounds: int) -> Found:
    """Measure our node for `rounds` times H inner steps, after one or two rounds."""
    turns = FRAGMENTS if cell.mode == "streaming" else 1
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as name,
        World() as network,
        Swarm(Path(name), run_of(cell)) as swarm,
    ):
        nodes, hosts = found_swarm(swarm, network, cell.nodes)
        founder = nodes[0]
        for host in hosts:  # Lines are limited now, because joining is not measured.
            host.limit((cell.mbit_s, cell.mbit_s))
        first = max(node.status()["run"]["round"] for node in nodes) + 1 + turns
        wait_for_round(nodes, first, ROUND_S)
        workers = [node.find("worker").pid for node in nodes]
        for pid in workers:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # This resets the peak (proc(5)).
        before = [count(node, host) for node, host in zip(nodes, hosts, strict=True)]
        wait_for_round(nodes, before[0].round + rounds * turns, rounds * ROUND_S)
        after = [count(node, host) for node, host in zip(nodes, hosts, strict=True)]
        records = [r for r in founder.rounds() if before[0].round < r["round"] <= after[0].round]
        transfers = [r["seconds"]["reduce"] + r["seconds"]["commit"] for r in records if r["outcome"] != "failed"]
        peaks = [peak_bytes(pid) for pid in workers]
        states = {(s["round"], s["state_digest"]) for s in (node.status()["run"] for node in nodes)}
        agree = len({r for r, _ in states}) == len(states)
    return found(before, after, turns, transfers, peaks, agree=agree)


def found(
    before: Sequence[Counted],
    after: Sequence[Counted],
    turns: int,
    transfers: Sequence[float],
    memory: Sequence[int],
    *,
    agree: bool,
) -> Found:
    pairs = list(zip(before, after, strict=True))
    busy = [(new.compute_s - old.compute_s) / (new.all_s - old.all_s) for old, new in pairs]
    per = [turns / max(1, new.round - old.round) for old, new in pairs]
    return Found(
        utilization=statistics.fmean(busy),
        least=min(busy),
        round_s=statistics.median((new.at_s - old.at_s) * p for (old, new), p in zip(pairs, per, strict=True)),
        transfer_s=turns * statistics.median(transfers),
        counted_bytes=statistics.fmean(
            (new.reduce_bytes - old.reduce_bytes) * p for (old, new), p in zip(pairs, per, strict=True)
        ),
        interface_bytes=statistics.fmean(
            (new.interface_bytes - old.interface_bytes) * p for (old, new), p in zip(pairs, per, strict=True)
        ),
        peak_mb=statistics.fmean(memory) / 1e6,
        agree=agree,
    )


def hivemind(cell: Cell, rounds: int) -> Found:
    """Measure the blocking fp16 round of hivemind's averager in the same loop of a sleep and `step`."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name, World() as network, ExitStack() as stack:
        hosts = [network.attach(DIRECT) for _ in range(cell.nodes)]
        helpers: list[Helper] = []
        said: list[dict[str, Any]] = []
        for rank, host in enumerate(hosts):
            arguments = ["--rank", str(rank), "--peers", str(cell.nodes), "--parameters", str(PARAMETERS)]
            arguments += ["--host", host.machine.address, *(["--bootstrap", said[0]["address"]] if said else [])]
            log = Path(name) / f"hivemind-{rank}.log"
            environment = {"OMP_NUM_THREADS": "1"}
            helpers.append(
                stack.enter_context(
                    Helper(
                        "tests.benchmarks.round_peer_hivemind",
                        arguments,
                        log,
                        environment,
                        namespace=host.machine.namespace,
                    )
                )
            )
            said.append(helpers[-1].hear(START_S))
        for host in hosts:
            host.limit((cell.mbit_s, cell.mbit_s))
        step_s, sent = [], [host.sent_bytes() for host in hosts]
        for _ in range(rounds):
            for helper in helpers:
                helper.tell(do="round", inner_s=cell.inner_s)
            step_s.append(statistics.fmean(helper.hear(ROUND_S)["step_s"] for helper in helpers))
        moved = [host.sent_bytes() - before for host, before in zip(hosts, sent, strict=True)]
    mean_s = statistics.fmean(step_s)
    busy = cell.inner_s / (cell.inner_s + mean_s)
    return Found(busy, busy, cell.inner_s + mean_s, mean_s, 0.0, statistics.fmean(moved) / rounds, 0.0, agree=False)


def row(cell: Cell, one: Found) -> str:
    counted = f"{one.counted_bytes / cell.payload_bytes:.3f}" if one.counted_bytes else ""
    cells = (
        f"{cell.mbit_s:g}", str(cell.nodes), cell.mode, cell.codec, f"{one.utilization:.1%}", f"{one.least:.1%}",
        f"{cell.formula:.1%}", f"{one.round_s:.1f}", f"{one.transfer_s:.1f}",
        f"{transfer_seconds(cell.payload_bytes, cell.mbit_s) / one.transfer_s:.0%}", counted,
        f"{one.interface_bytes / cell.payload_bytes:.3f}", f"{one.peak_mb:.0f}" if one.peak_mb else "",
        "yes" if one.agree else "" if cell.mode == "hivemind" else "NO",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


COLUMNS = (
    "Mbit/s", "nodes", "mode", "codec", "busy, mean", "least", "formula", "s per H steps", "transfer s",
    "of the line", "bytes counted / formula", "bytes on the interface / formula", "worker MB", "equal digests",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def table(kept: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """All measurements as Markdown, and the commit of each."""
    found = {text: Found(**one) for text, one in kept.items()}
    texts_by_commit: dict[str, list[str]] = {}
    for text, one in found.items():
        texts_by_commit.setdefault(one.commit, []).append(text)
    measured = "; ".join(f"{number}: {', '.join(texts)}" for number, texts in texts_by_commit.items())
    rows = [row(parse(text), one) for text, one in found.items()]
    return [*HEAD.split("\n"), *rows, "", f"Measured at commit {measured}."]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(DEFAULT), help="MBIT_S:NODES:MODE:CODEC[:INNER_S]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="measure again what is kept")
    options = parser.parse_args()
    end_all_on_sigterm()
    if reason := why_not():
        print(reason)
        return MachineError.exit_code
    kept: dict[str, Any] = json.loads(CELLS.read_text()) if CELLS.exists() and not options.fresh else {}
    print(HEAD)
    for text in options.cells.split(","):
        cell = parse(text)
        if str(cell) not in kept:
            measured = (hivemind if cell.mode == "hivemind" else ours)(cell, options.rounds)
            kept[str(cell)] = asdict(replace(measured, commit=commit()))
            CELLS.parent.mkdir(parents=True, exist_ok=True)
            CELLS.write_text(json.dumps(kept, indent=1))
        print(row(cell, Found(**kept[str(cell)])), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Runs cells, and keeps their results in a file with one line for each, so that a killed book goes on where it was."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from rich.progress import Progress

from node.host.parent_death import die_with_parent
from tests.benchmarks.book.arm import Arm
from tests.benchmarks.book.trial import Result, Trial, setting
from tests.benchmarks.figures import commit
from tests.benchmarks.processes import ROOT
from tests.swarm.harness import TINY

NICENESS = 19
TRAINING_CODE = (
    *(f"tests/benchmarks/book/{name}.py" for name in ("trial", "schedule", "shards")),
    *(f"node/training/{name}.py" for name in ("corpus", "inner", "model", "optimizers")),
    "node/diloco/*.py",
)
"""The files that decide what a training computes."""
Cell = tuple[Arm, int]


@cache
def code() -> str:
    """The version of the program that trains: a digest of TRAINING_CODE, of the model and of torch's version."""
    digest = hashlib.blake2b(json.dumps([TINY, torch.__version__], sort_keys=True).encode(), digest_size=4)
    for file in sorted(file for pattern in TRAINING_CODE for file in ROOT.glob(pattern)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class Store:
    """The file of results. Each line is a cell. A line that a killed book wrote half is skipped.

    A cell's name holds all fields of its arm and what all trainings share, so a result of other settings is not used.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._results: dict[str, Result] = {}
        self._versions: dict[str, tuple[str, str]] = {}
        """For each cell: the version of the code, and the commit."""
        for line in file.read_bytes().splitlines() if file.exists() else ():
            try:
                kept = json.loads(line)
            except ValueError:
                continue
            found = json.dumps(kept["cell"], sort_keys=True)
            self._results[found] = Result(**kept["result"])
            self._versions[found] = kept["code"], kept["commit"]

    def get(self, cell: Cell) -> Result | None:
        return self._results.get(key(cell))

    def versions(self, cells: Iterable[Cell]) -> Counter[tuple[str, str]]:
        """How many of these cells each version of the code has trained, with its commit."""
        return Counter(self._versions[key(cell)] for cell in dict.fromkeys(cells) if key(cell) in self._versions)

    def put(self, cell: Cell, result: Result) -> None:
        """Keep a result. Raises OSError if it cannot be written."""
        content = {"cell": name(cell), "code": code(), "commit": commit(), "result": asdict(result)}
        with self.file.open("a+b") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")  # The line before was written half.
            file.write(json.dumps(content, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._results[key(cell)], self._versions[key(cell)] = result, (code(), commit())


def name(cell: Cell) -> dict[str, object]:
    arm, seed = cell
    return {"setting": setting(), "seed": seed, **asdict(arm)}


def key(cell: Cell) -> str:
    return json.dumps(name(cell), sort_keys=True)


def play(cell: Cell) -> Result:
    arm, seed = cell
    return Trial(arm, seed).run()


def run(cells: Iterable[Cell], store: Store, jobs: int) -> list[tuple[Cell, Exception]]:
    """Run all cells that the store lacks, in this order. Returns those that failed.

    Raises BlockingIOError if another book writes to the same file, and OSError if a result cannot be written.
    """
    todo, failed = [cell for cell in dict.fromkeys(cells) if store.get(cell) is None], []
    store.file.parent.mkdir(parents=True, exist_ok=True)
    with store.file.open("a") as held, Progress() as progress:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        bar = progress.add_task(f"{len(todo)} cells", total=sum(arm.cost_s for arm, _ in todo))
        pool = ProcessPoolExecutor(jobs, initializer=start_process, initargs=(os.getpid(),))
        try:
            running = {pool.submit(play, cell): cell for cell in todo}
            for number, future in enumerate(as_completed(running), 1):
                cell = running[future]
                try:
                    result = future.result()
                except BrokenProcessPool:
                    raise
                except Exception as exc:  # noqa: BLE001  # The other cells are hours of work.
                    failed.append((cell, exc))
                else:
                    store.put(cell, result)
                progress.update(bar, advance=cell[0].cost_s, description=f"{number} of {len(todo)} cells")
        finally:
            pool.shutdown(cancel_futures=True)
    return failed


def start_process(parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    os.nice(NICENESS)

"""Runs cells, and keeps their results in a file with one line for each, so that a killed book goes on where it was."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

import torch
from rich.progress import Progress

from node.host.parent_death import die_with_parent
from tests.benchmarks.book.arm import Arm
from tests.benchmarks.book.trial import Result, Trial, setting

NICENESS = 19
Cell = tuple[Arm, int]


class Store:
    """The file of results. Each line is a cell. A line that a killed book wrote half is dropped.

    A cell's name holds all fields of its arm and what all trainings share, so a result of other settings is not used.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._results: dict[str, Result] = {}
        data = file.read_bytes() if file.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            kept = json.loads(line)
            self._results[json.dumps(kept["cell"], sort_keys=True)] = Result(**kept["result"])
        if len(whole) < len(data):
            os.truncate(file, len(whole))

    def get(self, cell: Cell) -> Result | None:
        return self._results.get(key(cell))

    def put(self, cell: Cell, result: Result) -> None:
        self._results[key(cell)] = result
        with self.file.open("a") as file:
            file.write(json.dumps({"cell": name(cell), "result": asdict(result)}, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())


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

    BlockingIOError if another book writes to the same file.
    """
    todo, failed = [cell for cell in dict.fromkeys(cells) if store.get(cell) is None], []
    store.file.parent.mkdir(parents=True, exist_ok=True)
    with store.file.open("a") as held, Progress() as progress:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        bar = progress.add_task(f"{len(todo)} cells", total=sum(arm.cost for arm, _ in todo))
        pool = ProcessPoolExecutor(jobs, initializer=start_process, initargs=(os.getpid(),))
        try:
            running = {pool.submit(play, cell): cell for cell in todo}
            for number, future in enumerate(as_completed(running), 1):
                cell = running[future]
                try:
                    store.put(cell, future.result())
                except BrokenProcessPool:
                    raise
                except Exception as exc:  # noqa: BLE001  # The other cells are hours of work.
                    failed.append((cell, exc))
                progress.update(bar, advance=cell[0].cost, description=f"{number} of {len(todo)} cells")
        finally:
            pool.shutdown(cancel_futures=True)
    return failed


def start_process(parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    os.nice(NICENESS)

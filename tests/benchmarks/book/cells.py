"""Runs cells, and keeps their results in a file with one line for each, so that a killed book goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import torch
from rich.progress import Progress

from tests.benchmarks.book.arm import Arm
from tests.benchmarks.book.trial import Result, Trial

NICENESS = 19
Cell = tuple[Arm, int]


class Store:
    """The file of results. Each line is a cell. A line that a killed book wrote half is dropped."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._results: dict[str, Result] = {}
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        for line in whole:
            kept = json.loads(line)
            self._results[kept["cell"]] = Result(**kept["result"])
        if len(whole) < len(lines):
            file.write_text("".join(whole))

    def get(self, cell: Cell) -> Result | None:
        return self._results.get(cell[0].key(cell[1]))

    def put(self, cell: Cell, result: Result) -> None:
        key = cell[0].key(cell[1])
        self._results[key] = result
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            file.write(json.dumps({"cell": key, "result": asdict(result)}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def play(cell: Cell) -> Result:
    arm, seed = cell
    return Trial(arm, seed).run()


def run(cells: Iterable[Cell], store: Store, jobs: int) -> None:
    """Run all cells that the store lacks, in this order."""
    todo = [cell for cell in dict.fromkeys(cells) if store.get(cell) is None]
    with Progress() as progress, ProcessPoolExecutor(jobs, initializer=start_process) as pool:
        bar = progress.add_task(f"{len(todo)} cells", total=sum(arm.cost for arm, _ in todo))
        running = {pool.submit(play, cell): cell for cell in todo}
        for number, future in enumerate(as_completed(running), 1):
            cell = running[future]
            store.put(cell, future.result())
            progress.update(bar, advance=cell[0].cost, description=f"{number} of {len(todo)} cells")


def start_process() -> None:
    torch.set_num_threads(1)
    os.nice(NICENESS)

"""Runs cells, and keeps their results in a file with one line for each, so that a killed book goes on where it was."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import torch

from tests.benchmarks.book.arm import Arm
from tests.benchmarks.book.trial import Result, Trial

NICENESS = 19
BAR = 30
"""Characters of the progress bar."""
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
    progress = Progress([arm.cost for arm, _ in todo])
    with ProcessPoolExecutor(jobs, initializer=start_process) as pool:
        running = {pool.submit(play, cell): cell for cell in todo}
        for future in as_completed(running):
            cell = running[future]
            store.put(cell, future.result())
            progress.done(cell[0].cost)


def start_process() -> None:
    torch.set_num_threads(1)
    os.nice(NICENESS)


class Progress:
    """Prints a bar, and the time that is left at the speed so far."""

    def __init__(self, costs: Sequence[int]) -> None:
        self._total, self._cells = sum(costs), len(costs)
        self._done, self._finished = 0, 0
        self._began_s = time.monotonic()

    def done(self, cost: int) -> None:
        self._done += cost
        self._finished += 1
        passed_s = time.monotonic() - self._began_s
        left_s = passed_s * (self._total - self._done) / self._done
        filled = BAR * self._done // self._total
        text = f"[{'#' * filled}{'.' * (BAR - filled)}] {self._finished} of {self._cells} cells, {minutes(left_s)} left"
        print(f"\r{text:<79}" if sys.stdout.isatty() else text, end="" if sys.stdout.isatty() else "\n", flush=True)
        if self._finished == self._cells and sys.stdout.isatty():
            print()


def minutes(seconds: float) -> str:
    """The time as a text, such as `2 h 05 min`."""
    whole = round(seconds / 60)
    return f"{whole // 60} h {whole % 60:02} min" if whole >= 60 else f"{whole} min"

"""The result of a benchmark as a table and as JSON: figures with their baselines and limits."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import psutil

from tests.benchmarks.processes import ROOT

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))
COLUMNS = ("figure", "ours", "baseline", "ratio", "allowed", "verdict")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number with its baseline and its limits."""

    name: str
    unit: str
    ours: float
    baseline: float
    baseline_name: str
    low: float | None = None
    """Smallest ratio (ours / baseline) that passes; None means no limit."""
    high: float | None = None
    """Largest ratio that passes; None means no limit."""
    ratio_measured: float | None = None
    """The ratio, if it is a median of paired ratios instead of the ratio of the two medians."""

    @property
    def ratio(self) -> float:
        return self.ours / self.baseline if self.ratio_measured is None else self.ratio_measured

    @property
    def passed(self) -> bool:
        return (self.low is None or self.ratio >= self.low) and (self.high is None or self.ratio <= self.high)

    def row(self) -> tuple[str, ...]:
        low = "" if self.low is None else f">= {self.low:g}"
        high = "" if self.high is None else f"<= {self.high:g}"
        return (
            self.name,
            f"{_short(self.ours)} {self.unit}",
            f"{_short(self.baseline)} {self.baseline_name}",
            f"{self.ratio:.3f}",
            " ".join(part for part in (low, high) if part),
            "PASS" if self.passed else "FAIL",
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one benchmark."""

    benchmark: str
    figures: Sequence[Figure]
    notes: Sequence[str] = ()
    """Lines that are printed under the table."""
    samples: Mapping[str, object] = field(default_factory=dict)
    """All measurements, for the JSON file."""

    def conclude(self) -> int:
        """Store and print the result. Returns the exit code."""
        self.save(RESULTS)
        print(*self.notes, sep="\n")
        for figure in self.figures:
            print(" ".join(figure.row()))
        return 0 if all(figure.passed for figure in self.figures) else 1

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        figures = [asdict(f) | {"ratio": f.ratio, "passed": f.passed} for f in self.figures]
        content = {
            "benchmark": self.benchmark,
            "commit": commit(),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {
                "processor": platform.machine(),
                "cores": psutil.cpu_count(),
                "python": platform.python_version(),
            },
            "load_average": psutil.getloadavg(),
            "figures": figures,
            "notes": list(self.notes),
            "samples": self.samples,
        }
        (folder / f"{self.benchmark}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@cache
def commit() -> str:
    """The commit of the working tree, with `+` if files were changed since; `unknown` without git.

    Set BENCHMARK_COMMIT where the files were copied without git.
    """
    if stated := os.environ.get("BENCHMARK_COMMIT"):
        return stated
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=7", "--dirty=+"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def table(figures: Sequence[Figure]) -> str:
    rows = [COLUMNS, *(figure.row() for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Text with median, minimum and maximum."""
    return f"{_short(median(values))} ({_short(min(values))} to {_short(max(values))})"


def _short(value: float) -> str:
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2e}"

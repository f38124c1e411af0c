"""Runs the benchmarks one after the other, each as a process, and prints a table. Exit code 1 if a figure fails.

    python -m tests.benchmarks [first_run] [inner] [data] [rounds] [memory] [codecs] [load] [pause]
    python -m tests.benchmarks slow_peer | slow_line | churn | scaling | hostile | join | homes
    python -m tests.benchmarks gpu | shared_gpu | tab | beside
    python -m tests.benchmarks publishing | kills | stops

Only the benchmarks of the first line run by default. Those of the second line take about 15 minutes each. `gpu`,
`shared_gpu` and `tab` exit with code 3 without a GPU or a browser. `kills` takes half an hour, and `stops` takes two
hours. Each has its own options: `python -m tests.benchmarks.rounds --help`. Full results are in results/*.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import psutil

from node.errors import MachineError
from tests.benchmarks.figures import RESULTS, Figure, table
from tests.benchmarks.processes import ROOT

BENCHMARKS = ("first_run", "inner", "data", "rounds", "memory", "codecs", "load", "pause")
LONG = (
    "slow_peer",
    "slow_line",
    "churn",
    "scaling",
    "hostile",
    "join",
    "homes",
    "gpu",
    "shared_gpu",
    "tab",
    "beside",
    "kills",
    "stops",
    "publishing",
)
LIMIT_S = 240.0
LONG_LIMIT_S = 2400.0
LIMITS_S = {"kills": 4800.0, "stops": 14_400.0}
NOT_HERE = MachineError.exit_code


class NotHere(Exception):
    """This machine lacks something that the benchmark needs, and the benchmark has printed what."""


def run(name: str) -> list[Figure]:
    """Run one benchmark. Returns all its figures, or none if it crashed. Raises NotHere.

    An earlier result stays until the benchmark replaces it.
    """
    file = RESULTS / f"{name}.json"
    before_ns = _written_ns(file)
    limit_s = LIMITS_S.get(name, LONG_LIMIT_S if name in LONG else LIMIT_S)
    try:
        command = [sys.executable, "-m", f"tests.benchmarks.{name}"]
        done = subprocess.run(command, cwd=ROOT, timeout=limit_s, check=False)
        if done.returncode == NOT_HERE:
            raise NotHere
        if _written_ns(file) == before_ns:
            raise FileNotFoundError(f"exit code {done.returncode}, and no result was written")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (subprocess.SubprocessError, OSError) as exc:
        print(f"{name}: did not end well: {exc}", file=sys.stderr)
        return []
    known = {field.name for field in fields(Figure)}
    return [Figure(**{key: value for key, value in one.items() if key in known}) for one in content["figures"]]


def _written_ns(file: Path) -> int:
    """When the file was written; 0 if there is none."""
    return file.stat().st_mtime_ns if file.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=", ".join((*BENCHMARKS, *LONG)))
    chosen = parser.parse_args().benchmarks or BENCHMARKS
    if unknown := set(chosen) - {*BENCHMARKS, *LONG}:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join((*BENCHMARKS, *LONG))}")
    load, cores = psutil.getloadavg()[0], psutil.cpu_count() or 1
    if load > cores / 2:
        print(f"Other programs use this machine (load {load:.1f} on {cores} cores): the figures will be rough.\n")
    began_s = time.monotonic()
    try:
        found = {name: run(name) for name in chosen}
    except NotHere:
        return NOT_HERE
    figures = [figure for some in found.values() for figure in some]
    print(f"\n{table(figures)}\n\n{time.monotonic() - began_s:.0f} s")
    return 0 if all(found.values()) and all(figure.passed for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Combines the results of several calls of a benchmark in one report. Each call with another seed adds a series.

A call with a seed that was measured before replaces the series of that seed.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from node.host.revision import revision
from tests.benchmarks.figures import RESULTS

COMMIT = revision()
"""The revision before the measurement, because the checkout may change meanwhile."""


@dataclass(frozen=True, slots=True)
class Series:
    """The measurements of one call as JSON, and how to repeat them."""

    seed: int
    samples: dict[str, Any]
    command: str = field(default_factory=lambda: f"python -m tests.benchmarks.{shlex.join(_words())}")
    commit: str = COMMIT
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())

    @property
    def note(self) -> str:
        return f"`{self.command}`, seed {self.seed}, commit {self.commit}, {self.date}."


def _words() -> list[str]:
    """The name of the benchmark and its arguments."""
    return [sys.argv[0].rsplit("/", 1)[-1].removesuffix(".py"), *sys.argv[1:]]


def with_earlier(benchmark: str, newest: Series) -> list[Series]:
    """Return the stored series of all other seeds from results/BENCHMARK.json, followed by the newest series."""
    file = RESULTS / f"{benchmark}.json"
    earlier = json.loads(file.read_text())["samples"]["series"] if file.exists() else []
    return [*(series for one in earlier if (series := Series(**one)).seed != newest.seed), newest]

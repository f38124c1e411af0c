"""Series of a benchmark that adds up over several calls: one series per seed, all in one report.

A series that was measured before with the same seed is replaced.
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
"""Read before the measurement: the checkout may change meanwhile."""


@dataclass(frozen=True, slots=True)
class Series:
    """What one call has measured, as JSON, and how to measure it again."""

    seed: int
    samples: dict[str, Any]
    command: str = field(default_factory=lambda: f"python -m tests.benchmarks.{shlex.join(_words())}")
    commit: str = COMMIT
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())

    @property
    def note(self) -> str:
        return f"`{self.command}`, seed {self.seed}, commit {self.commit}, {self.date}."


def _words() -> list[str]:
    """The benchmark's name and its arguments."""
    return [sys.argv[0].rsplit("/", 1)[-1].removesuffix(".py"), *sys.argv[1:]]


def with_earlier(benchmark: str, newest: Series) -> list[Series]:
    """The series that results/BENCHMARK.json has of other seeds, then the newest."""
    file = RESULTS / f"{benchmark}.json"
    earlier = json.loads(file.read_text())["samples"]["series"] if file.exists() else []
    return [*(series for one in earlier if (series := Series(**one)).seed != newest.seed), newest]

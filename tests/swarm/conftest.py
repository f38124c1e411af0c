"""Fixtures of the swarm tests: a swarm for each test, and durations that tests compare with promised limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.homes.world import World, why_not
from tests.swarm.harness import PATIENCE, Swarm

FIGURE = "figure"


class Figures:
    """Measured durations and their promised limits. They are printed at the end of the test run."""

    def __init__(self, properties: list[tuple[str, object]]) -> None:
        self._properties = properties

    def tell(self, what: str, seconds: float) -> None:
        """Report a duration that has no promised limit."""
        self._properties.append((FIGURE, f"{what}: {seconds:.3g} s"))

    def hold(self, what: str, seconds: float, promised_s: float) -> None:
        line = f"{what}: {seconds:.3g} s (promised {promised_s:g} s)"
        self._properties.append((FIGURE, line))
        assert seconds <= PATIENCE * promised_s, line


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    return Figures(request.node.user_properties)


@pytest.fixture
def network() -> Iterator[World]:
    if reason := why_not():
        pytest.skip(reason)
    with World() as made:
        yield made


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path) as made:
        yield made


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    told = [p for r in reports if getattr(r, "when", "") == "call" for p in r.user_properties]
    lines = [line for name, line in told if name == FIGURE]
    if lines:
        terminalreporter.section("figures of the swarm")
        for line in lines:
            terminalreporter.write_line(line)

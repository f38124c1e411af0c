"""Fixtures of the swarm tests: a swarm of the test's own, and the figures that the tests measure and hold to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.harness import PATIENCE, Swarm

_measured: list[str] = []


class Figures:
    """Seconds that users are promised, and what they were."""

    def hold(self, what: str, seconds: float, promised_s: float) -> None:
        _measured.append(f"{what}: {seconds:.1f} s (promised {promised_s:g} s)")
        assert seconds <= PATIENCE * promised_s, _measured[-1]


@pytest.fixture(scope="session")
def figures() -> Figures:
    return Figures()


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path) as made:
        yield made


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _measured:
        terminalreporter.section("figures of the swarm")
        for line in _measured:
            terminalreporter.write_line(line)

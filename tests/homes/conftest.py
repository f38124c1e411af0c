"""Fixtures of the tests with homes. They skip tests that this machine cannot run, and end all nodes after a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.homes.world import why_not
from tests.swarm.harness import Swarm


@pytest.fixture(autouse=True)
def possible_here() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path) as made:
        yield made

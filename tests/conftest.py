"""Shared by all tests: few threads, no settings of the person who runs them, and how three processes share them."""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Before anything imports torch: two cores are shared by all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("DILOCO_"):
            monkeypatch.delenv(variable)


WAITING = (
    "tests/swarm/test_namespaces.py",
    "tests/swarm/test_late.py",
    "tests/swarm/test_texts.py",
    "tests/docker/test_monitoring.py",
    "tests/browser/test_phases.py",
    "tests/browser/test_swarm.py",
)
"""Swarms that wait the most, in this order: what measures how soon something happens has the machine more to itself."""


def part_of(file: str) -> str:
    """What is run by one process in one go: the swarms of real processes, those that wait the most, any other file."""
    if file in WAITING:
        return "waiting"
    return "swarms" if file.startswith("tests/swarm/") else file


class Parts(LoadScopeScheduling):  # type: ignore[misc]
    """With `-n 3`: the swarms one after the other, beside them those that wait, and beside both all the rest."""

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid.split("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Parts:
    config.option.loadscopereorder = False
    return Parts(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first, in the processes that pytest-xdist starts."""
    if hasattr(config, "workerinput"):
        parts = ["swarms", "waiting"]

        def rank(item: pytest.Item) -> tuple[int, int]:
            file = item.nodeid.split("::")[0]
            part = part_of(file)
            return parts.index(part) if part in parts else len(parts), WAITING.index(file) if part == "waiting" else 0

        items.sort(key=rank)

"""Shared by all tests: few threads, no settings of the person who runs them, and how two processes share them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.swarm import warm

# Before anything imports torch: two cores are shared by all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("DILOCO_"):
            monkeypatch.delenv(variable)


NODES = ("tests/swarm/", "tests/homes/", "tests/browser/")


@pytest.fixture(scope="session", autouse=True)
def warm_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Real nodes start their workers from one process that has torch imported."""
    if sys.platform == "linux" and any(item.nodeid.startswith(NODES) for item in request.session.items):
        with warm.server():
            yield
    else:
        yield


BESIDE = (
    "tests/swarm/test_namespaces.py",
    "tests/swarm/test_late.py",
    "tests/browser/test_swarm.py",
    "tests/browser/test_phases.py",
)
"""Swarms that wait the most."""


def part_of(file: str) -> str:
    """What is run by one process in one go: the swarms of real processes, but those; any other file."""
    return "swarms" if file.startswith("tests/swarm/") and file not in BESIDE else file


class Parts(LoadScopeScheduling):  # type: ignore[misc]
    """With `-n 2`: the swarms one after the other, and beside them all the rest."""

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid.split("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Parts:
    config.option.loadscopereorder = False
    return Parts(config, log)


SLOW_FOLDERS = ("tests/swarm/", "tests/homes/", "tests/browser/", "tests/docker/")
QUICK = ("tests/swarm/test_story.py", "tests/browser/test_swarm.py::test_each_view_shows_what_the_node_says")
"""Of those folders, what `make test` runs, too: one story of a swarm, and one look at the page in a browser."""


def is_slow(nodeid: str) -> bool:
    """Whether only `make test-all` runs this: real swarms, browsers, containers, and the contract over libp2p."""
    if nodeid.startswith(SLOW_FOLDERS):
        return not nodeid.startswith(QUICK)
    return nodeid.startswith("tests/contract/") and "[p2p" in nodeid


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow. In the processes that pytest-xdist starts, the longest tests come first."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        files = [item.nodeid.split("::")[0] for item in items]
        rank = {file: (part_of(file) != "swarms", file not in BESIDE) for file in files}
        items.sort(key=lambda item: rank[item.nodeid.split("::")[0]])

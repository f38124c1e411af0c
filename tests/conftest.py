"""Shared by all tests: few threads, no settings of the person who runs them, and how two processes share them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything imports torch: two cores are shared by all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("DILOCO_"):
            monkeypatch.delenv(variable)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup`: the swarms of real processes one after the other, and beside them all the rest.

    The longest first. Networks of their own wait the most, so they go with the rest; there, files stay whole.
    """
    if not config.getoption("numprocesses", default=None):
        return
    here = Path(__file__).parent

    def is_swarm(item: pytest.Item) -> bool:
        return (here / "swarm") in item.path.parents and item.path.name != "test_namespaces.py"

    items.sort(key=lambda item: (not is_swarm(item), item.path.name != "test_namespaces.py"))
    for item in items:
        item.add_marker(pytest.mark.xdist_group("swarm" if is_swarm(item) else str(item.path.relative_to(here))))

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


BESIDE = ("test_namespaces.py", "test_late.py")
"""Swarms that wait the most."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup`: swarms of real processes one after the other, and beside them all the rest.

    The longest first; what is not among those swarms is dealt out file by file.
    """
    if not config.getoption("numprocesses", default=None):
        return
    here = Path(__file__).parent

    def order(item: pytest.Item) -> int:
        if item.path.name in BESIDE:
            return 1
        return 0 if (here / "swarm") in item.path.parents else 2

    items.sort(key=order)
    for item in items:
        item.add_marker(pytest.mark.xdist_group("swarm" if not order(item) else str(item.path.relative_to(here))))

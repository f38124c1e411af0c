"""Shared by all tests: few threads, and an environment without settings of the person who runs them."""

from __future__ import annotations

import os

import pytest

# Before anything imports torch: two cores are shared by all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("DILOCO_"):
            monkeypatch.delenv(variable)

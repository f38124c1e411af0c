"""No simulated node logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.simulation.run import quiet


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    quiet()
    yield
    logging.disable(logging.NOTSET)

"""Every contract test runs once over each transport."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.harness import Ether, Swarm, quicken


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            # hivemind drops its connections to p2pd without closing them.
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.timeout(60))


@pytest.fixture(scope="session", params=["local", "p2p"])
def ether(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ether]:
    torch.set_num_threads(1)
    made = Ether(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


@pytest.fixture
def swarm(ether: Ether, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    quicken(monkeypatch.setattr)
    made = Swarm(ether)
    yield made
    made.close()
    if ether.transport == "p2p":
        gc.collect()  # So that what was not closed is found here, where that is known.

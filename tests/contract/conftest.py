"""Every contract test runs once over each transport."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.swarm import directory, state
from tests.contract.harness import Swarm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            # hivemind drops its connections to p2pd without closing them.
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.timeout(60))


@pytest.fixture(params=["local", "p2p"])
def swarm(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    # A faster pulse than in life, so that news spreads in test time; what makes a peer dead stays as it is.
    monkeypatch.setattr(directory, "PULSE_S", 0.25)
    monkeypatch.setattr(state, "LOOK_S", 0.25)
    torch.set_num_threads(1)
    made = Swarm(request.param, tmp_path)
    yield made
    made.close()
    gc.collect()

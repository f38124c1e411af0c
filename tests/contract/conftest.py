"""Every contract test runs once over each transport."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.swarm import directory, rendezvous, state
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
    # A faster pulse than in life, and less grace for the late, to save the tests' time; what is dead stays as it is.
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.5)
    monkeypatch.setattr(directory, "PULSE_S", 0.25)
    monkeypatch.setattr(state, "LOOK_S", 0.25)
    torch.set_num_threads(1)
    made = Swarm(request.param, tmp_path)
    yield made
    made.close()
    if request.param == "p2p":
        gc.collect()  # So that what was not closed is found here, where that is known.

"""Every contract test runs once over each transport."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.harness import HostPool, Swarm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            # hivemind drops its connections to p2pd without closing them.
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.timeout(60))
            only = item.get_closest_marker("only_over")
            parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
            if only is not None and parameters.get("host_pool") not in (None, only.args[0]):
                item.add_marker(pytest.mark.skip(reason=only.args[1]))


@pytest.fixture(scope="session", params=["local", "p2p"])
def host_pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostPool]:
    torch.set_num_threads(1)
    made = HostPool(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


@pytest.fixture
def swarm(host_pool: HostPool) -> Iterator[Swarm]:
    made = Swarm(host_pool)
    yield made
    made.close()
    if host_pool.transport == "p2p":
        gc.collect()  # Find unclosed resources here, where their warnings are ignored.

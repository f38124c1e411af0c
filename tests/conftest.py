"""Settings for all tests: threads, environment, the slow tier, and the order of tests in several processes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.swarm import fork_server

# These must be set before torch is imported. All processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Hypothesis fails an example that takes 200 ms, as any may beside other tests.
hypothesis.settings.register_profile("beside other tests", deadline=None)
hypothesis.settings.load_profile("beside other tests")

LIMITED_DEVICE = os.environ.get("DILOCO_TEST_DEVICE") == "limited"
"""Whether all tests compute on a fake device without bf16, NVML and fused AdamW (`tests/limited_device.py`)."""
if LIMITED_DEVICE:
    from tests.limited_device import replace_cpu

    replace_cpu()  # Before the servers fork that start the nodes of tests.


@pytest.fixture(autouse=True)
def no_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("DILOCO_"):
            monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Undo changes of a test to logging. A handler that a test left behind would write to a closed stream."""
    root, ours = logging.getLogger(), logging.getLogger("node")
    handlers, level, own_level = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(own_level)


WITH_NODES = ("tests/benchmarks/", "tests/browser/", "tests/homes/", "tests/swarm/")


@pytest.fixture(scope="session", autouse=True)
def fork_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the servers that fork nodes under test. The servers have already imported the modules that nodes need."""
    if sys.platform == "linux" and any(item.nodeid.startswith(WITH_NODES) for item in request.session.items):
        with fork_server.servers():
            yield
    else:
        yield


TIMED_SWARMS = tuple(
    f"tests/swarm/test_{name}.py"
    for name in (
        "api_answers", "devices", "interrupted", "join", "leave", "limits", "one_machine", "overlapped", "slow_disk",
        "slow_peer",
    )
)  # fmt: skip
"""Tests with swarms of real processes that depend on timing. They run one after the other."""
LONGEST = (
    "tests/swarm/test_slow_lines.py",
    "tests/swarm/test_namespaces.py",
    "tests/homes/test_relay.py",
    "tests/swarm/test_late.py",
    "tests/swarm/test_texts.py",
    "tests/contract/test_slow_lines.py",
    "tests/benchmarks/test_smoke.py",
    "tests/browser/",
    "tests/homes/",
    "tests/swarm/",
)
"""Tests that take longest. They start first after the timed swarms, in this order."""


SINGLE = ("tests/benchmarks/test_smoke.py", "tests/simulation/test_simulation.py")
"""Long files whose tests share nothing, so that any process can run each of them."""


def scope_of(nodeid: str) -> str:
    """The group of tests that one pytest-xdist process runs in a row: all timed swarms, a file, or a test of SINGLE."""
    file = nodeid.split("::")[0]
    if file in SINGLE:
        return nodeid
    return "timed swarms" if file in TIMED_SWARMS else file


def rank_of(nodeid: str) -> int:
    """The position of a test's scope in the order in which scopes start."""
    if scope_of(nodeid) == "timed swarms":
        return -1
    return next((rank for rank, start in enumerate(LONGEST) if nodeid.startswith(start)), len(LONGEST))


class SwarmsInSequence(LoadScopeScheduling):  # type: ignore[misc]
    """One process runs the timed swarms one after the other; the other processes run everything else."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SwarmsInSequence:
    config.option.loadscopereorder = False
    return SwarmsInSequence(config, log)


SLOW = (
    "tests/benchmarks/",
    "tests/browser/",
    "tests/docker/",
    "tests/homes/",
    "tests/swarm/",
    "tests/contract/test_matrix.py",
    "tests/contract/test_membership.py",
    "tests/contract/test_quorum.py",
    "tests/contract/test_slow_lines.py",
    "tests/unit/test_publish_kills.py",
    "tests/unit/test_reference.py",
)
"""Folders and files that only `make test-all` runs, because they start real processes or wait for minutes."""
QUICK = (
    "tests/api/test_daemon.py",
    "tests/browser/test_swarm.py::test_each_view_of_the_dashboard_shows_data_of_the_node",
    "tests/swarm/test_story.py",
)
"""Tests that `make test` runs although they start real processes."""


def is_slow(item: pytest.Item) -> bool:
    """Whether only `make test-all` runs this test, as it does for tests with a real supervisor or over libp2p."""
    if item.nodeid.startswith(QUICK):
        return False
    if item.nodeid.startswith("tests/api/"):
        return isinstance(item, pytest.Function) and "Daemon" in item.function.__code__.co_names
    return item.nodeid.startswith(SLOW) or (item.nodeid.startswith("tests/contract/") and "[p2p" in item.nodeid)


LIMIT = 2.0
"""Factor by which a test may exceed its timeout, which holds for a fast machine, because it runs beside other tests."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests and raise all timeouts. In the processes of pytest-xdist, the longest tests come first."""
    for item in items:
        if is_slow(item) or item.get_closest_marker("nightly") is not None:
            item.add_marker(pytest.mark.slow)
        marker = item.get_closest_marker("timeout")
        timeout_s = marker.args[0] if marker is not None else float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(LIMIT * timeout_s), append=False)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank_of(item.nodeid))

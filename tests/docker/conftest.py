"""Fixtures of the container tests: the engine, the image, and containers that are removed after each test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.docker.container import Container
from tests.docker.engine import Engine, build, engine, why_not
from tests.swarm.conftest import figures, pytest_terminal_summary

__all__ = ["figures", "pytest_terminal_summary"]


@dataclass(frozen=True)
class Built:
    docker: Engine
    secret: str
    """A word that was in the secrets of the build and must not be in the image."""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    if reason := why_not():
        pytest.skip(reason)
    with engine() as docker:
        yield Built(docker, build(docker, tmp_path_factory.mktemp("build")))


@pytest.fixture(scope="session")
def docker(built: Built) -> Engine:
    return built.docker


@pytest.fixture
def alone(docker: Engine) -> Iterator[Container]:
    """A container that has not been started."""
    made = Container(docker, "alone")
    yield made
    made.purge()


@pytest.fixture(scope="module")
def four(docker: Engine) -> Iterator[list[Container]]:
    """Four containers on a private bridge: a founder, and three with the founder's invite in their environment."""
    from tests.docker.container import SMALL, THREAD

    network = "diloco-test-bridge"
    docker("network", "rm", network, check=False)
    docker("network", "create", network)
    made = [Container(docker, f"node{number}", network) for number in range(4)]
    try:
        made[0].run("run", "--name", "node0", THREAD, *SMALL)
        invite = made[0].invite()
        for number, container in enumerate(made[1:], 1):
            limits = {"DILOCO_LIMITS__CPU_THREADS": "1", "DILOCO_NODE__NAME": f"node{number}"}
            container.run("run", env={"DILOCO_JOIN": invite, **limits})
        for container in made:
            container.until(lambda s: s["peers"]["training"] == 4, 240, "a swarm of four")
        yield made
    finally:
        for container in made:
            container.purge()
        docker("network", "rm", network, check=False)

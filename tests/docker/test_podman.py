"""Podman builds the image and runs a node with the line of docker/README.md. Root runs it here."""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Iterator

import pytest

from tests.docker.container import SMALL, THREAD, Container
from tests.docker.engine import IMAGE, Engine, build, why_not
from tests.docker.test_readme import LINES, PAGE

STOP_S = 15.0
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Podman, which has built the image."""
    if reason := why_not() or ("" if shutil.which("podman") else "podman is not installed"):
        pytest.skip(reason)
    engine = Engine("", "podman")
    build(engine, tmp_path_factory.mktemp("build"))
    return engine


@pytest.fixture
def node(podman: Engine) -> Iterator[Container]:
    made = Container(podman, "podman", network="podman")
    yield made
    made.purge()


def test_page_names_the_difference_to_docker() -> None:
    (line,) = [line for line in LINES if line.startswith("docker run")]
    assert "--restart unless-stopped" in line
    assert re.search(r"`--restart always` in place of\s+`--restart unless-stopped`", PAGE)


def test_image_has_a_health_check(podman: Engine, node: Container) -> None:
    node.run("run", THREAD, *SMALL).until_round(1)
    podman("healthcheck", "run", node.name)  # Fails if the node is not healthy.
    assert "31337" in node.execute("id", "-u")


def test_line_of_the_page_starts_a_node_that_survives_a_stop(podman: Engine, node: Container) -> None:
    (line,) = [line for line in LINES if line.startswith("docker run")]
    replaced = {
        "diloco": node.name, "diloco:/data": f"{node.volume}:/data", "unless-stopped": "always",
        "31337:31337": "31337", "31337:31337/udp": "31337/udp", "127.0.0.1:8080:8080": "127.0.0.1::8080",
    }  # fmt: skip
    words = [replaced.get(word, word) for word in shlex.split(line)[1:]]
    podman(*words[: words.index("--join")], THREAD, *SMALL)
    before = node.until_round(3)
    assert "Dashboard: http://127.0.0.1:8080/#token=" in node.said()
    assert "Training towards round" in node.execute("diloco-node", "status")
    began_s = time.monotonic()
    podman("stop", node.name)
    assert time.monotonic() - began_s < STOP_S
    assert node.state()["ExitCode"] == 0
    podman("start", node.name)
    node.forget()
    after = node.until_round(before["run"]["round"] + 1)
    assert after["node"]["peer_id"] == before["node"]["peer_id"]


def test_memory_limit_is_read(node: Container) -> None:
    node.run("run", THREAD, *SMALL, engine_words=("--memory", "3g")).until_round(1)
    assert "limits memory to 3.22 GB" in node.execute("diloco-node", "doctor")


def test_image_in_docker_and_in_podman_has_one_size(docker: Engine, podman: Engine) -> None:
    sizes = [int(engine("inspect", "--format", "{{.Size}}", IMAGE)) for engine in (docker, podman)]
    print(*(f"{size / 1e6:.0f} MB" for size in sizes))
    assert max(sizes) < 1.1 * min(sizes)

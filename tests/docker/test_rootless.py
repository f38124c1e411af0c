"""Rootless Podman runs a node with the line of docker/README.md, on a machine of its own, as a user without rights."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docker.container import SMALL, THREAD
from tests.docker.engine import IMAGE, Engine
from tests.docker.machine import USER, Machine, make_image
from tests.docker.test_readme import LINES, PAGE
from tests.swarm.harness import wait_for

NODE_S = 180.0
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def machine(docker: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine whose user has the image."""
    folder = tmp_path_factory.mktemp("rootless")
    make_image(docker, folder)
    folder.chmod(0o755)
    packed = folder / "image.tar"
    docker("save", IMAGE, "--output", str(packed), timeout_s=300)
    packed.chmod(0o644)
    made = Machine(docker, files=(packed,))
    try:
        made("podman", "load", "--input", "/image.tar", user=USER)
        yield made
    finally:
        made.purge()
        packed.unlink()


def line_of_the_page() -> list[str]:
    """The words of the page's first line for Podman, up to those of the run."""
    (line,) = [line for line in LINES if line.startswith("docker run")]
    words = ["podman", *shlex.split(line)[1:]]
    words[words.index("unless-stopped")] = "always"
    return words[: words.index("--join")]


def status(machine: Machine) -> dict[str, Any]:
    said = machine("podman", "exec", "diloco", "diloco-node", "status", "--json", user=USER, check=False)
    return dict(json.loads(said)) if said.startswith("{") else {}


def until_round(machine: Machine, number: int) -> dict[str, Any]:
    wait_for(lambda: (status(machine) or {"run": {"round": -1}})["run"]["round"] >= number, NODE_S, f"round {number}")
    return status(machine)


def health(machine: Machine) -> str:
    return machine("podman", "inspect", "--format", "{{.State.Health.Status}}", "diloco", user=USER)


def test_line_of_the_page_starts_a_healthy_node_that_starts_again_with_the_machine(machine: Machine) -> None:
    machine(*line_of_the_page(), THREAD, *SMALL, user=USER)
    before = until_round(machine, 2)
    wait_for(lambda: health(machine) == "healthy", NODE_S, "a health check by the user's systemd")
    owner = machine("podman", "top", "diloco", "huser", user=USER).split()[-1]
    assert int(owner) > 100_000, "on the machine, the node is a user without rights"

    for command in ("systemctl --user enable podman-restart", "loginctl enable-linger"):
        assert f"`{command}`" in PAGE
        machine(*shlex.split(command), user=USER)
    machine.reboot()
    after = until_round(machine, before["run"]["round"] + 1)
    assert after["node"]["peer_id"] == before["node"]["peer_id"]

    machine("podman", "stop", "diloco", user=USER)
    assert machine("podman", "inspect", "--format", "{{.State.ExitCode}}", "diloco", user=USER) == "0"
    machine("podman", "rm", "diloco", user=USER)


def test_folder_of_the_user_holds_the_data(machine: Machine) -> None:
    folder = f"/home/{USER}/diloco"
    assert "`podman unshare chown 31337:31337 /srv/diloco`" in PAGE
    machine("mkdir", "--mode", "700", folder, user=USER)
    machine("podman", "unshare", "chown", "31337:31337", folder, user=USER)
    words = [f"{folder}:/data" if word == "diloco:/data" else word for word in line_of_the_page()]
    machine(*words, THREAD, *SMALL, user=USER)
    until_round(machine, 1)
    assert "identity.key" in machine("ls", folder)
    machine("podman", "rm", "--force", "diloco", user=USER)

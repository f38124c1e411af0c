"""`install-service` and `update` on a machine of their own: a container with systemd and the package in /opt/diloco.

The package contains a release key that is made here, as the project has not published its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node import __version__
from node.commands.release_file import Release, sign
from node.config.manifest import PROTOCOL_VERSION
from tests.docker.container import SMALL, THREAD
from tests.docker.engine import BUILD_S, ROOT, Engine, secrets
from tests.docker.machine import IMAGE as MACHINE
from tests.docker.machine import USER, Machine, make_image
from tests.swarm.harness import wait_for
from tests.unit.test_update import public

NEWER = "9.0.0"
PROGRAM = "/opt/diloco/bin/diloco-node"
IMAGE = "diloco-test-installed"
DOCKERFILE = f"""\
FROM {MACHINE}
RUN python3 -m venv /opt/diloco
COPY locks /locks
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \\
    pip="/opt/diloco/bin/pip install -q --no-deps" \\
    && locked="$pip --require-hashes --no-build-isolation --use-pep517" \\
    && $pip "$(grep -o '^torch==[^ ]*' /locks/torch.lock)" \\
    && $locked -r /locks/build.lock && $locked -r /locks/requirements.lock
COPY releases /releases
RUN /opt/diloco/bin/pip install -q --no-deps /releases/installed/*.whl && /opt/diloco/bin/pip check
"""
NODE_S = 240.0
STOP_S = 60.0
pytestmark = pytest.mark.timeout(BUILD_S)


class Service:
    """The node as a service of the machine or of a user."""

    def __init__(self, machine: Machine, user: str) -> None:
        self.machine, self.user = machine, user
        self.is_of_machine = user == "root"
        self.manager = ("systemctl",) if self.is_of_machine else ("systemctl", "--user")
        self.data = "/var/lib/diloco-node" if self.is_of_machine else f"/home/{user}/.local/share/diloco-node"

    def install(self, *words: str) -> str:
        return self.machine(PROGRAM, "install-service", *words, user=self.user)

    def shown(self, name: str) -> str:
        """A property of the unit, as `systemctl show` prints it."""
        return self.machine(*self.manager, "show", "--property", name, "--value", "diloco-node", user=self.user)

    def ask(self, *words: str) -> str:
        """Run a command of the node on the service's data folder."""
        as_node = ("sudo", "-u", "diloco") if self.is_of_machine else ()
        return self.machine(*as_node, PROGRAM, *words, "--data-dir", self.data, user=self.user, check=False)

    def until_round(self, number: int) -> dict[str, Any]:
        """Wait until the node has a round. Returns the status."""
        found: dict[str, Any] = {}

        def is_reached() -> bool:
            said = self.ask("status", "--json")
            found.clear()
            found.update(json.loads(said) if said.startswith("{") else {})
            return bool(found) and found["run"]["round"] >= number

        wait_for(is_reached, NODE_S, f"round {number}")
        return found


def make_wheel(folder: Path, version: str, key: Ed25519PrivateKey) -> Path:
    """Build this checkout as the package of another version, which knows a release key."""
    tree = folder / f"tree-{version}"
    subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True, timeout=300)
    subprocess.run(["cp", "-r", ROOT / "node/api/static", tree / "node/api"], check=True, timeout=60)
    for name, old, new in (
        ("node/__init__.py", f'"{__version__}"', f'"{version}"'),
        ("node/commands/release.toml", "keys = []", f'keys = ["{public(key)}"]'),
    ):
        text = (tree / name).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (tree / name).write_text(text.replace(old, new), encoding="utf-8")
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*words, folder / version, tree], check=True, timeout=300)
    (wheel,) = (folder / version).glob("*.whl")
    return wheel


def publish(folder: Path, wheel: Path, version: str, key: Ed25519PrivateKey) -> None:
    """Write a folder as a release has it: the wheel and a release file that announces `version`."""
    folder.mkdir(parents=True)
    data, now = wheel.read_bytes(), datetime.now(UTC)
    (folder / wheel.name).write_bytes(data)
    release = Release(
        version=version, protocol=PROTOCOL_VERSION, released_at=now, expires_at=now + timedelta(days=1),
        wheel=wheel.name, size_bytes=len(data), sha256=sha256(data).hexdigest(), notes="Better.",
    )  # fmt: skip
    (folder / "release.json").write_text(sign(release, key))


@pytest.fixture(scope="module")
def image(docker: Engine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine with an image that has the package, and the folders of a good, an old and a forged release."""
    folder = tmp_path_factory.mktemp("installed")
    key, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    present, newer = (make_wheel(folder, version, key) for version in (__version__, NEWER))
    releases = folder / "context/releases"
    publish(releases / "installed", present, __version__, key)
    publish(releases / "good", newer, NEWER, key)
    publish(releases / "old", present, "0.0.9", key)
    publish(releases / "forged", newer, NEWER, stranger)
    publish(releases / "exchanged", newer, NEWER, key)
    (releases / "exchanged" / newer.name).write_bytes(present.read_bytes())
    locks = folder / "context/locks"
    locks.mkdir()
    for name in (".ci/torch.lock", ".ci/build.lock", "requirements.lock"):
        (locks / Path(name).name).write_bytes((ROOT / name).read_bytes())
    (folder / "context/Dockerfile").write_text(DOCKERFILE)
    make_image(docker, folder)
    with secrets(folder) as (words, _):
        docker("build", "--network", "host", "--tag", IMAGE, *words, str(folder / "context"), timeout_s=BUILD_S)
    return docker


@pytest.fixture
def machine(image: Engine) -> Iterator[Machine]:
    made = Machine(image, IMAGE)
    yield made
    made.purge()


def test_only_a_good_release_is_installed_and_only_on_demand(machine: Machine) -> None:
    def update(release: str, *words: str) -> list[str]:
        return [PROGRAM, "update", "--from", f"/releases/{release}/release.json", *words]

    for release, fault in (("forged", "no valid signature"), ("old", f"older than this program ({__version__})")):
        assert fault in machine.fails(*update(release), code=2)
        assert fault in machine.fails(*update(release, "--install"), code=2)
    assert "is not the file that the release file names" in machine.fails(*update("exchanged", "--install"), code=2)
    said = machine(*update("good"))
    assert said.startswith(f"Version {NEWER} is available") and "Nothing is installed." in said
    assert __version__ in machine(PROGRAM, "--version")

    assert f"Version {NEWER} is installed. Restart the node" in machine(*update("good", "--install"))
    assert NEWER in machine(PROGRAM, "--version")
    assert "No broken requirements" in machine("/opt/diloco/bin/pip", "check")
    assert machine(*update("good")) == f"This is the newest version, {NEWER}."
    assert f"older than this program ({NEWER})" in machine.fails(*update("installed"), code=2)


def test_service_of_the_machine_survives_kill_reboot_and_update(machine: Machine) -> None:
    service = Service(machine, "root")
    service.install("--name", "lent", THREAD, *SMALL)
    before = service.until_round(3)
    assert before["node"]["data_dir"] == service.data

    main = service.shown("MainPID")
    assert machine("ps", "-o", "user=", "-p", main) == "diloco"
    machine("kill", "-9", main)
    after = service.until_round(before["run"]["round"] + 1)
    assert service.shown("NRestarts") == "1" and service.shown("MainPID") != main
    assert len(re.findall("p2pd", machine("ps", "-e", "-o", "comm="))) == 1, "the daemon of the killed node is gone"

    machine.reboot()
    rebooted = service.until_round(after["run"]["round"] + 1)

    machine(PROGRAM, "update", "--from", "/releases/good/release.json", "--install")
    old = service.until_round(rebooted["run"]["round"] + 1)
    assert old["node"]["version"] == __version__, "a running node goes on with the old version"
    machine("kill", "-9", *machine("pgrep", "-f", "node.worker").split())
    # The node ends, as it cannot start a worker of another version, and systemd starts it again.
    wait_for(lambda: service.shown("NRestarts") == "1", STOP_S, "a restart by systemd")
    updated = service.until_round(old["run"]["round"])
    assert updated["node"]["version"] == NEWER
    peers = {status["node"]["peer_id"] for status in (before, after, rebooted, updated)}
    assert len(peers) == 1 and {status["node"]["name"] for status in (before, updated)} == {"lent"}

    assert "accepted" in service.ask("leave")
    wait_for(lambda: service.shown("ActiveState") == "inactive", STOP_S, "the end of the service")
    assert (service.shown("Result"), service.shown("NRestarts")) == ("success", "1")
    service.install("--remove")
    assert service.shown("LoadState") == "not-found"
    assert "identity.key" in machine("ls", service.data)


def test_service_of_a_user_starts_with_the_machine_and_keeps_its_settings(machine: Machine) -> None:
    service = Service(machine, USER)
    said = service.install("--name", "mine", THREAD, *SMALL)
    assert "The service was started" in said and "log out" not in said
    before = service.until_round(2)
    machine.reboot()
    after = service.until_round(before["run"]["round"] + 1)
    assert after["node"]["peer_id"] == before["node"]["peer_id"]

    service.install("--name", "ours")
    renamed = service.until_round(after["run"]["round"] + 1)
    assert renamed["node"]["name"] == "ours" and renamed["limits"] == before["limits"]
    service.install("--remove")
    assert service.shown("LoadState") == "not-found"
    assert machine("ps", "-u", USER, "-o", "comm=").count("diloco-node") == 0
    assert "identity.key" in machine("ls", service.data, user=USER)

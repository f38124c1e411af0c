"""The commands in README's "Give your machine" work as written."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from tests.docker.container import SMALL, THREAD, Container
from tests.docker.engine import ROOT, Engine

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("\n## Give your machine\n")[2].partition("\n## ")[0]
LINES = [
    line.partition("  #")[0].strip()
    for b in re.findall(r"```console\n(.*?)```", SECTION, re.DOTALL)
    for line in b.splitlines()
]


def test_files_and_make_targets_named_in_the_readme_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {line.split()[1] for line in LINES if line.startswith("make ")} <= set(targets)
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in README.splitlines()
        if line.startswith("#")
    }
    for link in re.findall(r"\]\(([^)]+)\)", SECTION):
        assert link[1:] in headings if link.startswith("#") else (ROOT / link).exists(), link
    for line in LINES:
        for file in re.findall(r"(?<=\s)docker/\S+", line):
            assert (ROOT / file).exists(), line


def test_groups_of_a_container_are_numbers_of_this_machine() -> None:
    """Docker looks a name up in the image, which has no group `render`."""
    groups = re.findall(r'--group-add ("[^"]+"|[^\s`]+)', README)
    assert len(groups) > 2
    assert [name for name in groups if name != "keep-groups" and not name.startswith('"$(stat -c %g /dev/')] == []


def test_lines_with_the_image_follow_one_that_builds_it() -> None:
    starts = {"With Docker": "docker run", "Upgrade and downgrade": "docker run", "Watch a run": "docker compose"}
    for heading, start in starts.items():
        section = README.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
        assert 0 < section.find("make image") < section.find(start), heading


def test_podman_builds_an_image_with_a_health_check() -> None:
    for engine, is_podman in (("docker", False), ("docker buildx", False), ("podman", True), ("sudo podman", True)):
        done = subprocess.run(
            ["make", "--dry-run", "image", f"DOCKER={engine}"],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert ("build --format docker " in done.stdout) is is_podman, done.stdout


@pytest.fixture
def founder(docker: Engine) -> Iterator[Container]:
    made = Container(docker, "founder")
    yield made
    made.purge()


@pytest.mark.timeout(600)
def test_docker_command_in_the_readme_joins_a_swarm_and_upgrades_a_node(
    docker: Engine, founder: Container, alone: Container
) -> None:
    founder.run("run", THREAD, *SMALL)
    (line,) = [line for line in LINES if line.startswith("docker run")]
    # The test uses its own names and ports, because other containers may run on this machine.
    replaced = {
        "diloco": alone.name, "diloco:/data": f"{alone.volume}:/data", "diloco1-...": founder.invite(),
        "31337:31337": "31337", "31337:31337/udp": "31337/udp", "127.0.0.1:8080:8080": "127.0.0.1::8080",
    }  # fmt: skip
    words = shlex.split(line)
    assert set(replaced) <= set(words), line
    docker(*(replaced.get(word, word) for word in words[1:]))
    alone.until(lambda s: s["peers"]["training"] == 2 and s["phase"] in ("training", "syncing"), 180, "a member")
    assert "Dashboard: http://127.0.0.1:8080/#token=" in alone.said()
    for line in LINES:
        if line.startswith("docker exec diloco "):
            assert alone.execute(*shlex.split(line)[3:])
    began_as = alone.status()["node"]["peer_id"]
    # The documented upgrade is `docker stop`, `docker rm`, and the same `docker run` command again.
    docker("stop", alone.name)
    alone.remove()
    docker(*(replaced.get(word, word) for word in words[1:]))
    assert alone.until_phase("training")["node"]["peer_id"] == began_as

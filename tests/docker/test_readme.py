"""The commands for containers in README.md and docker/README.md work as written."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from tests.docker.container import SMALL, THREAD, Container
from tests.docker.engine import ROOT, Engine

README, PAGE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docker/README.md"))
SECTION = README.partition("\n### With Docker\n")[2].partition("\n### ")[0]


def lines(text: str) -> list[str]:
    """The commands of a page, without comments."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]


LINES = lines(PAGE)


def test_readme_starts_a_container_as_the_page_does() -> None:
    assert len(lines(SECTION)) >= 4
    assert lines(SECTION) == LINES[: len(lines(SECTION))]


def test_files_and_make_targets_named_on_the_page_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {line.split()[1] for line in LINES if line.startswith("make ")} <= set(targets)
    for line in LINES:
        for file in re.findall(r"(?<=\s)docker/\S+", line):
            assert (ROOT / file).exists(), line


def test_groups_of_a_container_are_numbers_of_this_machine() -> None:
    """Docker looks a name up in the image, which has no group `render`."""
    groups = re.findall(r'--group-add ("[^"]+"|[^\s`]+)', PAGE)
    assert len(groups) > 2
    assert [name for name in groups if name != "keep-groups" and not name.startswith('"$(stat -c %g /dev/')] == []


def test_lines_with_the_image_follow_one_that_builds_it() -> None:
    manual = (ROOT / "node" / "MANUAL.md").read_text(encoding="utf-8")
    pages = {"One node": PAGE, "Several nodes, Prometheus and Grafana": PAGE, "Upgrade and downgrade": manual}
    for heading, page in pages.items():
        section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        starts = [at for at in map(section.find, ("docker run", "docker compose")) if at > 0]
        assert 0 < section.find("make image") < min(starts), heading


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

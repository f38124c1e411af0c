"""compose.yaml is valid for each profile, and its swarm runs. Uses `docker-compose` or the plugin `docker compose`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

import pytest
import yaml

from node.config.loader import load
from tests.docker.engine import ROOT, Engine
from tests.swarm.harness import wait_for

FILE = ROOT / "docker" / "compose.yaml"
NAS = ROOT / "docker" / "nas" / "compose.yaml"
PROFILES = {
    "node": {"node"},
    "gpu": {"gpu"},
    "swarm": {"first", "invite", "second", "third", "relay"},
    "monitoring": {"prometheus", "grafana"},
    "alerts": {"alertmanager"},
}


def command() -> list[str]:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker") and not subprocess.call(["docker", "compose", "version"]):
        return ["docker", "compose"]
    pytest.skip("compose is not installed (apt: docker-compose)")


def compose(*words: str, environment: Mapping[str, str] | None = None, timeout_s: float = 300) -> str:
    done = subprocess.run(
        [*command(), "--file", str(FILE), *words], env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_each_profile_of_the_compose_file_is_valid(profile: str) -> None:
    services = yaml.safe_load(compose("--profile", profile, "config"))["services"]
    assert PROFILES[profile] <= set(services)
    for name, service in services.items():
        for port in service.get("ports", []):
            # Only the port for peers is published to other machines.
            assert "31337" in str(port) or "127.0.0.1" in str(port), (name, port)
        assert service["cap_drop"] == ["ALL"] and service["pids_limit"] > 0, name
        assert service["logging"]["options"]["max-size"], name
        if "diloco-node" in service["image"]:
            assert service["read_only"]
        else:
            assert not service["image"].endswith("latest") and ":" in service["image"], "pinned"


def test_nodes_of_compose_have_the_health_check_of_the_image() -> None:
    """Podman drops it from images in the format of OCI."""
    services = yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]
    (line,) = re.findall(r"^HEALTHCHECK (.*\\\n.*)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    options, command = line.split("CMD")
    wanted = {name.replace("-", "_"): value for name, value in re.findall(r"--([\w-]+)=(\w+)", options)}
    for name in ("node", "gpu", "first", "second", "third", "relay"):
        check = dict(services[name]["healthcheck"])
        assert check.pop("test") == ["CMD", *json.loads(command)]
        assert {key: str(value) for key, value in check.items()} == wanted


def test_compose_works_with_podman_and_under_selinux() -> None:
    services = yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]
    volumes = [volume for service in services.values() for volume in service.get("volumes", [])]
    folders = [volume for volume in volumes if volume.startswith("./")]
    assert len(folders) > 3 and all(volume.endswith(":ro,z") for volume in folders)
    images = [service["image"].partition(":-")[2] for service in services.values()]
    assert all(image.startswith(("diloco-node:", "docker.io/")) for image in images)


def test_memory_limit_of_the_nodes_is_set_by_a_variable() -> None:
    found = yaml.safe_load(compose("--profile", "node", "config", environment={"NODE_MEMORY": "2g"}))
    assert str(found["services"]["node"]["mem_limit"]) in ("2g", "2147483648")


def test_file_for_a_nas_stands_alone_and_agrees_with_the_template_for_unraid() -> None:
    done = subprocess.run(
        [*command(), "--file", str(NAS), "config"], capture_output=True, text=True, timeout=60, check=True
    )
    (service,) = yaml.safe_load(done.stdout)["services"].values()
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["mem_limit"] and service["pids_limit"]
    assert not any(str(volume).startswith((".", "/")) for volume in service["volumes"]), "no file of the repository"
    template = ET.parse(NAS.with_name("unraid.xml")).getroot()
    configs = {entry.get("Target"): entry for entry in template.iter("Config")}
    assert template.findtext("Repository") == service["image"]
    page = urlsplit(configs["DILOCO_API__PUBLIC_URL"].get("Default", ""))
    assert template.findtext("WebUI") == f"http://{page.hostname}:[PORT:{page.port}]/", "the node refuses other hosts"
    variables = {name for name in service["environment"] if name != "DILOCO_SCHEDULE__TIMEZONE"}
    assert {name for name, entry in configs.items() if entry.get("Type") == "Variable"} == variables
    extra = template.findtext("ExtraParams") or ""
    for words in ("--read-only", "--cap-drop ALL", "--stop-timeout 60", f"--pids-limit {service['pids_limit']}"):
        assert words in extra
    loaded = load(file=None, environ={k: str(v) for k, v in service["environment"].items()}, flags=[])
    assert loaded.config.api.host_names == ("nas.local",)


@pytest.fixture
def project(docker: Engine) -> Iterator[dict[str, str]]:
    environment = {"COMPOSE_PROJECT_NAME": f"dilocotest{uuid.uuid4().hex[:6]}", "DOCKER_HOST": docker.host}
    try:
        yield environment
    finally:
        compose("--profile", "swarm", "down", "--volumes", "--timeout", "20", environment=environment)


@pytest.mark.timeout(1200)
def test_swarm_profile_of_the_compose_file_starts_three_nodes_that_train(
    docker: Engine, project: dict[str, str], tmp_path: Path
) -> None:
    compose("--profile", "swarm", "up", "--detach", environment=project, timeout_s=400)

    def status(service: str) -> dict[str, Any]:
        name = compose("--profile", "swarm", "ps", "--quiet", service, environment=project).strip()
        told = docker("exec", name, "diloco-node", "status", "--json", check=False)
        return dict(json.loads(told)) if told.startswith("{") else {}

    def whole() -> bool:
        told = [status(name) for name in ("first", "second", "third")]
        return all(s and s["peers"]["training"] == 3 and s["run"]["round"] >= 0 for s in told)

    deadline_s = time.monotonic() + 700
    while not whole():
        assert time.monotonic() < deadline_s, [status(name) for name in PROFILES["swarm"] - {"invite"}]
        time.sleep(3)
    wait_for(lambda: status("relay").get("code") == "relay", 60, "the relay is one")

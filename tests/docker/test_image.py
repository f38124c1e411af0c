"""The image has the right labels and contents, and no secrets."""

from __future__ import annotations

import ensurepip
import json
import re
import subprocess
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.docker.conftest import Built
from tests.docker.engine import IMAGE, ROOT, Engine

SIZE_BYTES_MAX = 1.6e9
SECRET_FILES = re.compile(
    r"(^|/)(pip\.conf|\.npmrc|\.netrc|\.git|\.env|api-token|identity\.key|id_[a-z0-9]+|.*\.pem|known_hosts)$"
)
PUBLIC_PEM = re.compile(r"^(etc/ssl/|usr/share/ca-certificates/|.*/(certifi|botocore|grpc)/)")


def test_image_has_the_documented_settings_labels_and_version(docker: Engine) -> None:
    config = json.loads(docker("inspect", "--format", "{{json .Config}}", IMAGE))
    assert config["User"] == "31337:31337"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["tini", "--", "diloco-node"]
    assert config["Cmd"] == ["run"]
    assert set(config["Volumes"]) == {"/data"}
    assert config["Healthcheck"]["Test"][0] == "CMD"
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert {"title", "description", "licenses", "version", "revision", "created"} <= set(labels)
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert labels["revision"] == revision.strip()
    ask = ("-c", "from node.host.revision import revision; print(revision())")
    inside = docker("run", "--rm", "--network", "none", "--entrypoint", "python3", IMAGE, *ask)
    assert inside.rstrip("+") == labels["revision"][:12]
    version = docker("run", "--rm", "--network", "none", IMAGE, "--version")
    assert version == f"diloco-node {labels['version']}"


def test_image_is_smaller_than_its_size_limit(docker: Engine) -> None:
    size_bytes = int(docker("inspect", "--format", "{{.Size}}", IMAGE))
    print(f"{size_bytes / 1e6:.0f} MB")
    assert size_bytes < SIZE_BYTES_MAX


def test_image_has_no_secrets_in_its_history_and_layers(built: Built, tmp_path: Path) -> None:
    history = built.docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", IMAGE)
    assert built.secret not in history
    assert not re.search(r"https?://", history), "an index or a proxy is named"
    built.docker("save", "--output", str(tmp_path / "image.tar"), IMAGE, timeout_s=600)
    marks = (built.secret.encode(), b"trusted-host = 127.0.0.1")
    faults: list[str] = []
    with tarfile.open(tmp_path / "image.tar") as image:
        layers = [name for name in image.getnames() if name.endswith("layer.tar")]
        assert len(layers) > 3
        for layer in layers:
            packed = image.extractfile(layer)
            assert packed is not None
            with tarfile.open(fileobj=packed) as files:
                for file in files:
                    if SECRET_FILES.search(file.name) and not PUBLIC_PEM.search(file.name) and file.size:
                        faults.append(file.name)
                    if file.isfile() and file.size < 200_000:
                        content = files.extractfile(file)
                        assert content is not None
                        text = content.read()
                        faults += [file.name for mark in marks if mark in text]
                        if b"PRIVATE KEY-----" in text and b"\nMII" in text:
                            faults.append(file.name)
    assert faults == []


def test_no_program_in_the_image_is_setuid_or_setgid(docker: Engine) -> None:
    find = ("--entrypoint", "find", IMAGE, "/", "-xdev", "-type", "f", "-perm", "/6000")
    assert docker("run", "--rm", "--network", "none", "--user", "0", *find) == ""


def test_python_packages_in_the_image_are_compatible(docker: Engine) -> None:
    """The image does not contain pip, so the test mounts this machine's pip into a container."""
    (wheel,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    told = docker(
        "run", "--rm", "--network", "none", "--volume", f"{wheel}:/pip/{wheel.name}:ro", "--entrypoint", "python3",
        IMAGE, f"/pip/{wheel.name}/pip", "check", both=True,
    )  # fmt: skip
    assert "No broken requirements found" in told


@pytest.mark.timeout(300)
def test_make_sbom_lists_the_packages_in_the_image(docker: Engine) -> None:
    done = subprocess.run(
        ["make", "sbom", f"DOCKER={docker.client}"], cwd=ROOT, env=docker.environment,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    file = ROOT / "dist" / "sbom-cpu.spdx.json"
    packages = json.loads(file.read_text(encoding="utf-8"))["packages"]
    python = {one["name"].lower().replace("_", "-"): one for one in packages if one["comment"] == "python"}
    assert {"diloco-node", "torch", "hivemind", "uvicorn"} <= set(python)
    assert python["numpy"]["versionInfo"] == metadata.version("numpy")
    assert not {"pytest", "mypy", "ruff", "pip", "matplotlib"} & set(python)
    assert {"tini", "libc6"} <= {one["name"] for one in packages if one["comment"] == "debian"}
    assert [one["name"] for one in packages if one["licenseComments"] in ("", "unknown")] == []

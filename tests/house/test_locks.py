"""The lock files have versions and hashes for the dependencies in pyproject.toml; make and the image install them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = {
    name: ROOT / file
    for name, file in {
        "build": ".ci/build.lock", "torch": ".ci/torch.lock", "node": "requirements.lock",
        "datasets": ".ci/datasets.lock", "dev": ".ci/dev.lock",
    }.items()
}  # fmt: skip
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PLATFORMS = [
    {
        "sys_platform": system, "platform_system": name, "platform_machine": machine,
        "python_version": version, "python_full_version": f"{version}.5",
        "implementation_name": "cpython", "platform_python_implementation": "CPython",
    }
    for system, name, machine in (
        ("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64"),
    )
    for version in ("3.11", "3.12", "3.13")
]  # fmt: skip
"""Environments of the supported platforms, for markers."""


def lines_of(path: Path) -> list[str]:
    """The lines of a lock file, each with its hashes, without comments."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def locked(*names: str) -> list[Requirement]:
    lines = [line for name in names for line in lines_of(LOCKS[name])]
    return [Requirement(line.partition(" --hash")[0]) for line in lines]


@pytest.mark.parametrize("name", LOCKS)
def test_each_line_pins_one_version_with_hashes(name: str) -> None:
    lines = lines_of(LOCKS[name])
    assert lines
    package = r"[a-z0-9-]+==[A-Za-z0-9_.]+( ; [^-\\]+)?"
    assert [line for line in lines if not re.fullmatch(rf"{package}(\s+--hash=sha256:[0-9a-f]{{64}})+", line)] == []


@pytest.mark.parametrize("name", LOCKS)
def test_no_line_names_an_address_or_an_index(name: str) -> None:
    assert not re.search(r"://|@|--(?!hash=|require-hashes|no-deps)|\.(org|com|net)\b", LOCKS[name].read_text("utf-8"))


def test_no_package_has_two_versions_on_one_platform() -> None:
    for platform in PLATFORMS:
        versions: dict[str, set[str]] = {}
        for item in locked(*LOCKS):
            if item.marker is None or item.marker.evaluate(platform):
                versions.setdefault(item.name, set()).add(str(item.specifier))
        assert {name: found for name, found in versions.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (SETTINGS["build-system"]["requires"], ["build"]),
        (SETTINGS["project"]["dependencies"], ["torch", "node"]),
        (SETTINGS["project"]["optional-dependencies"]["datasets"], ["torch", "node", "datasets"]),
        (SETTINGS["project"]["optional-dependencies"]["dev"], list(LOCKS)),
    ],
    ids=["build", "node", "datasets", "dev"],
)
def test_every_dependency_is_locked_within_its_bounds_on_every_platform(asked: list[str], names: list[str]) -> None:
    for platform in PLATFORMS:
        there = {
            item.name: next(iter(item.specifier)).version
            for item in locked(*names)
            if item.marker is None or item.marker.evaluate(platform)
        }
        for wanted in map(Requirement, asked):
            version = there.get(canonicalize_name(wanted.name))
            assert version and wanted.specifier.contains(version), f"{wanted}: {version}; run make lock"


def test_only_the_lock_of_torch_has_cuda() -> None:
    assert [item.name for item in locked("torch") if item.marker is None] == ["torch"]
    others = {item.name for item in locked("build", "node", "datasets", "dev")}
    assert not {item.name for item in locked("torch")} & others
    assert {name for name in others if name.startswith(("nvidia-", "cuda-", "triton"))} == {"nvidia-ml-py"}


def pip_installs(text: str) -> list[str]:
    """Commands that install with pip, each on one line."""
    commands = re.split(r"\n|&&|; ", text.replace("\\\n", " "))
    return [command for command in commands if re.search(r"pip install |\$\((PIP_SHOWN|LOCKED)\) ", command)]


@pytest.mark.parametrize("file", ["Makefile", "docker/Dockerfile"])
def test_lock_files_are_installed_with_hashes_and_nothing_else_but_torch_is_downloaded(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    hashed = re.findall(r"^LOCKED := \$\(PIP_SHOWN\) (.*)", text, re.MULTILINE)
    commands = [
        command.replace("$(LOCKED)", f"pip install {''.join(hashed)}")
        for command in pip_installs(text)
        if not command.startswith("LOCKED :=")
    ]
    with_lock = [command for command in commands if re.search(r"-r \S+\.lock", command)]
    assert len(with_lock) >= 4
    assert [command for command in with_lock if not {"--require-hashes", "--no-deps"} <= set(command.split())] == []
    # `$torch` is what .ci/torch prints. The project itself, from this folder, has no hash. The extras are tested in the
    # versions that users get, by a job that holds no secrets.
    allowed = re.compile(
        r"\$\$torch|'\^torch==\[\^ \]\*' torch\.lock|--no-deps --no-build-isolation --editable \.|--no-index"
        r"|-e '\.\[eval,otlp,tensorboard,trackio,wandb\]' spdx-tools"
    )
    assert [command for command in commands if command not in with_lock and not allowed.search(command)] == []


def test_locks_are_sent_to_the_engine_that_builds_the_image() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall(r"^COPY (.*)", dockerfile, re.MULTILINE) for word in line.split()}
    sent = set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
    files = {word for word in copied if word.endswith(".lock")}
    assert files == {"requirements.lock", ".ci/build.lock", ".ci/torch.lock", ".ci/datasets.lock"}
    assert {f"!{file}" for file in files} <= sent

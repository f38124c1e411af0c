"""The workflows of GitHub Actions: pinned, with few rights, and with commands that bash and this repository know.

What only GitHub can do does not run here.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS: dict[str, dict[Any, Any]] = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in FILES}
STEPS = [
    (f"{name}.{job}.{number}", step)
    for name, workflow in WORKFLOWS.items()
    for job, content in workflow["jobs"].items()
    for number, step in enumerate(content.get("steps", []))
]
SCRIPTS = [(name, step["run"]) for name, step in STEPS if "run" in step]


def test_there_is_a_workflow_for_tests_and_two_for_releases() -> None:
    assert set(WORKFLOWS) == {"ci", "release", "latest"}
    assert [step["run"] for _, step in STEPS if step.get("run") == ".ci/run"] == [".ci/run"]


def test_limited_device_and_containers_are_tested() -> None:
    jobs = WORKFLOWS["ci"]["jobs"]
    assert jobs["limited-device"]["env"] == {"DILOCO_TEST_DEVICE": "limited"}
    assert jobs["limited-device"]["steps"][-1]["run"] == "make test"
    assert jobs["containers"]["steps"][-1]["run"].endswith("make test-docker")
    assert jobs["nightly"]["steps"][-1]["run"].endswith("make test-nightly")
    assert "schedule" in WORKFLOWS["ci"][True]  # YAML reads `on` as true.
    assert "schedule" in jobs["containers"]["if"] and "schedule" in jobs["nightly"]["if"]


def test_release_is_tested_before_it_is_published_and_becomes_the_latest_by_hand() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert jobs["tests"]["uses"] == "./.github/workflows/ci.yml" and "workflow_call" in WORKFLOWS["ci"][True]
    assert set(jobs["publish"]["needs"]) == {"tests", "image", "wheel"}
    (trial,) = [step for step in jobs["image"]["steps"] if step.get("name", "").startswith("The image trains")]
    assert "if" not in trial, "also the image with CUDA, on the processor"
    assert [name for name, script in SCRIPTS if ":latest" in script] == ["latest.latest.0"]
    assert WORKFLOWS["latest"][True] == {"release": {"types": ["published"]}}


def test_each_action_is_pinned_by_its_commit_and_names_its_version() -> None:
    used = re.findall(r"uses: (?!\./)(\S+)(.*)", "\n".join(file.read_text(encoding="utf-8") for file in FILES))
    assert len(used) >= 4
    for action, comment in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_jobs_have_only_the_rights_that_they_name_and_end_in_time() -> None:
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {}
        for job in workflow["jobs"].values():
            assert "write-all" not in str(job["permissions"])
            assert "uses" in job or job["timeout-minutes"] <= 120
    assert WORKFLOWS["ci"]["jobs"]["tests"]["permissions"] == {"contents": "read"}
    assert "id-token" not in WORKFLOWS["release"]["jobs"]["image"]["permissions"]


def test_no_package_without_a_known_hash_runs_beside_the_key_that_signs() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    with_key = [name for name, job in jobs.items() if "secrets." in str(job)]
    assert with_key == ["release"] and jobs["release"]["environment"] == "release"
    commands = "\n".join(step.get("run", "") for step in jobs["release"]["steps"])
    assert "make " not in commands and "npm" not in commands
    assert re.findall(r"pip install .*", commands) == re.findall(r"pip install .*--require-hashes.*", commands) != []
    locked = (ROOT / ".ci" / "signing.lock").read_text(encoding="utf-8").splitlines()
    lines = [line for line in locked if not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[\w-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert {line.partition("==")[0] for line in lines} >= {"cryptography", "pydantic", "packaging"}


def test_checkouts_keep_no_token() -> None:
    checkouts = [step for _, step in STEPS if str(step.get("uses", "")).startswith("actions/checkout@")]
    assert checkouts and all(step["with"] == {"persist-credentials": False} for step in checkouts)


@pytest.mark.parametrize("script", [script for _, script in SCRIPTS], ids=[name for name, _ in SCRIPTS])
def test_commands_of_a_step_are_valid_and_take_no_text_from_events(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "${{" not in script, "an expression in a script is code: pass it in the environment"


def test_files_and_make_targets_of_the_steps_exist() -> None:
    text = "\n".join(script for _, script in SCRIPTS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"image", "wheel"} <= set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    for file in re.findall(r"(?<![\w/])\.ci/[\w.]+", text):
        assert (ROOT / file).exists(), file


def test_release_builds_each_image_for_both_architectures_and_signs_it() -> None:
    built = {
        (row["target"], row["arch"]) for row in WORKFLOWS["release"]["jobs"]["image"]["strategy"]["matrix"]["include"]
    }
    assert {("cpu", "amd64"), ("cpu", "arm64"), ("cuda", "amd64")} == built
    stages = re.findall(r"^FROM runtime AS (\w+)", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert {target for target, _ in built} <= set(stages) == {"cpu", "cuda", "rocm"}
    text = "\n".join(script for _, script in SCRIPTS)
    for words in ("--sbom=true --provenance=mode=max", "cosign sign --yes", "cosign verify", "pyspdxtools", "--draft"):
        assert words in text

"""`make wheel` builds a package that works in an empty environment without a checkout."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from node.host.revision import revision
from tests.docker.engine import ASKED_FOR, ROOT
from tests.swarm.harness import wait_for


@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    not os.environ.get(ASKED_FOR), reason="part of `make test-docker`, as installing torch takes minutes"
)
def test_wheel_can_be_installed_and_run_in_an_empty_environment(tmp_path: Path) -> None:
    done = subprocess.run(["make", "wheel"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (ROOT / "dist").glob("diloco_node-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    assert [name for name in names if name.startswith(("tests", "dashboard", "docker")) or name.endswith(".ts")] == []
    assert "node/api/static/index.html" in names

    # With PYTHONPATH set, pip would find this checkout and consider the package installed.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DILOCO"))}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120, env=environment)
    python = tmp_path / "venv" / "bin" / "python"
    (torch,) = re.findall(r"^torch==\S+", (ROOT / ".ci" / "torch.lock").read_text(encoding="utf-8"), re.MULTILINE)
    locked = ["--require-hashes", "--no-build-isolation", "--use-pep517", "--requirement"]
    for packages in ([torch], [*locked, ROOT / ".ci/build.lock"], [*locked, ROOT / "requirements.lock"], [wheel]):
        done = subprocess.run(
            [python, "-m", "pip", "-q", "install", "--no-deps", *packages],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    checked = subprocess.run(
        [python, "-m", "pip", "check"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert checked.returncode == 0, checked.stdout

    data = tmp_path / "data"
    node = subprocess.Popen(
        [python.with_name("diloco-node"), "run", "--data-dir", data, "--api.port=0", "--limits.cpu_threads=1",
         "--swarm.listen=/ip4/127.0.0.1/tcp/0", "--run.round.inner_steps=5"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_for((data / "api.json").exists, 60, "api.json")
        url = json.loads((data / "api.json").read_text())["url"]
        token = (data / "api-token").read_text().strip()
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False) as http:
            wait_for(lambda: http.get("/api/v1/status").json()["run"]["round"] >= 0, 240, "a round")
            assert http.get("/api/v1/version").json()["revision"] == revision()
            page = http.get("/").text
            assets = re.findall(r'(?:src|href)="\.?/(assets/[^"]+)"', page)
            assert assets and all(http.get(f"/{name}").status_code == 200 for name in assets)
    finally:
        node.send_signal(signal.SIGTERM)
        try:
            said = node.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            node.kill()
            raise
    assert node.returncode == 0, said

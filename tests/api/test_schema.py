"""The tool schemathesis sends valid and invalid requests to a running node and checks the answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.daemon import Daemon

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
SEED = "7"
EXAMPLES = "8"
"""Number of requests of each kind for each route."""
EXCLUDED = "/api/v1/actions/(drain|leave)|/api/v1/events|/api/v1/generate|/readyz"
"""Routes that schemathesis does not call: actions that end the node, an endless stream, and those with a documented
503, which it always reports as an error. Other tests of this folder cover them."""


@pytest.mark.timeout(180)
def test_every_response_matches_the_openapi_document(tmp_path: Path) -> None:
    with Daemon(tmp_path / "data") as daemon:
        daemon.ready().until_phase("training")
        url = str(daemon.http.base_url).rstrip("/")
        token = (tmp_path / "data" / "api-token").read_text().strip()
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--url", url),
            *("-H", f"Authorization: Bearer {token}", "--seed", SEED, "--max-examples", EXAMPLES),
            *("--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS), "--request-timeout", "20"),
            *("--exclude-path-regex", EXCLUDED, "--generation-database", "none", "--no-color"),
        ]
        environ = os.environ | {"NO_PROXY": "*"}
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=170, cwd=tmp_path, env=environ
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert daemon.process.poll() is None
        assert not daemon.http.get("/api/v1/logs?level=error").json()["records"]

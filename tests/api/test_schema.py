"""The OpenAPI document against a node that runs: schemathesis asks what the document allows, and more."""

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
"""Of each kind and route."""
ENDS = "/api/v1/actions/(drain|leave)"
"""They end the node; what they answer is in test_daemon.py and test_routes.py."""
UNREADY = "/readyz"
"""Its 503, while the node resumes, is as documented; schemathesis takes any 503 for a fault. See test_routes.py."""
ENDLESS = "/api/v1/events"
"""A stream without an end; its test is in test_routes.py."""


@pytest.mark.timeout(180)
def test_every_answer_is_as_documented(tmp_path: Path) -> None:
    with Daemon(tmp_path / "data") as daemon:
        daemon.ready().until_phase("training")
        url = str(daemon.http.base_url).rstrip("/")
        token = (tmp_path / "data" / "api-token").read_text().strip()
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--url", url),
            *("-H", f"Authorization: Bearer {token}", "--seed", SEED, "--max-examples", EXAMPLES),
            *("--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS), "--request-timeout", "20"),
            *("--exclude-path-regex", f"{ENDS}|{ENDLESS}|{UNREADY}", "--generation-database", "none", "--no-color"),
        ]
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=170,
            cwd=tmp_path,
            env=os.environ | {"NO_PROXY": "*"},
        )
        print(done.stdout[-6000:])
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert daemon.process.poll() is None
        assert not daemon.http.get("/api/v1/logs?level=error").json()["records"]

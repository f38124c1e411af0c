"""The health check of the container image, run as the engine runs it, against a small server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "healthcheck.py"


class Livez(ThreadingHTTPServer):
    """Answers each request with `code` and `body`."""

    code, body = 200, b""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Livez)
        self.send_response(self.server.code)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def livez() -> Iterator[Livez]:
    server = Livez()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


def check(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-I", "-S", SCRIPT], env={"DILOCO_NODE__DATA_DIR": str(folder)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("http_code", "phase", "expected"),
    [(200, "training", 0), (200, "paused", 0), (200, "stopped", 0), (503, "training", 1), (200, "error", 1)],
)
def test_container_is_healthy_unless_the_node_hangs_or_is_in_error(
    tmp_path: Path, livez: Livez, http_code: int, phase: str, expected: int
) -> None:
    livez.code, livez.body = http_code, json.dumps({"ok": http_code == 200, "phase": phase, "code": "x"}).encode()
    (tmp_path / "api.json").write_text(json.dumps({"url": f"http://127.0.0.1:{livez.server_port}"}))
    code, said = check(tmp_path)
    assert code == expected and phase in said, "the engine shows the output, which names the phase"


@pytest.mark.parametrize("body", [b"", b"[]", b'{"ok": true}', b"<html>"])
def test_answer_that_is_not_the_nodes_is_unhealthy(tmp_path: Path, livez: Livez, body: bytes) -> None:
    livez.body = body
    (tmp_path / "api.json").write_text(json.dumps({"url": f"http://127.0.0.1:{livez.server_port}"}))
    assert check(tmp_path)[0] == 1


def test_node_that_does_not_answer_is_unhealthy(tmp_path: Path) -> None:
    assert check(tmp_path)[0] == 1
    (tmp_path / "api.json").write_text('{"url": "http://127.0.0.1:9"}')
    code, said = check(tmp_path)
    assert code == 1 and "does not answer" in said

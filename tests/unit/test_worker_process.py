"""What a worker process checks before it does anything."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from node import __version__
from node.config.schema import Config
from node.daemon.app import WORKER_COMMAND
from node.worker_protocol import WORKER_MESSAGE, Ended, Start, encode


@pytest.mark.timeout(120)
def test_worker_of_another_version_asks_for_a_new_start_and_imports_nothing_from_the_working_folder(
    tmp_path: Path,
) -> None:
    """After an update, a node that still runs has the old version, and starts workers of the new one."""
    (tmp_path / "random.py").write_text("raise SystemExit(99)\n")
    config = Config.model_validate({"node": {"data_dir": str(tmp_path / "data")}})
    # The settings and messages of another version are others.
    settings = config.model_dump(mode="json") | {"removed": {"setting": 1}}
    start = Start(mode="train", config=settings, version="0.0.1")
    line = encode(start).replace(b'"type":"start"', b'"type":"start","new":1')
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [*WORKER_COMMAND, "--fd", str(theirs.fileno())], cwd=tmp_path, pass_fds=[theirs.fileno()]
        )
        try:
            theirs.close()
            ours.sendall(line)
            assert process.wait(100) == 75
            with ours.makefile("rb") as lines:
                messages = [WORKER_MESSAGE.validate_json(line) for line in lines]
        finally:
            process.kill()
            process.wait()
    (ended,) = [message for message in messages if isinstance(message, Ended)]
    assert (ended.exit_code, ended.code) == (75, "updated")
    assert f"updated from 0.0.1 to {__version__}" in ended.reason

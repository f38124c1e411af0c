"""The data folder: made, locked, private, and refused with a sentence that helps."""

from __future__ import annotations

import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from node.daemon.folder import Asked, DataFolder
from node.errors import DataFolderError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_first_start_makes_a_private_folder_and_token(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with DataFolder.open(path) as folder:
        token = folder.token
        assert len(token) >= 43
        assert (mode(path), mode(path / "api-token")) == (0o700, 0o600)
        folder.write_address("http://127.0.0.1:1")
        assert json.loads((path / "api.json").read_text()) == {"url": "http://127.0.0.1:1", "pid": os.getpid()}
    assert not (path / "api.json").exists()
    with DataFolder.open(path) as again:
        assert again.token == token


def test_second_node_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with (
        DataFolder.open(tmp_path),
        pytest.raises(DataFolderError, match=rf"process {os.getpid()}\b") as caught,
    ):
        DataFolder.open(tmp_path)
    assert (caught.value.exit_code, caught.value.code) == (2, "folder_locked")
    DataFolder.open(tmp_path).close()


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataFolderError, match="--data-dir") as caught:
        DataFolder.open(tmp_path / "file" / "data")
    assert caught.value.exit_code == 2


def test_weak_token_is_refused_and_open_one_closed(tmp_path: Path) -> None:
    token = tmp_path / "api-token"
    token.write_text("hunter2\n")
    with pytest.raises(DataFolderError, match="remove the file") as caught:
        DataFolder.open(tmp_path)
    assert "hunter2" not in str(caught.value)
    token.write_text("x" * 43)
    token.chmod(0o644)
    with DataFolder.open(tmp_path):
        assert mode(token) == 0o600


def test_stale_address_goes_at_start(tmp_path: Path) -> None:
    (tmp_path / "api.json").write_text("{}")
    with DataFolder.open(tmp_path):
        assert not (tmp_path / "api.json").exists()


def test_pause_outlives_the_node(tmp_path: Path) -> None:
    pause = Asked(until=datetime(2030, 1, 1, tzinfo=UTC))
    with DataFolder.open(tmp_path) as folder:
        assert folder.load_asked() is None
        folder.save_asked(pause)
    with DataFolder.open(tmp_path) as folder:
        assert folder.load_asked() == pause
        folder.save_asked(None)
        assert folder.load_asked() is None
        (tmp_path / "pause.json").write_text('{"until": ')
        assert folder.load_asked() == Asked()


def test_disk_used_by_kind(tmp_path: Path) -> None:
    with DataFolder.open(tmp_path) as folder:
        (tmp_path / "checkpoints" / "7").mkdir(parents=True)
        (tmp_path / "checkpoints" / "7" / "x").write_bytes(b"12345")
        space = folder.space()
        assert 0 < space.free_bytes <= space.size_bytes
        assert space.used_bytes == {"checkpoints": 5, "history": 0, "cache": 0, "logs": 0}

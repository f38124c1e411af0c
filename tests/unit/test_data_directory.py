"""Tests of the data directory: its creation, its lock, its private files, and what it stores."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from node.daemon import data_directory
from node.daemon.data_directory import COUNTERS_FILE, DataDirectory, OwnerRequest, _require_private
from node.errors import DataFolderError, RestartError
from node.status import Activity, Counters, SavedCounters


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_first_start_creates_a_private_data_directory_and_an_api_token(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with DataDirectory.open(path) as directory:
        token = directory.token
        assert len(token) >= 43
        assert (mode(path), mode(path / "api-token")) == (0o700, 0o600)
        directory.write_address("http://127.0.0.1:1")
        assert json.loads((path / "api.json").read_text()) == {"url": "http://127.0.0.1:1", "pid": os.getpid()}
    assert not (path / "api.json").exists()
    (path / "api.json").write_text("{}")  # A killed node leaves this file.
    with DataDirectory.open(path) as again:
        assert again.token == token
        assert not (path / "api.json").exists()


def test_second_node_on_a_data_directory_is_refused_and_the_error_names_the_first(tmp_path: Path) -> None:
    with (
        DataDirectory.open(tmp_path),
        pytest.raises(DataFolderError, match=rf"process {os.getpid()}\b") as caught,
    ):
        DataDirectory.open(tmp_path)
    assert (caught.value.exit_code, caught.value.code) == (2, "folder_locked")
    DataDirectory.open(tmp_path).close()


def test_node_starts_although_a_command_looks_at_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_directory, "LOCK_PATIENCE_S", 10.0)
    with DataDirectory.open(tmp_path):
        pass
    looking = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    timer = threading.Timer(0.1, os.close, [looking])
    timer.start()
    with DataDirectory.open(tmp_path) as directory:
        assert directory.token
    timer.join()


def test_data_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataFolderError, match="--data-dir") as caught:
        DataDirectory.open(tmp_path / "file" / "data")
    assert caught.value.exit_code == 2


def test_weak_api_token_is_refused_and_a_readable_token_file_is_made_private(tmp_path: Path) -> None:
    token = tmp_path / "api-token"
    token.write_text("hunter2\n")
    with pytest.raises(DataFolderError, match="remove the file") as caught:
        DataDirectory.open(tmp_path)
    assert "hunter2" not in str(caught.value)
    for damaged in (b"\xff" * 44, b"\0" * 44):  # As a file may look after a power cut.
        token.write_bytes(damaged)
        with pytest.raises(DataFolderError, match="remove the file"):
            DataDirectory.open(tmp_path)
    token.write_text("x" * 43)
    token.chmod(0o644)
    with DataDirectory.open(tmp_path):
        assert mode(token) == 0o600


@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_data_directory_that_other_users_may_write_is_refused_and_unchanged(tmp_path: Path, bits: int) -> None:
    tmp_path.chmod(0o700 | bits)
    with pytest.raises(DataFolderError, match="chmod go-w") as caught:
        DataDirectory.open(tmp_path)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_data_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DataFolderError, match=f"belongs to user {os.getuid()}"):
        DataDirectory.open(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_file_that_is_replaced_while_the_folder_is_checked_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o666)
    monkeypatch.setattr(Path, "iterdir", lambda folder: [folder / "file", folder / "gone.new"])
    assert len(_require_private(tmp_path)) == 1


def test_folder_at_the_top_of_a_disk_of_its_own_may_be_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, 12345, 12345)
    (tmp_path / "lost+found").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    _require_private(tmp_path)
    os.chown(tmp_path / "lost+found", 54321, 54321)
    with pytest.raises(DataFolderError, match="belongs to user 54321"):
        _require_private(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", ["api-token", "settings.json", "checkpoints"])
def test_file_that_another_user_planted_is_refused_and_not_used(tmp_path: Path, name: str) -> None:
    """A planted token was taken over, and opened the API to its planter."""
    planted = tmp_path / name
    planted.mkdir() if name == "checkpoints" else planted.write_text("x" * 43)
    os.chown(planted, 12345, 12345)
    with pytest.raises(DataFolderError, match=rf"{name} belongs to user 12345"):
        DataDirectory.open(tmp_path)
    os.chown(planted, os.geteuid(), os.getegid())
    DataDirectory.open(tmp_path).close()


def test_file_and_folder_that_others_may_write_are_repaired(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "settings.json").chmod(0o666)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints").chmod(0o775)
    (tmp_path / "link").symlink_to("settings.json")
    (tmp_path / "api-token").write_text("x" * 43)
    (tmp_path / "api-token").chmod(0o644)
    with DataDirectory.open(tmp_path) as directory:
        repaired = ("checkpoints", "settings.json", "api-token")
        assert len(directory.warnings) == 3 and all(name in "".join(directory.warnings) for name in repaired)
    assert [mode(tmp_path / name) for name in repaired] == [0o755, 0o644, 0o600]
    with DataDirectory.open(tmp_path) as directory:
        assert directory.warnings == []


def test_pause_request_of_the_owner_survives_a_restart(tmp_path: Path) -> None:
    request = OwnerRequest(until=datetime(2030, 1, 1, tzinfo=UTC))
    with DataDirectory.open(tmp_path) as directory:
        assert directory.load_owner_request() is None
        directory.save_owner_request(request)
    with DataDirectory.open(tmp_path) as directory:
        assert directory.load_owner_request() == request
        directory.save_owner_request(None)
        assert directory.load_owner_request() is None
        (tmp_path / "pause.json").write_text('{"until": ')
        assert directory.load_owner_request() == OwnerRequest()
        (tmp_path / "pause.json").unlink()
        (tmp_path / "pause.json").mkdir()  # It cannot be read.
        assert directory.load_owner_request() == OwnerRequest()


def test_end_of_a_node_does_not_fail_if_its_address_cannot_be_removed(tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path):
        (tmp_path / "api.json").mkdir()
    (tmp_path / "api.json").rmdir()
    DataDirectory.open(tmp_path).close()


def test_saved_counters_survive_a_restart(tmp_path: Path) -> None:
    counters = Counters(tokens_processed=70, activity_seconds={Activity.COMPUTE: 2.5})
    saved = SavedCounters(counters=counters, rounds_joined=1, rounds_attempted=2, last_round=3)
    with DataDirectory.open(tmp_path) as directory:
        assert directory.load_counters() is None
        directory.save_counters(saved)
    stored = json.loads((tmp_path / COUNTERS_FILE).read_text())
    assert set(stored) == {"counters", "rounds_joined", "rounds_attempted", "last_round"}
    with DataDirectory.open(tmp_path) as directory:
        assert directory.load_counters() == saved


def test_counters_of_the_newest_readable_checkpoint_replace_lost_ones(tmp_path: Path) -> None:
    def checkpoint(number: int, text: str) -> None:
        (folder := tmp_path / f"checkpoints/round-{number:08}").mkdir(parents=True)
        (folder / "meta.json").write_text(text)

    saved = SavedCounters(counters=Counters(tokens_processed=70), rounds_joined=1, rounds_attempted=2, last_round=3)
    checkpoint(2, json.dumps({"body": {"extra": {"ledger": {**saved.model_dump(mode="json"), "last_round": 2}}}}))
    checkpoint(3, json.dumps({"body": {"extra": {"ledger": saved.model_dump(mode="json")}}}))
    checkpoint(4, json.dumps({"body": {"extra": {}}}))
    checkpoint(5, "{")
    (tmp_path / COUNTERS_FILE).write_bytes(b"")
    with DataDirectory.open(tmp_path) as directory:
        assert directory.load_counters() == saved


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b'{"counters": {"tokens_processed": -1}}', b"\xff"])
def test_damaged_counters_are_ignored_with_a_warning(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / COUNTERS_FILE).write_bytes(damage)
    with DataDirectory.open(tmp_path) as directory:
        assert directory.load_counters() is None
    assert "cannot be read" in caplog.text


def test_failure_to_write_the_counters_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = SavedCounters(counters=Counters(), rounds_joined=0, rounds_attempted=0)
    (tmp_path / f"{COUNTERS_FILE}.new").mkdir()
    with DataDirectory.open(tmp_path) as directory, caplog.at_level(logging.WARNING):
        directory.save_counters(saved)
        directory.save_counters(saved)
    assert caplog.text.count("cannot be written") == 1


def test_data_directory_reports_its_used_bytes_by_kind_of_file(tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path) as directory:
        (tmp_path / "checkpoints" / "7").mkdir(parents=True)
        (tmp_path / "checkpoints" / "7" / "x").write_bytes(b"12345")
        (tmp_path / "publish" / "round-7").mkdir(parents=True)
        (tmp_path / "publish" / "round-7" / "outer").write_bytes(b"123")
        space = directory.space()
        assert 0 < space.free_bytes <= space.size_bytes
        others = dict.fromkeys(("evaluate", "history", "cache", "logs", "metrics"), 0)
        assert space.used_bytes == {"checkpoints": 5, "publish": 3} | others


def test_full_disk_at_the_start_is_one_sentence_and_worth_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with DataDirectory.open(tmp_path) as directory:
        monkeypatch.setattr("node.daemon.data_directory.write_whole", full)
        with pytest.raises(RestartError, match=r"api\.json cannot be written \(No space left on device\)") as caught:
            directory.write_address("http://127.0.0.1:1")
    assert (caught.value.exit_code, caught.value.code) == (75, "disk")


@pytest.mark.parametrize(("name", "text"), [("touch", "The data folder .*"), ("write", r".*api-token")])
def test_full_disk_at_the_first_start_is_worth_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """A write, unlike the creation of a file, names no file in its error."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patched:
        if name == "touch":
            patched.setattr(Path, "touch", full)
        else:
            patched.setattr("node.daemon.data_directory.write_whole", full)
        with pytest.raises(RestartError, match=rf"^{text} cannot be written \(Disk quota exceeded\): free") as caught:
            DataDirectory.open(tmp_path)
    assert (caught.value.exit_code, caught.value.code) == (75, "disk")
    DataDirectory.open(tmp_path).close()

"""The size limit of the data folder removes the oldest files, never the newest checkpoint, and may refuse writes."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from node.errors import QuotaError
from node.host.disk_quota import RESERVE_BYTES, Quota

MB = 1_000_000


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: list[str] = []

    def put(self, name: str, megabytes: float, age_s: float = 0.0) -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(int(megabytes * MB)))
        for path in (file, file.parent):
            os.utime(path, (1e9 - age_s, 1e9 - age_s))
        return file

    def checkpoint(self, number: int, age_s: float, *, whole: bool = True, name: str = "round-") -> None:
        folder = f"checkpoints/{name}{number:08d}"
        if whole:
            self.put(f"{folder}/meta.json", 0.0)
        self.put(f"{folder}/outer.safetensors", 5, age_s)

    def quota(self, megabytes: float) -> Quota:
        return Quota(self.path, megabytes * MB, self.path / "text", self.told.append)

    @property
    def names(self) -> set[str]:
        return {str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_file() and p.name != "meta.json"}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.put("identity.key", 0.001, 999)
    made.put("text/mine.txt", 50, 999)
    made.put("cache/results-a.bin", 2, 50)
    made.put("cache/download-old.bin", 3, 60)
    made.put("cache/download-new.bin", 3, 5)
    made.put("cache/hub/models--x/blob", 4, 30)
    made.put("logs/node.log.1", 1, 70)
    made.put("logs/node.log", 1, 0)
    made.put("history/history.db", 1, 999)
    for number, age_s in ((1, 80), (2, 20), (3, 10)):
        made.checkpoint(number, age_s)
    return made


def test_quota_removes_nothing_without_a_limit_or_below_it(folder: Folder) -> None:
    before = folder.names
    for quota in (folder.quota(0), folder.quota(45)):
        with quota.room(5 * MB):
            pass
        quota.enforce()
    assert folder.names == before
    assert folder.quota(0).used_bytes() == 30.001 * MB


def test_quota_removes_the_oldest_files_first_and_some_kinds_of_file_never(folder: Folder) -> None:
    gone = []
    for more in (5, 6, 8, 10, 12, 16):
        before = folder.names
        with folder.quota(30.1 + RESERVE_BYTES / MB).room(more * MB):
            pass
        gone += sorted(before - folder.names)
        with folder.quota(30.1 + RESERVE_BYTES / MB).room(0):
            pass
    assert gone == [
        "checkpoints/round-00000001/outer.safetensors",
        "logs/node.log.1",
        "cache/download-old.bin",
        "cache/results-a.bin",
        "cache/hub/models--x/blob",
        "checkpoints/round-00000002/outer.safetensors",
    ]
    with pytest.raises(QuotaError, match=r"raise the limit") as caught, folder.quota(38.1).room(21 * MB):
        pytest.fail("there is no room")
    assert (caught.value.exit_code, caught.value.code) == (3, "disk_quota")
    assert {
        "text/mine.txt",
        "identity.key",
        "history/history.db",
        "logs/node.log",
        "cache/download-new.bin",
    } < folder.names
    assert "checkpoints/round-00000003/outer.safetensors" in folder.names


def test_quota_never_removes_the_newest_complete_checkpoint(folder: Folder) -> None:
    folder.checkpoint(4, 1, whole=False)
    folder.checkpoint(5, 100, name="damaged-round-")
    folder.checkpoint(6, 100, name=".writing-round-")
    with pytest.raises(QuotaError), folder.quota(20).room(10 * MB):
        pass
    assert len([name for name in folder.names if name.startswith("checkpoints")]) == 6, "nothing is removed in vain"
    with folder.quota(30 + RESERVE_BYTES / MB).room(10 * MB):
        pass
    left = {name.split("/")[1] for name in folder.names if name.startswith("checkpoints")}
    assert left == {"round-00000003", ".writing-round-00000006"} | ({"round-00000004"} & left)


def test_quota_reserves_room_for_writes_and_reports_a_refusal_until_there_is_room(folder: Folder) -> None:
    quota = folder.quota(60)
    with quota.room(10 * MB), quota.room(10 * MB), quota.room(10 * MB):
        with pytest.raises(QuotaError), quota.room(20 * MB):
            pass
        assert [bool(text) for text in folder.told] == [True]
    with quota.room(10 * MB):
        assert [bool(text) for text in folder.told] == [True, False]


def test_quota_enforces_a_lowered_limit_or_reports_that_it_cannot(folder: Folder) -> None:
    quota = folder.quota(60)
    quota.limit_bytes = 30 * MB
    quota.enforce()
    assert quota.used_bytes() <= 22 * MB
    least = quota.least_bytes()
    quota.limit_bytes = 5 * MB
    with pytest.raises(QuotaError, match="raise the limit"):
        quota.enforce()
    assert least >= quota.used_bytes() + 5 * MB


def test_concurrent_writers_never_exceed_the_disk_quota(tmp_path: Path) -> None:
    quota = Quota(tmp_path, 30 * MB, tmp_path / "text")
    (tmp_path / "cache").mkdir()
    most, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], quota.used_bytes())

    def write(name: int) -> None:
        for number in range(30):
            with quota.room(2 * MB):
                (tmp_path / "cache" / f"results-{name}-{number}.bin").write_bytes(bytes(2 * MB))

    watch = threading.Thread(target=look)
    watch.start()
    writers = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    over.set()
    watch.join(10)
    assert 10 * MB < most[0] <= 30 * MB


def test_a_copy_of_a_checkpoint_does_not_stop_the_quota(folder: Folder) -> None:
    (folder.path / "checkpoints" / "round-00000003.bak").mkdir()
    folder.put("checkpoints/round-00000003.bak/meta.json", 0.0)
    folder.quota(60).enforce()
    assert folder.quota(60).least_bytes() > 10 * MB


def test_states_that_several_folders_share_count_once_and_are_freed_with_the_last(folder: Folder) -> None:
    for number, age_s in ((1, 85), (2, 25)):
        waiting = folder.path / f"publish/round-{number:08d}-ab/outer.safetensors"
        waiting.parent.mkdir(parents=True)
        os.link(folder.path / f"checkpoints/round-{number:08d}/outer.safetensors", waiting)
        os.utime(waiting.parent, (1e9 - age_s, 1e9 - age_s))
    assert folder.quota(0).used_bytes() == 30.001 * MB
    with folder.quota(30.1 + RESERVE_BYTES / MB).room(15 * MB):
        pass
    assert folder.quota(0).used_bytes() <= 15.1 * MB
    left = {name for name in folder.names if name.startswith(("publish", "checkpoints"))}
    assert left == {
        "publish/round-00000001-ab/outer.safetensors",
        "checkpoints/round-00000003/outer.safetensors",
    }, "a process works on the oldest round that waits"


def test_quota_removes_nothing_behind_a_symlink(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> None:
    others = Folder(tmp_path_factory.mktemp("others"))
    others.put("huggingface/hub/blob", 100, 9999)
    (folder.path / "cache" / "huggingface").symlink_to(others.path / "huggingface")
    folder.quota(20).enforce()
    assert others.names == {"huggingface/hub/blob"}


def test_quota_keeps_the_login_at_the_hub_and_hidden_folders_that_are_in_use(folder: Folder) -> None:
    kept = {folder.put(name, 1, 999) for name in ("cache/huggingface/token", "cache/huggingface/stored_tokens")}
    kept.add(folder.put("cache/.publish-1.writing/round-3/model.safetensors", 1, 999))
    with suppress(QuotaError):
        folder.quota(1).enforce()
    assert all(path.exists() for path in kept) and "cache/results-a.bin" not in folder.names


def test_quota_counts_only_what_it_could_remove(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of another user stay, although the folder says how large they are."""
    caplog.set_level("INFO")
    monkeypatch.setattr(Path, "unlink", lambda *_: (_ for _ in ()).throw(PermissionError))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    before = folder.names
    with pytest.raises(QuotaError, match="raise the limit"), folder.quota(60 + RESERVE_BYTES / MB).room(40 * MB):
        pytest.fail("there is no room")
    assert folder.names == before and "Removed" not in caplog.text

"""After an atomic write, a file has its old or its new content, whatever the disk does."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from node.errors import UsageError
from node.host.files import LEFT_S, _machine_mark, scratch_folder, whole_folder, write_new, write_whole
from tests.unit.disk import disk_that_takes


@pytest.mark.parametrize("forced", [True, False])
def test_only_the_owner_can_read_a_written_file(tmp_path: Path, forced: bool) -> None:
    path = tmp_path / "peers.json"
    write_whole(path, "Zoë\n", forced=forced)
    assert path.read_bytes() == "Zoë\n".encode()
    write_whole(path, b"\x00\xff", forced=forced)
    assert path.read_bytes() == b"\x00\xff"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("forced", [True, False])
def test_a_write_to_a_full_disk_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path: Path, forced: bool) -> None:
    path = tmp_path / "totals.json"
    write_whole(path, "old", forced=forced)
    with disk_that_takes(1000), pytest.raises(OSError, match="too large"):
        write_whole(path, 2000 * "new", forced=forced)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_a_partly_written_file(tmp_path: Path) -> None:
    path = tmp_path / "pause.json"
    versions = [100_000 * b"a", 100_000 * b"b"]
    write_whole(path, versions[0])
    seen: set[bytes] = set()
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(300):
        write_whole(path, versions[turn % 2], forced=False)
    is_over.set()
    reader.join(10)
    assert seen == set(versions)


def test_folders_above_a_whole_folder_are_for_all_users(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with whole_folder(tmp_path / "place" / "run" / "one") as folder:
            (folder / "file").write_text("whole")
    finally:
        os.umask(before)
    made = [tmp_path / "place", tmp_path / "place" / "run", tmp_path / "place" / "run" / "one"]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o755] * 3


def test_what_another_machine_writes_stays_until_it_has_not_changed_for_an_hour(tmp_path: Path) -> None:
    """On a network file system the lock of another machine cannot be seen."""
    fresh, left = (tmp_path / f".one-0ther000-{name}.writing" for name in ("fresh", "left"))
    own = tmp_path / f".one-{_machine_mark()}-killed.writing"
    for folder in (fresh, left, own):
        folder.mkdir()
        (folder / "file").write_text("half")
    for path in (left / "file", left):
        os.utime(path, (time.time() - LEFT_S - 60,) * 2)
    with whole_folder(tmp_path / "one") as folder:
        (folder / "file").write_text("whole")
    assert sorted(tmp_path.iterdir()) == sorted([fresh, tmp_path / "one"])


def test_a_new_file_that_a_full_disk_refuses_is_not_in_the_way_of_the_next_try(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    with disk_that_takes(1000), pytest.raises(OSError, match="too large"):
        write_new(path, 2000 * "new")
    write_new(path, "new")
    with pytest.raises(UsageError, match="exists already"):
        write_new(path, "newer")
    assert path.read_text() == "new"


def test_a_link_that_somebody_else_has_planted_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "index.html"
    victim.write_text("mine")
    path.with_name("index.html.new").symlink_to(victim)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write_whole(path, "new")
    assert victim.read_text() == "mine"
    write_whole(path, "new")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == ("mine", "new", False)


def test_scratch_folder_is_removed_and_so_is_what_a_killed_process_has_left(tmp_path: Path) -> None:
    left = tmp_path / f".publish-{_machine_mark()}-abc.writing"
    (left / "round-1").mkdir(parents=True)
    with scratch_folder(tmp_path, "publish") as folder:
        assert list(tmp_path.iterdir()) == [folder] and folder.name.startswith(".publish-")
        with scratch_folder(tmp_path, "publish"):
            assert folder.is_dir(), "it is in use"
    assert list(tmp_path.iterdir()) == []

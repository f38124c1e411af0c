"""The socket folder is reused and cleaned by the next start, but not while its owner runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.swarm.transport.p2pd import SocketFolder, open_sockets

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sk") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_socket_folder_has_a_short_path_and_is_private_and_differs_per_data_folder(tmp_path: Path, base: Path) -> None:
    one, other = open_sockets(tmp_path / "one"), open_sockets(tmp_path / "other")
    assert one.path != other.path and one.path.parent == base
    assert len(str(one.path / "p2pclient-0123456789a.sock")) < 100
    assert one.path.stat().st_mode & 0o077 == 0
    one.close()
    other.close()
    assert list(base.iterdir()) == []


def test_socket_folder_of_a_killed_process_is_cleaned_by_the_next_start(tmp_path: Path, base: Path) -> None:
    code = (
        "import sys, time, tempfile\nfrom pathlib import Path\n"
        "from node.swarm.transport.p2pd import open_sockets\n"
        f"tempfile.tempdir = {str(base)!r}\nfolder = open_sockets(Path(sys.argv[1]))\n"
        "(folder.path / 'control').touch()\nprint(folder.path, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        beside = open_sockets(tmp_path)
        assert beside.path != left, "its owner is running"
        assert sorted(path.name for path in left.iterdir()) == ["control", "lock"]
        beside.close()
        process.send_signal(signal.SIGKILL)
    after = open_sockets(tmp_path)
    assert after.path == left and [path.name for path in left.iterdir()] == ["lock"]
    after.close()
    assert list(base.iterdir()) == []


def test_socket_folder_that_is_not_private_is_not_used(tmp_path: Path, base: Path) -> None:
    folder = open_sockets(tmp_path)
    path = folder.path
    folder.close()
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    elsewhere = open_sockets(tmp_path)
    assert elsewhere.path != path
    elsewhere.close()
    path.rmdir()
    (base / "target").mkdir()
    path.symlink_to(base / "target")
    linked = open_sockets(tmp_path)
    assert linked.path != path and list((base / "target").iterdir()) == []
    linked.close()


def test_socket_folder_may_be_closed_twice(tmp_path: Path) -> None:
    folder: SocketFolder = open_sockets(tmp_path)
    folder.close()
    folder.close()

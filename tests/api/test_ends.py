"""Ends that are not the usual ones: a long save, a full disk, a watch that fails, an order in the last moment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.api.daemon import Daemon, wait_for

STOP_S = 0.5


@pytest.mark.parametrize("order", ["leave", "signal"])
def test_a_worker_that_says_it_saves_has_longer(tmp_path: Path, order: str) -> None:
    with Daemon(tmp_path, "save:3", stop_s=STOP_S) as daemon:
        daemon.ready().until_phase("training")
        began_s = time.monotonic()
        if order == "leave":
            assert daemon.act("leave").status_code == 202
            code, said, err = daemon.end()
        else:
            code, said, err, _ = daemon.terminate()
    assert code == 0 and time.monotonic() - began_s >= 3
    assert "is killed" not in said + err and "lost" not in said + err


def test_a_save_that_takes_too_long_is_told(tmp_path: Path) -> None:
    with Daemon(tmp_path, "save:60", stop_s=STOP_S, save_s=2.0, persist=True) as daemon:
        daemon.ready().until_phase("training")
        began_s = time.monotonic()
        daemon.act("leave")
        reason = daemon.until_phase("stopped")["reason"]
        assert 2.0 <= time.monotonic() - began_s < 10
        assert "since its last checkpoint is lost" in reason and "did not end within 2 s" in reason
        assert daemon.terminate()[0] == 0


def test_a_pause_says_what_was_lost_until_the_node_trains_again(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", stop_s=STOP_S) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("pause")
        status = daemon.until_phase("paused", "paused")
        assert "since its last checkpoint is lost" in status["reason"] and "did not end within" in status["reason"]
        daemon.worker_pid()
        daemon.act("pause", {"for_s": 3600})
        wait_for(lambda: " until " in daemon.status()["reason"])
        assert "since its last checkpoint is lost" in daemon.status()["reason"]
        daemon.act("resume")
        assert "lost" not in daemon.until_phase("training")["reason"]


def test_a_worker_that_only_beats_has_no_longer(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", stop_s=STOP_S, save_s=60.0) as daemon:
        daemon.ready().until_phase("training")
        code, _, _, seconds = daemon.terminate()
    assert code == 0 and seconds < 10


def test_leave_ends_the_node_although_the_disk_is_full_and_something_was_set(tmp_path: Path) -> None:
    with Daemon(tmp_path, "disk-full") as daemon:
        daemon.ready().until_phase("training")
        assert daemon.http.patch("/api/v1/config", json={"limits": {"upload_mbit_s": 9}}).status_code == 200
        assert daemon.act("leave").status_code == 202
        assert daemon.end()[0] == 3


def test_leave_with_a_full_disk_stays_stopped_where_the_page_stays(tmp_path: Path) -> None:
    with Daemon(tmp_path, "disk-full", persist=True) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("leave")
        assert daemon.until_phase("error")["reason"] == "The disk is full."
        assert daemon.terminate()[0] == 0
    with Daemon(tmp_path, "work", persist=True) as daemon:
        assert daemon.ready().status()["phase"] == "stopped"
        assert daemon.terminate()[0] == 0


def test_an_order_to_drain_outlives_a_signal(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", persist=True, stop_s=STOP_S) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("drain")
        daemon.until_phase("draining")
        assert daemon.terminate()[0] == 0
    with Daemon(tmp_path, persist=True) as daemon:
        assert daemon.ready().status()["phase"] == "stopped"
        assert daemon.terminate()[0] == 0


def test_an_attempt_that_failed_is_not_the_round_to_pause_after(tmp_path: Path) -> None:
    with Daemon(tmp_path, "attempts") as daemon:
        first = daemon.ready().until_phase("training")["run"]["round"]
        after = first + 5
        assert daemon.act("pause", {"after_round": after}).status_code == 202
        daemon.until_phase("paused")
        records = daemon.http.get("/api/v1/rounds?limit=100").json()["rounds"]
        assert max(one["round"] for one in records if one["outcome"] == "complete") >= after
        assert daemon.terminate()[0] == 0


def test_a_pause_that_the_disk_does_not_take_holds_and_is_told(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        (tmp_path / "pause.json.new").mkdir()
        assert daemon.act("pause").status_code == 202
        daemon.until_phase("paused")
        notice = wait_for(lambda: [n for n in daemon.status()["notices"] if n["code"] == "not_kept"])[0]
        assert "pause.json could not be written" in notice["text"]
        answer = daemon.http.patch("/api/v1/config", json={"limits": {"upload_mbit_s": 9}})
        assert answer.status_code == 200
        (tmp_path / "pause.json.new").rmdir()
        assert daemon.act("resume").status_code == 202
        assert not [n for n in daemon.status()["notices"] if n["code"] == "not_kept"]
        assert daemon.terminate()[0] == 0


def test_a_setting_that_the_disk_does_not_take_is_not_changed(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        (tmp_path / "settings.json.new").mkdir()
        answer = daemon.http.patch("/api/v1/config", json={"limits": {"upload_mbit_s": 9}})
        assert answer.status_code == 422 and "settings.json" in answer.text and "nothing has changed" in answer.text
        assert daemon.http.get("/api/v1/config").json()["config"]["limits"]["upload_mbit_s"] == 0
        assert daemon.terminate()[0] == 0


@pytest.mark.parametrize(
    ("until", "code"),
    [
        ("9999-12-31T23:59:59-12:00", 422),
        ("9999-12-31T23:59:59Z", 422),
        ("0001-01-01T00:00:00+12:00", 422),
        ("2600-01-01T00:00:00Z", 409),
        ("2000-01-01T00:00:00Z", 409),
    ],
)
def test_moments_beyond_all_sense_are_refused_and_nothing_breaks(tmp_path: Path, until: str, code: int) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.act("pause", {"until": until}).status_code == code
        assert daemon.status()["phase"] == "training" and not (tmp_path / "pause.json").exists()
        assert daemon.terminate()[0] == 0


def test_a_moment_beyond_all_sense_in_the_file_is_a_pause_without_end(tmp_path: Path) -> None:
    tmp_path.joinpath("pause.json").write_text('{"until": "9999-12-31T23:59:59-12:00"}')
    with Daemon(tmp_path) as daemon:
        assert "`resume`" in daemon.ready().until_phase("paused")["reason"]
        assert daemon.terminate()[0] == 0


def test_a_watch_that_fails_ends_the_node_rather_than_leaving_it_unwatched(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    Path(f"{folder}.config").write_text('{"schedule": {"on_battery": "pause"}}')
    with Daemon(folder) as daemon:
        daemon.ready().until_phase("training")
        worker = daemon.worker_pid()
        Path(f"{folder}.probes").write_text("no JSON")
        code, _, err = daemon.end()
        assert code != 0 and "JSONDecodeError" in err
        wait_for(lambda: not Path(f"/proc/{worker}").exists())


def test_an_order_between_a_crash_and_what_follows_is_not_lost(tmp_path: Path) -> None:
    """What a cap on the GPU's power was before lies in a file that is read then: here, one that keeps it waiting."""
    with Daemon(tmp_path, "crash", backoff_s=[]) as daemon:
        daemon.ready().until_phase("error", "worker_crashes")
        os.mkfifo(tmp_path / "gpu-power.json")
        assert daemon.act("resume").status_code == 202
        reader_waits = wait_for(lambda: _open_for_reader(tmp_path / "gpu-power.json"))
        daemon.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        (tmp_path / "gpu-power.json").unlink()
        os.close(reader_waits)
        assert daemon.end()[0] == 0


def _open_for_reader(path: Path) -> int | None:
    """The pipe's other end, once somebody reads it."""
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None

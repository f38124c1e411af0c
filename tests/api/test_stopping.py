"""How a node stops: the time to save, a full disk, and persistent nodes (`node.persist`), which only a signal ends."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.api.daemon import Daemon, alive, wait_for

STOP_S = 0.5


@pytest.mark.parametrize("cause", ["leave", "signal"])
def test_worker_that_reports_unsaved_work_gets_more_time_to_stop(tmp_path: Path, cause: str) -> None:
    with Daemon(tmp_path, "save:3", stop_s=STOP_S) as daemon:
        daemon.ready().until_phase("training")
        began_s = time.monotonic()
        if cause == "leave":
            assert daemon.act("leave").status_code == 202
        else:
            daemon.process.send_signal(signal.SIGTERM)
        code, out, err = daemon.end()
    assert code == 0 and time.monotonic() - began_s >= 3
    assert "is killed" not in out + err and "lost" not in out + err


def test_worker_that_saves_for_too_long_is_killed_and_the_loss_is_reported(tmp_path: Path) -> None:
    with Daemon(tmp_path, "save:60", stop_s=STOP_S, save_s=2.0, persist=True) as daemon:
        daemon.ready().until_phase("training")
        began_s = time.monotonic()
        daemon.act("leave")
        reason = daemon.until_phase("stopped")["reason"]
        assert 2.0 <= time.monotonic() - began_s < 10
        assert "since its last checkpoint is lost" in reason and "did not end within 2 s" in reason
        assert daemon.terminate()[0] == 0


def test_a_crash_is_no_news_of_a_node_that_was_stopped_after_it(tmp_path: Path) -> None:
    """The notice promises that the worker starts again."""
    with Daemon(tmp_path, "crash", persist=True, backoff_s=[3.0] * 4) as daemon:
        daemon.ready()
        wait_for(lambda: "worker_crashed" in [one["code"] for one in daemon.status()["notices"]])
        daemon.act("leave")
        assert "worker_crashed" not in [one["code"] for one in daemon.until_phase("stopped")["notices"]]
        assert daemon.terminate()[0] == 0


def test_heartbeats_do_not_extend_the_time_that_a_worker_has_to_stop(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", stop_s=1.0, save_s=60.0) as daemon:
        daemon.ready().until_phase("training")
        worker = daemon.worker_pid()
        code, _, _, seconds = daemon.terminate()
        assert code == 0 and 1.0 < seconds < 15
        assert not alive(worker)


def test_node_with_a_full_disk_ends_on_leave_although_its_settings_were_changed(tmp_path: Path) -> None:
    with Daemon(tmp_path, "disk-full") as daemon:
        daemon.ready().until_phase("training")
        assert daemon.http.patch("/api/v1/config", json={"limits": {"upload_mbit_s": 9}}).status_code == 200
        assert daemon.act("leave").status_code == 202
        assert daemon.end()[0] == 3


def test_persistent_node_with_a_full_disk_reports_it_on_leave_and_stays_stopped(tmp_path: Path) -> None:
    with Daemon(tmp_path, "disk-full", persist=True) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("leave")
        assert daemon.until_phase("error")["reason"] == "The disk is full."
        assert daemon.terminate()[0] == 0
    with Daemon(tmp_path, "work", persist=True) as daemon:
        assert daemon.ready().status()["phase"] == "stopped"


def test_pause_takes_place_although_the_disk_is_full_and_says_what_is_lost(tmp_path: Path) -> None:
    with Daemon(tmp_path, "disk-full") as daemon:
        daemon.ready().until_phase("training")
        daemon.act("pause")
        reason = daemon.until_phase("paused", "paused")["reason"]
        assert "What it did since its last checkpoint is lost: The disk is full." in reason
        daemon.act("resume")
        assert "lost" not in daemon.until_phase("training")["reason"]


@pytest.mark.parametrize("persists", [False, True])
def test_updated_program_ends_the_node_so_that_the_service_starts_the_new_version(
    tmp_path: Path, persists: bool
) -> None:
    with Daemon(tmp_path, "updated", persist=persists) as daemon:
        assert daemon.end()[0] == 75


def test_persistent_node_stops_on_leave_and_trains_again_on_resume(tmp_path: Path) -> None:
    with Daemon(tmp_path, persist=True) as daemon:
        daemon.ready().until_phase("training")
        worker = daemon.worker_pid()
        assert daemon.act("leave").status_code == 202
        status = daemon.until_phase("stopped", "stopped")
        assert "resume" in status["reason"] and not status["final"]
        wait_for(lambda: not alive(worker))
        assert (daemon.code("/livez"), daemon.code("/readyz"), daemon.code("/")) == (200, 503, 200)
        assert daemon.act("pause").status_code == 409
        assert daemon.act("drain").status_code == 409
        assert daemon.act("leave").status_code == 202
        daemon.until_phase("stopped")
        assert daemon.act("resume").json() == {"phase": "training"}
        daemon.until_phase("training")
        assert daemon.worker_pid() != worker
        assert daemon.act("drain").status_code == 202
        daemon.until_phase("stopped", "stopped")
        code, _, _, seconds = daemon.terminate()
        assert (code, seconds < 15) == (0, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_stopped_persistent_node_stays_stopped_after_a_restart(tmp_path: Path, number: signal.Signals) -> None:
    with Daemon(tmp_path, persist=True) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("leave")
        daemon.until_phase("stopped")
        assert daemon.terminate(number)[0] == 0
    with Daemon(tmp_path, persist=True) as daemon:
        assert daemon.ready().status()["phase"] == "stopped"
        daemon.act("resume")
        daemon.until_phase("training")
        assert daemon.terminate(number)[0] == 0
    # The node does not remember the signal as a request to stop, so its next start trains.
    with Daemon(tmp_path, persist=True) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("leave")
        daemon.until_phase("stopped")
        assert daemon.terminate(number)[0] == 0
    # A node without `persist` has no page while stopped, so its start resumes training.
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.terminate(number)[0] == 0


@pytest.mark.parametrize(("action", "phase"), [("drain", "draining"), ("leave", "leaving")])
def test_persistent_node_that_gets_a_signal_while_it_stops_is_stopped_at_its_next_start(
    tmp_path: Path, action: str, phase: str
) -> None:
    with Daemon(tmp_path, "deaf", persist=True, stop_s=STOP_S) as daemon:
        daemon.ready().until_phase("training")
        daemon.act(action)
        daemon.until_phase(phase)
        code, _, _, seconds = daemon.terminate()
        assert (code, seconds < 15) == (0, True)
    with Daemon(tmp_path, persist=True) as daemon:
        assert daemon.ready().status()["phase"] == "stopped"


@pytest.mark.parametrize(
    ("behaviour", "exit_code", "phase", "code"),
    [("refuse", 4, "error", "refused"), ("complete", 0, "stopped", "run_complete")],
)
def test_worker_that_ends_on_its_own_ends_the_node_unless_the_node_is_persistent(
    tmp_path: Path, behaviour: str, exit_code: int, phase: str, code: str
) -> None:
    with Daemon(tmp_path / "a", behaviour) as daemon:
        returned, out, _ = daemon.end()
        assert (returned, out.splitlines()[-1]) == (exit_code, f"{phase} {code}")
    with Daemon(tmp_path / "b", behaviour, persist=True) as daemon:
        first = daemon.ready().until_phase(phase, code)
        assert daemon.code("/livez") == 200
        assert not first["final"]
        assert daemon.act("resume").status_code == 202
        wait_for(lambda: (s := daemon.status())["phase"] == phase and s["since"] != first["since"])
        returned, _, _, seconds = daemon.terminate()
        assert (returned, seconds < 15) == (0, True)


def test_signal_after_an_error_ends_a_persistent_node_with_exit_code_0(tmp_path: Path) -> None:
    with Daemon(tmp_path, "crash", persist=True, backoff_s=[]) as daemon:
        daemon.ready().until_phase("error", "worker_crashes")
        assert daemon.terminate()[0] == 0

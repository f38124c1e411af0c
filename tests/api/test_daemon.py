"""The supervisor as a real process with a real (scripted) worker: it stops, restarts, explains, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import time
from pathlib import Path

import psutil
import pytest

from node.config import Config
from node.daemon.server import bind
from node.daemon.shift import FROZEN_S
from node.daemon.supervisor import run
from node.errors import DataFolderError, MachineError, UsageError
from tests.api.daemon import Daemon, alive, wait_for

RESIDENT_BYTES_MAX = 100e6
QUICK = {"backoff_s": [0.05, 0.05, 0.05, 0.05]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_cleanly_with_an_event_stream_open(tmp_path: Path, number: signal.Signals) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        worker = daemon.worker_pid()
        with daemon.http.stream("GET", "/api/v1/events") as events:
            lines = events.iter_lines()
            assert "event: status" in [next(lines) for _ in range(4)]
            daemon.process.send_signal(number)
            began_s = time.monotonic()
            rest = list(lines)
        code, out, _ = daemon.end()
        assert (code, time.monotonic() - began_s < 10) == (0, True)
        told = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: ")]
        assert (told[-1]["phase"], told[-1]["final"]) == ("stopped", True)
        assert not any(status["final"] for status in told if status["phase"] != "stopped")
        assert "leaving leaving" in out
        assert out.rstrip().endswith("stopped stopped")
        assert not alive(worker)
        assert not (tmp_path / "api.json").exists()


def test_signal_right_after_the_start(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready()
        code, _, _, seconds = daemon.terminate()
        assert code == 0
        assert seconds < 15


def test_resident_memory_and_private_files(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        for path in ("/metrics", "/openapi.json", "/", "/api/v1/config", "/readyz"):
            assert daemon.code(path) == 200
        resident_bytes = psutil.Process(daemon.process.pid).memory_info().rss
        print(f"resident {resident_bytes / 1e6:.1f} MB")
        assert resident_bytes < RESIDENT_BYTES_MAX
        token = (tmp_path / "api-token").read_text().strip()
        assert stat.S_IMODE((tmp_path / "api-token").stat().st_mode) == 0o600
        _, out, err, _ = daemon.terminate()
        assert token not in out + err


def test_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    with Daemon(tmp_path, **QUICK) as daemon:
        daemon.ready().until_phase("training")
        first = daemon.worker_pid()
        os.kill(first, signal.SIGKILL)
        second = daemon.worker_pid(other_than=first)
        daemon.until_phase("training")
        assert not alive(first)
        assert alive(second)
        errors = [r["message"] for r in daemon.http.get("/api/v1/logs?level=error").json()["records"]]
        assert any("SIGKILL" in message and "memory" in message for message in errors)


def test_five_crashes_are_an_error_that_can_be_mended(tmp_path: Path) -> None:
    with Daemon(tmp_path, "crash", **QUICK) as daemon:
        status = daemon.ready().until_phase("error", "worker_crashes")
        assert "exit status 3" in status["reason"]
        assert "out of cheese" in status["reason"] and "crashed 5 times in a row (" in status["reason"]
        assert not status["final"]
        assert (daemon.code("/livez"), daemon.code("/readyz")) == (200, 503)
        assert daemon.act("pause").status_code == 409
        assert daemon.act("drain").status_code == 409
        assert daemon.act("resume").json() == {"phase": "training"}
        daemon.until_phase("error", "worker_crashes")
        assert daemon.act("leave").status_code == 202
        assert daemon.end()[0] == 0


def test_crash_once_goes_on(tmp_path: Path) -> None:
    with Daemon(tmp_path / "data", f"crash-once:{tmp_path / 'crashed'}", **QUICK) as daemon:
        daemon.ready().until_phase("training")
        assert (tmp_path / "crashed").exists()


def test_worker_that_hangs_turns_livez_and_is_replaced(tmp_path: Path) -> None:
    with Daemon(tmp_path, grace_s=1.0, stale_s=0.7, hung_s=2.5, **QUICK) as daemon:
        daemon.ready().until_phase("training")
        time.sleep(1.0)
        assert daemon.code("/livez") == 200
        worker = daemon.worker_pid()
        os.kill(worker, signal.SIGSTOP)
        wait_for(lambda: daemon.code("/livez") == 503, 5)
        assert daemon.code("/readyz") == 503
        daemon.worker_pid(other_than=worker)
        wait_for(lambda: daemon.code("/livez") == 200, 5)
        assert not alive(worker)


def test_worker_without_heartbeat_is_replaced_though_it_talks(tmp_path: Path) -> None:
    with Daemon(tmp_path, "silent", grace_s=1.0, stale_s=0.5, hung_s=1.0, **QUICK) as daemon:
        first = daemon.ready().worker_pid()
        daemon.worker_pid(other_than=first)


def test_workers_that_never_beat_are_an_error_however_long_each_was_waited_for(tmp_path: Path) -> None:
    with Daemon(tmp_path, "silent", grace_s=0.6, hung_s=0.6, healthy_s=0.5, **QUICK) as daemon:
        reason = daemon.ready().until_phase("error", "worker_crashes")["reason"]
        assert "crashed 5 times in a row" in reason and "no heartbeat" in reason


def test_a_node_that_was_frozen_goes_on_with_its_worker(tmp_path: Path) -> None:
    """As by `docker pause`: both processes stand still, and the clock does not."""
    with Daemon(tmp_path, grace_s=0.5, hung_s=2.0, **QUICK) as daemon:
        daemon.ready().until_phase("training")
        worker, supervisor = daemon.worker_pid(), daemon.process.pid
        time.sleep(1)
        for pid in (supervisor, worker):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(FROZEN_S + 1.5)
        os.kill(supervisor, signal.SIGCONT)
        time.sleep(0.5)
        os.kill(worker, signal.SIGCONT)
        time.sleep(1)
        assert daemon.worker_pid() == worker and alive(worker)
        # It is not forgiven for ever.
        os.kill(worker, signal.SIGSTOP)
        daemon.worker_pid(other_than=worker)


def test_deaf_worker_is_killed_at_leave(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", stop_s=1.0) as daemon:
        daemon.ready().until_phase("training")
        worker = daemon.worker_pid()
        code, _, _, seconds = daemon.terminate()
        assert code == 0
        assert 1.0 < seconds < 15
        assert not alive(worker)


def test_second_interrupt_hurries(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", stop_s=60.0) as daemon:
        daemon.ready().until_phase("training")
        daemon.process.send_signal(signal.SIGINT)
        daemon.until_phase("leaving")
        code, _, _, seconds = daemon.terminate(signal.SIGINT)
        assert code == 0
        assert seconds < 15


def test_killed_supervisor_leaves_no_worker(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        worker = daemon.worker_pid()
        daemon.process.send_signal(signal.SIGKILL)
        wait_for(lambda: not alive(worker), 5)
    # The lock went with the process, and the stale address goes with the next start.
    with Daemon(tmp_path) as daemon:
        wait_for(lambda: (tmp_path / "lock").read_text().strip() == str(daemon.process.pid))
        daemon.ready().until_phase("training")
        assert daemon.terminate()[0] == 0


@pytest.mark.parametrize("how", ["crash", "leave"])
def test_nothing_that_the_worker_started_outlives_it(tmp_path: Path, how: str) -> None:
    with Daemon(tmp_path / "data", f"brood:{tmp_path / 'pid'}", **QUICK) as daemon:
        daemon.ready().until_phase("training")
        grandchild = int((tmp_path / "pid").read_text())
        assert alive(grandchild)
        if how == "crash":
            first = daemon.worker_pid()
            os.kill(first, signal.SIGKILL)
            daemon.worker_pid(other_than=first)
        else:
            assert daemon.terminate()[0] == 0
        assert not alive(grandchild)


def test_one_crash_is_not_told_as_a_row_of_them(tmp_path: Path) -> None:
    with Daemon(tmp_path, "crash", backoff_s=[]) as daemon:
        status = daemon.ready().until_phase("error", "worker_crashes")
        assert status["reason"].startswith("The worker crashed (")


def test_rubbish_on_the_link_counts_as_a_crash(tmp_path: Path) -> None:
    with Daemon(tmp_path, "rubbish", **QUICK) as daemon:
        status = daemon.ready().until_phase("error", "worker_crashes")
        assert "no message" in status["reason"]


@pytest.mark.parametrize(
    ("act", "code", "last"), [("refuse", 4, "error refused"), ("complete", 0, "stopped run_complete")]
)
def test_worker_that_ends_of_itself_ends_the_node(tmp_path: Path, act: str, code: int, last: str) -> None:
    with Daemon(tmp_path, act) as daemon:
        returned, out, _ = daemon.end()
        assert (returned, out.splitlines()[-1]) == (code, last)


def test_locked_folder_names_its_holder(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Daemon(tmp_path) as second:
        # Whichever came second is refused; it does not touch the other's address.
        winner, loser = daemon, second
        wait_for(lambda: daemon.process.poll() is not None or second.process.poll() is not None)
        if daemon.process.poll() is not None:
            winner, loser = second, daemon
        code, _, err = loser.end()
        assert code == 2
        assert f"process {winner.process.pid}" in err
        assert "--data-dir" in err
        winner.ready().until_phase("training")


def test_port_in_use_and_unusable_folder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config.model_validate({"node": {"data_dir": tmp_path / "a"}, "api": {"port": port}})
        with pytest.raises(MachineError, match=r"--api\.port 0") as caught:
            run(config, join=None)
    assert (caught.value.exit_code, caught.value.code) == (3, "port_in_use")
    (tmp_path / "file").touch()
    config = Config.model_validate({"node": {"data_dir": tmp_path / "file" / "a"}, "api": {"port": 0}})
    with pytest.raises(DataFolderError, match="--data-dir"):
        run(config, join=None)
    with pytest.raises(UsageError, match=r"--api\.host"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(MachineError, match=r"--api\.host") as caught:
        bind("203.0.113.7", 0)
    assert (caught.value.exit_code, caught.value.code) == (3, "cannot_listen")


def test_metrics_and_logs_of_the_worker_come_through(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        wait_for(lambda: daemon.status()["run"]["round"] >= 2)
        text = daemon.http.get("/metrics").text
        assert 'diloco_node_phase{phase="training"} 1.0' in text
        assert 'diloco_sync_duration_seconds_count{stage="reduce"} 0.0' not in text
        hello = [r for r in daemon.http.get("/api/v1/logs").json()["records"] if r["message"] == "hello"]
        assert [(r["logger"], r["level"], r["round"]) for r in hello] == [("node.fake", "warning", 7)]
        assert daemon.http.get("/api/v1/rounds?limit=1").json()["rounds"][0]["round"] >= 2
        assert daemon.http.get("/api/v1/swarm").json()["peers"][0]["peer_id"] == "fake-other"

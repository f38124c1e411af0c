"""The supervisor as a real process with a fake worker: start, signals, and failures of the worker."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from node.api.public_routes import FRESH_S
from node.config.schema import Config
from node.daemon.app import run
from node.daemon.http_server import bind
from node.daemon.worker_watchdog import FROZEN_S
from node.errors import DataFolderError, MachineError, UsageError
from tests.api.daemon import Daemon, alive, wait_for

RESIDENT_BYTES_MAX = 100e6
QUICK: dict[str, Any] = {"backoff_s": [0.05, 0.05, 0.05, 0.05]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_the_node_and_its_event_streams(tmp_path: Path, number: signal.Signals) -> None:
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
        events_ = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: ")]
        assert (events_[-1]["phase"], events_[-1]["final"]) == ("stopped", True)
        assert not any(status["final"] for status in events_ if status["phase"] != "stopped")
        assert "leaving leaving" in out
        assert out.rstrip().endswith("stopped stopped")
        assert not alive(worker)
        assert not (tmp_path / "api.json").exists()


def test_signal_right_after_the_start_ends_the_node(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready()
        code, _, _, seconds = daemon.terminate()
        assert code == 0
        assert seconds < 15


def test_second_interrupt_kills_a_worker_that_does_not_stop(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", stop_s=60.0) as daemon:
        daemon.ready().until_phase("training")
        daemon.process.send_signal(signal.SIGINT)
        daemon.until_phase("leaving")
        code, _, _, seconds = daemon.terminate(signal.SIGINT)
        assert code == 0
        assert seconds < 15


def test_first_interrupt_of_a_node_that_leaves_already_does_not_kill_its_worker(tmp_path: Path) -> None:
    with Daemon(tmp_path, "save:4", stop_s=60.0) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("leave")
        daemon.until_phase("leaving")
        code, _, _, seconds = daemon.terminate(signal.SIGINT)
        assert code == 0
        assert seconds > 2.0, "it has saved its work"


def test_ctrl_z_does_not_stop_the_supervisor_and_names_the_command_that_pauses(tmp_path: Path) -> None:
    """The worker leads a session of its own, so it would compute on without a supervisor."""
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        daemon.process.send_signal(signal.SIGTSTP)
        assert psutil.Process(daemon.process.pid).status() != psutil.STATUS_STOPPED
        assert daemon.status()["phase"] == "training"
        code, _, err, _ = daemon.terminate()
        assert code == 0
        assert err.count("The node keeps running") == err.count("diloco-node pause") == 1


def test_killed_supervisor_leaves_no_worker_and_no_lock(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        worker = daemon.worker_pid()
        daemon.process.send_signal(signal.SIGKILL)
        wait_for(lambda: not alive(worker), 5)
    with Daemon(tmp_path) as daemon:
        wait_for(lambda: (tmp_path / "lock").read_text().strip() == str(daemon.process.pid))
        daemon.ready().until_phase("training")
        assert daemon.terminate()[0] == 0


def test_health_checks_and_metrics_answer_head_as_get_without_a_body(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        for path in ("/livez", "/readyz", "/metrics"):
            got, head = daemon.http.get(path), daemon.http.head(path)
            assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
            assert head.headers["content-type"] == got.headers["content-type"]
            assert int(head.headers["content-length"]) > 0
        with httpx.Client(base_url=daemon.http.base_url, trust_env=False) as somebody:
            assert somebody.head("/api/v1/status").status_code == 401
        assert daemon.terminate()[0] == 0


def test_supervisor_uses_little_memory_and_keeps_its_token_private(tmp_path: Path) -> None:
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


def inner_steps(daemon: Daemon) -> float:
    found = re.search(r"^diloco_inner_steps_total (\S+)", daemon.http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_api_serves_the_metrics_logs_and_round_records_of_the_worker(tmp_path: Path) -> None:
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


def test_killed_worker_is_replaced_and_counters_continue_after_restarts(tmp_path: Path) -> None:
    with Daemon(tmp_path, **QUICK) as daemon:
        daemon.ready().until_phase("training")
        first = daemon.worker_pid()
        wait_for(lambda: inner_steps(daemon) >= 5)
        os.kill(first, signal.SIGKILL)
        second = daemon.worker_pid(other_than=first)
        daemon.until_phase("training")
        assert not alive(first)
        assert alive(second)
        errors = [r["message"] for r in daemon.http.get("/api/v1/logs?level=error").json()["records"]]
        assert any("SIGKILL" in message and "memory" in message for message in errors)
        before = inner_steps(daemon)
        wait_for(lambda: inner_steps(daemon) > before >= 5)
        before = inner_steps(daemon)
        assert daemon.terminate()[0] == 0
    stored = json.loads((tmp_path / "totals.json").read_text())["counters"]["inner_steps"]
    assert stored >= before
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        wait_for(lambda: inner_steps(daemon) > stored)


def test_no_counter_falls_if_the_whole_node_is_killed_after_a_scrape(tmp_path: Path) -> None:
    """Prometheus takes a counter that falls for one that began again at zero, and counts all of it once more."""
    with Daemon(tmp_path) as daemon:
        daemon.ready()
        wait_for(lambda: inner_steps(daemon) >= 50)
        before = totals(daemon)
        daemon.process.kill()
    with Daemon(tmp_path) as daemon:
        after = totals(daemon.ready())
    assert before["diloco_inner_steps_total"] >= 50
    assert {name: total for name, total in before.items() if after[name] < total} == {}


def totals(daemon: Daemon) -> dict[str, float]:
    """The counters that continue after a restart."""
    lines = re.findall(r"^(diloco_\w+_total\S*) (\S+)$", daemon.http.get("/metrics").text, re.MULTILINE)
    anew = ("diloco_log_messages_total", "diloco_worker_restarts_total", "diloco_process_cpu_seconds_total")
    return {name: float(total) for name, total in lines if not name.startswith(anew)}


@pytest.mark.parametrize(
    ("backoff_s", "beginning"),
    [(QUICK["backoff_s"], "The worker crashed 5 times in a row ("), ([], "The worker crashed (")],
)
def test_node_whose_worker_crashes_too_often_stays_in_error_until_resume(
    tmp_path: Path, backoff_s: list[float], beginning: str
) -> None:
    with Daemon(tmp_path, "crash", backoff_s=backoff_s) as daemon:
        status = daemon.ready().until_phase("error", "worker_crashes")
        assert status["reason"].startswith(beginning)
        assert not [one for one in status["notices"] if one["code"] == "worker_crashed"], "the reason says it"
        assert "exit status 3" in status["reason"] and "out of cheese" in status["reason"]
        assert not status["final"]
        assert (daemon.code("/livez"), daemon.code("/readyz")) == (200, 503)
        assert daemon.act("pause").status_code == 409
        assert daemon.act("drain").status_code == 409
        assert daemon.act("resume").json() == {"phase": "training"}
        daemon.until_phase("error", "worker_crashes")
        assert daemon.act("leave").status_code == 202
        assert daemon.end()[0] == 0


def test_owner_is_warned_of_crashes_until_the_worker_has_run_for_a_while(tmp_path: Path) -> None:
    def warnings() -> list[str]:
        return [one["text"] for one in daemon.status()["notices"] if one["code"] == "worker_crashed"]

    with Daemon(tmp_path, healthy_s=2.0, **QUICK) as daemon:
        daemon.ready().until_phase("training")
        assert warnings() == []
        worker = daemon.worker_pid()
        os.kill(worker, signal.SIGKILL)
        (text,) = wait_for(warnings)
        assert text.startswith("The worker crashed (") and "SIGKILL" in text
        second = daemon.worker_pid(other_than=worker)
        os.kill(second, signal.SIGKILL)
        wait_for(lambda: "crashed 2 times in a row" in warnings()[0])
        daemon.worker_pid(other_than=second)
        wait_for(lambda: not warnings())
        assert daemon.status()["phase"] == "training"


def test_node_that_has_trained_waits_for_the_memory_that_a_worker_needs(tmp_path: Path) -> None:
    data, memory = tmp_path / "data", tmp_path / "data.memory"
    memory.write_text("1000000")
    with Daemon(data) as daemon:
        code, out, _ = daemon.end()
        assert (code, out.splitlines()[-1]) == (3, "error memory_limit")
    (data / "checkpoints" / "round--1").mkdir(parents=True)
    with Daemon(data) as daemon:
        assert daemon.end()[0] == 3, "the initial parameters are no proof that the run fits"
    (data / "checkpoints" / "round-0").mkdir()
    with Daemon(data, memory_pauses_s=[0.05, 0.1]) as daemon:
        reason = daemon.ready().until_phase("starting", "memory_limit")["reason"]
        assert "0.001 GB are free: raise the memory limit" in reason and reason.endswith("The node tries again.")
        memory.unlink()
        daemon.until_phase("training")
        assert daemon.terminate()[0] == 0
    memory.write_text("1000000")
    with Daemon(data) as daemon:
        daemon.ready().until_phase("starting", "memory_limit")
        assert daemon.terminate()[0] == 0, "the wait of five seconds ends at once"


def test_invalid_message_from_the_worker_counts_as_a_crash(tmp_path: Path) -> None:
    with Daemon(tmp_path, "rubbish", backoff_s=[]) as daemon:
        assert "not a valid message" in daemon.ready().until_phase("error", "worker_crashes")["reason"]


def test_worker_that_sends_no_heartbeat_counts_as_crashed(tmp_path: Path) -> None:
    with Daemon(tmp_path, "silent", grace_s=0.6, start_s=0.0, hung_s=0.6, healthy_s=0.5, **QUICK) as daemon:
        reason = daemon.ready().until_phase("error", "worker_crashes")["reason"]
        assert "crashed 5 times in a row" in reason and "no heartbeat" in reason


def test_worker_that_computes_before_its_first_heartbeat_is_not_killed(tmp_path: Path) -> None:
    """Such as one that imports its modules on a slow machine."""
    with Daemon(tmp_path, "slow:5", grace_s=1.0, hung_s=2.5, **QUICK) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.status()["notices"] == []
        assert "is killed" not in daemon.terminate()[2]


@pytest.mark.parametrize(("behaviour", "start_s"), [("asleep", 600.0), ("slow:300", 1.5)])
def test_worker_that_is_idle_or_takes_too_long_before_its_first_heartbeat_is_killed(
    tmp_path: Path, behaviour: str, start_s: float
) -> None:
    with Daemon(tmp_path, behaviour, grace_s=0.5, hung_s=1.0, start_s=start_s, backoff_s=[]) as daemon:
        assert "no heartbeat" in daemon.ready().until_phase("error", "worker_crashes")["reason"]


def test_livez_fails_while_the_worker_hangs_and_the_worker_is_replaced(tmp_path: Path) -> None:
    with Daemon(tmp_path, grace_s=1.0, stale_s=0.7, hung_s=2.5, **QUICK) as daemon:
        daemon.ready().until_phase("training")
        time.sleep(1.0)
        wait_for(lambda: daemon.code("/livez") == 200, 5)
        worker = daemon.worker_pid()
        os.kill(worker, signal.SIGSTOP)
        wait_for(lambda: daemon.code("/livez") == 503, 5)
        assert daemon.code("/readyz") == 503
        daemon.worker_pid(other_than=worker)
        wait_for(lambda: daemon.code("/livez") == 200, 5)
        assert not alive(worker)


def test_node_that_was_frozen_for_a_while_keeps_its_worker(tmp_path: Path) -> None:
    """Both processes stop while the clock continues, as with `docker pause`."""
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
        # A worker that hangs after the freeze is still replaced.
        os.kill(worker, signal.SIGSTOP)
        daemon.worker_pid(other_than=worker)


@pytest.mark.parametrize("how", ["crash", "leave"])
def test_child_processes_of_the_worker_end_with_the_worker(tmp_path: Path, how: str) -> None:
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
        wait_for(lambda: not alive(grandchild), 10)  # SIGKILL may take effect after `kill` returns.


PUBLIC = {"/public": 307, "/public/": 200, "/public/run.json": 200, "/public/public.css": 200}
"""The routes of the public page and their codes."""


def public_codes(daemon: Daemon) -> dict[str, int]:
    """What somebody without a token gets."""
    with httpx.Client(base_url=daemon.http.base_url, timeout=5, trust_env=False) as somebody:
        return {path: somebody.get(path).status_code for path in PUBLIC}


def public_run(daemon: Daemon) -> dict[str, Any]:
    with httpx.Client(base_url=daemon.http.base_url, timeout=5, trust_env=False) as somebody:
        return dict(somebody.get("/public/run.json").json())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_public_page_is_served_while_the_worker_is_dead_or_hangs(tmp_path: Path, how: signal.Signals) -> None:
    Path(f"{tmp_path}.config").write_text(json.dumps({"api": {"public": True}}))
    # A dead worker is not replaced during this test.
    with Daemon(tmp_path, backoff_s=[60.0], grace_s=1.0, stale_s=0.7, hung_s=60.0) as daemon:
        daemon.ready().until_phase("training")
        wait_for(lambda: public_run(daemon)["round"] >= 3)
        worker = daemon.worker_pid()
        os.kill(worker, how)
        wait_for(lambda: not alive(worker) if how == signal.SIGKILL else daemon.code("/livez") == 503, 10)
        assert public_codes(daemon) == PUBLIC
        run = wait_for(lambda: (now := public_run(daemon))["state"] == "unknown" and now, 10)
        assert run["round"] >= 3, "the page keeps what the node knew"
        assert run == public_run(daemon) | {"at": run["at"]}, "nothing changes without a worker"
        assert public_codes(daemon) == PUBLIC
        assert how == signal.SIGSTOP or not alive(worker)


def test_public_page_is_served_by_a_node_whose_worker_cannot_start(tmp_path: Path) -> None:
    Path(f"{tmp_path}.config").write_text(json.dumps({"api": {"public": True}}))
    with Daemon(tmp_path, "crash", **QUICK) as daemon:
        daemon.ready()
        assert public_codes(daemon) == PUBLIC, "before the last try"
        daemon.until_phase("error", "worker_crashes")
        time.sleep(FRESH_S)
        assert public_codes(daemon) == PUBLIC
        run = public_run(daemon)
        assert (run["state"], run["round"], run["rounds"]) == ("unknown", -1, [])
        assert daemon.act("leave").status_code == 202
        assert daemon.end()[0] == 0


def test_failed_background_task_ends_the_node(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    Path(f"{folder}.config").write_text('{"schedule": {"on_battery": "pause"}}')
    with Daemon(folder) as daemon:
        daemon.ready().until_phase("training")
        worker = daemon.worker_pid()
        Path(f"{folder}.probes").write_text("no JSON")
        code, _, err = daemon.end()
        assert code != 0 and "JSONDecodeError" in err
        wait_for(lambda: not Path(f"/proc/{worker}").exists())


def test_stop_signal_right_after_a_worker_crash_ends_the_node(tmp_path: Path) -> None:
    """After a crash the supervisor reads a file about the GPU's power limit. A pipe in its place delays the read."""
    pipe = tmp_path / "gpu-power.json"
    with Daemon(tmp_path, "crash", backoff_s=[]) as daemon:
        daemon.ready().until_phase("error", "worker_crashes")
        os.mkfifo(pipe)
        assert daemon.act("resume").status_code == 202

        def open_for_reader() -> int | None:
            """The writing end of the pipe, or None while nothing reads from it."""
            try:
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                return None

        writer = wait_for(open_for_reader)
        daemon.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        pipe.unlink()
        os.close(writer)
        assert daemon.end()[0] == 0


def test_second_node_on_a_data_folder_is_told_which_process_holds_it(tmp_path: Path) -> None:
    with Daemon(tmp_path) as one, Daemon(tmp_path) as other:
        wait_for(lambda: one.process.poll() is not None or other.process.poll() is not None)
        winner, loser = (one, other) if one.process.poll() is None else (other, one)
        code, _, err = loser.end()
        assert code == 2
        assert f"process {winner.process.pid}" in err
        assert "--data-dir" in err
        winner.ready().until_phase("training")


def test_unusable_port_data_folder_and_host_are_refused(tmp_path: Path) -> None:
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

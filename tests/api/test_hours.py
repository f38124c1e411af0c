"""Training hours with the real supervisor, a fake worker process and a clock that the test sets."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.api.daemon import Daemon, alive, wait_for

HOURS = {"schedule": {"timezone": "UTC", "active": ["mon-fri 22:00-08:00"]}}
MONDAY = datetime(2026, 11, 16, tzinfo=UTC)


class Environment:
    """Sets the configuration, the clock and the probes that the supervisor of a data folder reads."""

    def __init__(self, folder: Path, config: object = HOURS) -> None:
        self.folder = folder / "data"
        self._write("config", config)

    def _write(self, name: str, value: object) -> None:
        file = Path(f"{self.folder}.{name}")
        new = file.with_suffix(".new")
        new.write_text(json.dumps(value))
        new.replace(file)

    def set_clock(self, hour: float) -> None:
        """Set the clock. `hour` counts from Monday, 0:00."""
        self._write("clock", (MONDAY + timedelta(hours=hour)).timestamp())

    def set_probes(self, **values: object) -> None:
        self._write("probes", values)


def errors(daemon: Daemon) -> list[str]:
    return [r["message"] for r in daemon.http.get("/api/v1/logs?level=error").json()["records"]]


def test_node_trains_inside_its_active_hours_and_frees_the_device_outside_them(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.set_clock(12)
    with Daemon(environment.folder) as daemon:
        status = daemon.ready().until_phase("paused", "scheduled")
        assert status["reason"] == "The node is outside of its hours until Mon 22:00."
        assert status["pause"] == {"by": "schedule", "until": "2026-11-16T22:00:00Z", "after_round": None}
        assert status["schedule_next"] == "2026-11-16T22:00:00Z"
        assert (daemon.code("/livez"), daemon.code("/readyz")) == (200, 200)
        environment.set_clock(22)
        status = daemon.until_phase("training", "train")
        assert (status["pause"]["by"], status["schedule_next"]) == ("", "2026-11-17T08:00:00Z")
        trainer = daemon.worker_pid()
        environment.set_clock(32)
        daemon.until_phase("paused", "scheduled")
        assert not alive(trainer)
        # Repeated stops by the schedule do not count as crashes.
        for day in range(1, 7):
            environment.set_clock(24 * (day % 4) + 23)
            daemon.until_phase("training", "train")
            environment.set_clock(24 * (day % 4) + 33)
            daemon.until_phase("paused", "scheduled")
        assert errors(daemon) == []
        assert daemon.act("leave").status_code == 202
        assert daemon.end()[0] == 0


def test_pause_and_resume_by_the_owner_override_the_active_hours_after_restarts(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.set_clock(12)
    with Daemon(environment.folder) as daemon:
        daemon.ready().until_phase("paused", "scheduled")
        assert daemon.act("resume").status_code == 202
        daemon.until_phase("training", "train")
        assert daemon.terminate()[0] == 0
    environment.set_clock(13)
    with Daemon(environment.folder) as daemon:
        daemon.ready().until_phase("training", "train")
        environment.set_clock(23)
        wait_for(lambda: not (environment.folder / "pause.json").exists())
        # If the owner's pause ends outside of the active hours, the schedule continues the pause.
        daemon.act("pause", {"for_s": 12 * 3600})
        status = daemon.until_phase("paused", "paused")
        assert status["pause"] == {"by": "owner", "until": "2026-11-17T11:00:00Z", "after_round": None}
        assert daemon.terminate()[0] == 0
    environment.set_clock(24 + 10.9)
    with Daemon(environment.folder) as daemon:
        daemon.ready().until_phase("paused", "paused")
        worker = daemon.worker_pid()
        environment.set_clock(24 + 11)
        daemon.until_phase("paused", "scheduled")
        assert alive(worker), "a continued pause keeps its worker"
        environment.set_clock(24 + 22)
        daemon.until_phase("training", "train")
        # The node is not running while its active hours begin.
        daemon.act("pause", {"for_s": 3600})
        daemon.until_phase("paused", "paused")
        assert daemon.terminate()[0] == 0
    environment.set_clock(48 + 23)
    with Daemon(environment.folder) as daemon:
        daemon.ready().until_phase("training", "train")


def test_active_hours_set_on_a_running_node_apply_at_once(tmp_path: Path) -> None:
    environment = Environment(tmp_path, {})
    environment.set_clock(12)
    with Daemon(environment.folder) as daemon:
        assert daemon.ready().until_phase("training")["schedule_next"] is None
        answer = daemon.http.patch("/api/v1/config", json=HOURS)
        assert answer.status_code == 200, answer.text
        daemon.until_phase("paused", "scheduled")
        assert daemon.http.patch("/api/v1/config", json={"schedule": {"active": None}}).status_code == 200
        daemon.until_phase("training", "train")


def test_node_pauses_on_battery_and_while_its_user_is_active(tmp_path: Path) -> None:
    environment = Environment(tmp_path, {"schedule": {"user_active": "pause", "user_idle_s": 60}})
    environment.set_clock(12)
    environment.set_probes(battery=True)
    with Daemon(environment.folder) as daemon:
        status = daemon.ready().until_phase("paused", "on_battery")
        assert status["pause"]["by"] == "battery"
        environment.set_probes(battery=False, idle_s=100)
        hour = 12.0

        def trains() -> bool:
            """Whether the node trains. Every look moves the clock by six minutes, because the wait for steady mains
            power begins at the hour at which the node reads the sensors, which may be after any single move."""
            nonlocal hour
            hour += 0.1
            environment.set_clock(hour)
            status = daemon.status()
            return (status["phase"], status["code"]) == ("training", "train")

        wait_for(trains)
        environment.set_probes(battery=False, idle_s=1)
        daemon.until_phase("paused", "user_active")
        daemon.act("resume")
        daemon.until_phase("training", "train")
        assert errors(daemon) == []


def test_drain_and_leave_override_the_active_hours(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.set_clock(23)
    with Daemon(environment.folder, "deaf", stop_s=20.0) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.act("drain").status_code == 202
        environment.set_clock(33)
        wait_for(lambda: daemon.status()["pause"]["by"] == "schedule")
        assert daemon.status()["phase"] == "draining"
        assert daemon.act("leave").status_code == 202
        os.kill(daemon.worker_pid(), 9)
        assert daemon.end()[0] == 0


def test_node_leaves_the_swarm_when_the_months_traffic_limit_is_reached_until_the_next_month(tmp_path: Path) -> None:
    environment = Environment(tmp_path, {"schedule": {"timezone": "UTC"}})
    environment.set_clock(12)
    with Daemon(environment.folder) as daemon:
        daemon.ready().until_phase("training", "train")
        worker = daemon.worker_pid()
        wait_for(lambda: daemon.status()["month"]["sent_bytes"] >= 2_000_000)
        assert daemon.http.patch("/api/v1/config", json={"limits": {"month_gb": 0.002}}).status_code == 200
        status = daemon.until_phase("paused", "traffic_limit")
        assert not alive(worker)
        assert status["pause"] == {"by": "traffic", "until": "2026-12-01T00:00:00Z", "after_round": None}
        assert "not in the swarm until 0:00 on 1 December 2026 (UTC)" in status["reason"]
        assert (status["month"]["month"], status["month"]["limit_bytes"]) == ("2026-11", 2_000_000)
        assert daemon.http.get("/api/v1/swarm").json()["peers"] == []
        assert (daemon.code("/livez"), daemon.code("/readyz")) == (200, 200)
        sent = status["month"]["sent_bytes"]
        time.sleep(1)
        assert daemon.status()["month"]["sent_bytes"] == sent, "no worker runs, so nothing is sent"
        assert daemon.act("resume").status_code == 202
        daemon.until_phase("training", "train")
        daemon.terminate()
    with Daemon(environment.folder) as daemon:
        daemon.ready().until_phase("paused", "traffic_limit")
        assert daemon.status()["node"]["peer_id"] == "", "no worker was started"
        environment.set_clock(24 * 15)
        status = daemon.until_phase("training", "train")
        assert status["month"]["month"] == "2026-12"
        assert errors(daemon) == []

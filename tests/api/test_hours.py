"""A node that keeps its hours: the real supervisor, a worker that is a real process, and a clock that the test sets."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.api.daemon import Daemon, alive, wait_for

HOURS = {"schedule": {"timezone": "UTC", "active": ["mon-fri 22:00-08:00"]}}
MONDAY = datetime(2026, 11, 16, tzinfo=UTC)
PROBED_S = 0.2
"""So often `node_main` looks."""


class World:
    """What the supervisor of a data folder sees."""

    def __init__(self, folder: Path, config: object = HOURS) -> None:
        self.folder = folder / "data"
        self._put("config", config)

    def _put(self, name: str, value: object) -> None:
        file = Path(f"{self.folder}.{name}")
        new = file.with_suffix(".new")
        new.write_text(json.dumps(value))
        new.replace(file)

    def at(self, hour: float) -> None:
        """Hours since Monday, 0:00."""
        self._put("clock", (MONDAY + timedelta(hours=hour)).timestamp())

    def probes(self, **values: object) -> None:
        self._put("probes", values)


def errors(daemon: Daemon) -> list[str]:
    return [r["message"] for r in daemon.http.get("/api/v1/logs?level=error").json()["records"]]


def test_the_hours_turn_and_the_device_is_free_outside_of_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.at(12)
    with Daemon(world.folder) as daemon:
        status = daemon.ready().until_phase("paused", "scheduled")
        assert status["reason"] == "Outside of its hours until Mon 22:00."
        assert status["pause"] == {"by": "schedule", "until": "2026-11-16T22:00:00Z", "after_round": None}
        assert status["schedule_next"] == "2026-11-16T22:00:00Z"
        assert (daemon.code("/livez"), daemon.code("/readyz")) == (200, 200)
        world.at(22)
        status = daemon.until_phase("training", "train")
        assert (status["pause"]["by"], status["schedule_next"]) == ("", "2026-11-17T08:00:00Z")
        trainer = daemon.worker_pid()
        world.at(32)
        daemon.until_phase("paused", "scheduled")
        assert not alive(trainer)
        # Back and forth, as often as it likes: no crash is counted, and nothing gets stuck.
        for day in range(1, 7):
            world.at(24 * (day % 4) + 23)
            daemon.until_phase("training", "train")
            world.at(24 * (day % 4) + 33)
            daemon.until_phase("paused", "scheduled")
        assert errors(daemon) == []
        assert daemon.act("leave").status_code == 202
        assert daemon.end()[0] == 0


def test_the_owner_goes_before_the_hours_over_restarts(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.at(12)
    with Daemon(world.folder) as daemon:
        daemon.ready().until_phase("paused", "scheduled")
        assert daemon.act("resume").status_code == 202
        daemon.until_phase("training", "train")
        assert daemon.terminate()[0] == 0
    world.at(13)
    with Daemon(world.folder) as daemon:
        daemon.ready().until_phase("training", "train")
        world.at(23)
        wait_for(lambda: not (world.folder / "pause.json").exists())
        # In the hours, a pause that ends outside of them goes on as theirs.
        daemon.act("pause", {"for_s": 12 * 3600})
        status = daemon.until_phase("paused", "paused")
        assert status["pause"] == {"by": "owner", "until": "2026-11-17T11:00:00Z", "after_round": None}
        assert daemon.terminate()[0] == 0
    world.at(24 + 10.9)
    with Daemon(world.folder) as daemon:
        daemon.ready().until_phase("paused", "paused")
        worker = daemon.worker_pid()
        world.at(24 + 11)
        daemon.until_phase("paused", "scheduled")
        assert alive(worker), "a pause that goes on needs no other worker"
        world.at(24 + 22)
        daemon.until_phase("training", "train")
        # Away over the turn of the hours.
        daemon.act("pause", {"for_s": 3600})
        daemon.until_phase("paused", "paused")
        assert daemon.terminate()[0] == 0
    world.at(48 + 23)
    with Daemon(world.folder) as daemon:
        daemon.ready().until_phase("training", "train")


def test_hours_that_are_set_while_it_runs_hold_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, {})
    world.at(12)
    with Daemon(world.folder) as daemon:
        assert daemon.ready().until_phase("training")["schedule_next"] is None
        answer = daemon.http.patch("/api/v1/config", json=HOURS)
        assert answer.status_code == 200, answer.text
        daemon.until_phase("paused", "scheduled")
        assert daemon.http.patch("/api/v1/config", json={"schedule": {"active": None}}).status_code == 200
        daemon.until_phase("training", "train")


def test_battery_and_user(tmp_path: Path) -> None:
    world = World(tmp_path, {"schedule": {"user_active": "pause", "user_idle_s": 60}})
    world.at(12)
    world.probes(battery=True)
    with Daemon(world.folder) as daemon:
        status = daemon.ready().until_phase("paused", "on_battery")
        assert status["pause"]["by"] == "battery"
        world.probes(battery=False, idle_s=100)
        time.sleep(3 * PROBED_S)  # What was read just before is weighed before the clock moves.
        world.at(12.5)
        daemon.until_phase("training", "train")
        world.probes(battery=False, idle_s=1)
        daemon.until_phase("paused", "user_active")
        daemon.act("resume")
        daemon.until_phase("training", "train")
        assert errors(daemon) == []


def test_drain_and_leave_go_before_the_hours(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.at(23)
    with Daemon(world.folder, "deaf", stop_s=20.0) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.act("drain").status_code == 202
        world.at(33)
        wait_for(lambda: daemon.status()["pause"]["by"] == "schedule")
        assert daemon.status()["phase"] == "draining"
        assert daemon.act("leave").status_code == 202
        os.kill(daemon.worker_pid(), 9)
        assert daemon.end()[0] == 0

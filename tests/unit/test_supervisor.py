"""What the owner can say to a node: pause, resume, drain, leave; with the scripted worker as a real process."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.api.daemon import Daemon, alive, wait_for


def test_pause_frees_the_worker_and_resume_brings_it_back(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        trainer = daemon.worker_pid()
        assert daemon.act("pause").status_code == 202
        assert daemon.act("pause").json() == {"phase": "paused"}
        daemon.until_phase("paused", "paused")
        assert not alive(trainer)
        relay = daemon.worker_pid(other_than=trainer)
        assert (daemon.code("/livez"), daemon.code("/readyz")) == (200, 200)
        assert daemon.act("resume").json() == {"phase": "training"}
        daemon.until_phase("training", "train")
        assert not alive(relay)
        assert daemon.act("resume").status_code == 202
        assert not (tmp_path / "pause.json").exists()


def test_pause_for_a_while_ends_by_itself(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("pause", {"for_s": 2})
        status = daemon.until_phase("paused", "paused")
        assert " until " in status["reason"] and " on " in status["reason"]
        daemon.until_phase("training")


def test_pause_until_outlives_a_restart(tmp_path: Path) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.act("pause", {"until": (until - timedelta(hours=2)).isoformat()}).status_code == 409
        assert daemon.act("pause", {"until": until.isoformat()}).status_code == 202
        daemon.until_phase("paused", "paused")
        assert daemon.terminate()[0] == 0
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("paused", "paused")
        code, out, _, _ = daemon.terminate()
        assert code == 0
        assert "training" not in out
    past = {"until": (until - timedelta(hours=2)).isoformat()}
    (tmp_path / "pause.json").write_text(json.dumps(past))
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert not (tmp_path / "pause.json").exists()


def test_pause_after_a_round(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        after = daemon.status()["run"]["round"] + 10
        assert daemon.act("pause", {"after_round": after}).json() == {"phase": "paused"}
        assert daemon.status()["phase"] == "training"
        daemon.until_phase("paused", "paused")
        rounds = daemon.http.get("/api/v1/rounds").json()["rounds"]
        assert after <= rounds[0]["round"] <= after + 3


def test_resume_takes_back_a_pause_to_come(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        after = daemon.status()["run"]["round"] + 6
        daemon.act("pause", {"after_round": after})
        daemon.act("resume")
        wait_for(lambda: daemon.status()["run"]["round"] > after + 3)
        assert daemon.status()["phase"] == "training"


def test_pause_is_reached_though_the_worker_is_deaf(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", stop_s=0.5) as daemon:
        daemon.ready().until_phase("training")
        trainer = daemon.worker_pid()
        daemon.act("pause")
        daemon.until_phase("paused", "paused")
        assert not alive(trainer)
        # A kill that the owner asked for is no crash.
        assert daemon.http.get("/api/v1/logs?level=error").json()["records"] == []


@pytest.mark.parametrize(("action", "phase"), [("drain", "draining"), ("leave", "leaving")])
def test_stops_end_with_code_0(tmp_path: Path, action: str, phase: str) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.act(action).json() == {"phase": phase}
        code, out, _ = daemon.end()
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()][-1] == "stopped"
        assert f"{phase} {phase}" in out


def test_no_way_back_from_leave_and_drain(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", stop_s=3.0) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.act("drain").status_code == 202
        assert [daemon.act(a).status_code for a in ("drain", "pause", "resume")] == [202, 409, 409]
        # A drain may last as long as the round does: no deadline but the heartbeat's.
        time.sleep(3.5)
        assert daemon.status()["phase"] == "draining"
        assert daemon.act("leave").json() == {"phase": "leaving"}
        refused = daemon.act("pause")
        assert refused.status_code == 409
        assert refused.headers["content-type"] == "application/problem+json"
        assert [daemon.act(a).status_code for a in ("leave", "drain", "resume")] == [202, 409, 409]
        assert daemon.end()[0] == 0

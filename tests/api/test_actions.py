"""The owner's actions pause, resume, drain and leave. The supervisor and a fake worker run as real processes."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from tests.api.daemon import Daemon, alive, wait_for


def test_pause_ends_the_training_worker_and_resume_starts_a_new_one(tmp_path: Path) -> None:
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


def test_pause_for_some_seconds_ends_by_itself(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        daemon.act("pause", {"for_s": 2})
        reason = daemon.until_phase("paused", "paused")["reason"]
        assert " until " in reason and " on " in reason
        daemon.until_phase("training")


def test_pause_until_a_given_time_survives_a_restart(tmp_path: Path) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.act("pause", {"until": until.isoformat()}).status_code == 202
        daemon.until_phase("paused", "paused")
        assert daemon.terminate()[0] == 0
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("paused", "paused")
        code, out, _, _ = daemon.terminate()
        assert code == 0
        assert "training" not in out
    (tmp_path / "pause.json").write_text(json.dumps({"until": (until - timedelta(hours=2)).isoformat()}))
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert not (tmp_path / "pause.json").exists()


def test_pause_until_a_time_out_of_range_is_refused(tmp_path: Path) -> None:
    moments = {
        "9999-12-31T23:59:59-12:00": 422,
        "9999-12-31T23:59:59Z": 422,
        "0001-01-01T00:00:00+12:00": 422,
        "2600-01-01T00:00:00Z": 409,
        "2000-01-01T00:00:00Z": 409,
    }
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert {until: daemon.act("pause", {"until": until}).status_code for until in moments} == moments
        assert daemon.status()["phase"] == "training" and not (tmp_path / "pause.json").exists()
        assert daemon.terminate()[0] == 0
    (tmp_path / "pause.json").write_text('{"until": "9999-12-31T23:59:59-12:00"}')
    with Daemon(tmp_path) as daemon:
        assert "`resume`" in daemon.ready().until_phase("paused")["reason"], "a damaged file pauses until resume"
        assert daemon.terminate()[0] == 0


def test_pause_after_a_round_waits_for_that_round(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        after = daemon.status()["run"]["round"] + 10
        assert daemon.act("pause", {"after_round": after}).json() == {"phase": "paused"}
        assert daemon.status()["phase"] == "training"
        daemon.until_phase("paused", "paused")
        rounds = daemon.http.get("/api/v1/rounds").json()["rounds"]
        assert after <= rounds[0]["round"] <= after + 3


def test_failed_attempt_at_a_round_does_not_trigger_a_pause_after_that_round(tmp_path: Path) -> None:
    with Daemon(tmp_path, "attempts") as daemon:
        after = daemon.ready().until_phase("training")["run"]["round"] + 5
        assert daemon.act("pause", {"after_round": after}).status_code == 202
        daemon.until_phase("paused")
        records = daemon.http.get("/api/v1/rounds?limit=100").json()["rounds"]
        assert max(one["round"] for one in records if one["outcome"] == "complete") >= after


def test_resume_cancels_a_pending_pause(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        after = daemon.status()["run"]["round"] + 6
        daemon.act("pause", {"after_round": after})
        daemon.act("resume")
        wait_for(lambda: daemon.status()["run"]["round"] > after + 3)
        assert daemon.status()["phase"] == "training"


def test_pause_kills_an_unresponsive_worker_and_reports_the_lost_work_until_resume(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", stop_s=0.5) as daemon:
        daemon.ready().until_phase("training")
        trainer = daemon.worker_pid()
        daemon.act("pause")
        reason = daemon.until_phase("paused", "paused")["reason"]
        assert "since its last checkpoint is lost" in reason and "did not end within" in reason
        assert not alive(trainer)
        # A worker that is killed after an order to stop does not count as crashed.
        assert daemon.http.get("/api/v1/logs?level=error").json()["records"] == []
        daemon.worker_pid(other_than=trainer)
        daemon.act("pause", {"for_s": 3600})
        wait_for(lambda: " until " in daemon.status()["reason"])
        assert "since its last checkpoint is lost" in daemon.status()["reason"]
        daemon.act("resume")
        assert "lost" not in daemon.until_phase("training")["reason"]


def test_pause_of_a_worker_that_has_just_started_is_no_warning(tmp_path: Path) -> None:
    with Daemon(tmp_path, "asleep") as daemon:
        daemon.ready()
        wait_for(lambda: psutil.Process(daemon.process.pid).children())
        daemon.act("pause")
        assert "lost" not in daemon.until_phase("paused", "paused")["reason"]
        assert "has nothing to save" in daemon.http.get("/api/v1/logs").text
        assert daemon.http.get("/api/v1/logs?level=warning").json()["records"] == []


@pytest.mark.parametrize(("action", "phase"), [("drain", "draining"), ("leave", "leaving")])
def test_drain_and_leave_end_the_node_with_exit_code_0(tmp_path: Path, action: str, phase: str) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.act(action).json() == {"phase": phase}
        code, out, _ = daemon.end()
        assert code == 0
        assert out.splitlines()[-1].split()[0] == "stopped"
        assert f"{phase} {phase}" in out


@pytest.mark.parametrize(
    ("behaviour", "phase", "how"), [("work", "training", "drain"), ("connect", "connecting", "leave")]
)
def test_drain_waits_for_a_round_only_if_the_node_is_in_one(
    tmp_path: Path, behaviour: str, phase: str, how: str
) -> None:
    with Daemon(tmp_path, behaviour) as daemon:
        daemon.ready().until_phase(phase)
        assert daemon.act("drain").json() == {"phase": "draining"}
        assert daemon.end()[0] == 0
    logged = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert f"asked to {how}" in logged


def test_pause_and_resume_are_refused_after_drain_or_leave(tmp_path: Path) -> None:
    with Daemon(tmp_path, "deaf", stop_s=3.0) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.act("drain").status_code == 202
        assert [daemon.act(a).status_code for a in ("drain", "pause", "resume")] == [202, 409, 409]
        # A drain has no deadline, because the round that it finishes may be long.
        time.sleep(3.5)
        assert daemon.status()["phase"] == "draining"
        assert daemon.act("leave").json() == {"phase": "leaving"}
        refused = daemon.act("pause")
        assert refused.status_code == 409
        assert refused.headers["content-type"] == "application/problem+json"
        assert [daemon.act(a).status_code for a in ("leave", "drain", "resume")] == [202, 409, 409]
        assert daemon.end()[0] == 0


def test_pause_that_cannot_be_stored_still_holds_and_shows_a_notice(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        (tmp_path / "pause.json.new").mkdir()
        assert daemon.act("pause").status_code == 202
        daemon.until_phase("paused")
        notice = wait_for(lambda: [n for n in daemon.status()["notices"] if n["code"] == "not_kept"])[0]
        assert "pause.json could not be written" in notice["text"]
        assert daemon.http.patch("/api/v1/config", json={"limits": {"upload_mbit_s": 9}}).status_code == 200
        (tmp_path / "pause.json.new").rmdir()
        assert daemon.act("resume").status_code == 202
        assert not [n for n in daemon.status()["notices"] if n["code"] == "not_kept"]


def test_setting_that_cannot_be_stored_is_not_changed(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        (tmp_path / "settings.json.new").mkdir()
        answer = daemon.http.patch("/api/v1/config", json={"limits": {"upload_mbit_s": 9}})
        assert answer.status_code == 422 and "settings.json" in answer.text and "nothing has changed" in answer.text
        assert daemon.http.get("/api/v1/config").json()["config"]["limits"]["upload_mbit_s"] == 0


def test_amendment_is_refused_while_there_is_no_worker_to_submit_it(tmp_path: Path) -> None:
    body = {"text": "{}", "signatures": {"ada": "00"}}
    with Daemon(tmp_path, "crash", backoff_s=[60.0]) as daemon:
        daemon.ready().until_phase("starting", "worker_crashed")
        answer = daemon.http.post("/api/v1/amendments", json=body)
        assert answer.status_code == 409 and "submit it again" in answer.json()["detail"]
        assert daemon.terminate()[0] == 0
    with Daemon(tmp_path / "other") as daemon:
        daemon.ready().until_phase("training")
        assert daemon.http.post("/api/v1/amendments", json=body).status_code == 202
        assert daemon.terminate()[0] == 0

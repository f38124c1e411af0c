"""Changes of the configuration over HTTP: valid ones apply and persist, and invalid ones change nothing."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from node.config.loader import known_keys, load
from node.config.overrides import CHANGEABLE
from node.config.weekly_hours import machine_zone
from node.daemon.live_config import LiveConfig
from tests.api.conftest import ClientMaker, FakeNode
from tests.api.daemon import Daemon, wait_for

PATH = "/api/v1/config"


def test_every_setting_that_the_api_can_change_exists_in_the_configuration() -> None:
    assert set(CHANGEABLE) <= set(known_keys())
    fixed = [key for key in CHANGEABLE if key.startswith(("run.", "api.", "swarm."))]
    assert fixed == ["swarm.relay_mbit_s"], "a limit; the others define the node"


def test_patch_changes_the_configuration_and_returns_the_result(client: ClientMaker, fake_node: FakeNode) -> None:
    patch = {"limits": {"upload_mbit_s": 20}, "schedule": {"active": ["sat 10:00-12:00"], "timezone": "Asia/Tokyo"}}
    assert client().get(PATH).json()["timezone"] == machine_zone().key
    response = client().request("PATCH", PATH, json=patch)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["config"]["limits"]["upload_mbit_s"] == 20
    assert answer["changeable"]["limits.upload_mbit_s"] == "now"
    assert answer["changeable"]["devices.micro_batch"] == "restart"
    assert (answer["pending_restart"], answer["timezone"]) == ([], "Asia/Tokyo")
    assert fake_node.config.schedule.active == ("sat 10:00-12:00",)


@pytest.mark.parametrize(
    ("patch", "faults"),
    [
        ({"limits": {"upload_mbit_s": 1}}, {"limits.upload_mbit_s": "less than 2 Mbit/s"}),
        ({"limits": {"upload_mbit_s": "much"}}, {"limits.upload_mbit_s": "number"}),
        ({"limits": {"cpu_threads": True}}, {"limits.cpu_threads": "true or false"}),
        ({"limits": {"disk_gb": 0.001}}, {"limits.disk_gb": "at least 0.023"}),
        ({"limits": {"upload": 1}}, {"limits.upload": "limits.upload_mbit_s"}),
        ({"limits": 5}, {"limits": "section"}),
        ({"limits": None}, {"limits": "section"}),
        ({"api": {"port": 5}}, {"api.port": "cannot be changed"}),
        ({"run": {"inner": {"lr": 1.0}}}, {"run.inner.lr": "cannot be changed"}),
        ({"schedule": {"active": ["mon 9-17"]}}, {"schedule.active": "mon-fri 22:00-08:00"}),
        ({"schedule": {"timezone": "Mars/Base"}}, {"schedule.timezone": "time zone"}),
        ({"log": {"level": "loud"}}, {"log.level": "debug"}),
        ({"devices": {"precision": "int1"}}, {"devices.precision": "fp16"}),
        ({"node": {"name": "x" * 65}}, {"node.name": "64"}),
        ({"limits": {"upload_mbit_s": "x", "cpu_threads": -1}}, {"limits.upload_mbit_s": "", "limits.cpu_threads": ""}),
    ],
)
def test_invalid_patch_of_the_configuration_changes_nothing_and_names_each_fault(
    client: ClientMaker, fake_node: FakeNode, patch: dict[str, Any], faults: dict[str, str]
) -> None:
    before = fake_node.config
    response = client().request("PATCH", PATH, json={"log": {"level": "debug"}, **patch})
    problem = response.json()
    assert (response.status_code, problem["code"]) == (422, "bad_config")
    found = {fault["where"]: fault["message"] for fault in problem["faults"]}
    assert found.keys() == faults.keys()
    assert all(text in found[key] for key, text in faults.items()), found
    assert fake_node.config == before


@pytest.mark.parametrize("body", [[], "x", None, 5])
def test_patch_of_the_configuration_must_be_a_json_object(client: ClientMaker, body: object) -> None:
    assert client().request("PATCH", PATH, json=body).status_code == 422


def test_changed_settings_apply_at_once_and_survive_restarts(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        before = daemon.http.get(PATH).json()
        patch = {"limits": {"upload_mbit_s": 20}, "node": {"name": "renamed"}, "devices": {"micro_batch": 2}}
        answer = daemon.http.patch(PATH, json={**patch, "log": {"level": "debug"}}).json()
        assert answer["pending_restart"] == ["devices.micro_batch"]
        assert answer["origins"]["node.name"] == "settings page"
        status = daemon.status()
        assert (status["limits"]["upload_mbit_s"], status["node"]["name"]) == (20, "renamed")
        adjusted = wait_for(lambda: [message for message in logged(daemon) if "adjust" in message])
        assert json.loads(adjusted[-1].partition(" ")[2])["limits"]["upload_mbit_s"] == 20
        # Pause and resume restart the worker.
        for action, phase in (("pause", "paused"), ("resume", "training")):
            daemon.act(action)
            daemon.until_phase(phase)
            assert daemon.http.get(PATH).json()["pending_restart"] == []
        file = tmp_path / "settings.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert daemon.terminate()[0] == 0
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        found = daemon.http.get(PATH).json()
        assert found["config"]["limits"]["upload_mbit_s"] == 20
        assert found["origins"]["limits.upload_mbit_s"] == "settings page"
        keys = {"limits": {"upload_mbit_s": None}, "node": {"name": None}, "devices": {"micro_batch": None}}
        answer = daemon.http.patch(PATH, json={**keys, "log": {"level": None}}).json()
        assert (answer["config"], answer["origins"]) == (before["config"], before["origins"])
        assert json.loads(file.read_text()) == {}


def logged(daemon: Daemon) -> list[str]:
    return [record["message"] for record in daemon.http.get("/api/v1/logs?limit=2000").json()["records"]]


@pytest.mark.parametrize(
    ("text", "upload_mbit_s"),
    [("{", 0), ("[]", 0), ('{"limits.upload_mbit_s": 7, "limits.cpu_threads": "x", "limits.gone": 1}', 7)],
)
def test_damaged_settings_file_is_set_aside_with_a_warning(tmp_path: Path, text: str, upload_mbit_s: float) -> None:
    (tmp_path / "settings.json").write_text(text)
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.status()["limits"]["upload_mbit_s"] == upload_mbit_s
        assert (tmp_path / "settings.damaged.json").read_text() == text
        (notice,) = daemon.status()["notices"]
        assert notice["code"] == "settings_damaged" and "settings.damaged.json" in notice["text"]
        assert "hours and limits, now have the values of the configuration" in notice["text"]
        assert [line for line in logged(daemon) if "settings.damaged.json" in line]
        assert daemon.http.patch(PATH, json={"limits": {"upload_mbit_s": 9}}).status_code == 200
        assert daemon.status()["notices"] == []
        assert daemon.terminate()[0] == 0
    assert "settings.damaged.json" in (tmp_path / "logs" / "node.log").read_text()


def test_damaged_totals_are_logged_and_traffic_of_a_damaged_month_counts_from_now(tmp_path: Path) -> None:
    for name in ("months.json", "totals.json"):
        (tmp_path / name).write_bytes(b"")  # As after a power cut.
    (tmp_path / "totals.json").chmod(0o666)
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        (notice,) = daemon.status()["notices"]
        assert notice["code"] == "months_damaged" and "months.damaged.json" in notice["text"]
        assert "counted from now on" in notice["text"]
        assert (tmp_path / "months.damaged.json").read_bytes() == b""
        assert daemon.terminate()[0] == 0
    log = (tmp_path / "logs" / "node.log").read_text()
    assert "months.damaged.json" in log and "totals.json cannot be read" in log
    assert f"could write to {tmp_path / 'totals.json'}. Its permissions are repaired." in log


def test_a_setting_that_the_worker_refuses_can_be_reset(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"devices.device": "cuda"}')
    with Daemon(tmp_path, "refuse-cuda") as daemon:
        status = daemon.ready().until_phase("error", "no_gpu")
        assert "changed back" in status["reason"]
        assert daemon.http.patch(PATH, json={"devices": {"device": None}}).status_code == 200
        assert daemon.act("resume").status_code == 202
        daemon.until_phase("training")


def test_node_with_changed_settings_still_ends_with_exit_code_3_if_its_port_is_taken(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"limits.upload_mbit_s": 7}')
    with Daemon(tmp_path, "port-taken") as daemon:
        assert daemon.end()[0] == 3


def test_change_of_the_settings_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's event loop makes the change, and answers all other requests meanwhile."""

    def no_sync(_fd: int) -> None:
        raise AssertionError("fsync")

    monkeypatch.setattr("os.fsync", no_sync)
    loaded = load(file=None, environ={"HOME": str(tmp_path)}, flags=[])
    live = LiveConfig(loaded.config, loaded.origins, tmp_path, lambda *_: None)
    assert live.change({"node": {"name": "x"}}, lambda _config: None) == ("node.name",)
    assert json.loads((tmp_path / "settings.json").read_text()) == {"node.name": "x"}

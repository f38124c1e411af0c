"""The configuration over HTTP: what may change does, what may not is said, and a patch counts whole or not at all."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from node.choices import CHANGEABLE
from node.sources import known_keys
from tests.api.conftest import ClientMaker, StillNode
from tests.api.daemon import Daemon, wait_for

PATH = "/api/v1/config"


def patched(client: ClientMaker, body: Any) -> tuple[int, dict[str, Any]]:
    async def main() -> tuple[int, dict[str, Any]]:
        async with client() as http:
            answer = await http.patch(PATH, json=body)
            return answer.status_code, answer.json()

    return asyncio.run(main())


def test_every_key_that_may_change_is_a_key() -> None:
    assert set(CHANGEABLE) <= set(known_keys())
    fixed = [key for key in CHANGEABLE if key.startswith(("run.", "api.", "swarm."))]
    assert fixed == ["swarm.relay_mbit_s"], "a limit, where the others are what the node is"


def test_a_patch_is_taken_and_answers_as_get_does(client: ClientMaker, still_node: StillNode) -> None:
    code, answer = patched(client, {"limits": {"upload_mbit_s": 20}, "schedule": {"active": ["sat 10:00-12:00"]}})
    assert code == 200, answer
    assert answer["config"]["limits"]["upload_mbit_s"] == 20
    assert answer["changeable"]["limits.upload_mbit_s"] == "now"
    assert answer["changeable"]["devices.micro_batch"] == "restart"
    assert answer["pending_restart"] == []
    assert still_node.config.schedule.active == ("sat 10:00-12:00",)


@pytest.mark.parametrize(
    ("body", "where", "said"),
    [
        ({"limits": {"upload_mbit_s": 1}}, "limits.upload_mbit_s", "less than 2 Mbit/s"),
        ({"limits": {"upload_mbit_s": "much"}}, "limits.upload_mbit_s", "number"),
        ({"limits": {"cpu_threads": True}}, "limits.cpu_threads", "true or false"),
        ({"limits": {"upload": 1}}, "limits.upload", "limits.upload_mbit_s"),
        ({"limits": 5}, "limits", "section"),
        ({"limits": None}, "limits", "section"),
        ({"api": {"port": 5}}, "api.port", "cannot be changed"),
        ({"run": {"inner": {"lr": 1.0}}}, "run.inner.lr", "cannot be changed"),
        ({"schedule": {"active": ["mon 9-17"]}}, "schedule.active", "mon-fri 22:00-08:00"),
        ({"schedule": {"timezone": "Mars/Base"}}, "schedule.timezone", "time zone"),
        ({"log": {"level": "loud"}}, "log.level", "debug"),
        ({"devices": {"precision": "int1"}}, "devices.precision", "fp16"),
        ({"node": {"name": "x" * 65}}, "node.name", "64"),
    ],
)
def test_what_cannot_be_is_said_of_each_key(
    client: ClientMaker, still_node: StillNode, body: dict[str, Any], where: str, said: str
) -> None:
    before = still_node.config
    code, problem = patched(client, {"node": {"name": "fine"}, **body} if "node" not in body else body)
    assert code == 422
    assert problem["code"] == "bad_config"
    (fault,) = problem["faults"]
    assert fault["where"] == where
    assert said in fault["message"]
    assert still_node.config == before, "nothing of it may be taken"


def test_all_faults_at_once_and_no_body_but_an_object(client: ClientMaker) -> None:
    code, problem = patched(client, {"limits": {"upload_mbit_s": "x", "cpu_threads": -1}})
    assert code == 422
    assert [fault["where"] for fault in problem["faults"]] == ["limits.upload_mbit_s", "limits.cpu_threads"]
    for body in ([], "x", None, 5):
        assert patched(client, body)[0] == 422


def test_changes_hold_at_once_and_over_restarts(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        before = daemon.http.get(PATH).json()
        patch = {"limits": {"upload_mbit_s": 20}, "node": {"name": "renamed"}, "devices": {"micro_batch": 2}}
        answer = daemon.http.patch(PATH, json={**patch, "log": {"level": "debug"}}).json()
        assert answer["pending_restart"] == ["devices.micro_batch"]
        assert answer["origins"]["node.name"] == "settings page"
        status = daemon.status()
        assert (status["limits"]["upload_mbit_s"], status["node"]["name"]) == (20, "renamed")
        told = wait_for(lambda: [r for r in logged(daemon) if "adjust" in r])
        assert json.loads(told[-1].partition(" ")[2])["limits"]["upload_mbit_s"] == 20
        # A pause and a resume are a start of the worker.
        daemon.act("pause")
        daemon.until_phase("paused")
        assert daemon.http.get(PATH).json()["pending_restart"] == []
        daemon.act("resume")
        daemon.until_phase("training")
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
        assert answer["config"] == before["config"]
        assert answer["origins"] == before["origins"]
        assert json.loads(file.read_text()) == {}


def logged(daemon: Daemon) -> list[str]:
    return [r["message"] for r in daemon.http.get("/api/v1/logs?limit=2000").json()["records"]]


@pytest.mark.parametrize(
    ("text", "upload"),
    [("{", 0), ("[]", 0), ('{"limits.upload_mbit_s": 7, "limits.cpu_threads": "x", "limits.gone": 1}', 7)],
)
def test_a_damaged_file_is_set_aside_with_a_warning(tmp_path: Path, text: str, upload: float) -> None:
    (tmp_path / "settings.json").write_text(text)
    with Daemon(tmp_path) as daemon:
        daemon.ready().until_phase("training")
        assert daemon.status()["limits"]["upload_mbit_s"] == upload
        assert (tmp_path / "settings.damaged.json").read_text() == text
        assert "settings.damaged.json" in daemon.terminate()[2]


def test_what_was_set_last_and_does_not_work_can_be_set_back(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"devices.device": "cuda"}')
    with Daemon(tmp_path, "refuse-cuda") as daemon:
        status = daemon.ready().until_phase("error", "no_gpu")
        assert "changed back" in status["reason"]
        assert daemon.http.patch(PATH, json={"devices": {"device": None}}).status_code == 200
        assert daemon.act("resume").status_code == 202
        daemon.until_phase("training")


def test_a_taken_port_ends_the_node_whatever_is_set_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"limits.upload_mbit_s": 7}')
    with Daemon(tmp_path, "port-taken") as daemon:
        assert daemon.end()[0] == 3

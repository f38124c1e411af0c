"""Containers as volunteers start them: read-only, without capabilities, as nobody. They train, agree, and come back."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.docker.container import SMALL, THREAD, Container, agree
from tests.docker.engine import Engine
from tests.swarm.harness import PATIENCE, wait_for

HEALTHY_S = 60.0
STOP_S = 15.0
GONE_S = 5.0
WORKER = """
import pathlib
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit() and b"node.worker\\0--fd" in (entry / "cmdline").read_bytes():
        print(entry.name)
"""
pytestmark = pytest.mark.timeout(900)


def worker_of(container: Container) -> int:
    """Its process id, as the container counts."""
    return int(wait_for(lambda: container.execute("python3", "-c", WORKER, check=False).strip(), 60, "a worker"))


def kept(container: Container, before: dict[str, Any], timeout_s: float = 240) -> None:
    """After a restart: the same node, its totals kept, in the rounds again."""
    container.forget()
    status = container.until(
        lambda s: s["phase"] == "training" and s["run"]["round"] > before["run"]["round"],
        timeout_s,
        "back in the rounds",
    )
    assert status["node"]["peer_id"] == before["node"]["peer_id"]
    # A checkpoint is written once a minute; what was trained since then is done again.
    assert status["contribution"]["tokens_total"] >= 0.5 * before["contribution"]["tokens_total"]


# One


def test_it_is_healthy_and_its_commands_answer(alone: Container) -> None:
    began_s = time.monotonic()
    alone.run("run", "--name", "alone", THREAD, *SMALL)
    wait_for(lambda: alone.state()["Health"]["Status"] == "healthy", PATIENCE * HEALTHY_S, "healthy")
    took_s = time.monotonic() - began_s
    print(f"healthy after {took_s:.0f} s")
    assert took_s < HEALTHY_S
    alone.until_round(0)
    assert "Training towards round" in alone.execute("diloco-node", "status")
    assert alone.execute("diloco-node", "invite").startswith("diloco1-")
    assert alone.execute("id", "-u") == "31337"
    assert "Dashboard: http://127.0.0.1:8080/#token=" in alone.said()
    # The token is needed, and only known host names are answered, although HTTP binds all addresses.
    base = str(alone.http.base_url)
    assert httpx.get(f"{base}/api/v1/status", trust_env=False).status_code == 401
    assert httpx.get(f"{base}/livez", headers={"Host": "evil.example"}, trust_env=False).status_code == 403
    assert httpx.get(base, trust_env=False).status_code == 200
    # Nothing but the volume was written to.
    assert alone.docker("diff", alone.name) == ""


def test_a_hung_worker_is_restarted_from_inside(alone: Container) -> None:
    alone.run("run", THREAD, *SMALL)
    alone.until_round(0)
    started = alone.state()["StartedAt"]
    worker = worker_of(alone)
    # The supervisor is patient for a minute after a worker's start, then for half a minute without a beat.
    alone.execute("python3", "-c", f"import os; os.kill({worker}, 19)")
    wait_for(lambda: worker_of(alone) != worker, 180, "another worker")
    before = alone.status()["run"]["round"]
    alone.until_round(before + 1)
    assert (alone.state()["StartedAt"], alone.restarts()) == (started, 0)


def test_leave_and_resume(alone: Container) -> None:
    alone.run("run", THREAD, *SMALL)
    before = alone.until_round(0)
    alone.execute("diloco-node", "leave")
    alone.until_phase("stopped")
    assert "resume" in alone.execute("diloco-node", "status")
    time.sleep(5)
    assert (alone.state()["Status"], alone.restarts()) == ("running", 0)
    alone.docker("restart", alone.name)
    alone.forget()
    alone.until_phase("stopped")
    alone.execute("diloco-node", "resume")
    kept(alone, before)


def test_a_fatal_error_stays_on_the_page(alone: Container) -> None:
    """A model that needs more memory than any machine has: exit code 3 outside of containers."""
    huge = (
        "--run.model.hidden_size=65536",
        "--run.model.num_hidden_layers=512",
        "--run.model.intermediate_size=262144",
    )
    alone.run("run", THREAD, *huge)
    status = alone.until_phase("error")
    assert status["code"] == "machine" or "memory" in status["reason"], status
    time.sleep(5)
    assert (alone.state()["Status"], alone.restarts()) == ("running", 0)
    assert alone.http.get("/livez").status_code == 200
    began_s = time.monotonic()
    alone.docker("stop", alone.name)
    assert time.monotonic() - began_s < STOP_S
    assert alone.state()["ExitCode"] == 0


def test_two_containers_on_one_volume(docker: Engine, alone: Container) -> None:
    alone.run("run", THREAD, *SMALL)
    alone.until_phase("training")
    second = Container(docker, "second", volume=alone.volume)
    try:
        said = docker("run", "--rm", "--name", second.name, "--volume", f"{alone.volume}:/data",
                      "diloco-node:cpu", "run", THREAD, check=False, both=True)  # fmt: skip
        assert "Another node" in said and "/data" in said
        assert docker("ps", "--all", "--quiet", "--filter", f"name={second.name}") == ""
    finally:
        second.remove()
    assert alone.status()["phase"] in ("training", "syncing")


# Four, in this order


def test_four_agree(four: list[Container]) -> None:
    number = agree(four)
    print(f"four containers agree on round {number}")
    assert all(c.state()["Health"]["Status"] == "healthy" for c in four)


def test_stop_in_a_round_with_a_page_open(four: list[Container]) -> None:
    leaver = four[3]
    before = leaver.status()
    with leaver.page_open():
        leaver.until(lambda s: s["phase"] == "syncing", 120, "in a round")
        began_s = time.monotonic()
        leaver.docker("stop", leaver.name)
        took_s = time.monotonic() - began_s
    print(f"docker stop took {took_s:.1f} s")
    assert leaver.state()["ExitCode"] == 0
    assert took_s < STOP_S
    for other in four[:3]:
        other.until(lambda s: s["peers"]["training"] == 3, PATIENCE * GONE_S, "the leaver is gone")
    leaver.docker("start", leaver.name)
    kept(leaver, before)


def test_kill(four: list[Container]) -> None:
    before = four[2].status()
    four[2].docker("kill", four[2].name)
    assert four[2].state()["Status"] == "exited"
    four[2].docker("start", four[2].name)
    kept(four[2], before)


def test_pause_for_a_minute(four: list[Container]) -> None:
    before = four[1].status()
    four[1].docker("pause", four[1].name)
    time.sleep(60)
    four[1].docker("unpause", four[1].name)
    kept(four[1], before)


def test_restart(four: list[Container]) -> None:
    before = four[0].status()
    four[0].docker("restart", four[0].name)
    kept(four[0], before)


def test_recreated_on_the_same_volume(four: list[Container]) -> None:
    before = four[3].status()
    four[3].docker("stop", four[3].name)
    four[3].remove()
    four[3].run("run")
    kept(four[3], before)


def test_all_agree_after_all_that(four: list[Container]) -> None:
    agree(four)
    assert [c.restarts() for c in four] == [0, 0, 0, 0]

"""Containers train, agree and restart when started as volunteers start them: read-only and without privileges."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.docker.container import SMALL, THREAD, Container, agree
from tests.docker.engine import IMAGE, Engine
from tests.swarm.conftest import Figures
from tests.swarm.harness import wait_for

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
    """The process id of the container's worker, inside the container."""
    return int(wait_for(lambda: container.execute("python3", "-c", WORKER, check=False).strip(), 60, "a worker"))


def known(container: Container) -> dict[str, Any]:
    """Return the node's status after waiting for one more round. Its values must survive an interruption."""
    told = container.status()
    joined = told["contribution"]["rounds_joined"]
    container.until(lambda s: s["contribution"]["rounds_joined"] > joined, 180, "one more round")
    return told


def kept(container: Container, before: dict[str, Any], timeout_s: float = 240) -> None:
    """Assert that the restarted node has the identity and totals of `before` and takes part in rounds."""
    container.forget()
    first = container.until(lambda s: s["contribution"]["tokens_total"], 120, "totals")["contribution"]
    for total in ("tokens_total", "rounds_joined", "rounds_attempted", "training_s"):
        assert first[total] >= before["contribution"][total], total
    status = container.until(
        lambda s: s["phase"] == "training" and s["run"]["round"] > before["run"]["round"],
        timeout_s,
        "back in the rounds",
    )
    assert status["node"]["peer_id"] == before["node"]["peer_id"]


# tests with one container


def test_container_becomes_healthy_and_its_commands_answer(alone: Container, figures: Figures) -> None:
    began_s = time.monotonic()
    alone.run("run", "--name", "alone", THREAD, *SMALL)
    wait_for(alone.is_healthy, 2 * HEALTHY_S, "healthy")
    took_s = time.monotonic() - began_s
    figures.hold("from docker run until healthy", took_s, HEALTHY_S)
    assert took_s < HEALTHY_S
    alone.until_round(0)
    assert "Training towards round" in alone.execute("diloco-node", "status")
    # A note on standard error may stand beside it.
    assert any(line.startswith("diloco1-") for line in alone.execute("diloco-node", "invite").splitlines())
    assert alone.execute("id", "-u") == "31337"
    assert "Dashboard: http://127.0.0.1:8080/#token=" in alone.said()
    # The token is needed, and only known host names are answered, although HTTP binds all addresses.
    base = str(alone.http.base_url)
    assert httpx.get(f"{base}/api/v1/status", trust_env=False).status_code == 401
    assert httpx.get(f"{base}/livez", headers={"Host": "evil.example"}, trust_env=False).status_code == 403
    assert httpx.get(base, trust_env=False).status_code == 200
    # The node has written only to the volume.
    assert alone.docker("diff", alone.name) == ""


def test_hung_worker_is_replaced_without_a_restart_of_its_container(alone: Container) -> None:
    alone.run("run", THREAD, *SMALL)
    alone.until_round(0)
    started = alone.state()["StartedAt"]
    worker = worker_of(alone)
    # The supervisor gives a worker a minute to start. After that it replaces one that sends no heartbeat for 30 s.
    alone.execute("python3", "-c", f"import os; os.kill({worker}, 19)")
    wait_for(lambda: worker_of(alone) != worker, 180, "another worker")
    before = alone.status()["run"]["round"]
    alone.until_round(before + 1)
    assert (alone.state()["StartedAt"], alone.restarts()) == (started, 0)


def test_container_keeps_running_after_leave_and_trains_again_after_resume(alone: Container) -> None:
    alone.run("run", THREAD, *SMALL)
    alone.until_round(0)
    before = alone.status()
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


def test_container_with_a_fatal_error_keeps_running_and_shows_the_error(alone: Container) -> None:
    """The model needs more memory than any machine has. Outside of a container the node ends with exit code 3."""
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


def test_container_with_too_little_memory_refuses_with_the_figures_and_is_unhealthy(alone: Container) -> None:
    """The engine's limit is read in both versions of control groups, and the kernel kills nothing."""
    alone.run(
        "run", THREAD,
        env={"DILOCO_API__PUBLIC_URL": "http://nas.local:9000"},
        engine_words=("--memory", "512m", "--health-interval", "2s", "--health-retries", "2"),
    )  # fmt: skip
    status = alone.until_phase("error")
    assert "0.537 GB (memory." in status["reason"] and "GB are free" in status["reason"], status["reason"]
    assert status["node"]["memory_limit_bytes"] == 512 * 2**20
    assert "at most 0.537 GB" in alone.execute("diloco-node", "status")
    assert "limits memory to 0.537 GB" in alone.execute("diloco-node", "doctor", check=False)
    wait_for(lambda: alone.state()["Health"]["Status"] == "unhealthy", 90, "the container is unhealthy")
    assert (alone.state()["OOMKilled"], alone.restarts()) == (False, 0)
    assert "Dashboard: http://nas.local:9000/#token=" in alone.said()


def test_container_with_a_damaged_invite_keeps_running_and_shows_the_error(alone: Container) -> None:
    """If the container ended with exit code 2, the engine would restart it forever, without a page for the reason."""
    alone.run("run", THREAD, env={"DILOCO_JOIN": "diloco1-cut-short"})
    status = alone.until_phase("error")
    assert status["code"] == "bad_invite" and "copy the whole text again" in status["reason"]
    assert "copy the whole text again" in alone.execute("diloco-node", "status")
    alone.execute("diloco-node", "resume")
    alone.until(lambda s: s["phase"] == "error" and s["since"] != status["since"], 60, "error again")
    assert (alone.state()["Status"], alone.restarts()) == ("running", 0)
    # The remedy is to use the same volume with another invite or, as in this test, without one.
    alone.remove()
    alone.run("run", THREAD, *SMALL)
    alone.until_round(0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--limits.cpu_treads=1",), "limits.cpu_threads"),
        (("--api.tls_cert=/data/none.pem", "--api.tls_key=/data/none.key"), "none.pem"),
    ],
)
def test_container_whose_api_cannot_start_ends_with_exit_code_2(
    alone: Container, words: tuple[str, ...], said: str
) -> None:
    """A container without an API ends, so that the engine starts it again. The log gives the reason."""
    alone.run("run", *words)
    wait_for(lambda: alone.restarts() >= 2, 120, "the engine starts it again")
    alone.docker("update", "--restart", "no", alone.name)
    wait_for(lambda: alone.state()["Status"] == "exited", 60, "it ends")
    assert alone.state()["ExitCode"] == 2
    lines = [line for line in alone.said().splitlines() if line.startswith("diloco-node: ")]
    assert len(lines) >= 3 and all(said in line for line in lines)


def test_second_container_on_a_volume_ends_with_exit_code_2(docker: Engine, alone: Container, figures: Figures) -> None:
    alone.run("run", THREAD, *SMALL)
    alone.until_phase("training")
    second = Container(docker, "second", volume=alone.volume)
    try:
        began_s = time.monotonic()
        words = ("--name", second.name, "--volume", f"{alone.volume}:/data", IMAGE, "run", THREAD)
        said = docker("run", *words, check=False, both=True)
        figures.hold("a second container on the volume, until it has ended", time.monotonic() - began_s, 10)
        assert "Another node" in said and "/data" in said
        assert (second.state()["Status"], second.state()["ExitCode"]) == ("exited", 2)
    finally:
        second.remove()
    assert alone.status()["phase"] in ("training", "syncing")


# tests with four containers, which must run in this order


def test_four_containers_train_and_agree(four: list[Container]) -> None:
    number = agree(four)
    print(f"four containers agree on round {number}")
    for container in four:
        wait_for(container.is_healthy, HEALTHY_S, f"{container.name} is healthy: {container.state()['Health']}")


def stop_seen_by(leaver: Container, others: list[Container]) -> tuple[float, float]:
    """Stop a container. Returns the seconds until it has ended, and until all others count one peer less."""
    members = len(others) + 1
    began_s = time.monotonic()

    def gone_after(other: Container) -> float:
        other.until(lambda s: s["peers"]["training"] < members, STOP_S, "the leaver is gone")
        return time.monotonic() - began_s

    with ThreadPoolExecutor(len(others)) as threads:
        gone = [threads.submit(gone_after, other) for other in others]
        leaver.docker("stop", leaver.name)
        took_s = time.monotonic() - began_s
        return took_s, max(one.result(2 * STOP_S) for one in gone)


def test_container_stops_promptly_in_mid_round_with_an_open_page_and_returns(
    four: list[Container], figures: Figures
) -> None:
    leaver, others = four[3], four[:3]
    before = known(leaver)
    with leaver.page_open():
        leaver.until(lambda s: s["phase"] == "syncing", 120, "in a round")
        took_s, gone_s = stop_seen_by(leaver, others)
    figures.hold("docker stop in a round, with a page open", took_s, STOP_S)
    figures.hold("from its signal until the others count one less", gone_s, GONE_S)
    assert leaver.state()["ExitCode"] == 0
    assert took_s < STOP_S
    leaver.docker("start", leaver.name)
    kept(leaver, before)


def test_killed_container_keeps_its_identity_and_totals_after_a_start(four: list[Container]) -> None:
    before = known(four[2])
    four[2].docker("kill", four[2].name)
    assert four[2].state()["Status"] == "exited"
    four[2].docker("start", four[2].name)
    kept(four[2], before)


def test_container_returns_to_the_rounds_after_a_pause_of_a_minute(four: list[Container]) -> None:
    before = known(four[1])
    four[1].docker("pause", four[1].name)
    time.sleep(60)
    four[1].docker("unpause", four[1].name)
    kept(four[1], before)


def test_restarted_container_keeps_its_identity_and_totals(four: list[Container]) -> None:
    before = known(four[0])
    four[0].docker("restart", four[0].name)
    kept(four[0], before)


def test_container_recreated_on_its_volume_keeps_its_identity_and_totals(four: list[Container]) -> None:
    before = known(four[3])
    four[3].docker("stop", four[3].name)
    four[3].remove()
    four[3].run("run")
    kept(four[3], before)


def test_four_containers_still_agree_after_stops_kills_pauses_and_restarts(four: list[Container]) -> None:
    agree(four)
    assert [c.restarts() for c in four] == [0, 0, 0, 0]

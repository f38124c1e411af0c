"""The dashboard shows each phase and error state of real nodes, and the state of a relay."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext

from tests.browser.harness import Dashboard, missing
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, tiny
from tests.swarm.node_main import PROGRAM, TIMINGS

pytestmark = pytest.mark.timeout(300)

LONG_S = PATIENCE * START_S
STOP_S = 6.0
"""Seconds that an unresponsive worker has to stop. They are enough to see the phase `leaving` on the page."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the fault plan of all nodes in this module. The nodes read it at each stage."""
    return tmp_path_factory.mktemp("faults") / "plan"


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, plan: Path) -> Iterator[Swarm]:
    """A swarm whose rounds need two members. Its founder has just been started, and its worker is suspended."""
    if lacks := missing():
        pytest.skip(lacks)
    run = tiny(round={"inner_steps": 10, "min_peers": 2})
    with Swarm(tmp_path_factory.mktemp("phases"), run) as swarm:
        founder = swarm.node("founder")
        founder.program = "node.cli"  # The worker imports torch, so it can be suspended in the phase `starting`.
        founder.start(env={"DILOCO_FAULTS": f"file:{plan}"})
        founder.find("worker").suspend()
        yield swarm


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Path]]:
    """A node whose worker crashes while the other tests run, and the file with its fault plan."""
    folder = tmp_path_factory.mktemp("crashing")
    plan = folder / "plan"
    plan.write_text("inner@*=fail")
    with Swarm(folder / "swarm", tiny(round={"inner_steps": 150})) as swarm:
        node = swarm.node("crashing")
        node.program = PROGRAM
        yield node.start(env={TIMINGS: json.dumps({"backoff_s": []}), "DILOCO_FAULTS": f"file:{plan}"}), plan


@pytest.fixture
def tabs(context: BrowserContext) -> Iterator[list[Dashboard]]:
    """The list of the test's tabs. All of them are checked at the end of the test."""
    made: list[Dashboard] = []
    yield made
    for tab in made:
        tab.check()


def show(tabs: list[Dashboard], context: BrowserContext, node: Node) -> Dashboard:
    tabs.append(Dashboard(context, node).open())
    return tabs[-1]


def seen(tab: Dashboard, name: str) -> None:
    """Assert that the page shows the state as a word with a reason and that axe finds no fault. Saves a screenshot."""
    assert tab.mark("state").inner_text() and tab.mark("reason").inner_text()
    assert tab.serious() == [], name
    tab.shoot(f"phase-{name}")


def test_dashboard_shows_each_phase_of_a_node_from_starting_to_stopped(
    swarm: Swarm, plan: Path, crashing: object, context: BrowserContext, tabs: list[Dashboard]
) -> None:
    founder = swarm.nodes[0]
    first = show(tabs, context, founder).until_phase("starting", word="Starting")
    seen(first, "starting")
    founder.find("worker").resume()
    first.until_phase("syncing", word="Waiting", wait_s=LONG_S)
    first.mark("reason").filter(has_text="1 of 1 member is ready").wait_for()
    first.page.get_by_text("No other members now").wait_for()
    seen(first, "waiting-for-peers")

    plan.write_text("serve@*=stall:15")
    second = swarm.node("second", join=founder.invite())
    second.preset, second.program = None, PROGRAM
    second.start(env={TIMINGS: json.dumps({"stop_s": STOP_S}), "DILOCO_FAULTS": f"file:{plan}"})
    other = show(tabs, context, second).until_phase("downloading", word="Downloading", wait_s=LONG_S)
    seen(other, "downloading")
    plan.unlink()
    other.until_phase("training", word="Training", wait_s=LONG_S)
    seen(other, "training")

    plan.write_text("reduce@*=stall:8")  # A sync of less than three seconds is not shown as one.
    other.until_phase("syncing", word="Syncing", wait_s=LONG_S)
    seen(other, "syncing")
    plan.unlink()

    os.kill(second.find("worker").pid, signal.SIGSTOP)
    other.button("Leave").click()
    other.button("Leave now").click()
    other.until_phase("leaving", word="Leaving")
    seen(other, "leaving")
    # The node's address answers for one more second. The page must not find out while it is checked.
    other.page.route("**/api/v1/status", lambda route: None)
    other.until_phase("stopped", word="Stopped")
    for gone in (False, True):
        if gone:
            other.page.unroute("**/api/v1/status")
        other.until_stale(gone)
        assert other.page.locator(".orders button").count() == 0, "a node that has ended takes no orders"
        other.page.get_by_text("This node has ended.").first.wait_for()
        assert f"diloco-node run --data-dir {second.folder}" in other.mark("again").inner_text()
        assert other.page.title().startswith("Stopped")
        seen(other, "ended" if gone else "ending")
    assert second.wait_end(10 * PATIENCE) == 0
    first.page.locator(".events li").filter(has_text="second is gone: no answer").wait_for(timeout=1e3 * LONG_S)

    relay = swarm.node("relay", join=founder.invite())
    relay.preset, relay.order = None, "relay"
    relay.start()


def test_dashboard_shows_an_error_after_worker_crashes_until_resume(
    crashing: tuple[Node, Path], context: BrowserContext, tabs: list[Dashboard]
) -> None:
    node, plan = crashing
    tab = show(tabs, context, node).until_phase("error", word="Error", wait_s=LONG_S)
    tab.mark("reason").filter(has_text="injected at inner").wait_for()
    assert tab.mark("reason").inner_text().startswith("The worker crashed (")
    assert tab.button("Pause").count() == 0
    seen(tab, "error")
    plan.unlink()
    tab.button("Resume").click()
    tab.until_phase("training", word="Training", wait_s=LONG_S)


def test_dashboard_of_a_relay_shows_the_run_but_no_training(
    swarm: Swarm, context: BrowserContext, tabs: list[Dashboard]
) -> None:
    (relay,) = [node for node in swarm.nodes if node.order == "relay"]
    tab = show(tabs, context, relay).until_phase("training", word="Relaying", wait_s=LONG_S)
    tab.page.get_by_text("This node relays for the run and does not train.").first.wait_for()
    assert tab.button("Pause").count() == tab.button("Resume").count() == 0
    assert tab.button("Leave").count() == 1
    assert tab.page.get_by_role("progressbar", name="Progress to the next sync").count() == 0
    tab.page.locator("[aria-labelledby=run]").get_by_text("tiny", exact=True).wait_for()
    number = swarm.nodes[0].status()["run"]["round"]  # -1 if the only round failed when the other node left.
    tab.page.get_by_text("A relay does not see the progress of the run.").wait_for()
    relayed = tab.page.locator("[aria-labelledby=relayed]")
    relayed.locator("dd").nth(0).filter(has_text=str(number) if number >= 0 else "–").wait_for()
    told = tab.page.locator("main").inner_text()
    for word in ("Compute time", "Inner step", "Speed of this node", "Time by activity", "GPU"):
        assert word not in told, f"a relay has no such thing: {word}"
    seen(tab, "relay")
    tab.view("Swarm")
    peers = tab.page.get_by_role("region", name="Peers, table")
    peers.get_by_text("founder").wait_for()
    assert tab.serious() == []
    tab.shoot("relay-swarm")
    tab.view("Settings").page.get_by_text("Upload").first.wait_for()
    told = tab.page.locator("main").inner_text()
    for word in ("Hours", "Precision", "Sequences at once", "Share of GPU memory"):
        assert word not in told, f"nothing to set for a relay: {word}"
    tab.shoot("relay-settings")


def test_dashboard_shows_a_drain_that_waits_and_that_no_peer_answers(
    swarm: Swarm, context: BrowserContext, tabs: list[Dashboard]
) -> None:
    founder = swarm.nodes[0]
    invite = founder.invite()
    # The founder is alone again and cannot finish its round, so a drain waits.
    first = show(tabs, context, founder).until_phase("syncing", word="Waiting", wait_s=LONG_S)
    assert founder.act("drain").status_code == 202
    first.until_phase("draining", word="Finishing")
    seen(first, "draining")
    founder.end_by_force()
    lone = swarm.node("lone", join=invite)
    tab = show(tabs, context, lone.start()).until_phase("connecting", word="Connecting", wait_s=LONG_S)
    tab.mark("reason").filter(has_text="peer").wait_for()
    seen(tab, "connecting")


def test_node_that_recovered_from_crashes_can_be_paused_after_its_round(
    crashing: tuple[Node, Path], context: BrowserContext, tabs: list[Dashboard]
) -> None:
    node, plan = crashing
    plan.write_text("inner@*=stall:0.1")  # This makes a round last until the page has been checked.
    node.until_round(node.status()["run"]["round"] + 1)
    tab = show(tabs, context, node)
    tab.page.locator("html:not([data-phase=unknown])").wait_for(state="attached")
    tab.until_phase("training", word="Training", wait_s=LONG_S)
    tab.button("Pause").click()
    tab.item("After this round").click()
    tab.page.get_by_text("Pauses after round").wait_for()
    seen(tab, "pausing-after-round")
    plan.unlink()
    tab.until_phase("paused", word="Paused", wait_s=LONG_S)
    assert node.status()["run"]["round"] >= 0, "the round was seen through, and who serves the state now stands there"
    seen(tab, "paused")

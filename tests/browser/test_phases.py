"""Every phase and error state of a node, brought about for real, as the page tells it."""

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
from tests.swarm.impatient import PROGRAM, TIMINGS

pytestmark = pytest.mark.timeout(300)

LONG_S = PATIENCE * START_S


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Faults of all nodes of the module; read anew at each place."""
    return tmp_path_factory.mktemp("faults") / "plan"


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, plan: Path) -> Iterator[Swarm]:
    """A run whose rounds need two members, and its founder, just started."""
    if lacks := missing():
        pytest.skip(lacks)
    run = tiny(round={"inner_steps": 40, "min_peers": 2})
    with Swarm(tmp_path_factory.mktemp("phases"), run) as swarm:
        swarm.found(env={"DILOCO_FAULTS": f"file:{plan}"})
        yield swarm


@pytest.fixture
def tabs(context: BrowserContext) -> Iterator[list[Dashboard]]:
    """Tabs to be judged at the end."""
    made: list[Dashboard] = []
    yield made
    for tab in made:
        tab.check()


def show(tabs: list[Dashboard], context: BrowserContext, node: Node) -> Dashboard:
    tabs.append(Dashboard(context, node).open())
    return tabs[-1]


def seen(tab: Dashboard, name: str) -> None:
    """The state is rendered: a word, a reason, nothing that axe objects to, a picture."""
    assert tab.mark("state").inner_text() and tab.mark("reason").inner_text()
    assert tab.serious() == [], name
    tab.shoot(f"phase-{name}")


def test_starting_waiting_downloading_training_syncing_leaving_draining(
    swarm: Swarm, plan: Path, context: BrowserContext, tabs: list[Dashboard]
) -> None:
    founder = swarm.nodes[0]
    first = show(tabs, context, founder).until_phase("starting", word="Starting")
    seen(first, "starting")
    first.until_phase("syncing", word="Waiting", wait_s=LONG_S)
    seen(first, "waiting-for-peers")

    plan.write_text("serve@*=stall:2")
    second = swarm.node("second", join=founder.invite())
    second.preset = None
    second.start(env={"DILOCO_FAULTS": f"file:{plan}"})
    other = show(tabs, context, second).until_phase("downloading", word="Downloading", wait_s=LONG_S)
    seen(other, "downloading")
    plan.unlink()
    other.until_phase("training", word="Training", wait_s=LONG_S)
    seen(other, "training")

    plan.write_text("reduce@*=stall:4")
    other.until_phase("syncing", word="Syncing", wait_s=LONG_S)
    seen(other, "syncing")
    plan.unlink()

    os.kill(second.find("worker").pid, signal.SIGSTOP)
    other.button("Leave").click()
    other.button("Leave now").click()
    other.until_phase("leaving", word="Leaving")
    seen(other, "leaving")
    other.until_phase("stopped", word="Stopped")
    seen(other, "stopped")
    assert second.wait_end(10 * PATIENCE) == 0

    # Alone again, its round does not come about: a drain waits for it.
    first.until_phase("syncing", word="Waiting", wait_s=LONG_S)
    assert founder.act("drain").status_code == 202
    first.until_phase("draining", word="Finishing")
    seen(first, "draining")


def test_connecting_where_nobody_answers(swarm: Swarm, context: BrowserContext, tabs: list[Dashboard]) -> None:
    founder = swarm.nodes[0]
    invite = founder.invite()
    founder.end_by_force()
    lone = swarm.node("lone", join=invite)
    lone.preset = None
    tab = show(tabs, context, lone.start()).until_phase("connecting", word="Connecting", wait_s=LONG_S)
    tab.mark("reason").filter(has_text="peer").wait_for()
    seen(tab, "connecting")


def test_a_worker_that_crashes_is_an_error_until_resume_and_a_pause_after_its_round(
    tmp_path: Path, context: BrowserContext, tabs: list[Dashboard]
) -> None:
    plan = tmp_path / "plan"
    plan.write_text("inner@*=fail")
    with Swarm(tmp_path / "swarm", tiny(round={"inner_steps": 600})) as swarm:
        node = swarm.node("crashing")
        node.program = PROGRAM
        node.start(env={TIMINGS: json.dumps({"backoff_s": []}), "DILOCO_FAULTS": f"file:{plan}"})
        tab = show(tabs, context, node).until_phase("error", word="Error", wait_s=LONG_S)
        tab.mark("reason").filter(has_text="injected at inner").wait_for()
        assert tab.button("Pause").count() == 0
        seen(tab, "error")
        plan.unlink()
        tab.button("Resume").click()
        tab.until_phase("training", word="Training", wait_s=LONG_S)
        tab.button("Pause").click()
        tab.item("After this round").click()
        tab.page.get_by_text("Pauses after round").wait_for()
        seen(tab, "pausing-after-round")
        tab.until_phase("paused", word="Paused", wait_s=LONG_S)
        assert node.status()["run"]["round"] >= 0, "the round was seen through"
        seen(tab, "paused")

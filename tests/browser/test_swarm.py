"""A real swarm of three nodes, operated through the dashboard of one node."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from playwright.sync_api import BrowserContext

from tests.browser.harness import NARROW, VIEWS, WIDE, Dashboard, missing
from tests.browser.load import browser_meter, busy_ratio, node_meter, quiet_after
from tests.swarm.conftest import Figures
from tests.swarm.harness import PATIENCE, START_S, Swarm, tiny, wait_for

pytestmark = pytest.mark.timeout(240)

SCRIPT = "<script>alert(1)</script>"
GOOD = "good live"
FREED_S = 5.0
FREE_RATIO, FREE_S = 0.1, 10.0
"""A node is idle if it uses less than FREE_RATIO of a core for FREE_S seconds."""
GONE_S = 15.0
TAB_RATIO = 0.05
TAB_S = 10.0
SETTLED_S = 5.0
"""Seconds for loading the page. This time is not measured."""
TRIES = 10
"""Number of wrong tokens per minute after which requests are throttled."""
READINGS = """
() => {
  const bar = document.querySelector('[role=progressbar]'), texts = document.querySelectorAll('.readings dd');
  const [round, step] = [...texts].map((text) => text.innerText);
  const [done, all] = step.split('of').map(Number);
  return [document.documentElement.dataset.phase, Number(round), done / all, bar.ariaValueNow / 100];
}
"""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A swarm of a founder, a node with a hostile name, and another one."""
    if lacks := missing():
        pytest.skip(lacks)
    run = tiny(round={"inner_steps": 15, "min_peers": 1}, evaluation={"batches": 1})
    with Swarm(tmp_path_factory.mktemp("browser"), run) as swarm:
        swarm.found()
        invite = swarm.nodes[0].invite()
        for folder, name in (("script", SCRIPT), ("good", GOOD)):
            node = swarm.node(folder, join=invite)
            node.name, node.preset = name, None
            node.start()
        for node in swarm.nodes:
            node.until(lambda s: s["contribution"]["rounds_joined"] >= 2, PATIENCE * START_S)
            node.calm()
        yield swarm


@pytest.fixture
def tab(swarm: Swarm, context: BrowserContext) -> Iterator[Dashboard]:
    """The founder's page with a login. It is checked at the end of the test."""
    yield from judged(Dashboard(context, swarm.nodes[0]))


@pytest.fixture
def other(swarm: Swarm, context: BrowserContext) -> Iterator[Dashboard]:
    """The page of a node that the tests do not disturb."""
    yield from judged(Dashboard(context, swarm.nodes[1]))


def judged(tab: Dashboard) -> Iterator[Dashboard]:
    tab.open().page.locator("html:not([data-phase=unknown]):not([data-phase=locked])").wait_for(state="attached")
    yield tab
    tab.check()


def test_each_view_of_the_dashboard_shows_data_of_the_node(tab: Dashboard) -> None:
    tab.until_phase("training")
    assert tab.mark("reason").inner_text()
    tab.page.get_by_text("Tokens", exact=True).first.wait_for()
    tab.page.get_by_role("heading", name="Devices").wait_for()
    without_gpu = all(device["kind"] == "cpu" for device in tab.node.status()["devices"])
    tab.page.locator(".devices").wait_for()
    assert (tab.page.get_by_text("No GPU in use").count() == 1) is without_gpu
    tab.view("Swarm")
    rows = tab.page.get_by_role("region", name="Peers, table").get_by_role("row")
    rows.nth(3).wait_for()
    assert rows.count() == 4, "a head and three members"
    tab.mark("rounds").get_by_role("option").nth(1).wait_for()
    given = tab.page.get_by_role("region", name="Contributions, table").get_by_role("row")
    given.nth(3).wait_for()
    tab.view("Logs")
    tab.page.locator(".log .line").filter(has_text="Round").first.wait_for()
    tab.page.get_by_role("searchbox").fill("Founded the run")
    tab.page.locator(".log .line").filter(has_text="Founded the run").wait_for()
    wait_for(lambda: tab.page.locator(".log .line").count() <= 2, 10, "the search leaves out the rest")
    tab.view("Settings")
    tab.page.get_by_text("Upload").first.wait_for()
    tab.view("Overview")


def test_progress_bar_to_the_next_sync_restarts_with_each_round(tab: Dashboard) -> None:
    """Rounds have a fixed number of steps, so the progress bar shows the share of the steps that are done."""
    tab.until_phase("training")
    seen: dict[int, float] = {}
    deadline_s = time.monotonic() + PATIENCE * START_S
    while len(seen) < 4:
        assert time.monotonic() < deadline_s, seen
        phase, number, steps, way = tab.page.evaluate(READINGS)
        if phase == "training":
            assert way == pytest.approx(steps, abs=0.011), f"round {number}"
            seen.setdefault(number, way)
        tab.page.wait_for_timeout(50)
    assert min(seen.values()) < 0.5, seen


def test_dashboard_shows_hostile_peer_names_as_plain_text(tab: Dashboard) -> None:
    tab.until_phase("training").view("Swarm")
    peers = tab.page.get_by_role("region", name="Peers, table")
    peers.get_by_text(SCRIPT).wait_for()
    assert tab.page.evaluate("document.querySelectorAll('main script').length") == 0
    peers.get_by_text(GOOD).wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_view_of_the_dashboard_is_accessible_and_fits_on_a_phone(tab: Dashboard, scheme: str) -> None:
    tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    tab.until_phase("training")
    for view in VIEWS:
        tab.view(view).until_filled(view)
        shown = tab.shoot(f"{view.lower()}-{scheme}")
        assert tab.serious() == [], view
        tab.page.set_viewport_size(NARROW)
        assert tab.overflow_px() <= 0, f"{view} is wider than 360 px"
        tab.shoot(f"{view.lower()}-{scheme}-narrow")
        tab.page.set_viewport_size(WIDE)
    print(f"screenshots: {shown.parent}")


def test_dashboard_opens_only_with_the_right_token_and_can_be_locked_again(
    swarm: Swarm, context: BrowserContext
) -> None:
    tab = Dashboard(context, swarm.nodes[0]).open(with_token=False).until_phase("locked", word="Locked")
    assert tab.serious() == []
    tab.page.get_by_label("Token").fill("wrong")
    tab.button("Open").click()
    fault = tab.page.get_by_role("alert")
    fault.filter(has_text="This token is wrong").wait_for()
    tab.shoot("locked-wrong")
    for number in range(TRIES):
        # The Enter key does nothing while the previous request is pending.
        tab.page.locator("button[type=submit]:enabled").wait_for()
        tab.page.get_by_label("Token").fill(f"wrong {number}")
        with tab.page.expect_response("**/api/v1/session"):
            tab.page.keyboard.press("Enter")
    fault.filter(has_text="Too many wrong tokens").wait_for()
    assert tab.serious() == []
    tab.shoot("locked-too-many")
    assert tab.page.get_by_role("navigation", name="Views").count() == 0
    tab.page.get_by_label("Token").fill(tab.token)
    tab.page.keyboard.press("Enter")
    tab.until_phase("training")
    assert tab.token not in tab.page.url
    tab.page.reload()
    tab.until_phase("training")
    tab.view("Settings").button("Lock this page").click()
    tab.until_phase("locked", word="Locked")
    tab.page.reload()
    tab.until_phase("locked", word="Locked")
    tab.check()


def test_pause_button_frees_the_processor_and_resume_button_continues_training(
    tab: Dashboard, figures: Figures
) -> None:
    node = tab.node
    tab.until_phase("training", wait_s=PATIENCE * START_S)
    worker, meter = node.find("worker"), node_meter(node)
    wait_for(lambda: busy_ratio(meter) > FREE_RATIO, START_S, "it works")
    tab.button("Pause").click()
    tab.item("For 1 hour").click()
    began_s = time.monotonic()
    psutil.wait_procs([worker], timeout=START_S)
    assert not worker.is_running(), "the process with the model is gone"
    figures.hold("paused by click: the model has left the memory after", time.monotonic() - began_s, FREED_S)
    tab.until_phase("paused", word="Paused")
    figures.hold("paused by click: the page says so after", time.monotonic() - began_s, FREED_S)
    assert re.fullmatch(r"Paused until (tomorrow )?\d\d:\d\d\.", tab.mark("reason").inner_text())
    assert re.search(r"until \d+:\d\d on \d+ \w+ \d{4} \(.+\)\.$", node.status()["reason"])
    limit_s = PATIENCE * FREED_S
    freed_s, told = quiet_after(meter, FREE_RATIO, began_s=began_s, quiet_s=FREE_S, limit_s=limit_s)
    print(f"paused by click: of a core, seconds after: {told}")
    figures.hold("paused by click: the processor is free after", freed_s, FREED_S)
    tab.button("Resume").click()
    tab.until_phase("training", word="Training", wait_s=PATIENCE * START_S)
    node.until_training(PATIENCE * START_S)


def test_dashboard_can_be_operated_with_the_keyboard_alone(tab: Dashboard) -> None:
    tab.until_phase("training")
    keys = tab.page.keyboard
    tab.tab_to("button Pause")
    keys.press("Enter")
    tab.item("For 1 hour").wait_for()
    keys.press("Escape")
    tab.item("For 1 hour").wait_for(state="hidden")
    wait_for(lambda: tab.focused() == "button Pause", 5, "Escape gives the focus back")
    keys.press("Enter")
    wait_for(lambda: "menuitem" in tab.focused(), 5, "the menu takes the focus")
    keys.press("End")
    assert tab.focused() == "menuitem Until I resume"
    keys.press("Enter")
    tab.until_phase("paused", word="Paused")
    tab.mark("reason").filter(has_text="Paused until you resume.").wait_for()
    tab.tab_to("button Resume")
    keys.press("Enter")
    tab.until_phase("training", word="Training", wait_s=PATIENCE * START_S)
    tab.tab_to("a Swarm")
    keys.press("Enter")
    tab.page.get_by_role("region", name="Peers, table").wait_for()
    tab.page.locator("body").press("Home")
    tab.page.evaluate("document.activeElement.blur()")
    tab.tab_to("a Overview")
    keys.press("Enter")
    tab.mark("reason").wait_for()


def test_dashboard_greys_a_killed_peer_and_says_that_it_does_not_answer(
    swarm: Swarm, other: Dashboard, figures: Figures
) -> None:
    other.until_phase("training", wait_s=PATIENCE * START_S).view("Swarm")
    peers = other.page.get_by_role("region", name="Peers, table").get_by_role("row")
    peers.filter(has_text="good").wait_for()
    victim = swarm.nodes[2]
    its = Dashboard(other.page.context, victim).open().until_phase("training", wait_s=PATIENCE * START_S)
    victim.running.send_signal(signal.SIGKILL)
    began_s = time.monotonic()
    peers.filter(has_text="good").filter(has_text="No answer").wait_for(timeout=60_000)
    figures.hold("a killed peer is grey on the page after", time.monotonic() - began_s, GONE_S)
    its.until_stale(True).mark("stale").filter(has_text="does not answer").wait_for()
    assert its.page.title().startswith("Offline")
    assert its.serious() == []
    its.shoot("no-answer")
    its.check()
    its.page.close()
    victim.end_by_force()
    victim.start()  # The last test of this file checks that the node returns.


def test_open_tab_of_the_dashboard_uses_little_processor_time(swarm: Swarm, other: Dashboard, figures: Figures) -> None:
    other.until_phase("training", wait_s=PATIENCE * START_S)
    meter, settled_s = browser_meter(), time.monotonic() + SETTLED_S
    while busy_ratio(meter) > TAB_RATIO and time.monotonic() < settled_s:
        pass
    share = busy_ratio(meter, TAB_S)
    figures.hold("an open tab's share of a core, per cent rather than", 100 * share, 100 * TAB_RATIO)


def test_dashboard_says_that_its_node_has_ended_and_recovers_when_it_restarts(swarm: Swarm, tab: Dashboard) -> None:
    node = tab.node
    port = tab.url.rpartition(":")[2]
    tab.until_phase("training", wait_s=PATIENCE * START_S)
    node.running.send_signal(signal.SIGTERM)
    node.wait_end(10 * PATIENCE)

    def told() -> set[tuple[str, str]]:
        entries = swarm.nodes[1].http.get("/api/v1/journal").json()["entries"]
        return {(entry["name"], entry["kind"]) for entry in entries}

    wait_for(lambda: ("founder", "left") in told(), 30, "the founder said goodbye")
    tab.until_stale(True)
    tab.mark("stale").filter(has_text="The node has ended.").wait_for()
    node.start(f"--api.port={port}")
    # The node's sessions ended with it. The tab asks for the token again without a reload.
    tab.page.locator("html[data-phase=locked], html[data-stale=false]").first.wait_for(state="attached", timeout=60_000)
    if tab.phase == "locked":
        tab.page.get_by_label("Token").fill(tab.token)
        tab.button("Open").click()
    tab.until_phase("training", wait_s=PATIENCE * START_S)
    tab.until_stale(False)
    # The page shows the other two nodes as well.
    tab.view("Swarm")
    peers = tab.page.get_by_role("region", name="Peers, table").get_by_role("row")
    for name in ("good", SCRIPT):
        peers.filter(has_text=name).wait_for(timeout=1e3 * PATIENCE * START_S)

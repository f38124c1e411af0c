"""A real swarm of three through the page of one of them: read, paused, resumed, hurt, restarted; no mouse needed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
from playwright.sync_api import BrowserContext

from tests.browser.harness import NARROW, VIEWS, WIDE, Dashboard, missing
from tests.swarm.conftest import Figures
from tests.swarm.harness import PATIENCE, START_S, Node, Swarm, tiny, wait_for

pytestmark = pytest.mark.timeout(240)

SCRIPT = "<script>alert(1)</script>"
BIDI = "good\u202elive\u2066"
FREED_S = 5.0
GONE_S = 15.0
BUSY_RATIO = 0.5
"""Of a core, from which on a node counts as working."""
TAB_RATIO = 0.05
TAB_S = 10.0
SETTLED_S = 5.0
"""Loading the page is not counted."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """The founder, and two with names that should be text and nothing else."""
    if lacks := missing():
        pytest.skip(lacks)
    run = tiny(round={"inner_steps": 60, "min_peers": 1}, evaluation={"batches": 1})
    with Swarm(tmp_path_factory.mktemp("browser"), run) as swarm:
        swarm.found()
        invite = swarm.nodes[0].invite()
        for folder, name in (("script", SCRIPT), ("bidi", BIDI)):
            node = swarm.node(folder, join=invite)
            node.name, node.preset = name, None
            node.start()
        for node in swarm.nodes:
            node.until(lambda s: s["contribution"]["rounds_joined"] >= 2, PATIENCE * START_S)
            node.calm()
        yield swarm


@pytest.fixture
def tab(swarm: Swarm, context: BrowserContext) -> Iterator[Dashboard]:
    """The founder's page, logged in; at the end it has broken no rule."""
    made = Dashboard(context, swarm.nodes[0]).open()
    made.page.locator("html:not([data-phase=unknown]):not([data-phase=locked])").wait_for(state="attached")
    yield made
    made.check()


def test_each_view_shows_what_the_node_says(tab: Dashboard) -> None:
    tab.until_phase("training")
    assert tab.mark("reason").inner_text()
    tab.page.get_by_text("Tokens", exact=True).first.wait_for()
    tab.page.get_by_role("heading", name="Devices").wait_for()
    tab.view("Swarm")
    rows = tab.page.get_by_role("region", name="Peers, table").get_by_role("row")
    rows.nth(3).wait_for()
    assert rows.count() == 4, "a head and three members"
    assert tab.mark("rounds").get_by_role("option").count() >= 2
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


def test_names_of_strangers_are_text(tab: Dashboard) -> None:
    tab.until_phase("training").view("Swarm")
    peers = tab.page.get_by_role("region", name="Peers, table")
    peers.get_by_text(SCRIPT).wait_for()
    assert tab.page.evaluate("document.querySelectorAll('main script').length") == 0
    text = peers.inner_text()
    assert "good" in text
    assert not {"\u202e", "\u2066"} & set(text), "signs that turn the text around are not passed on"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_and_nothing_is_wider_than_a_phone(tab: Dashboard, scheme: str) -> None:
    tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    tab.until_phase("training")
    for view in VIEWS:
        tab.view(view)
        tab.page.locator("main h1").first.wait_for()
        time.sleep(1)  # for what the view asks the node
        shown = tab.shoot(f"{view.lower()}-{scheme}")
        assert tab.serious() == [], view
        tab.page.set_viewport_size(NARROW)  # type: ignore[arg-type]
        assert tab.overflow_px() <= 0, f"{view} is wider than 360 px"
        tab.shoot(f"{view.lower()}-{scheme}-narrow")
        tab.page.set_viewport_size(WIDE)  # type: ignore[arg-type]
    print(f"screenshots: {shown.parent}")


def test_wrong_token_right_token_and_locking_again(swarm: Swarm, context: BrowserContext) -> None:
    tab = Dashboard(context, swarm.nodes[0]).open(with_token=False).until_phase("locked", word="Locked")
    assert tab.serious() == []
    tab.page.get_by_label("Token").fill("wrong")
    tab.button("Open").click()
    tab.page.get_by_role("alert").filter(has_text="wrong").wait_for()
    assert tab.page.get_by_role("navigation", name="Views").count() == 0
    tab.page.get_by_label("Token").fill(tab.token)
    tab.page.keyboard.press("Enter")
    tab.until_phase("training")
    assert tab.token not in tab.page.url
    tab.page.reload()
    tab.until_phase("training")
    tab.view("Settings").button("Lock this page").click()
    tab.until_phase("locked", word="Locked")
    tab.check()


def test_without_a_mouse(tab: Dashboard) -> None:
    tab.until_phase("training")
    keys = tab.page.keyboard
    tab.tab_to("a Swarm")
    keys.press("Enter")
    tab.page.get_by_role("region", name="Peers, table").wait_for()
    tab.page.locator("body").press("Home")
    tab.page.evaluate("document.activeElement.blur()")
    tab.tab_to("a Overview")
    keys.press("Enter")
    tab.mark("reason").wait_for()
    tab.tab_to("button Pause")
    keys.press("Enter")
    tab.item("For 1 hour").wait_for()
    keys.press("Escape")
    tab.item("For 1 hour").wait_for(state="hidden")
    assert tab.focused() == "button Pause", "Escape gives the focus back"
    keys.press("Enter")
    wait_for(lambda: "menuitem" in tab.focused(), 5, "the menu takes the focus")
    keys.press("End")
    assert tab.focused() == "menuitem Until I resume"
    keys.press("Enter")
    tab.until_phase("paused", word="Paused")
    tab.tab_to("button Resume")
    keys.press("Enter")
    tab.until_phase("training", word="Training", wait_s=PATIENCE * START_S)


def test_pause_by_click_frees_the_processor_and_resume_takes_it_again(tab: Dashboard, figures: Figures) -> None:
    node = tab.node
    tab.until_phase("training", wait_s=PATIENCE * START_S)
    worker = node.find("worker")
    wait_for(lambda: busy_ratio(node) > BUSY_RATIO / 2, START_S, "it works")
    tab.button("Pause").click()
    tab.item("Until I resume").click()
    began_s = time.monotonic()
    psutil.wait_procs([worker], timeout=START_S)
    assert not worker.is_running(), "the process with the model is gone"
    figures.hold("paused by click: the model has left the memory after", time.monotonic() - began_s, FREED_S)
    tab.until_phase("paused", word="Paused")
    figures.hold("paused by click: the page says so after", time.monotonic() - began_s, FREED_S)
    # What stays in the swarm for a paused node takes some seconds to start; after that there is nothing to do.
    wait_for(lambda: busy_ratio(node) < BUSY_RATIO / 5, PATIENCE * START_S, "the processor is free")
    figures.tell("paused by click: what goes on without a model has started after", time.monotonic() - began_s)
    tab.button("Resume").click()
    tab.until_phase("training", word="Training", wait_s=PATIENCE * START_S)
    node.until_training(PATIENCE * START_S)


def test_a_killed_peer_goes_from_the_page(swarm: Swarm, tab: Dashboard, figures: Figures) -> None:
    tab.until_phase("training", wait_s=PATIENCE * START_S).view("Swarm")
    peers = tab.page.get_by_role("region", name="Peers, table").get_by_role("row")
    peers.filter(has_text="good").wait_for()
    victim = swarm.nodes[2]
    victim.running.send_signal(signal.SIGKILL)
    began_s = time.monotonic()
    peers.filter(has_text="good").wait_for(state="detached", timeout=60_000)
    figures.hold("a killed peer is gone from the page after", time.monotonic() - began_s, GONE_S)
    victim.end_by_force()
    victim.start()
    peers.filter(has_text="good").wait_for(timeout=1e3 * PATIENCE * START_S)


def test_an_open_tab_costs_little(swarm: Swarm, tab: Dashboard, figures: Figures) -> None:
    tab.until_phase("training", wait_s=PATIENCE * START_S)
    tab.page.wait_for_timeout(1e3 * SETTLED_S)
    before_s, began_s = browser_s(), time.monotonic()
    tab.page.wait_for_timeout(1e3 * TAB_S)
    share = (browser_s() - before_s) / (time.monotonic() - began_s)
    figures.hold("an open tab's share of a core, per cent rather than", 100 * share, 100 * TAB_RATIO)


def test_the_page_outlives_its_node_and_recovers(tab: Dashboard) -> None:
    node = tab.node
    port = tab.url.rpartition(":")[2]
    tab.until_phase("training", wait_s=PATIENCE * START_S)
    node.running.send_signal(signal.SIGTERM)
    node.wait_end(10 * PATIENCE)
    tab.until_stale(True)
    tab.mark("stale").filter(has_text="does not answer").wait_for()
    tab.shoot("no-answer")
    node.start(f"--api.port={port}")
    # Its sessions ended with it: the tab asks for the token, and nobody has to load the page again.
    tab.page.locator("html[data-phase=locked], html[data-stale=false]").first.wait_for(state="attached", timeout=60_000)
    if tab.phase == "locked":
        tab.page.get_by_label("Token").fill(tab.token)
        tab.button("Open").click()
    tab.until_phase("training", wait_s=PATIENCE * START_S)
    tab.until_stale(False)


def busy_ratio(node: Node, window_s: float = 1.0) -> float:
    """Of a core, all its processes together."""

    def used_s() -> float:
        total = 0.0
        for process in node.processes():
            with suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total

    before_s, began_s = used_s(), time.monotonic()
    time.sleep(window_s)
    return (used_s() - before_s) / (time.monotonic() - began_s)


def browser_s() -> float:
    """Processor seconds of all of Chromium's processes so far."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "chrom" in process.name():
                total += sum(process.cpu_times()[:2])
    return total

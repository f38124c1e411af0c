"""What the page tells the owner of a machine. The node behind it reports what each test writes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from playwright.sync_api import BrowserContext, Route, expect

from node.api.node_interface import RecentWork
from node.status import GovernanceInfo, PauseInfo, Phase, RefusedAmendment, Sample, TrainingInfo
from tests.browser.harness import NARROW, RESULTS, WIDE, Dashboard
from tests.browser.scene import KEYS, MONTH, Scene, peer, scene
from tests.swarm.harness import Node, wait_for

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def village(tmp_path: Path) -> Iterator[Scene]:
    with scene(tmp_path) as made:
        yield made


@pytest.fixture
def tab(village: Scene, context: BrowserContext) -> Iterator[Dashboard]:
    tab = village.open(context)
    yield tab
    tab.check()


def test_run_card_shows_purpose_progress_and_the_share_of_this_node(tab: Dashboard) -> None:
    card = tab.page.locator("[aria-labelledby=run]")
    card.get_by_text("To see how far the laptops of one street get.").wait_for()
    told = card.inner_text().replace("\u202f", " ")
    for text in (
        "village",
        "8.4 %",
        "168 M of 2.00 G tokens",
        "About 8 hours left",
        "152 M",
        "Python's standard library",
    ):
        assert text in told, told
    facts = dict(zip(*(card.locator(tag).all_inner_texts() for tag in ("dt", "dd")), strict=True))
    assert facts["Your share"].startswith("29")
    assert facts["Rank"].split("\n")[:1] == ["2nd"]
    assert facts["Streak"].split("\n")[:1] == ["12"]
    assert card.get_by_role("progressbar").get_attribute("aria-valuenow") == "8.4"
    assert "Share, rank and streak count up to round 41." in told


def test_owner_who_was_away_sees_what_the_machine_has_done_since(
    village: Scene, context: BrowserContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_s: list[float] = []

    async def work(since_s: float) -> RecentWork:
        asked_s.append(since_s)
        return RecentWork(seen_s=32_280.0, rounds=87, computed_s=31_000.0, tokens=1_200_000, tokens_merged=1_100_000)

    monkeypatch.setattr(village.node.past, "work", work)
    tab = village.open(context)
    tab.mark("recent").get_by_text("In the last 24 hours").wait_for()
    tab.button("Leave").wait_for()
    assert "Your credit stays." in tab.page.locator(".order-notes").inner_text()
    tab.page.wait_for_function("localStorage.getItem('diloco-visit') !== null")
    stored = json.loads(tab.page.evaluate("localStorage.getItem('diloco-visit')"))
    stored["at"] -= 9 * 3_600_000
    tab.page.evaluate("text => localStorage.setItem('diloco-visit', text)", json.dumps(stored))
    tab.page.reload()
    tab.mark("recent").get_by_text("Since your last visit").wait_for()
    assert tab.mark("recent").inner_text().replace("\u202f", " ") == (
        "Your work counted. Since your last visit 9 h ago, this machine was on for 8 h 58 min and trained on 1.20 M "
        "tokens. 1.10 M tokens of its work were merged into the model."
    )
    assert asked_s[-1] == pytest.approx(stored["at"] / 1000, abs=1.0)
    tab.page.screenshot(path=str(RESULTS / "away.png"), full_page=True)
    tab.page.set_viewport_size(NARROW)
    assert tab.overflow_px() <= 0
    tab.page.screenshot(path=str(RESULTS / "away-narrow.png"), full_page=True)
    tab.check()


def test_newest_text_of_the_model_is_shown_as_plain_text(village: Scene, tab: Dashboard) -> None:
    shown = tab.mark("answer")
    shown.filter(has_text="open(path, mode) as file").wait_for()
    assert "after round 40" in shown.inner_text()
    hostile = Sample(round=41, prompt="a", text="<img src=x onerror=alert(1)>\u202e")
    samples = (hostile, *village.report.training.samples)
    village.show(training=village.report.training.model_copy(update={"samples": samples}))
    shown.filter(has_text="<img src=x onerror=alert(1)>").wait_for()
    assert "\u202e" not in shown.inner_text()
    assert shown.locator("img").count() == 0
    tab.page.set_viewport_size(NARROW)
    long = Sample(round=42, prompt="a", text=" " * 60 + "word" * 60)
    village.show(training=village.report.training.model_copy(update={"samples": (long,)}))
    shown.filter(has_text="wordword").wait_for()
    assert tab.overflow_px() <= 0


def test_newest_text_of_the_model_stays_while_the_node_is_paused(village: Scene, context: BrowserContext) -> None:
    """A paused node has no worker, so the text comes from the disk."""
    kept = [{"round": 40, "prompt": "def open_file(", "text": "kept on disk"}]
    (village.folder / "samples.json").write_text(json.dumps({"samples": kept}))
    village.show(training=TrainingInfo())
    village.enter(Phase.PAUSED)
    tab = village.open(context)
    tab.mark("answer").filter(has_text="kept on disk").wait_for()
    tab.check()


def test_explanation_of_a_term_appears_on_focus_and_stays_inside_a_narrow_window(tab: Dashboard) -> None:
    tab.page.locator("[aria-labelledby=run] .term").first.wait_for()
    tab.page.set_viewport_size(NARROW)
    term = tab.page.locator("[aria-labelledby=run] .term").filter(has_text="Rank")
    term.focus()
    tip = tab.page.locator(".tip")
    tip.filter(has_text="This node's place among all members").wait_for()
    assert tab.overflow_px() <= 0
    tab.page.keyboard.press("Escape")
    tip.wait_for(state="detached")
    tab.page.set_viewport_size(WIDE)


def test_events_say_who_left_who_fell_silent_and_who_joined(village: Scene, tab: Dashboard) -> None:
    village.depart("attic", ago_s=630, says_goodbye=True)
    village.depart("garage", ago_s=330, says_goodbye=False)
    village.ahead_s = 0
    village.show(swarm=(*village.report.swarm, peer("barn")))
    village.enter(Phase.ERROR, "worker_crashes", "The worker crashed (killed). See the log, then `resume`.")
    events = tab.page.locator(".events li")
    events.filter(has_text="The worker crashed").wait_for()
    told = [text.split("\n")[-1] for text in events.all_inner_texts()]
    assert told[0].endswith("See the log, then resume.")
    assert told[1:4] == ["barn joined", "garage is gone: no answer", "attic left"]
    assert re.match(r"\d\d:\d\d", events.first.inner_text())
    assert tab.serious() == []


def test_refused_amendments_are_listed_with_the_reason(village: Scene, context: BrowserContext) -> None:
    refused = RefusedAmendment(digest="ab" * 32, reason="its round is over", number=3, change="inner.lr = 0.0002")
    village.act(lambda: village.board.set_governance(GovernanceInfo(run="cd" * 32, refused=(refused,))))
    listed = village.open(context).page.locator("[aria-labelledby=amendments] li")
    listed.first.wait_for()
    assert listed.all_inner_texts() == ["3. inner.lr = 0.0002 Refused: its round is over."]


def test_departed_peers_stay_in_the_table_in_grey_for_an_hour(village: Scene, tab: Dashboard) -> None:
    village.depart("cellar", ago_s=3700, says_goodbye=True)
    village.depart("attic", ago_s=630, says_goodbye=True)
    village.depart("garage", ago_s=330, says_goodbye=False)
    village.ahead_s = 0
    tab.view("Swarm")
    rows = tab.page.get_by_role("region", name="Peers, table").locator("tbody tr")
    rows.filter(has_text="attic").wait_for()
    told = rows.all_inner_texts()
    assert len(told) == 3, "the one that left more than an hour ago is not shown"
    assert "shed" in told[0], "departed peers come last"
    attic, garage = (rows.filter(has_text=name) for name in ("attic", "garage"))
    assert "Left" in attic.inner_text() and "10 min ago" in attic.inner_text().replace("\u202f", " ")
    assert "No answer" in garage.inner_text()
    assert attic.get_attribute("class") == "departed"
    assert tab.serious() == []


def test_peer_table_shows_owners_if_there_are_any(village: Scene, tab: Dashboard) -> None:
    tab.view("Swarm")
    table = tab.page.get_by_role("region", name="Peers, table")
    table.locator("tbody tr").filter(has_text="attic").wait_for()
    assert table.get_by_role("button", name="Owner").count() == 0
    shed, attic, *others = village.report.swarm
    anna = {"owner": "12D3KooWannas0", "owner_name": "Anna", "team": "Street 7"}
    village.show(swarm=(shed, attic.model_copy(update=anna), *others))
    table.get_by_role("button", name="Owner").click()
    told = table.locator("tbody tr").first.inner_text()
    assert "Anna annas0" in told and "Street 7" in told, told
    assert tab.overflow_px() == 0 and tab.serious() == []


def test_table_of_a_large_swarm_shows_a_hundred_peers_and_this_node_at_first(village: Scene, tab: Dashboard) -> None:
    own, *others = village.report.swarm
    slow = own.model_copy(update={"tokens_per_second": 0.0})
    rows = (others[0].model_copy(update={"name": f"peer {n}", "peer_id": f"12D3KooW{n:044}"}) for n in range(296))
    village.show(swarm=(slow, *others, *rows))
    tab.view("Swarm")
    table = tab.page.get_by_role("region", name="Peers, table")
    tab.button("Show all 300").wait_for()
    assert table.locator("tbody tr").count() == 101
    assert "shed" in table.locator("tbody tr.marked").inner_text()
    assert tab.serious() == []
    tab.button("Show all 300").click()
    wait_for(lambda: table.locator("tbody tr").count() == 300, 10, "all peers")


COUNT_SORTS = """
window.sorts = 0;
const sort = Array.prototype.sort;
Array.prototype.sort = function (...by) {
  if (this[0]?.short_id) window.sorts += 1;
  return sort.apply(this, by);
};
window.sorts;
"""
"""Counts how often a table of peers is drawn: it sorts its rows each time."""


def test_peers_are_not_drawn_again_with_each_status(village: Scene, tab: Dashboard) -> None:
    """The status comes once a second, the peer table every three seconds."""
    tab.view("Swarm").page.locator("[aria-labelledby=peers] tbody tr").first.wait_for()
    tab.page.evaluate(COUNT_SORTS)
    began_s = time.monotonic()
    for step in range(60):
        village.show(training=village.report.training.model_copy(update={"inner_step": step}))
        tab.page.wait_for_timeout(100)
    assert 1 <= tab.page.evaluate("window.sorts") <= 4 + (time.monotonic() - began_s) / 3


def test_round_that_ends_by_the_clock_is_shown_in_seconds(village: Scene, tab: Dashboard) -> None:
    readings = tab.page.locator(".ruler .readings")
    told = readings.inner_text().replace("\u202f", " ")
    assert "This round\n1 min 2 s of 1 min 40 s" in told and "Inner step" not in told
    village.show(sync=village.report.sync.model_copy(update={"round_s": None}))
    readings.get_by_text("Inner step").wait_for()
    assert "32 of 20" in readings.inner_text()


def test_dead_daemon_is_offline_and_the_page_says_what_it_did_last(village: Scene, tab: Dashboard) -> None:
    tab.mark("state").filter(has_text="Training").wait_for()
    village.end()
    tab.mark("state").filter(has_text="Offline").wait_for()
    assert re.fullmatch(r"Last state: Training, \d+\Ws ago\.", tab.mark("reason").inner_text())
    assert tab.page.title().startswith("Offline")
    assert re.search(r"Showing data from \d+\Ws ago\.", tab.mark("stale").inner_text())
    assert tab.serious() == []


def test_owner_can_let_the_node_finish_its_round_before_it_leaves(village: Scene, tab: Dashboard) -> None:
    tab.button("Leave").click()
    with tab.page.expect_response("**/api/v1/actions/drain"):
        tab.button("After this round").click()
    tab.button("Leave").wait_for()
    assert [action for action, _ in village.node.acted] == ["drain"]
    village.enter(Phase.PAUSED)
    tab.until_phase("paused")
    tab.button("Leave").click()
    tab.button("Leave now").wait_for()
    assert tab.button("After this round").count() == 0, "a paused node is in no round"


def test_short_sync_of_each_round_does_not_change_the_state_word(village: Scene, tab: Dashboard) -> None:
    tab.until_phase("training", word="Training")
    village.enter(Phase.SYNCING, "syncing", "Averaging round 42.")
    tab.page.wait_for_timeout(1200)  # Until the event has arrived.
    assert (tab.phase, tab.mark("reason").inner_text()) == ("training", "Training towards round 42.")
    tab.until_phase("syncing", word="Syncing")


def test_drafts_of_settings_survive_views_reloads_and_tabs_and_one_bar_saves_them(
    village: Scene, tab: Dashboard, context: BrowserContext
) -> None:
    tab.view("Settings")
    tab.page.locator(".presets").get_by_label("Light").check()
    bar = tab.mark("save")
    bar.filter(has_text="unsaved changes").wait_for()
    box, height = bar.bounding_box(), tab.page.viewport_size
    assert box is not None and height is not None
    assert box["y"] + box["height"] <= height["height"], "the bar is in sight although the page is longer"
    upload = tab.page.get_by_label("Upload", exact=True)
    assert upload.input_value() == "5"
    upload.fill("1")
    tab.view("Overview")
    tab.page.get_by_role("link", name="Settings not saved").wait_for()
    tab.page.reload()
    other = village.open(context)
    for one in (tab, other):
        one.page.get_by_role("link", name="Settings").click()
        one.page.get_by_label("Upload", exact=True).wait_for()
        assert one.page.get_by_label("Upload", exact=True).input_value() == "1"
    tab.button("Save").click()
    tab.page.get_by_text("rounds time out at less than 2 Mbit/s").wait_for()
    assert tab.serious() == []
    assert village.node.config.limits.upload_mbit_s == 0, "all changes are saved, or none"
    upload.fill("9")
    tab.button("Save").click()
    bar.get_by_text("Saved.").wait_for()
    config = village.node.config
    assert (config.limits.upload_mbit_s, config.schedule.user_active) == (9, "pause")
    other.mark("save").filter(has_text="unsaved").wait_for(state="detached")
    other.check()


def test_advanced_settings_are_in_a_fold_that_opens_for_a_fault(village: Scene, tab: Dashboard) -> None:
    tab.view("Settings")
    fold = tab.page.locator("details.advanced")
    fold.wait_for()
    keep = tab.page.get_by_label("Keep", exact=True)
    assert not keep.is_visible()
    fold.locator("summary").click()
    keep.fill("0")
    fold.locator("summary").click()
    tab.button("Save").click()
    fault = tab.page.locator("[data-key='checkpoint.keep'] .fault")
    fault.filter(has_text=re.compile(".")).wait_for()
    assert keep.is_visible()
    keep.fill("3")
    assert (keep.get_attribute("aria-invalid"), fault.inner_text()) == ("false", "")
    tab.button("Save").click()
    tab.mark("save").get_by_text("Saved.").wait_for()
    assert keep.is_visible(), "the fold stays open"


def test_settings_page_shows_what_another_program_has_saved(village: Scene, tab: Dashboard) -> None:
    tab.view("Settings")
    upload = tab.page.get_by_label("Upload", exact=True)
    upload.wait_for()
    assert upload.input_value() == "0"
    headers = {"Authorization": f"Bearer {tab.token}"}
    change = {"limits": {"upload_mbit_s": 7}}
    assert httpx.patch(f"{tab.url}/api/v1/config", json=change, headers=headers).status_code == 200
    village.act(lambda: village.board.update_settings("shed", village.node.config.limits.model_dump()))
    expect(upload).to_have_value("7", timeout=75_000)
    upload.fill("0")
    tab.mark("save").filter(has_text="1 unsaved change").wait_for()


def test_what_is_typed_while_the_settings_are_saved_stays_a_draft(village: Scene, tab: Dashboard) -> None:
    held: list[Route] = []
    tab.page.route(
        "**/api/v1/config", lambda route: held.append(route) if route.request.method == "PATCH" else route.continue_()
    )
    tab.view("Settings")
    name = tab.page.get_by_label("Name", exact=True)
    name.fill("bob")
    with tab.page.expect_request(lambda request: request.method == "PATCH"):
        tab.button("Save").click()
    name.fill("bobby")
    held[0].continue_()
    tab.mark("save").get_by_text("Saved.").wait_for()
    assert (name.input_value(), village.node.config.node.name) == ("bobby", "bob")
    assert "1 unsaved change" in tab.mark("save").inner_text()


def test_answers_that_fail_are_not_shown_as_empty_lists(village: Scene, context: BrowserContext) -> None:
    problem = json.dumps({"status": 503, "title": "Unavailable", "detail": "It cannot be read now."})
    for what in ("history?*", "journal?*", "contributions", "rounds?*"):
        context.route(f"**/api/v1/{what}", lambda route: route.fulfill(status=503, body=problem))
    tab = village.open(context)
    for section in ("history", "events"):
        tab.page.locator(f"[aria-labelledby={section}]").get_by_text("It cannot be read now.").wait_for()
    context.unroute("**/api/v1/rounds?*")
    tab.view("Swarm")
    tab.page.locator("[aria-labelledby=contributions]").get_by_text("It cannot be read now.").wait_for()
    tab.page.locator("[aria-labelledby=rounds-title] [role=option]").first.wait_for()
    tab.check()


def test_error_of_an_action_goes_when_the_state_changes(village: Scene, tab: Dashboard) -> None:
    tab.page.route("**/api/v1/actions/pause", lambda route: route.abort())
    tab.button("Pause").click()
    tab.item("Until I resume").click()
    alert = tab.page.locator("main .notice.error")
    alert.get_by_text("The node does not answer.").wait_for()
    village.enter(Phase.PAUSED)
    tab.until_phase("paused", word="Paused")
    alert.wait_for(state="detached")


def test_prompt_stays_and_explanation_goes_when_the_view_changes(tab: Dashboard) -> None:
    prompt = tab.page.get_by_label("The model continues this text")
    prompt.fill("def f(")
    tab.page.locator(".term").first.hover()
    tab.page.locator(".tip").wait_for()
    tab.page.evaluate("location.hash = '#/logs'")
    tab.page.locator(".tip").wait_for(state="detached")
    tab.view("Overview")
    assert prompt.input_value() == "def f("


def test_month_shows_electricity_its_source_and_what_happens_at_the_traffic_limit(
    village: Scene, tab: Dashboard
) -> None:
    card = tab.page.locator("[aria-labelledby=month]")
    card.get_by_text("measured by the device").wait_for()
    told = card.inner_text().replace("\u202f", " ")
    assert "24.7 kWh" in told and "61.0 GB" in told
    assert "At 200 GB of traffic the node leaves the swarm until the next month." in told
    estimated = MONTH.model_copy(
        update={"measured_joules": 0.0, "estimated_joules": 9e6, "limit_bytes": 60_000_000_000}
    )
    village.act(lambda: village.board.set_month(estimated))
    card.get_by_text("estimated, the device has no meter").wait_for()
    card.get_by_text("The limit is reached.").wait_for()
    assert tab.serious() == []


RECORDER = """
window.told = [];
window.Notification = class {
  static permission = localStorage.getItem("diloco-notify") === "on" ? "granted" : "default";
  static requestPermission() { this.permission = "granted"; return Promise.resolve("granted"); }
  constructor(title, { body }) { window.told.push(`${title}: ${body}`); }
  close() {}
};
"""


@pytest.mark.timeout(120)
def test_browser_notifies_of_an_error_only_after_the_owner_asked_for_it(
    village: Scene, context: BrowserContext
) -> None:
    context.add_init_script(RECORDER)
    tab = village.open(context).view("Settings")
    box = tab.page.get_by_label("Notify me in this browser when the node needs me")
    box.wait_for()
    assert not box.is_checked()
    village.enter(Phase.ERROR, "worker_crashes", "The worker crashed. See the log, then `resume`.")
    tab.page.wait_for_timeout(12_000)
    assert tab.page.evaluate("window.told") == []
    box.click()
    wait_for(lambda: tab.page.evaluate("window.told.length"), 20, "a notification")
    assert tab.page.evaluate("window.told") == ["shed needs you: The worker crashed. See the log, then resume."]
    assert box.is_checked()
    tab.page.reload()
    box.wait_for()
    assert box.is_checked(), "the choice is kept"
    second = village.open(context).view("Settings")
    tab.page.wait_for_timeout(14_000)
    assert [one.page.evaluate("window.told") for one in (tab, second)] == [[], []], "the error was told before"
    village.enter(Phase.ERROR, "no_gpu", "The GPU is gone.")
    wait_for(
        lambda: tab.page.evaluate("window.told.length") + second.page.evaluate("window.told.length"), 20, "another"
    )
    second.page.wait_for_timeout(3_000)
    told = [one.page.evaluate("window.told") for one in (tab, second)]
    assert sorted(told) == [[], ["shed needs you: The GPU is gone."]], "one of the tabs tells"
    assert tab.serious() == []
    tab.check()


def test_name_of_a_peer_cannot_turn_the_text_of_the_page_around(village: Scene, tab: Dashboard) -> None:
    """A node refuses such a name in its own configuration, but another program may announce it."""
    village.show(swarm=(*village.report.swarm, peer("barn").model_copy(update={"name": "good\u202elive\u2066"})))
    events = tab.page.locator(".events")
    events.get_by_text("joined").wait_for()
    told = events.inner_text()
    tab.view("Swarm")
    peers = tab.page.get_by_role("region", name="Peers, table")
    peers.get_by_text("good").wait_for()
    assert not {"\u202e", "\u2066"} & set(told + peers.inner_text())


def test_node_without_a_name_is_called_by_the_end_of_its_peer_id(village: Scene, tab: Dashboard) -> None:
    header = tab.page.locator("header.top .identity")
    village.act(lambda: village.board.update_settings("", {}))
    header.get_by_text(KEYS["shed"][-6:], exact=True).wait_for()
    village.show(peer_id="")  # as before the worker's first report
    header.get_by_text("diloco-node", exact=True).wait_for()


def test_points_of_a_chart_have_one_resolution_also_after_a_refresh(village: Scene, context: BrowserContext) -> None:
    """The node chooses the step by the length of the time that is asked for and by the number of points."""
    asked: list[tuple[float, str]] = []

    def answer(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        since_s = datetime.fromisoformat(query["since"][0]).timestamp()
        asked.append((time.time() - since_s, query["points"][0]))
        route.fulfill(json={"step_s": 10.0, "at_s": [time.time() // 10 * 10], "series": {"training_loss": [2.0]}})

    context.route("**/api/v1/history*", answer)
    page = village.open(context).page
    for _ in range(2):
        page.wait_for_event("response", lambda response: "/api/v1/history" in response.url)
    assert {points for _, points in asked} == {"240"}
    assert all(span_s == pytest.approx(3600, abs=30) for span_s, _ in asked), asked


def test_number_can_be_typed_digit_by_digit(tab: Dashboard) -> None:
    """`1.0` is on the way to `1.05`. Only the owner may change what stands in the field."""
    tab.view("Settings")
    upload = tab.page.get_by_label("Upload", exact=True)
    upload.fill("")
    for text in ("1.05", "0.05"):
        upload.fill("")
        upload.press_sequentially(text)
        assert upload.input_value() == text
    tab.button("Discard").click()
    assert upload.input_value() == "0", "a draft that was discarded does not stay in the field"
    assert tab.focused() != "body ", "the keyboard focus stays on the page"


def test_link_of_the_node_opens_a_locked_tab_and_does_not_stay_in_its_address(
    village: Scene, context: BrowserContext
) -> None:
    tab = Dashboard(context, cast(Node, village)).open(with_token=False).until_phase("locked", word="Locked")
    tab.page.evaluate(f"location.hash = 'token={tab.token}'")
    tab.until_phase("training", word="Training")
    assert tab.token not in tab.page.url
    tab.check()


def test_lock_of_one_tab_locks_all_tabs(village: Scene, context: BrowserContext) -> None:
    first, second = village.open(context), village.open(context)
    first.view("Settings").button("Lock this page").click()
    for tab in (first, second):
        tab.until_phase("locked", word="Locked")
        assert tab.page.evaluate("sessionStorage.length") == 0
        tab.page.reload()
        tab.until_phase("locked", word="Locked")
        tab.check()


def test_page_says_that_it_is_not_locked_if_the_node_does_not_hear_of_it(village: Scene, tab: Dashboard) -> None:
    """The cookie stays, so the page would open again by itself."""
    tab.view("Settings")
    tab.page.route("**/api/v1/session", lambda route: route.abort())
    tab.button("Lock this page").click()
    tab.page.get_by_text("This page is not locked. The node does not answer.").wait_for()
    tab.page.unroute("**/api/v1/session")
    tab.button("Lock this page").click()
    tab.until_phase("locked", word="Locked")


def test_login_says_that_the_browser_did_not_keep_the_cookie(village: Scene, context: BrowserContext) -> None:
    context.route("**/api/v1/session", lambda route: route.fulfill(json={"cookie": "diloco"}))
    tab = Dashboard(context, cast(Node, village)).open(with_token=False).until_phase("locked", word="Locked")
    tab.page.get_by_label("Token").fill(tab.token)
    tab.button("Open").click()
    tab.page.get_by_text("The token is right, but the browser did not keep the cookie").wait_for()
    tab.check()


def test_keyboard_focus_stays_on_the_actions_when_a_button_disappears(village: Scene, tab: Dashboard) -> None:
    tab.button("Leave").focus()
    tab.page.keyboard.press("Enter")
    tab.button("Stay").wait_for()
    assert tab.focused() == "button Stay"
    tab.page.keyboard.press("Escape")
    tab.button("Stay").wait_for(state="detached")
    assert tab.focused().startswith("button ")
    tab.button("Pause").focus()
    tab.page.keyboard.press("Enter")
    tab.item("Until I resume").wait_for()
    tab.page.keyboard.press("End")
    tab.page.keyboard.press("Enter")
    village.enter(Phase.PAUSED)
    tab.button("Resume").wait_for()
    assert tab.focused() == "button Resume"


def test_keyboard_focus_stays_near_a_button_that_is_disabled_or_disappears(village: Scene, tab: Dashboard) -> None:
    tab.page.route("**/api/v1/generate", lambda route: route.fulfill(status=429, json={"detail": "It is busy."}))
    tab.page.get_by_label("The model continues this text").fill("def")
    tab.button("Continue").focus()
    tab.page.keyboard.press("Enter")
    tab.page.get_by_text("It is busy.").wait_for()
    assert tab.focused() == "button Continue"

    own, *others = village.report.swarm
    rows = (others[0].model_copy(update={"peer_id": f"12D3KooW{n:044}"}) for n in range(117))
    village.show(swarm=(own, *others, *rows))
    tab.view("Swarm").button("Show all 121").focus()
    tab.page.keyboard.press("Enter")
    tab.button("Show all 121").wait_for(state="detached")
    assert tab.focused().startswith("region ")

    found = tab.page.evaluate("fetch('/api/v1/config').then((answer) => answer.json())")
    saved = {"GET": {"schedule.active": "settings page"}, "PATCH": {}}
    tab.page.route(
        "**/api/v1/config", lambda route: route.fulfill(json=found | {"origins": saved[route.request.method]})
    )
    tab.view("Settings").button("Reset to default : Hours").focus()
    tab.page.keyboard.press("Enter")
    tab.button("Reset to default : Hours").wait_for(state="detached")
    assert tab.focused().startswith("group ")


def test_node_outside_the_swarm_shows_neither_members_nor_a_time_at_which_it_would_start(
    village: Scene, tab: Dashboard
) -> None:
    """It has no worker. What it last heard of the others is old."""
    network = tab.page.locator("[aria-labelledby=network]")
    network.get_by_text("connected to this node").wait_for()
    until = (datetime.now(UTC) + timedelta(hours=9)).isoformat()
    village.act(lambda: village.board.set_pause(PauseInfo(by="schedule", until=until), until))
    village.enter(Phase.ERROR, "worker_crashes", "The worker crashed.")
    network.get_by_text("This node is not in the swarm.").wait_for()
    assert "connected to this node" not in network.inner_text()
    assert "Until" not in tab.page.locator(".since").inner_text()
    tab.view("Swarm")
    tab.page.locator("[aria-labelledby=peers]").get_by_text("This node is not in the swarm.").wait_for()
    assert tab.page.locator("main .ledger dd").all_inner_texts()[:2] == ["–", "–"]
    assert tab.serious() == []


def test_paused_run_has_no_speed_and_no_member_that_trains(village: Scene, tab: Dashboard) -> None:
    village.show(run=village.report.run.model_copy(update={"is_paused": True}))
    village.enter(Phase.SYNCING, "run_paused", "The run is paused.")
    tab.mark("state").filter(has_text="Paused").wait_for()
    readings = tab.page.locator(".readings > div")
    told = dict(text.replace("\u202f", " ").split("\n", 1) for text in readings.all_inner_texts())
    assert told["Speed"] == "0 tok/s" and told["Next sync"] == "–"
    tab.page.locator("[aria-labelledby=network]").get_by_text("The run is paused, so nobody trains").wait_for()
    tab.page.locator("[aria-labelledby=run]").get_by_text("The run is paused.").wait_for()
    tab.view("Swarm")
    tab.page.locator("main .ledger").get_by_text("the run is paused").wait_for()
    assert tab.page.locator("main .ledger dd").first.inner_text().split("\n")[0] == "0"

"""The public page of a large run, as the files that `site` writes, in a real browser."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Dialog, Page, ViewportSize

from node.api.leaderboard import RankedMember, RankedOwner, RankedTeam
from node.api.public_page import STYLE, render
from node.api.public_run import STREAKS_SHOWN, LossPoint, PublicMember, PublicRound, PublicRun, PublicSample
from tests.browser.harness import AXE, RESULTS

MOST_COMPRESSED_BYTES = 150_000
EVIL = "<img src=x onerror=alert(1)>"
LEADERS, ROUNDS, LOSSES = 100, 50, 400
SIZES = [(360, 740), (1440, 900)]

pytestmark = pytest.mark.timeout(120)


def large_run() -> PublicRun:
    """A run as large as the page shows it, with hostile names."""
    given = {"share_ratio": 0.01, "rounds": 900, "first_round": 3, "last_round": 999, "streak": 12}
    names = [EVIL, "w" * 64, *(f"machine {number}" for number in range(LEADERS - 2))]
    keys = [f"12D3KooW{number:044}" for number in range(LEADERS)]
    machines, tokens = list(zip(names, keys, strict=True)), [10**9 - 10**6 * rank for rank in range(LEADERS)]
    owners = tuple(
        RankedOwner(rank=rank + 1, name=name, key=key, team=EVIL, machines=1, tokens=tokens[rank], **given)
        for rank, (name, key) in enumerate(machines)
    )
    return PublicRun(
        name=EVIL,
        purpose="To see how far the laptops of one street get.",
        manifest_hash="ab" * 32,
        model="llama, 12 layers",
        parameters=150_000_000,
        data=("hub:allenai/c4?config=en",),
        tokenizer="hub:mistralai/Mistral-7B-v0.1",
        state="training",
        at="2026-11-26T10:00:00+00:00",
        round=999,
        tokens=4 * 10**9,
        total_tokens=10**10,
        progress_ratio=0.4,
        ends_at="2026-12-24T18:00:00+00:00",
        tokens_per_second=12_345.0,
        loss=3.21,
        state_digest="cd" * 32,
        members=tuple(PublicMember(name=name, tokens_per_second=123.0) for name in names),
        members_now=5000,
        members_ever=5000,
        leaders=tuple(
            RankedMember(rank=rank + 1, name=name, key=key, tokens=tokens[rank], **given)
            for rank, (name, key) in enumerate(machines)
        ),
        owners=owners,
        streaks=owners[:STREAKS_SHOWN],
        teams=(RankedTeam(rank=1, name=EVIL, owners=100, machines=100, tokens=10**9, share_ratio=1.0),),
        credit_round=998,
        rounds=tuple(
            PublicRound(number=999 - i, at="2026-11-26T09:58:00+00:00", members=12, tokens=4 * 10**6, loss=3.2)
            for i in range(ROUNDS)
        ),
        losses=tuple(LossPoint(tokens=10**7 * (i + 1), loss=3 + 8 * math.exp(-i / 40)) for i in range(LOSSES)),
        invite="diloco1-" + "a" * 300,
        samples=tuple(
            PublicSample(number=number, prompt="Once upon a time", text=f" there was a model. {EVIL} " * 8)
            for number in (10, 100, 999)
        ),
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    run = large_run()
    for name, text in {"public.css": STYLE, "run.json": run.model_dump_json(), "index.html": render(run)}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def opened(context: BrowserContext, site: Path) -> tuple[Page, list[str]]:
    """The page, and everything that it has asked for or complained about."""
    page = context.new_page()
    seen: list[str] = []

    def dismiss(dialog: Dialog) -> None:
        seen.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("request", lambda request: seen.append(request.url))
    page.on("dialog", dismiss)
    page.on("pageerror", lambda error: seen.append(f"error: {error}"))
    page.goto(site.joinpath("index.html").as_uri())
    return page, seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=["phone", "desk"])
def test_page_asks_nobody_else_fits_the_window_and_is_accessible(
    browser: Browser, site: Path, size: tuple[int, int], scheme: str
) -> None:
    viewport = ViewportSize(width=size[0], height=size[1])
    context = browser.new_context(viewport=viewport, color_scheme="dark" if scheme == "dark" else "light")
    page, seen = opened(context, site)
    assert sorted(Path(url).name for url in seen) == ["index.html", "public.css"]
    assert all(url.startswith(site.as_uri()) for url in seen)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert page.evaluate("document.images.length") == 0, "names stay text"
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations)")
    faults = [
        f"{one['id']}: {[node['target'] for node in one['nodes']][:3]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
    assert faults == []
    RESULTS.mkdir(exist_ok=True)
    page.screenshot(path=RESULTS / f"public-{size[0]}-{scheme}.png", full_page=True)
    context.close()


def test_page_is_complete_without_scripts(browser: Browser, site: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page, _ = opened(context, site)
    text = page.locator("main").inner_text()
    for told in ("laptops of one street", "40.0 %", "3.21", "machine 7", "Once upon a time", EVIL):
        assert told in text
    assert page.locator("svg").count() >= 1, "the curve of the loss"
    context.close()


def test_files_of_the_largest_page_are_small(site: Path) -> None:
    sizes = {path.name: len(gzip.compress(path.read_bytes())) for path in site.iterdir()}
    print(sizes)
    assert sum(sizes.values()) <= MOST_COMPRESSED_BYTES

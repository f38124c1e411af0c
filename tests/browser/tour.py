"""Takes pictures of what a volunteer sees, for a reader who answers the ten questions below from them alone.

    python -m tests.browser.tour        pictures of each view at 360 and 1,280 pixels, in tests/browser/results

The node is the one of `scene`: it has trained for hours, one peer left and another fell silent. The pictures also show it
alone, paused, as a relay, in an error, and after its daemon was killed.

1. What am I training?                          6. Did my work count while I slept?
2. How far is it?                               7. What does the model say?
3. When is it done?                             8. How do I get my machine back?
4. What does it cost me?                        9. Is something wrong?
5. Who else is here?                           10. How do I tell others?
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, sync_playwright

from node.api.examples import PUBLIC_RUN
from node.api.public_page import STYLE, render
from node.status import Phase
from tests.browser.harness import ARGUMENTS, CHROMIUM, NARROW, RESULTS, VIEWS, WIDE, missing
from tests.browser.scene import Scene, peer, scene

SETTLE_MS = 1500
"""Time for charts and transitions before a picture is taken."""


def take_pictures(browser: Browser) -> None:
    """Save all pictures. Each window has its own node."""
    for size in (NARROW, WIDE):
        with tempfile.TemporaryDirectory() as name, scene(Path(name)) as village:
            village.depart("cellar", ago_s=1800, says_goodbye=True)
            village.depart("garage", ago_s=600, says_goodbye=False)
            village.ahead_s = 0
            village.show(swarm=(*village.report.swarm, peer("barn")))
            context = browser.new_context(viewport=size, color_scheme="light")
            context.set_default_timeout(30_000)
            take_tour(village, context, str(size["width"]))
            shoot_public_page(context, Path(name), str(size["width"]))
            context.close()


def take_tour(village: Scene, context: BrowserContext, width: str) -> None:
    tab = village.open(context)

    def shoot(name: str) -> None:
        tab.page.wait_for_timeout(SETTLE_MS)
        print(tab.shoot(f"tour-{width}-{name}"))

    for view in VIEWS:
        tab.view(view)
        shoot(view.lower())
    tab.view("Overview")
    for phase, code, reason in STATES:
        village.enter(phase, code, reason, ago_s=600)
        tab.until_phase(phase.value)
        shoot(code)
    village.end()
    tab.until_stale(True)
    shoot("killed")


def shoot_public_page(context: BrowserContext, folder: Path, width: str) -> None:
    for name, text in {"public.css": STYLE, "index.html": render(PUBLIC_RUN)}.items():
        (folder / name).write_text(text)
    page = context.new_page()
    page.goto((folder / "index.html").as_uri())
    file = RESULTS / f"tour-{width}-public.png"
    page.screenshot(path=file, full_page=True)
    print(file)


STATES = (
    (Phase.PAUSED, "paused", "Paused by the owner."),
    (Phase.CONNECTING, "alone", "No peer answers. Trying again every 15 s."),
    (Phase.ERROR, "crashed", "The worker ended three times in a row. See the logs."),
)


def main() -> int:
    if lacks := missing():
        print(f"No pictures: {lacks}")
        return 3
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        take_pictures(browser)
        browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

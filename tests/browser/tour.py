"""Takes pictures of what a volunteer sees, for a reader who answers the ten questions below from them alone.

    python -m tests.browser.tour        pictures of each view at 360 and 1,280 pixels, in tests/browser/results

Four real nodes train for some minutes, in a network of their own in which the founder has a public address. One of them
leaves and one is killed. The pictures show the founder's page: each view, then paused, alone, with a worker that
crashes, and after the daemon was killed. They also show the public page. Needs root.

1. What am I training?                          6. Did my work count while I slept?
2. How far is it?                               7. What does the model say?
3. When is it done?                             8. How do I get my machine back?
4. What does it cost me?                        9. Is something wrong?
5. Who else is here?                           10. How do I tell others?
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.browser.harness import ARGUMENTS, CHROMIUM, NARROW, RESULTS, VIEWS, WIDE, Dashboard, missing
from tests.swarm.harness import START_S, Node, Swarm, tiny

RUN = tiny(
    name="village",
    purpose="To see how far the laptops of one street get.\nEverything that comes out of it belongs to everybody.",
    total_tokens=20_000_000,
    model={"hidden_size": 64, "intermediate_size": 192},
    round={"policy": "time", "inner_steps": 100, "min_peers": 1},
    evaluation={"batches": 4, "every_rounds": 4},
    sample={"prompts": ["def open_file("], "every_rounds": 8},
)
ADDRESS = "11.0.1.2"
"""A public address, as in the laboratory of homes."""
PORT = 31337
INSIDE = "--inside"
ROUNDS = 24
SETTLE_MS = 2500
"""Time for data, charts and transitions before a picture is taken."""
GONE_S = 25.0
"""Time until a killed member counts as gone, and the node has had a round without it."""
CRASHES = 6
CRASH_S = 3.0


class Tour:
    """The founder's page in a phone's window and in a desktop's."""

    def __init__(self, browser: Browser, node: Node) -> None:
        self.node, self.tabs = node, []
        for size in (NARROW, WIDE):
            context = browser.new_context(viewport=size, color_scheme="light")
            context.set_default_timeout(30_000)
            self.tabs.append((size["width"], Dashboard(context, node).open()))

    def shoot(self, name: str, view: str = "Overview") -> None:
        for _, tab in self.tabs:
            tab.view(view)
        for width, tab in self.tabs:
            tab.page.wait_for_timeout(SETTLE_MS)
            print(tab.shoot(f"tour-{width}-{name}"), flush=True)

    def shoot_public_page(self) -> None:
        for width, tab in self.tabs:
            page = tab.page.context.new_page()
            page.goto(f"{tab.url}/public/")
            file = RESULTS / f"tour-{width}-public.png"
            page.screenshot(path=file, full_page=True)
            page.close()
            print(file, flush=True)


def take_pictures(browser: Browser, swarm: Swarm) -> None:
    founder = swarm.node("founder")
    founder.listen = f"/ip4/{ADDRESS}/tcp/{PORT}"
    founder.start("--api.public=true", f"--swarm.announce={founder.listen}")
    others = [swarm.node(name, join=founder.invite()) for name in ("attic", "garage", "cellar")]
    for node in others:
        node.preset, node.listen = None, f"/ip4/{ADDRESS}/tcp/0"
        node.start()
    founder.until_training(3 * START_S)
    attic, garage, cellar = others
    founder.until_round(ROUNDS, 20 * START_S)
    cellar.stop()
    garage.end_by_force()
    time.sleep(GONE_S)
    tour = Tour(browser, founder)
    for view in VIEWS:
        tour.shoot(view.lower(), view)
    tour.shoot_public_page()
    founder.act("pause")
    founder.until(lambda s: s["phase"] == "paused", START_S)
    tour.shoot("paused")
    founder.act("resume")
    founder.until_training()
    attic.stop()
    time.sleep(GONE_S)
    tour.shoot("alone")
    for _ in range(CRASHES):
        founder.find("worker").kill()
        time.sleep(CRASH_S)
        if founder.status()["phase"] == "error":
            break
        founder.until(lambda s: s["phase"] in ("training", "error"), START_S)
    tour.shoot("crashed")
    founder.find("supervisor").kill()
    time.sleep(CRASH_S)
    tour.shoot("killed")


def main() -> int:
    if lacks := missing():
        print(f"No pictures: {lacks}.")
        return 3
    if sys.argv[1:] != [INSIDE]:
        again = f"exec {sys.executable} -m tests.browser.tour {INSIDE}"
        script = f"ip link set lo up && ip address add {ADDRESS}/32 dev lo && {again}"
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", script])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        with Swarm(Path(folder), RUN) as swarm:
            take_pictures(browser, swarm)
        browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Measures the cost of an open tab: the processor time of Chromium while the page shows a training node.

    python -m tests.benchmarks.tab [--seconds 60]

An empty page in the same browser is measured before and after; the cost is the difference. Chromium renders on the
processor here, so the figure includes rendering. The view Swarm is measured with a made-up swarm of a thousand peers,
whose node reports once a second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from node.errors import MachineError
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.load import RUN
from tests.browser.harness import ARGUMENTS, CHROMIUM, WIDE, Dashboard, missing
from tests.browser.load import browser_meter
from tests.browser.scene import Scene, scene
from tests.swarm.harness import Swarm

SHARE = 0.05
PEERS = 1000


def share_of_a_core(page: Page, seconds: float) -> float:
    """The share of a core that the whole browser uses while this page is open and idle."""
    meter, began_s = browser_meter(), time.monotonic()
    page.wait_for_timeout(1e3 * seconds)
    return meter.read_s() / (time.monotonic() - began_s)


def share_with_reports(village: Scene, page: Page, seconds: float) -> float:
    """The share of a core that the whole browser uses while this page shows a large swarm."""
    first, known = village.report.swarm[1], village.report.swarm
    names = ((f"peer {number}", f"12D3KooW{number:044}") for number in range(PEERS - len(known)))
    others = (first.model_copy(update={"name": name, "peer_id": key}) for name, key in names)
    village.show(swarm=(*known, *others))
    page.get_by_role("button", name=f"Show all {PEERS}").wait_for()
    meter, began_s = browser_meter(), time.monotonic()
    while (past_s := time.monotonic() - began_s) < seconds:
        training = village.report.training.model_copy(update={"inner_step": int(past_s)})
        village.show(training=training)
        page.wait_for_timeout(1e3)
    return meter.read_s() / past_s


def measure(folder: Path, seconds: float) -> Result:
    (folder.parent / "village").mkdir()
    with Swarm(folder, RUN) as swarm, sync_playwright() as playwright, scene(folder.parent / "village") as village:
        node = swarm.found("--limits.cpu_threads=1")
        node.until_round(0)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        context = browser.new_context(viewport=WIDE)
        empty = context.new_page()
        idle = [share_of_a_core(empty, seconds / 2)]
        tab = Dashboard(context, node).open().until_phase("training")
        tab.page.bring_to_front()
        tab.page.wait_for_timeout(5e3)
        shown = share_of_a_core(tab.page, seconds)
        tab.page.close()
        large = village.open(context).view("Swarm")
        crowded = share_with_reports(village, large.page, seconds)
        large.page.close()
        idle.append(share_of_a_core(empty, seconds / 2))
        browser.close()
    before = sum(idle) / len(idle)
    costs = [
        Figure(f"open tab{what}, share of a core", "%", 100 * (used - before), 100 * SHARE, "% promised", high=1.0)
        for what, used in (("", shown), (f", Swarm of {PEERS:,}", crowded))
    ]
    return Result("tab", costs, [f"all of the browser: {shown:.2%} and {crowded:.2%}, with an empty page {before:.2%}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    if lacks := missing():
        print(f"tab: {lacks}", file=sys.stderr)
        return MachineError.exit_code
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        return measure(Path(name) / "swarm", options.seconds).conclude()


if __name__ == "__main__":
    sys.exit(main())

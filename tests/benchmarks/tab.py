"""Measures the cost of an open tab: the processor time of Chromium while the page shows a training node.

    python -m tests.benchmarks.tab [--seconds 60]

An empty page in the same browser is measured before and after; the cost is the difference. Chromium renders on the
processor here, so the figure includes rendering.
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
from tests.swarm.harness import Swarm

SHARE = 0.05


def share_of_a_core(page: Page, seconds: float) -> float:
    """The share of a core that the whole browser uses while this page is open and idle."""
    meter, began_s = browser_meter(), time.monotonic()
    page.wait_for_timeout(1e3 * seconds)
    return meter.read_s() / (time.monotonic() - began_s)


def measure(folder: Path, seconds: float) -> Result:
    with Swarm(folder, RUN) as swarm, sync_playwright() as playwright:
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
        idle.append(share_of_a_core(empty, seconds / 2))
        browser.close()
    before = sum(idle) / len(idle)
    cost = Figure("open tab, share of a core", "%", 100 * (shown - before), 100 * SHARE, "% promised", high=1.0)
    return Result("tab", [cost], [f"all of the browser: {shown:.2%}, with an empty page {before:.2%}"])


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

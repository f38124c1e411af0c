"""What an open tab costs: processor time of all of Chromium's processes while it shows a node that trains.

    python -m tests.benchmarks.tab [--seconds 60]

An empty page in the same browser is measured before and after; a tab costs what is used beyond that. Chromium draws on
the processor here (no GPU), so its own drawing is in the figure, by kind of process.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
from playwright.sync_api import Page, sync_playwright

from node.errors import MachineError
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.load import RUN
from tests.browser.harness import ARGUMENTS, CHROMIUM, WIDE, Dashboard, missing
from tests.swarm.harness import Swarm

SHARE = 0.05


def used_s() -> Counter[str]:
    """Processor seconds so far, by kind of Chromium's processes."""
    used: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "chrom" in process.name():
                kind = re.search(r"--type=(\S+)", " ".join(process.cmdline()))
                used[kind[1] if kind else "browser"] += sum(process.cpu_times()[:2])
    return used


def shares(page: Page, seconds: float) -> dict[str, float]:
    """Of a core, while this page is open and nobody touches it."""
    before, began_s = used_s(), time.monotonic()
    page.wait_for_timeout(1e3 * seconds)
    after, took_s = used_s(), time.monotonic() - began_s
    return {kind: (after[kind] - before[kind]) / took_s for kind in after}


def measure(folder: Path, seconds: float) -> Result:
    with Swarm(folder, RUN) as swarm, sync_playwright() as playwright:
        node = swarm.found("--limits.cpu_threads=1")
        node.until_round(0)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        context = browser.new_context(viewport=WIDE)  # type: ignore[arg-type]
        empty = context.new_page()
        idle = [shares(empty, seconds / 2)]
        tab = Dashboard(context, node).open().until_phase("training")
        tab.page.bring_to_front()
        tab.page.wait_for_timeout(5e3)
        shown = shares(tab.page, seconds)
        tab.page.close()
        idle.append(shares(empty, seconds / 2))
        browser.close()
    before = sum(sum(one.values()) for one in idle) / len(idle)
    cost = sum(shown.values()) - before
    notes = [f"open tab, {kind}: {share:.2%} of a core" for kind, share in sorted(shown.items())]
    notes.append(f"empty page, all: {before:.2%}")
    return Result(
        "tab", [Figure("open tab, share of a core", "%", 100 * cost, 100 * SHARE, "% promised", high=1.0)], notes
    )


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

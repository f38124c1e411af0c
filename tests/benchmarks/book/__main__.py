"""Tests the claims of the papers, and writes the book of claims.

    python -m tests.benchmarks.book                      all chapters
    python -m tests.benchmarks.book workers steps        these chapters
    python -m tests.benchmarks.book --grids              settings to compare before the arms are chosen
    python -m tests.benchmarks.book --report             only writes the report again

Finished cells (an arm with a seed) are kept in results/book.jsonl, so a book that was stopped goes on where it was. It
runs at the lowest priority. The report is results/book.md.
"""

from __future__ import annotations

import argparse
import subprocess
from dataclasses import replace
from datetime import UTC, datetime

from tests.benchmarks.book import cells, report
from tests.benchmarks.book.arm import STEPS
from tests.benchmarks.book.chapters import CHAPTERS, GRID_SEEDS, GRIDS
from tests.benchmarks.book.claims import Claim
from tests.benchmarks.figures import RESULTS

HEAD = """# The book of claims

What the papers on training with rare synchronisation say, tested here by one command: `make book`. All models are toys
(two layers, 0.12 million parameters, bytes of Python's standard library), so an effect that depends on size may be
missing. Pairs of trainings have the same seed, text and start. An effect is the mean of the paired differences, with
its 95 % interval by Student's t. *Reproduced* and *refuted here* mean that the whole interval lies on one side of the
limit. Losses are those of the anchor on held-out text, in nats per byte.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.book",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help=", ".join(CHAPTERS))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS, help="inner steps of most arms, fewer for a quick trial")
    parser.add_argument("--grids", action="store_true", help="train the settings that are compared with each other")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    if unknown := set(options.chapters) - set(CHAPTERS):
        parser.error(f"no chapter {', '.join(sorted(unknown))}; there are {', '.join(CHAPTERS)}")
    chapters = {name: [shortened(claim, options.steps) for claim in claims] for name, claims in CHAPTERS.items()}
    store = cells.Store(RESULTS / "book.jsonl")
    failed = []
    if not options.report:
        wanted = [
            (arm, seed)
            for seed in range(options.seeds)
            for name in options.chapters or chapters
            for claim in chapters[name]
            for arm in (claim.arm, claim.other)
        ]
        if options.grids:
            wanted = [(arm, seed) for seed in GRID_SEEDS for grid in GRIDS.values() for arm in grid]
        try:
            failed = cells.run(wanted, store, options.jobs)
        except BlockingIOError:
            parser.error(f"another book writes to {store.file}: wait for its end.")
    write(store, chapters, options.seeds)
    for (arm, seed), exc in failed:
        print(f"Failed with seed {seed}: {arm}: {exc!r}")
    return 1 if failed else 0


def shortened(claim: Claim, steps: int) -> Claim:
    """The claim with fewer steps of both arms: `steps` in place of STEPS."""
    arm, other = (arm.but(steps=arm.steps * steps // STEPS) for arm in (claim.arm, claim.other))
    return replace(claim, arm=arm, other=other)


def write(store: cells.Store, chapters: dict[str, list[Claim]], seeds: int) -> None:
    """Write the report and its plots."""
    found = {name: [report.finding(store, claim, seeds) for claim in claims] for name, claims in chapters.items()}
    findings = [one for chapter in found.values() for one in chapter]
    RESULTS.mkdir(parents=True, exist_ok=True)
    report.draw_effects(findings, RESULTS / "book.svg")
    report.draw_curves(store, seeds, RESULTS / "book_curves.svg")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    written = f"Written on {datetime.now(UTC):%Y-%m-%d} at commit {commit.stdout.strip() or 'unknown'}."
    lines = [
        HEAD,
        f"{written} {len(findings)} claims: {report.summary(findings)}.",
        "",
        "![All effects](book.svg)",
        "",
        "![Loss by tokens](book_curves.svg)",
    ]
    for name, chapter in found.items():
        lines += ["", f"## {name.capitalize()}", "", f"`make book ARGS={name}`", "", *report.table(chapter)]
    lines += ["", "## Grids", "", "`make book ARGS=--grids`", "", *report.grids(store)]
    (RESULTS / "book.md").write_text("\n".join(lines) + "\n")
    print(f"{len(findings)} claims: {report.summary(findings)}. The book is {RESULTS / 'book.md'}.")


if __name__ == "__main__":
    raise SystemExit(main())

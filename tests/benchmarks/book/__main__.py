"""Tests the claims of the papers, and writes the book of claims.

    python -m tests.benchmarks.book                      all chapters
    python -m tests.benchmarks.book workers steps        these chapters
    python -m tests.benchmarks.book --grids              settings to compare before the arms are chosen
    python -m tests.benchmarks.book --report             only writes the report again
    python -m tests.benchmarks.book --steps 60           a quick trial, whose report is another file

Finished cells (an arm with a seed) are kept in results/book.jsonl, so a book that was stopped goes on where it was. It
runs at the lowest priority. The report is results/book.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from tests.benchmarks.book import cells, report
from tests.benchmarks.book.arm import STEPS
from tests.benchmarks.book.chapters import BASE, CHAPTERS, GRID_SEEDS, GRIDS
from tests.benchmarks.book.claims import Claim
from tests.benchmarks.book.trial import LENGTH
from tests.benchmarks.figures import RESULTS

HEAD = f"""# The book of claims

What the papers on training with rare synchronisation say, tested here by one command: `make book`. All models are toys
(two layers, 0.12 million parameters, bytes of Python's standard library), so an effect that depends on size may be
missing.

- **Base.** {BASE.workers} workers (K), a round each {BASE.inner_steps} steps (H), {BASE.steps} inner steps of each
  worker, batches of {BASE.batch} x {LENGTH} bytes, from scratch, all workers on the same text. Inner AdamW with rate
  {BASE.inner_lr:g}, on a cosine to a tenth. Outer Nesterov with rate {BASE.outer_lr:g} and momentum {BASE.momentum:g}.
  The columns "arm" and "against" say what differs from it.
- **Effects.** Pairs of trainings have the same seed, text and start. An effect is the mean of the paired differences,
  with its 95 % interval by Student's t. *Reproduced* and *refuted here* mean that the whole interval is on one side
  of the limit. The smallest visible effect is half the width of the interval. Seeds were chosen before the run.
- **Many claims.** {{claims}} claims with 95 % intervals: one or two verdicts may be wrong by chance. Most claims
  compare with the same base, so their errors are not independent.
- **Units.** A token is a byte. A percent of perplexity per byte is about four percent per token of four bytes. So a
  limit in percent of perplexity is wider here than in a paper, and each effect is given in both units.
- **Rates.** The grids at the end chose the rates, with seeds that no claim uses.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.book",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help=", ".join(CHAPTERS))
    parser.add_argument("--seeds", type=int, help="the most seeds of a claim, fewer for a quick trial")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS, help="inner steps of most arms, fewer for a quick trial")
    parser.add_argument("--grids", action="store_true", help="train the settings that are compared with each other")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--mixed", action="store_true", help="also use cells that other versions of the code trained")
    options = parser.parse_args()
    if unknown := set(options.chapters) - set(CHAPTERS):
        parser.error(f"no chapter {', '.join(sorted(unknown))}; there are {', '.join(CHAPTERS)}")
    if options.grids and options.chapters:
        parser.error("--grids trains all grids: give no chapter")
    is_quick = options.steps != STEPS or options.seeds is not None
    chapters = {name: [shortened(claim, options.steps, options.seeds) for claim in CHAPTERS[name]] for name in CHAPTERS}
    store = cells.Store(RESULTS / "book.jsonl")
    wanted = grid_cells() if options.grids else cells_of(chapters, options.chapters or list(CHAPTERS))
    old = sum(count for (code, _), count in store.versions(wanted).items() if code != cells.code())
    if old and not (options.mixed or options.report):
        parser.error(f"other code trained {old} of these cells: move {store.file} away, or use them with --mixed.")
    failed = []
    try:
        if not options.report:
            failed = cells.run(wanted, store, options.jobs)
    except BlockingIOError:
        parser.error(f"another book writes to {store.file}: wait for its end.")
    finally:
        write(store, chapters, "book-quick" if is_quick else "book")
    for (arm, seed), exc in failed:
        print(f"Failed with seed {seed}: {arm}: {exc!r}")
    return 1 if failed else 0


def shortened(claim: Claim, steps: int, seeds: int | None) -> Claim:
    """The claim with `steps` in place of STEPS, and with at most so many seeds."""
    arm, other = (arm.but(steps=arm.steps * steps // STEPS) for arm in (claim.arm, claim.other))
    return replace(claim, arm=arm, other=other, seeds=min(claim.seeds, seeds or claim.seeds))


def cells_of(chapters: dict[str, list[Claim]], names: Sequence[str]) -> list[cells.Cell]:
    """The cells of these chapters, seed by seed. Long cells are first, so that no worker waits at the end for one."""
    claims = [claim for name in names for claim in chapters[name]]
    found: list[cells.Cell] = []
    for seed in range(max(claim.seeds for claim in claims)):
        arms = {arm for claim in claims if seed < claim.seeds for arm in (claim.arm, claim.other)}
        found += [(arm, seed) for arm in sorted(arms, key=lambda arm: (-arm.cost_s, repr(arm)))]
    return found


def grid_cells() -> list[cells.Cell]:
    return [(arm, seed) for seed in GRID_SEEDS for grid in GRIDS.values() for arm in grid]


def write(store: cells.Store, chapters: dict[str, list[Claim]], name: str) -> None:
    """Write the report and its plots."""
    found = {chapter: [report.finding(store, claim) for claim in claims] for chapter, claims in chapters.items()}
    findings = [one for chapter in found.values() for one in chapter]
    RESULTS.mkdir(parents=True, exist_ok=True)
    report.draw_effects(findings, RESULTS / f"{name}.svg")
    report.draw_curves(store, RESULTS / f"{name}_curves.svg")
    versions = store.versions([*cells_of(chapters, list(chapters)), *grid_cells()])
    trained = ", ".join(f"{count} at commit {commit} (code {code})" for (code, commit), count in versions.most_common())
    written = f"Written on {datetime.now(UTC):%Y-%m-%d}. {len(findings)} claims: {report.summary(findings)}."
    lines = [
        HEAD.format(claims=len(findings)),
        f"{written} Trainings: {trained or 'none'}.",
        "",
        *report.verdicts(found),
        "",
        f"![All effects]({name}.svg)",
        "",
        f"![Loss by tokens]({name}_curves.svg)",
    ]
    for chapter, ones in found.items():
        lines += ["", f"## {chapter.capitalize()}", "", f"`make book ARGS={chapter}`", "", *report.table(ones)]
    lines += ["", "## A larger model", "", "`python -m tests.benchmarks.book.large`", "", *larger()]
    lines += ["", "## Grids", "", "`make book ARGS=--grids`: means of two seeds.", "", *report.grids(store)]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    print(f"{len(findings)} claims: {report.summary(findings)}. The book is {RESULTS / f'{name}.md'}.")


def larger() -> list[str]:
    """What the leg with 20 million parameters has found, if a GPU has run it."""
    try:
        found = json.loads((RESULTS / "book_large.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ["20 million parameters, 0.5 G tokens, 8 workers against data parallel: **not run**, as it needs a GPU."]
    figures = [f"- **{one['name']}: {100 * (one['ratio'] - 1):+.1f} % of loss.**" for one in found["figures"]]
    return [f"At commit {found['commit']}, {found['at']}.", "", *figures, *(f"- {note}" for note in found["notes"])]


if __name__ == "__main__":
    raise SystemExit(main())

"""Writes one report on the cost of synchronisation from all stored results, as Markdown, JSON and plots.

    python -m tests.benchmarks.report

It reads the results of `sync`, `link_drop` and `codecs` in results/, and writes report.md, report.json and the plots to
the same folder. The report names the measurements that are missing.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import psutil

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from tests.benchmarks import sync
from tests.benchmarks.figures import RESULTS, commit

OURS, FORMULA, OTHER = "#2563eb", "#111827", "#f59e0b"
DPI = 120


def read(name: str) -> Any:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def of_sync() -> list[str]:
    kept: dict[str, Any] = read("sync") or {}
    if not kept:
        return ["Not measured: `python -m tests.benchmarks.sync`."]
    cells = [(sync.parse(text), sync.Found(**one)) for text, one in kept.items()]
    cells.sort(key=lambda cell: (cell[0].nodes, cell[0].mbit_s, cell[0].mode, cell[0].codec))
    figure, axes = plt.subplots(figsize=(9, 0.3 * len(cells) + 1))
    for place, (cell, one) in enumerate(cells):
        color = OTHER if cell.mode == "hivemind" else OURS
        axes.barh(place, 100 * one.utilization, color=color, height=0.7)
        axes.plot([100 * cell.formula] * 2, [place - 0.4, place + 0.4], color=FORMULA, linewidth=2)
        axes.text(101, place, f"{one.utilization:.1%}", va="center", fontsize=8)
    names = [f"{cell.mbit_s:g} Mbit/s, {cell.nodes} nodes, {cell.mode} {cell.codec}" for cell, _ in cells]
    axes.set_yticks(range(len(cells)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.set_xlabel("computing, % of the time (black: the formula; orange: hivemind's averager)")
    save(figure, "utilization")
    return [*sync.table(kept), "", "![Utilisation by cell](utilization.png)"]


def of_link_drop() -> list[str]:
    kept = read("link_drop")
    if kept is None:
        return ["Not measured: `python -m tests.benchmarks.link_drop`."]
    rounds = kept["samples"]["rounds"]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 4.5), sharex=True)
    at_s = [one["at_s"] for one in rounds]
    above.plot(at_s, [100 * one["utilization"] for one in rounds], "o-", color=OURS, label="measured")
    above.axhline(100 * kept["samples"]["fixed"], color=FORMULA, linestyle=":", label="slow line, fixed H (formula)")
    above.set_ylabel("computing, %")
    above.set_ylim(0, 105)
    above.legend(fontsize=8, loc="lower right")
    below.step(at_s, [one["inner_steps"] for one in rounds], where="post", color=OURS)
    below.set_ylabel("H of the next round")
    below.set_ylim(bottom=0)
    below.set_xlabel("seconds")
    phase_s = kept["samples"]["phase_s"]
    for axes in (above, below):
        axes.axvspan(phase_s, 2 * phase_s, color="#fee2e2")
    save(figure, "link_drop")
    title, *phases = kept["notes"]
    return [
        title,
        "",
        *(f"- {one.strip()}" for one in phases),
        "",
        "![Utilisation and H over time; shaded: the slow line](link_drop.png)",
    ]


def of_codecs() -> list[str]:
    kept = read("codecs")
    return list(kept["notes"]) if kept is not None else ["Not measured: `python -m tests.benchmarks.codecs`."]


def save(figure: Figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=DPI)
    plt.close(figure)


PARTS = (
    ("Utilisation and bytes", of_sync, "sync"),
    ("A line that drops and comes back", of_link_drop, "link_drop"),
    ("Codecs", of_codecs, "codecs"),
)


def main() -> int:
    written = f"Written on {datetime.now(UTC):%Y-%m-%d} at commit {commit()}, on {psutil.cpu_count()} cores."
    lines = ["# What synchronising costs", "", f"`make bench-sync`. {written}"]
    for title, part, _ in PARTS:
        lines += ["", f"## {title}", "", *part()]
    report: Path = RESULTS / "report.md"
    report.write_text("\n".join(lines) + "\n")
    (RESULTS / "report.json").write_text(json.dumps({name: read(name) for _, _, name in PARTS}, indent=1) + "\n")
    print(f"Wrote {report.relative_to(RESULTS.parents[2])}, report.json and the plots.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

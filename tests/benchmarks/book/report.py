"""Writes the book: a table of all verdicts, the chapters with their figures, and plots."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from tests.benchmarks.book.arm import Arm
from tests.benchmarks.book.cells import Store
from tests.benchmarks.book.chapters import BASE, DATA_PARALLEL, GRID_SEEDS, GRIDS, PLAIN
from tests.benchmarks.book.claims import Claim, Finding, Rule, Verdict, judge
from tests.benchmarks.book.trial import Result

mpl.rcParams["svg.hashsalt"] = "book"  # The same results give the same file.
COLORS = {
    Verdict.REPRODUCED: "#15803d",
    Verdict.REFUTED: "#b91c1c",
    Verdict.UNSEEN: "#6b7280",
    Verdict.NOT_RUN: "#d1d5db",
}
DRAWN_PERCENT = 30.0
"""Effects beyond this are drawn at the edge."""


def results_of(store: Store, arm: Arm, seeds: int) -> list[Result]:
    return [result for seed in range(seeds) if (result := store.get((arm, seed))) is not None]


def finding(store: Store, claim: Claim, seeds: int) -> Finding:
    both = [(store.get((claim.arm, seed)), store.get((claim.other, seed))) for seed in range(seeds)]
    return judge(claim, [(arm, other) for arm, other in both if arm is not None and other is not None])


def effect_text(one: Finding) -> str:
    if one.verdict is Verdict.NOT_RUN:
        return ""
    if not math.isfinite(one.effect):
        return "diverged"
    digits = 3 if one.claim.unit == "cosine" else 2
    return f"{one.effect:+.{digits}f} ± {one.half:.{digits}f} {one.claim.unit}"


def verdict_text(one: Finding) -> str:
    if one.verdict is Verdict.UNSEEN:
        return f"{one.verdict} (smallest visible effect {one.half:.2g} {one.claim.unit})"
    return f"**{one.verdict}**" if one.verdict is Verdict.REFUTED else str(one.verdict)


def rule_text(claim: Claim) -> str:
    sign = {Rule.BELOW: "<", Rule.ABOVE: ">", Rule.WITHIN: "within ±"}[claim.rule]
    return f"{sign} {claim.limit:g}" if claim.rule is not Rule.WITHIN else f"{sign}{claim.limit:g}"


def table(findings: Sequence[Finding]) -> list[str]:
    rows = ["| claim | paper | here, 95 % interval | asked | seeds | verdict |", "|---|---|---|---|---|---|"]
    for one in findings:
        claim = one.claim
        says = claim.says + (f" *{claim.note}*" if claim.note else "")
        rows.append(
            f"| `{claim.name}`: {says} | {claim.source}: {claim.paper} | {effect_text(one)} | {rule_text(claim)} "
            f"| {one.seeds} | {verdict_text(one)} |"
        )
    return rows


def grids(store: Store) -> list[str]:
    """The losses of the settings that were compared, the means of GRID_SEEDS."""
    rows = ["Means of two seeds that no claim uses.", ""]
    rows += ["| what | setting | held-out loss |", "|---|---|---|"]
    for name, arms in GRIDS.items():
        for arm in arms:
            losses = [one.loss for seed in GRID_SEEDS if (one := store.get((arm, seed))) is not None]
            setting = f"inner {arm.inner_lr:g}, outer {arm.outer_lr:g}"
            setting += f", eps {arm.adam_eps:g}" if arm.optimizer == "adam" else ""
            rows.append(f"| {name} | {setting} | {f'{statistics.fmean(losses):.4f}' if losses else 'not run'} |")
    return rows


def draw_effects(findings: Sequence[Finding], file: Path) -> None:
    """A plot of all effects in percent, with their intervals and limits."""
    shown = [one for one in findings if one.claim.unit != "cosine" and one.verdict is not Verdict.NOT_RUN]
    figure, axes = plt.subplots(figsize=(9, 0.28 * len(shown) + 1))
    for place, one in enumerate(shown):
        value = max(-DRAWN_PERCENT, min(DRAWN_PERCENT, one.effect))
        axes.errorbar(value, place, xerr=min(one.half, DRAWN_PERCENT), fmt="o", color=COLORS[one.verdict], capsize=3)
        axes.plot([one.claim.limit] * 2, [place - 0.4, place + 0.4], color="#111827", linewidth=1.5)
    axes.set_yticks(range(len(shown)), [one.claim.name for one in shown], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="#9ca3af", linewidth=0.8)
    axes.set_xlabel("effect in % with its 95 % interval (bar: the claim's limit; green: reproduced, red: refuted here)")
    save(figure, file)


def draw_curves(store: Store, seeds: int, file: Path) -> None:
    """Loss by tokens: plain, data parallel and DiLoCo, the means of all seeds."""
    figure, axes = plt.subplots(figsize=(8, 4))
    for name, arm in (("one worker", PLAIN), ("data parallel, 8", DATA_PARALLEL), ("DiLoCo, 8, H 30", BASE)):
        results = results_of(store, arm, seeds)
        if results:
            tokens = [point[0] / 1e6 for point in results[0].curve]
            losses = [statistics.fmean(one.curve[i][1] for one in results) for i in range(len(tokens))]
            axes.plot(tokens, losses, "o-", markersize=3, label=name)
    axes.set_xlabel("million tokens of all workers together")
    axes.set_ylabel("held-out loss, nats per token")
    if axes.lines:
        axes.legend()
    save(figure, file)


def save(figure: Figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def summary(findings: Sequence[Finding]) -> str:
    counts = Counter(one.verdict for one in findings)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])

"""Writes the book: a table of all verdicts, the chapters with their figures, and plots."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from tests.benchmarks.book.arm import Arm
from tests.benchmarks.book.cells import Store
from tests.benchmarks.book.chapters import BASE, DATA_PARALLEL, GRID_SEEDS, GRIDS, PLAIN
from tests.benchmarks.book.claims import SEEDS, Claim, Finding, Rule, Verdict, judge, loss, perplexity
from tests.benchmarks.book.trial import Result
from tests.benchmarks.curves import interval_95

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


def finding(store: Store, claim: Claim) -> Finding:
    both = [(store.get((claim.arm, seed)), store.get((claim.other, seed))) for seed in range(claim.seeds)]
    return judge(claim, [(arm, other) for arm, other in both if arm is not None and other is not None])


def arm_text(arm: Arm) -> str:
    """What of an arm differs from the base."""
    base = asdict(BASE)
    changes = [
        f"{name} {value if not isinstance(value, float) else f'{value:g}'}"
        for name, value in asdict(arm).items()
        if value != base[name] and not (arm.kind == "plain" and name == "workers")
    ]
    return ", ".join(changes).replace("_", " ").replace("kind ", "") or "base"


def arm_cell(arm: Arm, results: Sequence[Result]) -> str:
    """An arm with its mean loss and its tokens."""
    if not results:
        return arm_text(arm)
    mean = statistics.fmean(one.loss for one in results)
    tokens = statistics.fmean(one.tokens for one in results) / 1e6
    return f"{arm_text(arm)}: {mean:.4f} ({tokens:.2f} M tokens)"


def effect_text(one: Finding) -> str:
    """The effect with its interval. Effects on the loss and on the perplexity both have the other one beside them."""
    if one.verdict is Verdict.NOT_RUN:
        return ""
    if not math.isfinite(one.effect):
        return "diverged"
    digits = 3 if one.claim.unit == "cosine" else 2
    text = f"{one.effect:+.{digits}f} ± {one.half:.{digits}f} {one.claim.unit}"
    if one.claim.measure not in (loss, perplexity):
        return text
    other, unit = (perplexity, "perplexity") if one.claim.measure is loss else (loss, "loss")
    mean, half = interval_95([other(*pair) for pair in one.pairs])
    return f"{text} ({unit} {mean:+.2f} ± {half:.2f} %)"


def verdict_text(one: Finding) -> str:
    if one.verdict is Verdict.UNSEEN and not math.isfinite(one.effect):
        return f"{one.verdict}: a training diverged"
    if one.verdict is Verdict.UNSEEN and one.has_effect:
        return "cannot be decided at this scale: the interval contains the limit"
    if one.verdict is Verdict.UNSEEN:
        return f"{one.verdict} (smallest visible effect {one.half:.2g} {one.claim.unit})"
    if one.verdict is not Verdict.REFUTED:
        return str(one.verdict)
    is_better = one.claim.rule is Rule.WITHIN and one.claim.measure in (loss, perplexity) and one.effect < 0
    return f"**{one.verdict}**{': the arm is better' if is_better else ''}"


def rule_text(claim: Claim) -> str:
    sign = {Rule.BELOW: "<", Rule.ABOVE: ">", Rule.WITHIN: "within ±"}[claim.rule]
    return f"{sign} {claim.limit:g}" if claim.rule is not Rule.WITHIN else f"{sign}{claim.limit:g}"


def table(findings: Sequence[Finding]) -> list[str]:
    rows = ["| claim | paper | arm: loss | against | effect here, 95 % interval | asked | seeds | verdict |"]
    rows.append("|" + "---|" * 8)
    for one in findings:
        claim = one.claim
        says = claim.says + (f" *{claim.note}*" if claim.note else "")
        arm = arm_cell(claim.arm, [pair[0] for pair in one.pairs])
        other = arm_cell(claim.other, [pair[1] for pair in one.pairs])
        rows.append(
            f"| `{claim.name}`: {says} | {claim.source}: {claim.paper} | {arm} | {other} | {effect_text(one)} "
            f"| {rule_text(claim)} | {len(one.pairs)} | {verdict_text(one)} |"
        )
    return rows


def verdicts(found: dict[str, list[Finding]]) -> list[str]:
    """All claims with their verdicts, in short."""
    rows = ["| chapter | claim | effect | verdict |", "|---|---|---|---|"]
    for name, findings in found.items():
        for one in findings:
            effect = effect_text(one).split(" (")[0]
            rows.append(f"| {name} | {one.claim.says} | {effect} | {verdict_text(one)} |")
    return rows


def grids(store: Store) -> list[str]:
    """The losses of the settings that were compared, the means of GRID_SEEDS. The best of each grid is in bold."""
    rows = ["| what | setting, against the base | held-out loss |", "|---|---|---|"]
    for name, arms in GRIDS.items():
        means = []
        for arm in arms:
            losses = [one.loss for seed in GRID_SEEDS if (one := store.get((arm, seed))) is not None]
            means.append(statistics.fmean(losses) if losses else math.nan)
        best = min((mean for mean in means if not math.isnan(mean)), default=math.nan)
        for arm, mean in zip(arms, means, strict=True):
            text = "not run" if math.isnan(mean) else f"**{mean:.4f}**" if mean == best else f"{mean:.4f}"
            rows.append(f"| {name} | {arm_text(arm)} | {text} |")
    return rows


def draw_effects(findings: Sequence[Finding], file: Path) -> None:
    """A plot of all effects in percent, with their intervals and limits."""
    shown = [one for one in findings if one.claim.unit != "cosine" and math.isfinite(one.effect)]
    figure, axes = plt.subplots(figsize=(9, 0.28 * len(shown) + 1))
    for place, one in enumerate(shown):
        value = max(-DRAWN_PERCENT, min(DRAWN_PERCENT, one.effect))
        axes.errorbar(value, place, xerr=min(one.half, DRAWN_PERCENT), fmt="o", color=COLORS[one.verdict], capsize=3)
        for limit in {one.claim.limit, -one.claim.limit if one.claim.rule is Rule.WITHIN else one.claim.limit}:
            axes.plot([limit] * 2, [place - 0.4, place + 0.4], color="#111827", linewidth=1.5)
    names = [f"{one.claim.name} ({'loss' if 'loss' in one.claim.unit else 'perplexity'})" for one in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.axvline(0, color="#9ca3af", linewidth=0.8)
    axes.set_xlabel("effect in % with its 95 % interval (bar: the claim's limit; green: reproduced, red: refuted here)")
    axes.set_ylim(len(shown) - 0.5, -0.5)
    save(figure, file)


def draw_curves(store: Store, file: Path) -> None:
    """Loss by tokens: plain, data parallel and DiLoCo, the means of all seeds, with their 95 % intervals."""
    figure, axes = plt.subplots(figsize=(8, 4))
    for name, arm in (("one worker", PLAIN), ("data parallel, 8", DATA_PARALLEL), ("DiLoCo, 8, H 30", BASE)):
        curves = [one.curve for one in results_of(store, arm, SEEDS)]
        points = min((len(curve) for curve in curves), default=0)  # Of a training that diverged, it is shorter.
        if points:
            tokens = [point[0] / 1e6 for point in curves[0][:points]]
            spread = [interval_95([curve[i][1] for curve in curves]) for i in range(points)]
            halves = [half if math.isfinite(half) else 0.0 for _, half in spread]
            axes.errorbar(tokens, [mean for mean, _ in spread], yerr=halves, fmt="o-", markersize=3, label=name)
    axes.set_xlabel("million tokens of all workers together")
    axes.set_ylabel("held-out loss, nats per byte")
    if axes.containers:
        axes.legend()
    save(figure, file)


def save(figure: Figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def summary(findings: Sequence[Finding]) -> str:
    counts = Counter(one.verdict for one in findings)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])

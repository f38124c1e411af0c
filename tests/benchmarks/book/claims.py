"""The claims of the book: what a paper says, the arms that test it here, and the rule of the verdict.

A claim compares two arms with the same seeds. Its effect is a paired difference in percent: of the perplexity, exp(loss
- loss of the other arm) - 1, where the paper gives perplexities, else of the loss. Some claims compare other figures,
for example cosine similarities, and have a unit of their own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.benchmarks.book.arm import Arm
from tests.benchmarks.book.trial import Result
from tests.benchmarks.curves import interval_95

SEEDS = 6
"""Paired seeds of most claims."""
MOST_LOSS = 100.0
"""Of a training that did not diverge, nats per token. Guessing has 5.6."""


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    REFUTED = "refuted here"
    UNSEEN = "cannot be seen at this scale"
    NOT_RUN = "not run"


class Rule(StrEnum):
    """What the claim says of the effect, the difference of the arm from the other arm."""

    BELOW = "below"
    """The effect is below the limit. Of losses, with limit 0: the arm is better."""
    ABOVE = "above"
    """The effect is above the limit."""
    WITHIN = "within"
    """The size of the effect is below the limit."""


Measure = Callable[[Result, Result], float]


def perplexity(arm: Result, other: Result) -> float:
    """Change of the perplexity in percent."""
    return 100 * math.expm1(arm.loss - other.loss)


def loss(arm: Result, other: Result) -> float:
    """Change of the loss in percent."""
    return 100 * (arm.loss / other.loss - 1)


def cosine(arm: Result, other: Result) -> float:
    """Difference of the mean cosine similarities, without unit; nan if there are none."""
    if not arm.cosines or not other.cosines:
        return math.nan
    return statistics.fmean(arm.cosines) - statistics.fmean(other.cosines)


def early_loss(arm: Result, other: Result) -> float:
    """Change of the loss after a quarter of the tokens, in percent; nan if the curves are too short."""
    return _change_of_curve(arm, other, len(arm.curve) // 4 - 1)


def gap_gained(arm: Result, other: Result) -> float:
    """How much of its gap in loss the arm makes up from a quarter of the tokens to the end, in percent of the loss."""
    return early_loss(arm, other) - _change_of_curve(arm, other, len(arm.curve) - 1)


def _change_of_curve(arm: Result, other: Result, point: int) -> float:
    if not 0 <= point < len(other.curve):
        return math.nan
    return 100 * (arm.curve[point][1] / other.curve[point][1] - 1)


UNITS: dict[Measure, str] = {
    perplexity: "% of perplexity",
    loss: "% of loss",
    cosine: "cosine",
    early_loss: "% of loss at a quarter",
    gap_gained: "% of loss",
}


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper, and how it is tested."""

    name: str
    says: str
    source: str
    """Paper, and its table, figure or section."""
    paper: str
    """The paper's figure, with its setting."""
    arm: Arm
    other: Arm
    rule: Rule
    limit: float = 0.0
    measure: Measure = perplexity
    note: str = ""
    """What differs from the paper's setting."""
    seeds: int = SEEDS
    """Paired seeds, chosen before the run."""

    @property
    def unit(self) -> str:
        return UNITS[self.measure]


@dataclass(frozen=True)
class Finding:
    """The outcome of one claim."""

    claim: Claim
    verdict: Verdict
    effect: float = math.nan
    half: float = math.nan
    """Half of the width of the 95 % interval of the effect (Student's t, paired seeds); nan if a training diverged."""
    pairs: Sequence[tuple[Result, Result]] = ()

    @property
    def has_effect(self) -> bool:
        """Whether the interval excludes zero."""
        return abs(self.effect) > self.half


def judge(claim: Claim, pairs: Sequence[tuple[Result, Result]]) -> Finding:
    """The verdict on the claim: it is certain only if the whole interval lies on one side of the limit."""
    if len(pairs) < 2:
        return Finding(claim, Verdict.NOT_RUN, pairs=pairs)
    if diverged := _verdict_of_diverged(claim, pairs):
        return Finding(claim, diverged, pairs=pairs)
    differences = [claim.measure(arm, other) for arm, other in pairs]
    if any(math.isnan(one) for one in differences):  # A training of a few steps has no curve.
        return Finding(claim, Verdict.NOT_RUN, pairs=pairs)
    mean, half = interval_95(differences)
    low, high = mean - half, mean + half
    if claim.rule is Rule.WITHIN:
        holds, fails = max(abs(low), abs(high)) < claim.limit, low > claim.limit or high < -claim.limit
    elif claim.rule is Rule.BELOW:
        holds, fails = high < claim.limit, low > claim.limit
    else:
        holds, fails = low > claim.limit, high < claim.limit
    verdict = Verdict.REPRODUCED if holds else Verdict.REFUTED if fails else Verdict.UNSEEN
    return Finding(claim, verdict, mean, half, pairs)


def _verdict_of_diverged(claim: Claim, pairs: Sequence[tuple[Result, Result]]) -> Verdict | None:
    """The verdict if a training diverged, which has no interval; None if none did."""
    if any(other.loss > MOST_LOSS for _, other in pairs):
        return Verdict.UNSEEN
    if not any(arm.loss > MOST_LOSS for arm, _ in pairs):
        return None
    if claim.measure not in (loss, perplexity):
        return Verdict.UNSEEN
    return Verdict.REPRODUCED if claim.rule is Rule.ABOVE else Verdict.REFUTED

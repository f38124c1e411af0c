"""Curves of the evaluation loss, as nodes report them while they train."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t distribution for 1 to 15 degrees of freedom. More are taken as 15."""


@dataclass(frozen=True, slots=True)
class Point:
    """The evaluation loss of the anchor after one round."""

    round: int
    at_s: float
    """Seconds from the curve's zero until the point was seen."""
    tokens: int
    """Tokens that the swarm had trained on."""
    loss: float


@dataclass(slots=True)
class Curve:
    """The points of a curve, one for each round, in the order of the rounds."""

    points: list[Point] = field(default_factory=list)

    def see(self, status: dict[str, Any], at_s: float) -> None:
        """Add the newest round's point from a node's status if it is new."""
        run, last = status["run"], status["sync"]["last"]
        loss = status["training"]["evaluation_loss"]
        if last is None or loss is None or run["round"] != last["round"] or last["outcome"] == "failed":
            return
        # A node whose contribution was excluded keeps its parameters and has not evaluated this anchor.
        mine = [member for member in last["members"] if member["peer_id"] == status["node"]["peer_id"]]
        if not mine or not mine[0]["included"] or any(point.round >= run["round"] for point in self.points):
            return
        self.points.append(Point(run["round"], at_s, run["swarm_tokens"], loss))

    def loss_at_s(self, at_s: float) -> float:
        return _interpolate([(p.at_s, p.loss) for p in self.points], at_s)

    def loss_at_tokens(self, tokens: float) -> float:
        return _interpolate([(float(p.tokens), p.loss) for p in self.points], tokens)

    def coarse(self, points: int) -> list[Point]:
        """Return `points` evenly spaced points of the curve, including the last one."""
        every = max(1, len(self.points) // points)
        return self.points[::-1][::every][::-1]


def _interpolate(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate between the two points around x. Beyond an end, return its value. ValueError without points."""
    if not curve:
        raise ValueError("no round was evaluated")
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1]


def interval_95(differences: Sequence[float]) -> tuple[float, float]:
    """The mean and the half width of its 95 % t-interval. The half width is infinite for fewer than two differences."""
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, math.inf
    quantile = T_95[min(len(differences) - 1, len(T_95)) - 1]
    return mean, quantile * statistics.stdev(differences) / math.sqrt(len(differences))

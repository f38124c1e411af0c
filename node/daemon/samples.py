"""Reports in, rows of the history out: what a node did in each few seconds. Knows values; no disk, no thread, no clock.

A row holds what can be added up over rows exactly: seconds and bytes as sums, readings as means over the time seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from node.api.metrics import Series
from node.status import Activity, Channel, Outcome, Phase, Report, RoundRecord

STEP_S = 10
"""Of the finest rows."""
GAP_S = 60.0
"""A longer silence between two reports is a gap, of which nothing is known."""

MEANS = (
    "training_loss", "evaluation_loss", "tokens_per_second", "swarm_tokens_per_second", "swarm_peers",
    "forecast_utilization_ratio",
)  # fmt: skip
STAGES = ("rendezvous", "reduce", "commit", "apply", "blocked")
SUMS = (
    *(f"activity_{activity}" for activity in Activity), *(f"sync_{stage}" for stage in STAGES),
    "sent_bytes", "received_bytes",
)  # fmt: skip


@dataclass(slots=True)
class Row:
    """What is known of the time from `at_s` to `at_s` + the step of its table."""

    at_s: int
    seen_s: float = 0.0
    """Seconds of it that are known of."""
    rounds: int = 0
    """Rounds that were over in it."""
    means: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(MEANS))
    sums: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(SUMS))

    def add(self, other: Row) -> None:
        """Take in another part of the same time."""
        for name, value in other.means.items():
            own = self.means[name]
            if own is None or value is None or not self.seen_s + other.seen_s:
                self.means[name] = value if own is None else own
            else:
                self.means[name] = (own * self.seen_s + value * other.seen_s) / (self.seen_s + other.seen_s)
        for name, value in other.sums.items():
            own = self.sums[name]
            self.sums[name] = own if value is None else value + (own or 0.0)
        self.seen_s += other.seen_s
        self.rounds += other.rounds


class Sampler:
    """One writer. Moments are given twice: wall clock for the place in time, monotonic for lengths."""

    def __init__(self, *, trains: bool) -> None:
        """`trains`: whether activities and losses apply to this node at all."""
        self._trains = trains
        self._before: tuple[float, float, Series] | None = None
        self._open: dict[int, Row] = {}

    def told(self, wall_s: float, monotonic_s: float, report: Report, totals: Series) -> None:
        """A report covers the time since the one before it."""
        before, self._before = self._before, (wall_s, monotonic_s, totals)
        if before is None:
            return
        elapsed_s = monotonic_s - before[1]
        if not 0 < elapsed_s <= GAP_S:
            return
        part = Row(0, elapsed_s, means=self._readings(report), sums=self._spent(before[2], totals, elapsed_s))
        self._spread(part, wall_s - elapsed_s, wall_s)

    def round_over(self, wall_s: float, record: RoundRecord) -> None:
        """Its seconds count where it ended; those of rounds that this node only took over say nothing."""
        if not record.head or record.outcome is Outcome.SKIPPED:
            return
        seconds = record.seconds.model_dump()
        row = Row(0, rounds=1, sums=dict.fromkeys(SUMS) | {f"sync_{name}": seconds[name] for name in STAGES})
        self._row_at(wall_s).add(row)

    def take(self, wall_s: float | None) -> list[Row]:
        """The rows that are over at `wall_s`, None: all that is there. They are the caller's from then on."""
        now = math.inf if wall_s is None else wall_s
        # Rows far ahead are there if the clock was set back: they are over, too.
        done = [at for at in self._open if at + STEP_S <= now or at > now + STEP_S]
        return [row for at in sorted(done) if (row := self._open.pop(at)).seen_s or row.rounds]

    def _readings(self, report: Report) -> dict[str, float | None]:
        training = report.training
        told: dict[str, float | None] = {
            "training_loss": training.loss,
            "evaluation_loss": training.evaluation_loss,
            "tokens_per_second": training.tokens_per_second,
            "swarm_tokens_per_second": sum(row.tokens_per_second for row in report.swarm),
            "swarm_peers": float(report.peers.training),
            "forecast_utilization_ratio": report.forecast_utilization_ratio,
        }
        if not self._trains:
            told |= {"training_loss": None, "tokens_per_second": None, "forecast_utilization_ratio": None}
        elif report.state.phase is Phase.PAUSED:
            told["forecast_utilization_ratio"] = None
        return {name: value if value is not None and math.isfinite(value) else None for name, value in told.items()}

    def _spent(self, before: Series, now: Series, elapsed_s: float) -> dict[str, float | None]:
        """Sums over this time. Activities never add up to more than it; what nobody accounts for was idle."""

        def grown(name: str, labels: tuple[str, ...]) -> dict[str, float]:
            return {label: max(0.0, now[(name, label)] - before[(name, label)]) for label in labels}

        sums: dict[str, float | None] = dict.fromkeys(SUMS)
        sums["sent_bytes"] = sum(grown("network_sent_bytes", tuple(Channel)).values())
        sums["received_bytes"] = sum(grown("network_received_bytes", tuple(Channel)).values())
        if self._trains:
            spent = grown("activity_seconds", tuple(Activity))
            total_s = sum(spent.values())
            if total_s > elapsed_s:
                spent = {activity: seconds * elapsed_s / total_s for activity, seconds in spent.items()}
            else:
                spent[Activity.IDLE] += elapsed_s - total_s
            sums |= {f"activity_{activity}": seconds for activity, seconds in spent.items()}
        return sums

    def _spread(self, part: Row, from_s: float, to_s: float) -> None:
        """Over the rows that the time from `from_s` to `to_s` lies in, evenly."""
        at_s = from_s
        while at_s < to_s:
            row = self._row_at(at_s)
            end_s = min(to_s, float(row.at_s + STEP_S))
            share = (end_s - at_s) / part.seen_s
            row.add(Row(row.at_s, end_s - at_s, means=part.means, sums=_scaled(part.sums, share)))
            at_s = end_s

    def _row_at(self, at_s: float) -> Row:
        start = int(at_s // STEP_S) * STEP_S
        return self._open.setdefault(start, Row(start))


def _scaled(sums: Mapping[str, float | None], by: float) -> dict[str, float | None]:
    return {name: None if value is None else value * by for name, value in sums.items()}

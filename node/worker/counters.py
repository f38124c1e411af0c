"""The worker's counters: seconds by activity, tokens, rounds and failures. A worker continues earlier workers' counts.

The supervisor keeps the totals in the data folder; every checkpoint has a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from node.status import Activity, Channel, ContributionInfo, Counters, Outcome, SavedCounters
from node.swarm.member import MemberSnapshot

K = TypeVar("K")


class WorkCounters:
    """Counts what a node's workers have done, over all starts. Main thread only. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._activity = Activity.IDLE
        self._activity_began_at_s = clock()
        self.totals = Counters(activity_seconds=dict.fromkeys(Activity, 0.0))
        """All counts except the transport's, which start at 0 in each process."""
        self.rounds_joined = 0
        self.rounds_attempted = 0
        self.last_round = -1
        """The newest counted round. A round that is replayed after a crash is not counted again."""
        self._durations: dict[str, list[float]] = defaultdict(list)
        self._round_began = (clock(), 0.0)
        """(clock, total compute seconds) at the end of the previous round."""
        self.utilization_ratio: float | None = None
        self.forecast_ratio: float | None = None

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Count the time of this block as `activity`, except the time of `doing` blocks inside it."""
        outer = self._activity
        self._switch(activity)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, activity: Activity) -> None:
        now_s = self._clock()
        self.totals.activity_seconds[self._activity] += now_s - self._activity_began_at_s
        self._activity, self._activity_began_at_s = activity, now_s

    def step_done(self, seconds: float, tokens: int) -> None:
        """Count an inner step. `tokens` is 0 for a skipped step."""
        self.totals.inner_steps += 1
        self.totals.skipped_steps += not tokens
        self.totals.tokens_processed += tokens
        self.add_duration("inner_step", seconds)

    def add_duration(self, name: str, seconds: float) -> None:
        """Record a duration. `name` is a key of `worker_protocol.DurationReport`."""
        self._durations[name].append(seconds)

    def take_durations(self) -> dict[str, list[float]]:
        taken, self._durations = dict(self._durations), defaultdict(list)
        return taken

    def count_round(self, round_: int, outcome: Outcome, *, attempted: bool, included: bool) -> None:
        _increment(self.totals.sync_rounds, outcome)
        self.rounds_attempted += attempted
        self.rounds_joined += included
        self.last_round = round_

    def count_failure(self, code: str) -> None:
        _increment(self.totals.sync_rounds, Outcome.FAILED)
        _increment(self.totals.sync_failures, code)

    def count_tokens(self, round_: int, *, merged: int, discarded: int, is_replayed: bool) -> None:
        """Count the tokens that a round merged and discarded. A replayed round does not count a second time."""
        if not is_replayed or round_ > self.last_round:
            self.totals.tokens_merged += merged
            self.totals.tokens_discarded += discarded

    def round_done(self, *, at_s: float) -> None:
        """Measure the utilization of the round that ends now. `at_s` is the Unix time, for display."""
        self._switch(self._activity)
        self.totals.last_sync_at_s = at_s
        began_at_s, compute_before_s = self._round_began
        now_s, compute_s = self._clock(), self.totals.activity_seconds[Activity.COMPUTE]
        if now_s > began_at_s:
            self.utilization_ratio = min(1.0, (compute_s - compute_before_s) / (now_s - began_at_s))
        self._round_began = (now_s, compute_s)

    def counters(self, view: MemberSnapshot) -> Counters:
        """The totals, including what this process's transport has counted in `view`."""
        self._switch(self._activity)
        totals = self.totals
        transport = {
            "forwarded_bytes": totals.forwarded_bytes + view.forwarded_bytes,
            "peers_rejected": _sum(totals.peers_rejected, view.rejected),
            "amendments_refused": _sum(totals.amendments_refused, view.amendments_refused),
            "network_sent_bytes": _sum(totals.network_sent_bytes, view.sent_bytes),
            "network_received_bytes": _sum(totals.network_received_bytes, view.received_bytes),
        }
        return totals.model_copy(update=transport, deep=True)

    def contribution(self, counters: Counters) -> ContributionInfo:
        return ContributionInfo(
            rounds_joined=self.rounds_joined,
            rounds_attempted=self.rounds_attempted,
            tokens_total=counters.tokens_processed,
            tokens_merged=counters.tokens_merged,
            tokens_discarded=counters.tokens_discarded,
            bytes_forwarded=counters.forwarded_bytes,
            bytes_sent=sum(counters.network_sent_bytes.values()),
            bytes_received=sum(counters.network_received_bytes.values()),
            bytes_relayed=counters.network_sent_bytes.get(Channel.RELAY, 0),
            training_s=counters.activity_seconds[Activity.COMPUTE],
        )

    def save(self, counters: Counters) -> dict[str, Any]:
        """Return `SavedCounters` as JSON, for a checkpoint."""
        return SavedCounters(
            counters=counters,
            rounds_joined=self.rounds_joined,
            rounds_attempted=self.rounds_attempted,
            last_round=self.last_round,
        ).model_dump(mode="json")

    def load(self, saved: Mapping[str, Any] | SavedCounters) -> None:
        """Continue from saved totals, unless they are older than the current ones. Raises ValidationError."""
        saved = SavedCounters.model_validate(saved)
        theirs, mine = saved.counters, self.totals
        age = (theirs.tokens_processed, sum(theirs.activity_seconds.values()))
        if age < (mine.tokens_processed, sum(mine.activity_seconds.values())):
            return
        seconds = mine.activity_seconds | theirs.activity_seconds
        self.totals = theirs.model_copy(update={"activity_seconds": seconds}, deep=True)
        self.rounds_joined, self.rounds_attempted = saved.rounds_joined, saved.rounds_attempted
        self.last_round = saved.last_round
        self._round_began = (self._clock(), self.totals.activity_seconds[Activity.COMPUTE])


def _increment(counts: dict[K, int], key: K) -> None:
    counts[key] = counts.get(key, 0) + 1


def _sum(one: Mapping[K, int], other: Mapping[K, int]) -> dict[K, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}

"""What a worker counts: seconds by activity, tokens, rounds, failures. Knows no training.

Totals go into every checkpoint and into a file of their own (`totals`), so they last over restarts; the supervisor
turns them into metrics.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from node.status import Activity, Channel, ContributionInfo, Counters, Outcome
from node.swarm.member import View

K = TypeVar("K")


def _sum(one: Mapping[K, int], other: Mapping[K, int]) -> dict[K, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}


class Ledger:
    """One writer: the main thread. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._activity = Activity.IDLE
        self._since_s = clock()
        self.seconds: dict[Activity, float] = dict.fromkeys(Activity, 0.0)
        self.inner_steps = 0
        self.skipped_steps = 0
        self.tokens = 0
        self.rounds: Counter[Outcome] = Counter()
        self.failures: Counter[str] = Counter()
        self.carried = 0
        self.tokens_merged = 0
        """Of this node, that are in records of rounds."""
        self.tokens_discarded = 0
        """That never will be."""
        self.digest_mismatches = 0
        self.rounds_joined = 0
        self.rounds_attempted = 0
        self.last_round = -1
        """The newest round that is counted; one that is replayed after a crash is not counted again."""
        self.last_sync_at_s = 0.0
        self._before = Counters()
        """Of earlier processes: what the wire counts starts at 0 with each."""
        self.durations: dict[str, list[float]] = defaultdict(list)
        """Seconds not told yet, by the names of `link.Observed`."""
        self._round_began_s = (clock(), 0.0)
        self.utilization_ratio: float | None = None
        self.forecast_ratio: float | None = None
        """What the formula says of it."""

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """The time until the end of the block, less inner blocks, is spent on this."""
        before = self._activity
        self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, activity: Activity) -> None:
        now_s = self._clock()
        self.seconds[self._activity] += now_s - self._since_s
        self._activity, self._since_s = activity, now_s

    def step_done(self, seconds: float, tokens: int) -> None:
        self.inner_steps += 1
        self.tokens += tokens
        self.durations["inner_step"].append(seconds)

    def count_round(self, round_: int, outcome: Outcome, *, attempted: bool, included: bool) -> None:
        self.rounds[outcome] += 1
        self.rounds_attempted += attempted
        self.rounds_joined += included
        self.last_round = round_

    def count_tokens(self, round_: int, *, merged: int, discarded: int, is_replayed: bool) -> None:
        """What became of this node's tokens at a round's end. A replayed round that was counted before counts once."""
        if not is_replayed or round_ > self.last_round:
            self.tokens_merged += merged
            self.tokens_discarded += discarded

    def round_done(self, *, at_s: float) -> None:
        """A round has ended just now. `at_s`: Unix time, for display."""
        self._switch(self._activity)
        self.last_sync_at_s = at_s
        began_s, compute_s = self._round_began_s
        now_s, compute_now_s = self._clock(), self.seconds[Activity.COMPUTE]
        if now_s > began_s:
            self.utilization_ratio = min(1.0, (compute_now_s - compute_s) / (now_s - began_s))
        self._round_began_s = (now_s, compute_now_s)

    def counters(self, view: View) -> Counters:
        """A snapshot. `view`: what this process's wire has counted since its start."""
        self._switch(self._activity)
        return Counters(
            activity_seconds=dict(self.seconds),
            tokens_processed=self.tokens,
            tokens_merged=self.tokens_merged,
            tokens_discarded=self.tokens_discarded,
            forwarded_bytes=self._before.forwarded_bytes + view.forwarded_bytes,
            inner_steps=self.inner_steps,
            skipped_steps=self.skipped_steps,
            sync_rounds=dict(self.rounds),
            sync_failures=dict(self.failures),
            contributions_carried=self.carried,
            digest_mismatches=self.digest_mismatches,
            peers_rejected=_sum(self._before.peers_rejected, view.rejected),
            network_sent_bytes=_sum(self._before.network_sent_bytes, view.sent_bytes),
            network_received_bytes=_sum(self._before.network_received_bytes, view.received_bytes),
            last_sync_at_s=self.last_sync_at_s,
        )

    def contribution(self, counters: Counters) -> ContributionInfo:
        return ContributionInfo(
            rounds_joined=self.rounds_joined,
            rounds_attempted=self.rounds_attempted,
            tokens_total=self.tokens,
            tokens_merged=self.tokens_merged,
            tokens_discarded=self.tokens_discarded,
            bytes_forwarded=counters.forwarded_bytes,
            bytes_sent=sum(counters.network_sent_bytes.values()),
            bytes_received=sum(counters.network_received_bytes.values()),
            bytes_relayed=counters.network_sent_bytes.get(Channel.RELAY, 0),
            training_s=self.seconds[Activity.COMPUTE],
        )

    def take_durations(self) -> dict[str, list[float]]:
        taken, self.durations = dict(self.durations), defaultdict(list)
        return taken

    def save(self, counters: Counters) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return {
            "counters": counters.model_dump(mode="json"),
            "rounds_joined": self.rounds_joined,
            "rounds_attempted": self.rounds_attempted,
            "last_round": self.last_round,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `save` gave, unless that is older than what is known. Raises ValueError or KeyError."""
        counters = Counters.model_validate(saved["counters"])
        joined, attempted = int(saved["rounds_joined"]), int(saved["rounds_attempted"])
        seconds = counters.activity_seconds
        if (counters.tokens_processed, sum(seconds.values())) < (self.tokens, sum(self.seconds.values())):
            return
        self.seconds.update(seconds)
        self.tokens, self.inner_steps = counters.tokens_processed, counters.inner_steps
        self.skipped_steps = counters.skipped_steps
        self.tokens_merged, self.tokens_discarded = counters.tokens_merged, counters.tokens_discarded
        self.rounds, self.failures = Counter(counters.sync_rounds), Counter(counters.sync_failures)
        self.carried, self.digest_mismatches = counters.contributions_carried, counters.digest_mismatches
        self.last_sync_at_s = counters.last_sync_at_s
        self._before = counters
        self.rounds_joined, self.rounds_attempted = joined, attempted
        self.last_round = int(saved.get("last_round", -1))
        self._round_began_s = (self._clock(), self.seconds[Activity.COMPUTE])

"""Counts, times, records, reports and logs each round that ends."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence

from node.diloco.aggregate import contribution_cosine
from node.errors import RoundFailed
from node.status import Channel, Member, Outcome, RoundRecord, Seconds, Stage, utc_now
from node.swarm.chain.chain import Tip
from node.swarm.consensus.commit import Committed
from node.swarm.messages import Join, parse
from node.swarm.state_sync.catch_up import ResyncCause
from node.training.algorithm import inner_learning_rate
from node.worker.counters import WorkCounters
from node.worker.reporter import Reporter
from node.worker.round_diagnostics import NOTICE_CODE, ExclusionNotice, Needs, expected_utilization
from node.worker.session import Session

logger = logging.getLogger(__name__)


class RoundLog:
    """Writes the records of rounds. Used by the main thread only."""

    def __init__(
        self, session: Session, reporter: Reporter, counters: WorkCounters, exclusion: ExclusionNotice
    ) -> None:
        self._session, self._reporter, self._counters, self._exclusion = session, reporter, counters, exclusion
        view = session.swarm.view
        self._moved_bytes = _own_bytes(view.sent_bytes), _own_bytes(view.received_bytes)
        """(bytes sent, bytes received) until the end of the previous round."""

    def round_over(self, done: Committed, *, blocked_s: float, apply_s: float, step_s: float | None) -> RoundRecord:
        """Log a committed round and return its record.

        `blocked_s` is the time for which training was blocked. `step_s` is this node's step time, for the forecast.
        """
        view, counters, run = self._session.swarm.view, self._counters, self._session.terms_after(done.tip).run
        rate = inner_learning_rate(run, self._session.schedule_tokens(done.tip))
        is_paused = self._session.rules.at(done.tip.state.amendments, done.outcome.round).is_paused
        names, fragments = {row.peer_id: row.name for row in view.rows}, run.sync.fragment_count
        moved = (0, 0)
        if done.is_replayed:
            blocked_s = apply_s = 0.0
        else:
            moved = self._bytes_since_last_round(_own_bytes(view.sent_bytes), _own_bytes(view.received_bytes))
        record = make_record(
            done, rate, view.peer_id, names, fragments, blocked_s=blocked_s, apply_s=apply_s, moved_bytes=moved
        )
        record = without_contributions(record) if is_paused else record
        if done.is_replayed:
            self._log_replayed(done, record)
            return record
        for stage, (total_s, stage_blocked_s) in split_by_stage(
            done.stage_s, blocked_s=blocked_s, apply_s=apply_s
        ).items():
            counters.add_duration(f"sync.{stage}", total_s)
            counters.add_duration(f"blocked.{stage}", stage_blocked_s)
        attempted = (done.offered or done.included) and record.outcome is not Outcome.ALONE
        counters.count_round(record.round, record.outcome, attempted=attempted, included=done.included and attempted)
        counters.round_done(at_s=time.time())
        counters.forecast_ratio = expected_utilization(self._session, done.tip, step_s, record)
        self._reporter.round_over(record)
        loss = self._reporter.training.loss
        logger.info(
            "Round %d is committed (%s): the mean includes %d of %d member%s, it took %.1f s%s, the digest is %s.",
            record.round,
            record.outcome,
            len(done.outcome.included),
            len(record.members),
            "" if len(record.members) == 1 else "s",
            sum(done.stage_s.values()),
            f", this node's training loss is {loss:.3f}" if loss is not None else "",
            record.state_digest[:12],
            extra={"round": record.round},
        )
        return record

    def _log_replayed(self, done: Committed, record: RoundRecord) -> None:
        """Count and report a round that an earlier process of this node committed, if that process did not."""
        if record.round <= self._counters.last_round:
            self._reporter.sync = self._reporter.sync.model_copy(update={"last": record})
            return
        attempted = record.outcome not in (Outcome.ALONE, Outcome.SKIPPED)
        self._counters.count_round(
            record.round, record.outcome, attempted=attempted, included=done.included and attempted
        )
        self._reporter.round_over(record)

    def update_exclusion_notice(
        self, done: Committed, *, worked: bool, round_s: float | None, step_s: float | None
    ) -> None:
        """Notify the owner when several rounds in a row exclude this node's work.

        `worked` says whether this node worked for the round, which lasted `round_s`. `step_s` is its inner step time.
        """
        if round_s is None:
            return
        needs = Needs(round_s, self._session.swarm.view.upload_s, done.fetch_s, step_s or 0.0)
        sync = self._session.terms_after(done.tip).run.sync
        text = self._exclusion.round_over(worked=worked, included=done.included, needs=needs, sync=sync)
        if text is not None:
            self._reporter.notice(NOTICE_CODE, text)

    def round_failed(self, error: RoundFailed, tip: Tip) -> None:
        """Log a failed attempt at the round after `tip`."""
        self._counters.count_failure(error.code)
        self._reporter.tell_round(
            RoundRecord(
                round=tip.round + 1,
                outcome=Outcome.FAILED,
                started_at=utc_now(),
                swarm_tokens=tip.state.tokens,
                reason=str(error),
            )
        )

    def _bytes_since_last_round(self, sent: int, received: int) -> tuple[int, int]:
        before, self._moved_bytes = self._moved_bytes, (sent, received)
        return sent - before[0], received - before[1]


def make_record(
    done: Committed,
    learning_rate: float,
    own_peer_id: str,
    names: Mapping[str, str],
    fragments: int,
    *,
    blocked_s: float,
    apply_s: float,
    moved_bytes: tuple[int, int],
) -> RoundRecord:
    """Make the record. `learning_rate` is that of the next step; `moved_bytes` (sent, received) since the last one."""
    plan = done.outcome.plan
    joins = [parse(Join, join.text) for join in plan.joins]
    excluded = [peer for peer in plan.members if peer not in done.outcome.included]
    if own_peer_id not in plan.members:
        outcome = Outcome.SKIPPED
    elif len(plan.members) == 1:
        outcome = Outcome.ALONE
    else:
        outcome = Outcome.PARTIAL if excluded else Outcome.COMPLETE
    reason = "" if done.offered or done.included or done.is_replayed else "This node had nothing to contribute."
    if excluded:
        who = ", ".join(names.get(peer, peer[-6:]) for peer in excluded)
        reason = f"Contributions that did not arrive completely in time are excluded: {who}."
    stages = {stage.value: done.stage_s.get(stage, 0.0) for stage in Stage}
    stages[Stage.APPLY] += apply_s
    return RoundRecord(
        round=done.outcome.round,
        outcome=outcome,
        members=tuple(
            Member(
                peer_id=join.signer,
                name=names.get(join.signer, join.signer[-6:]),
                weight=content.tokens // fragments,
                included=join.signer in done.outcome.included,
            )
            for join, content in zip(plan.joins, joins, strict=True)
        ),
        started_at=utc_now(ago_s=sum(done.stage_s.values()) + apply_s),
        seconds=Seconds(**stages, blocked=blocked_s),
        bytes_sent=moved_bytes[0],
        bytes_received=moved_bytes[1],
        head=done.tip.head,
        state_digest=done.tip.digest,
        swarm_tokens=done.tip.state.tokens,
        learning_rate=learning_rate,
        reason=reason,
        **_shared_values(done, joins),
    )


def _shared_values(done: Committed, joins: Sequence[Join]) -> dict[str, float | None]:
    """Losses, norm and cosine of a round, which all nodes compute alike from its `joins`."""
    included = [
        join for peer, join in zip(done.outcome.plan.members, joins, strict=True) if peer in done.outcome.included
    ]
    norm, cosine = done.mean_norm, None
    if norm is not None:
        norm = float(f"{norm:.9g}")  # Sums of squares may differ in the last bits between machines.
        cosine = contribution_cosine([join.norm for join in included], [join.tokens for join in included], norm)
    return {
        "evaluation_loss": _median([join.evaluation_loss for join in joins]),
        "training_loss": _median([join.training_loss for join in included]),
        "mean_norm": norm,
        "contribution_cosine": round(cosine, 6) if cosine is not None else None,
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def without_contributions(record: RoundRecord) -> RoundRecord:
    """The record of a round of a paused run, in which nobody has contributed."""
    members = tuple(member.model_copy(update={"weight": 0}) for member in record.members)
    reason = "The run is paused. This round has only accepted amendments."
    none = dict.fromkeys(("evaluation_loss", "training_loss", "mean_norm", "contribution_cosine"))
    return record.model_copy(update={"members": members, "reason": reason, **none})


def make_dropped_record(cause: ResyncCause) -> RoundRecord:
    """Make the record of the rounds that this node discards when it leaves its side of a split."""
    first, last, tokens = cause.dropped[0].round, cause.dropped[-1].round, sum(link.tokens for link in cause.dropped)
    which = f"round {first}" if first == last else f"rounds {first} to {last}"
    return RoundRecord(
        round=last,
        outcome=Outcome.SKIPPED,
        started_at=utc_now(),
        head=cause.dropped[-1].head,
        dropped=last - first + 1,
        reason=f"Dropped {which} of this side of a split, with {tokens} tokens, because {cause.reason}.",
    )


def split_by_stage(stage_s: Mapping[str, float], *, blocked_s: float, apply_s: float) -> dict[str, tuple[float, float]]:
    """Return the (total, blocked) seconds of each stage.

    Training is blocked at the end of a round, so `blocked_s` covers the last seconds of the stages. `apply_s` is the
    trainer's own part of the last stage.
    """
    seconds = {}
    for stage in reversed([stage for stage in Stage if stage in stage_s]):
        stage_blocked_s = min(blocked_s, stage_s[stage])
        blocked_s -= stage_blocked_s
        own_s = apply_s if stage is Stage.APPLY else 0.0
        seconds[stage.value] = (stage_s[stage] + own_s, stage_blocked_s + own_s)
    return seconds


def _own_bytes(moved_bytes: Mapping[Channel, int]) -> int:
    """The bytes of all channels except the traffic that this node relays for others."""
    return sum(count for channel, count in moved_bytes.items() if channel != Channel.RELAY)

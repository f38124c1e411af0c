"""A trainer's rounds, written down as they end: counted, timed, told, logged. Knows rounds; trains nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from node.errors import RoundFailed
from node.status import Channel, Outcome, RoundRecord, Stage
from node.swarm.chain import Tip
from node.swarm.rounds import Committed
from node.worker import left_out
from node.worker.expected import expected_utilization
from node.worker.ledger import Ledger
from node.worker.left_out import LeftOut, Needs
from node.worker.minutes import failed_record, record_of
from node.worker.session import Session
from node.worker.teller import Teller

logger = logging.getLogger(__name__)


def stages_of(stage_s: Mapping[str, float], *, blocked_s: float, apply_s: float) -> dict[str, tuple[float, float]]:
    """Seconds by stage: all, and those in which the trainer stood still.

    It stands still at the end of what it waits for, so `blocked_s` are the last seconds of the stages. `apply_s` is its
    own part of the last one.
    """
    found = {}
    for stage in reversed([stage for stage in Stage if stage in stage_s]):
        stood_s = min(blocked_s, stage_s[stage])
        blocked_s -= stood_s
        own_s = apply_s if stage is Stage.APPLY else 0.0
        found[stage.value] = (stage_s[stage] + own_s, stood_s + own_s)
    return found


class Books:
    """One writer: the main thread."""

    def __init__(self, session: Session, teller: Teller, ledger: Ledger, left_out: LeftOut) -> None:
        self._session, self._teller, self._ledger, self._left_out = session, teller, ledger, left_out
        self._traffic_before = (0, 0)

    def round_over(self, done: Committed, *, blocked_s: float, apply_s: float, step_s: float | None) -> RoundRecord:
        """A round holds. `blocked_s`: this node stood still for it; `step_s`: its own inner step, for the forecast."""
        view, ledger = self._session.swarm.view, self._ledger
        names = {row.peer_id: row.name for row in view.rows}
        if done.is_replayed:
            record = record_of(done, view.peer_id, names, blocked_s=0.0, apply_s=0.0, moved_bytes=(0, 0))
            self._round_again(done, record)
            return record
        moved = self._traffic_since(_own(view.sent_bytes), _own(view.received_bytes))
        record = record_of(done, view.peer_id, names, blocked_s=blocked_s, apply_s=apply_s, moved_bytes=moved)
        for stage, (seconds, stood_s) in stages_of(done.stage_s, blocked_s=blocked_s, apply_s=apply_s).items():
            ledger.durations[f"sync.{stage}"].append(seconds)
            ledger.durations[f"blocked.{stage}"].append(stood_s)
        attempted = done.offered and record.outcome is not Outcome.ALONE
        included = done.included and attempted
        ledger.count_round(record.round, record.outcome, attempted=attempted, included=included)
        ledger.round_done(at_s=time.time())
        ledger.forecast_ratio = expected_utilization(self._session, done.tip, step_s, record)
        self._teller.round_over(record)
        self._log(done, record)
        return record

    def _round_again(self, done: Committed, record: RoundRecord) -> None:
        """A round that an earlier process of this node committed: counted and told where that did not come to it."""
        if record.round <= self._ledger.last_round:
            self._teller.sync = self._teller.sync.model_copy(update={"last": record})
            return
        attempted = record.outcome not in (Outcome.ALONE, Outcome.SKIPPED)
        included = done.included and attempted
        self._ledger.count_round(record.round, record.outcome, attempted=attempted, included=included)
        self._teller.round_over(record)

    def look_if_left_out(self, done: Committed, *, worked: bool, round_s: float | None, step_s: float | None) -> None:
        """Tell the owner, once round after round holds without what this node had done for it (`worked`).

        `round_s`: T_r of the round that is over; `step_s`: this node's own inner step.
        """
        if round_s is None:
            return
        needs = Needs(round_s, self._session.swarm.view.upload_s, done.fetch_s, step_s or 0.0)
        text = self._left_out.round_over(worked=worked, included=done.included, needs=needs)
        if text is not None:
            self._teller.notice(left_out.CODE, text)

    def round_failed(self, error: RoundFailed, tip: Tip) -> None:
        """An attempt at the round after `tip` came to nothing."""
        self._ledger.failures[error.code] += 1
        self._ledger.rounds[Outcome.FAILED] += 1
        self._teller.tell_round(failed_record(tip.round + 1, error, tip.state.tokens))

    def _traffic_since(self, sent: int, received: int) -> tuple[int, int]:
        before, self._traffic_before = self._traffic_before, (sent, received)
        return sent - before[0], received - before[1]

    def _log(self, done: Committed, record: RoundRecord) -> None:
        loss = self._teller.training.loss
        logger.info(
            "Round %d: %s with %d of %d member%s in %.1f s%s; digest %s.",
            record.round,
            record.outcome,
            len(done.outcome.included),
            len(record.members),
            "" if len(record.members) == 1 else "s",
            sum(done.stage_s.values()),
            f", loss {loss:.3f}" if loss is not None else "",
            record.state_digest[:12],
            extra={"round": record.round},
        )


def _own(moved_bytes: Mapping[Channel, int]) -> int:
    """All but what was carried for others."""
    return sum(count for channel, count in moved_bytes.items() if channel != Channel.RELAY)

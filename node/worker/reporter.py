"""Collects the worker's status and sends it to the supervisor: a new phase at once, other values once a second.

The phase changes only in `Reporter.enter`, which informs the swarm and the supervisor together.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from node.config.amendments import (
    AcceptedAmendment,
    AmendmentError,
    SignedAmendment,
    Terms,
    decode_list,
    rewound_tokens,
)
from node.config.manifest import Manifest
from node.status import (
    AT_WORK,
    AmendmentInfo,
    DeviceInfo,
    GovernanceInfo,
    Notice,
    PeersInfo,
    Phase,
    PhaseState,
    PublicationInfo,
    RefusedAmendment,
    Report,
    RoundRecord,
    RunInfo,
    Sample,
    SyncInfo,
    TaskScore,
    TrainingInfo,
    utc_now,
)
from node.swarm.chain.chain import Tip
from node.swarm.member import MemberSnapshot
from node.swarm.member_thread import SwarmThread
from node.worker.counters import WorkCounters
from node.worker.supervisor_link import SupervisorLink
from node.worker_protocol import (
    DurationReport,
    GovernanceReport,
    ListenReport,
    NoticeReport,
    RoundReport,
    StatusReport,
)

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
DEVICE_INTERVAL_S = 5.0
NO_TEXT_S = 300.0
"""After so long without text, the owner is told."""
MOST_REFUSED = 8
"""Refused submissions that are reported."""


class Reporter:
    """Reports to the supervisor. Used by the main thread only, except for `notice`."""

    def __init__(
        self, link: SupervisorLink, counters: WorkCounters, describe_devices: Callable[[], tuple[DeviceInfo, ...]]
    ) -> None:
        self._link, self._counters, self._describe_devices = link, counters, describe_devices
        self.swarm: SwarmThread | None = None
        self.invite: Callable[[tuple[str, ...]], str] = lambda _: ""
        """Returns the invite to the run with the given addresses of this node."""
        self.state = PhaseState(since=utc_now())
        self.run = RunInfo()
        self.training = TrainingInfo()
        self.sync = SyncInfo()
        self.publication = PublicationInfo()
        self._governance = GovernanceInfo()
        self._told_governance = GovernanceInfo()
        self._refused: deque[RefusedAmendment] = deque(maxlen=MOST_REFUSED)
        self._reported_at_s = 0.0
        self._devices: tuple[DeviceInfo, ...] = ()
        self._devices_at_s = 0.0
        self._no_text_since_s: float | None = None

    # phases

    def enter(self, phase: Phase, reason: str, code: str) -> None:
        """Change phase, reason or code. Entering the current ones again has no effect."""
        if (phase, reason, code) == (self.state.phase, self.state.reason, self.state.code):
            return
        was_at_work, is_at_work = self.state.code in AT_WORK, code in AT_WORK
        goes_on = was_at_work == is_at_work and (is_at_work or phase == self.state.phase)
        since = self.state.since if goes_on else utc_now()
        self.state = PhaseState(phase=phase, reason=reason, code=code, since=since)
        logger.debug("The phase is %s: %s", phase, reason)
        if self.swarm is not None:
            self.swarm.say(phase, self.training.tokens_per_second, self._counters.utilization_ratio)
        self.tell(now=True)

    def enter_training(self, next_round: int, *, overlaps: bool) -> None:
        reason = f"Training towards round {next_round}."
        if overlaps:
            reason = f"Training towards round {next_round + 1}, while round {next_round} is averaged."
        self.enter(Phase.TRAINING, reason, "training")

    def enter_no_text(self, problem: str) -> None:
        """Training waits for text. The owner gets a notice if that lasts long."""
        reason = f"{problem or 'The text is being read.'} Training waits for text."
        self.enter(Phase.TRAINING, reason, "no_text")
        now_s = time.monotonic()
        if self._no_text_since_s is None:
            self._no_text_since_s = now_s
        elif now_s - self._no_text_since_s > NO_TEXT_S:
            self.notice("no_text", f"This node has not trained for minutes. {reason}")

    def leave_no_text(self) -> None:
        """There is text again, so the notice is withdrawn."""
        if self._no_text_since_s is not None:
            self._no_text_since_s = None
            self.notice("no_text", "")

    def enter_waiting(self, view: MemberSnapshot, next_round: int) -> None:
        """Enter the phase in which training is blocked until a round is over."""
        stage = f" ({view.stage})" if view.stage != "idle" else ""
        reason = view.waiting_reason or f"Averaging round {next_round}{stage}."
        self.enter(Phase.SYNCING, reason, view.waiting_code or "syncing")

    # values of the next report

    def set_step(self, loss: float, lr: float, steps: int, tokens_per_second: float) -> None:
        self.training = self.training.model_copy(
            update={"loss": loss, "learning_rate": lr, "inner_step": steps, "tokens_per_second": tokens_per_second}
        )

    def set_inner_steps(self, done: int, inner_steps: int) -> None:
        self.training = self.training.model_copy(update={"inner_step": done, "inner_steps": inner_steps})

    def set_sync_progress(self, progress_ratio: float, eta_s: float | None, round_s: float | None) -> None:
        """Progress towards the next contribution. `eta_s` is None before the first timed step, `round_s` if the round
        does not end by the clock."""
        self.sync = self.sync.model_copy(update={"progress_ratio": progress_ratio, "eta_s": eta_s, "round_s": round_s})

    def set_evaluation_loss(self, own: float | None, record: RoundRecord | None) -> None:
        """Report `own` loss on the new anchor, or without one the loss in `record`, which is of the previous anchor."""
        loss = own if own is not None or record is None else record.evaluation_loss
        if loss is not None:
            self.training = self.training.model_copy(update={"evaluation_loss": loss})

    def set_samples(self, samples: tuple[Sample, ...]) -> None:
        self.training = self.training.model_copy(update={"samples": samples})

    def set_task_scores(self, scores: tuple[TaskScore, ...]) -> None:
        self.training = self.training.model_copy(update={"task_scores": scores})

    def set_run(self, manifest: Manifest) -> None:
        """Report the run of a node that has no state."""
        run = manifest.run
        self._governance = self._governance.model_copy(
            update={
                "run": manifest.hash,
                "mode": run.governance,
                "keys": run.governance_keys,
                "threshold": run.governance_threshold,
            }
        )
        update = {
            "manifest_hash": manifest.hash,
            "name": run.name,
            "total_tokens": run.total_tokens + manifest.rewound_tokens,
            "rewound_tokens": manifest.rewound_tokens,
        }
        self.run = self.run.model_copy(update=update)

    def set_position(self, manifest: Manifest, terms: Terms, tip: Tip) -> None:
        """Report the node's position in the run. `terms` are the settings of the next round."""
        self.set_run(manifest)
        accepted = decode_list(tip.state.amendments)
        rewound = manifest.rewound_tokens + rewound_tokens(tip.state.amendments)
        self._governance = self._governance.model_copy(
            update={
                "round": tip.round,
                "schedule_tokens": tip.state.tokens - rewound,
                "is_paused": terms.is_paused,
                "amendments": tuple(_accepted_info(one, tip.round + 1) for one in accepted),
            }
        )
        self.run = self.run.model_copy(
            update={
                "total_tokens": terms.run.total_tokens + rewound,
                "rewound_tokens": rewound,
                "is_paused": terms.is_paused,
                "amendments": len(accepted),
                "round": tip.round,
                "swarm_tokens": tip.state.tokens,
                "head": tip.head,
                "state_digest": tip.digest,
            }
        )

    # events

    def notice(self, code: str, text: str, level: Literal["info", "warning", "error"] = "warning") -> None:
        """Set the notice of this code. An empty text withdraws it. Callable from any thread."""
        notice = Notice(code=code, level=level, text=text) if text else None
        self._link.send(NoticeReport(code=code, notice=notice))

    def listening(self, addresses: tuple[str, ...]) -> None:
        """Report the multiaddresses that this node listens on. The supervisor keeps them from other nodes."""
        self._link.send(ListenReport(addresses=addresses))

    def round_over(self, record: RoundRecord) -> None:
        """Report the record as the newest one."""
        self.sync = self.sync.model_copy(update={"last": record})
        self.tell_round(record)

    def tell_round(self, record: RoundRecord) -> None:
        self._link.send(RoundReport(record=record))

    def amendment_refused(self, signed: SignedAmendment, reason: str) -> None:
        """Report that a submitted amendment is refused. Callable from any thread."""
        logger.warning("A submitted amendment is refused: %s", reason)
        self._refused.append(_refused(signed, reason))

    # reports

    @property
    def round_now(self) -> int | None:
        """The last known round, for log records; None before the first."""
        return self.run.round if self.run.round >= 0 else None

    @property
    def is_due(self) -> bool:
        """Whether the next `tell` sends more than a heartbeat."""
        return time.monotonic() - self._reported_at_s >= REPORT_INTERVAL_S

    def tell(self, *, now: bool = False) -> None:
        """Send a heartbeat, and a report if one is due."""
        self._link.beat()
        if not now and not self.is_due:
            return
        self._reported_at_s = now_s = time.monotonic()
        if now_s - self._devices_at_s >= DEVICE_INTERVAL_S:
            self._devices, self._devices_at_s = self._describe_devices(), now_s
        self._link.send(StatusReport(report=self._report(), last_round=self._counters.last_round))
        self._tell_governance()
        durations = self._counters.take_durations()
        if durations:
            self._link.send(DurationReport(seconds=durations))

    def _tell_governance(self) -> None:
        """Send the amendments if they have changed."""
        known = {one.number for one in self._governance.amendments}
        pending = [_info(one) for one in self.view.pending_amendments]
        amendments = (*self._governance.amendments, *(one for one in pending if one.number not in known))
        dropped = (_refused(one.signed, one.reason) for one in self.view.dropped_amendments)
        update = {"amendments": amendments, "refused": (*self._refused, *dropped)}
        governance = self._governance.model_copy(update=update)
        if governance != self._told_governance:
            self._told_governance = governance
            self._link.send(GovernanceReport(governance=governance))

    @property
    def view(self) -> MemberSnapshot:
        return self.swarm.view if self.swarm is not None else MemberSnapshot()

    def _report(self) -> Report:
        view = self.view
        counters = self._counters.counters(view)
        run = {
            "swarm_round": max(view.swarm_round, self.run.round),
            "invite": self.invite(view.addresses),
            "invite_note": view.invite_note,
        }
        return Report(
            state=self.state,
            peer_id=view.peer_id,
            run=self.run.model_copy(update=run),
            training=self.training.model_copy(update={"tokens_total": counters.tokens_processed}),
            sync=self.sync.model_copy(update={"stage": view.stage}),
            peers=PeersInfo(connected=view.connected, training=view.training),
            swarm=view.rows,
            left=view.left,
            compute_utilization_ratio=self._counters.utilization_ratio,
            forecast_utilization_ratio=self._counters.forecast_ratio,
            reachability=view.reachability,
            reachability_code=view.reachability_code,
            reachability_reason=view.reachability_reason,
            devices=self._devices,
            contribution=self._counters.contribution(counters),
            publication=self.publication,
            counters=counters,
        )


def _refused(signed: SignedAmendment, reason: str) -> RefusedAmendment:
    try:
        number, change = signed.amendment.number, signed.amendment.describe()
    except AmendmentError:  # The text holds no amendment.
        number, change = 0, ""
    return RefusedAmendment(digest=_digest(signed), reason=reason, number=number, change=change)


def _digest(signed: SignedAmendment) -> str:
    return hashlib.sha256(signed.text.encode()).hexdigest()


def _accepted_info(accepted: AcceptedAmendment, next_round: int) -> AmendmentInfo:
    amendment = accepted.signed.amendment
    is_due = amendment.action == "rollback" and amendment.from_round <= next_round
    was_skipped = is_due and accepted.rewound_tokens is None
    return _info(accepted.signed).model_copy(update={"accepted_round": accepted.round, "was_skipped": was_skipped})


def _info(signed: SignedAmendment) -> AmendmentInfo:
    amendment = signed.amendment
    return AmendmentInfo(
        digest=_digest(signed),
        number=amendment.number,
        from_round=amendment.from_round,
        change=amendment.describe(),
        signers=tuple(sorted(signed.signatures)),
        is_replaceable=amendment.is_replaceable,
    )

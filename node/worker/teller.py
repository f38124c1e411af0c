"""What the worker says of itself, and when: phases at once, everything else once a second. Knows no training.

The phase changes in `enter` and nowhere else: it sets the state, tells the swarm and the supervisor together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from node.link import Noticed, Observed, RoundTold, Told
from node.status import (
    DeviceInfo,
    Notice,
    PeersInfo,
    Phase,
    PhaseState,
    Report,
    RoundRecord,
    RunInfo,
    SyncInfo,
    TrainingInfo,
    utc_now,
)
from node.swarm.member import View
from node.swarm.thread import SwarmThread
from node.worker.channel import Channel
from node.worker.ledger import Ledger

logger = logging.getLogger(__name__)

TELL_S = 1.0
DEVICE_S = 5.0


class Teller:
    """One writer: the main thread."""

    def __init__(self, channel: Channel, ledger: Ledger, describe: Callable[[], tuple[DeviceInfo, ...]]) -> None:
        self._channel, self._ledger, self._describe = channel, ledger, describe
        self.swarm: SwarmThread | None = None
        self.invite: Callable[[tuple[str, ...]], str] = lambda _: ""
        """To the run, by this node's addresses, which become known at any time."""
        self.state = PhaseState(since=utc_now())
        self.run = RunInfo()
        self.training = TrainingInfo()
        self.sync = SyncInfo()
        self._told_at_s = 0.0
        self._devices: tuple[DeviceInfo, ...] = ()
        self._devices_at_s = 0.0

    def enter(self, phase: Phase, reason: str, code: str) -> None:
        """Be in a phase for a reason. Repeating it changes nothing."""
        if (phase, reason, code) == (self.state.phase, self.state.reason, self.state.code):
            return
        since = self.state.since if phase == self.state.phase else utc_now()
        self.state = PhaseState(phase=phase, reason=reason, code=code, since=since)
        logger.debug("%s: %s", phase, reason)
        if self.swarm is not None:
            self.swarm.say(phase, self.training.tokens_per_second, self._ledger.utilization_ratio)
        self.tell(now=True)

    def notice(self, code: str, text: str, level: Literal["info", "warning", "error"] = "warning") -> None:
        """What the owner should know; an empty text: it is over. From any thread."""
        notice = Notice(code=code, level=level, text=text) if text else None
        self._channel.send(Noticed(code=code, notice=notice))

    def round_over(self, record: RoundRecord) -> None:
        self.sync = self.sync.model_copy(update={"last": record})
        self.tell_round(record)

    def tell_round(self, record: RoundRecord) -> None:
        self._channel.send(RoundTold(record=record))

    @property
    def round_now(self) -> int | None:
        """The last one that this node knows of, for log records; None before the first."""
        return self.run.round if self.run.round >= 0 else None

    @property
    def is_due(self) -> bool:
        """Whether the next `tell` tells more than that this thread lives."""
        return time.monotonic() - self._told_at_s >= TELL_S

    def tell(self, *, now: bool = False) -> None:
        """A beat, and a report if one is due."""
        self._channel.beat()
        if not now and not self.is_due:
            return
        self._told_at_s = now_s = time.monotonic()
        if now_s - self._devices_at_s >= DEVICE_S:
            self._devices, self._devices_at_s = self._describe(), now_s
        self._channel.send(Told(report=self._report()))
        durations = self._ledger.take_durations()
        if durations:
            self._channel.send(Observed(seconds=durations))

    @property
    def view(self) -> View:
        return self.swarm.view if self.swarm is not None else View()

    def _report(self) -> Report:
        view = self.view
        counters = self._ledger.counters(view)
        return Report(
            state=self.state,
            peer_id=view.peer_id,
            run=self.run.model_copy(
                update={
                    "swarm_round": max(view.swarm_round, self.run.round),
                    "invite": self.invite(view.addresses),
                    "invite_note": view.invite_note,
                }
            ),
            training=self.training.model_copy(update={"tokens_total": self._ledger.tokens}),
            sync=self.sync.model_copy(update={"stage": view.stage}),
            peers=PeersInfo(connected=view.connected, training=view.training),
            swarm=view.rows,
            compute_utilization_ratio=self._ledger.utilization_ratio,
            forecast_utilization_ratio=self._ledger.forecast_ratio,
            reachability=view.reachability,
            reachability_code=view.reachability_code,
            reachability_reason=view.reachability_reason,
            devices=self._devices,
            contribution=self._ledger.contribution(counters),
            counters=counters,
        )

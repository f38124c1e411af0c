"""The pause policy: whether the owner, the scheduled hours, the battery or an active user pause the node.

The owner has priority: `pause` holds as long as requested, and `resume` overrides a cause until that cause has ended.
`PauseInputs` and `PauseDecision` are pure values; `PausePolicy` holds the state of a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Literal

from node.api.node_interface import PAUSE_MAX_S, NotAllowed, PauseOrder
from node.config.schema import ScheduleConfig
from node.config.weekly_hours import FAR_DAYS, Hours
from node.daemon.data_directory import DataDirectory, OwnerRequest
from node.status import TRAFFIC_LIMIT, PausedBy, PauseInfo, rfc3339

SensorCause = Literal["battery", "user", "traffic"]

MAINS_STEADY_S = 60.0
"""How long mains power must be back before the node resumes, so that a loose plug does not restart it repeatedly."""


def now_utc() -> datetime:
    return datetime.now(UTC)


def _without_moment(request: OwnerRequest) -> OwnerRequest | None:
    """What is left of a request whose moment has come: a `resume` before the pause, a pause after a round, or None."""
    if request.until is not None and request.resumed_until is not None:
        return OwnerRequest(resumed_until=request.resumed_until)
    return OwnerRequest(after_round=request.after_round) if request.after_round is not None else None


@dataclass(frozen=True, slots=True)
class PauseDecision:
    by: PausedBy = ""
    """What pauses the node; empty if nothing does."""
    code: str = ""
    reason: str = ""
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class PauseInputs:
    """Everything that may pause the node, at one moment."""

    hours: Hours = field(default_factory=Hours)
    request: OwnerRequest | None = None
    on_battery: bool = False
    """Whether the machine is on battery and the configuration pauses the node then."""
    user_active: bool = False
    """Whether someone uses the machine and the configuration pauses the node then."""
    traffic_until: datetime | None = None
    """When the month ends whose traffic limit is reached; None while it is not."""
    overridden: frozenset[SensorCause] = frozenset()
    """Causes that the owner overrode with `resume`."""

    def settled(self, now: datetime) -> PauseInputs:
        """Return these inputs without an expired request, and without overrides whose cause has ended."""
        request = self.request
        while request is not None and request.ends_at is not None and request.ends_at <= now:
            request = _without_moment(request)
        return replace(self, request=request, overridden=self.overridden & self._sensor_causes)

    def resumed(self, now: datetime) -> PauseInputs:
        """Return the inputs after a `resume`, which overrides every present cause."""
        request = None
        if not self.hours.is_active(now):
            hours_change_at = self.hours.next_change(now) or now + timedelta(days=FAR_DAYS)
            request = OwnerRequest(resumed_until=hours_change_at)
        return replace(self, request=request, overridden=self._sensor_causes)

    @property
    def _sensor_causes(self) -> frozenset[SensorCause]:
        active: dict[SensorCause, bool] = {
            "battery": self.on_battery,
            "user": self.user_active,
            "traffic": self.traffic_until is not None,
        }
        return frozenset(cause for cause, is_active in active.items() if is_active)

    def decide(self, now: datetime) -> PauseDecision:
        if self.traffic_until is not None and "traffic" not in self.overridden:
            # First, because the node leaves the swarm. Any other pause keeps it a member, which costs traffic.
            until = self.hours.dated(self.traffic_until)
            reason = f"This month's traffic limit is reached: the node is not in the swarm until {until}, or `resume`."
            return PauseDecision("traffic", TRAFFIC_LIMIT, reason, self.traffic_until)
        request = self.request or OwnerRequest(after_round=0)
        if request.is_pause:
            text = "`resume`" if request.until is None else self.hours.dated(request.until)
            return PauseDecision("owner", "paused", f"The node is paused until {text}.", request.until)
        if request.resumed_until is None and not self.hours.is_active(now):
            change_at = self.hours.next_change(now)
            until = f" until {self.hours.local(change_at)}" if change_at is not None else ""
            return PauseDecision("schedule", "scheduled", f"The node is outside of its hours{until}.", change_at)
        if self.on_battery and "battery" not in self.overridden:
            return PauseDecision(
                "battery", "on_battery", "The machine is on battery: training resumes on mains power, or with `resume`."
            )
        if self.user_active and "user" not in self.overridden:
            reason = "Somebody uses this machine: training resumes when they are away, or with `resume`."
            return PauseDecision("user", "user_active", reason)
        return PauseDecision()


class PausePolicy:
    """Decides when the node pauses. Used by the supervisor's event loop only."""

    def __init__(
        self, schedule: ScheduleConfig, directory: DataDirectory, clock: Callable[[], datetime], *, trains: bool
    ) -> None:
        """`clock` is the wall clock, which goes on while the machine sleeps. A relay (not `trains`) never pauses."""
        self._directory, self._clock, self._trains = directory, clock, trains
        self._schedule = schedule
        self._battery: bool | None = None
        self._on_battery_at: datetime | None = None
        """When the machine was last seen on battery power."""
        self._idle_s: float | None = None
        self._traffic_until: datetime | None = None
        self._inputs = PauseInputs(schedule.hours, directory.load_owner_request() if trains else None)
        self._hours_change: tuple[datetime, tzinfo, datetime | None] | None = None
        """When and for which time zone the next change of the scheduled hours was computed, and that change."""

    def update_schedule(self, schedule: ScheduleConfig) -> None:
        """Apply a new schedule. If its hours differ, a `resume` that overrode the previous hours ends."""
        if schedule.hours != self._inputs.hours:
            self._inputs, self._hours_change = replace(self._inputs, hours=schedule.hours), None
            request = self._inputs.request
            if request is not None and request.resumed_until is not None:
                rest = request.model_copy(update={"resumed_until": None})
                self._set_request(rest if rest != OwnerRequest() else None)
        self._schedule = schedule

    def update_traffic(self, until: datetime | None) -> None:
        """Say until when the month's traffic limit is reached; None if it is not."""
        self._traffic_until = until

    def update_sensors(self, battery: bool | None, idle_s: float | None) -> None:
        if battery:
            self._on_battery_at = self._clock()
        self._battery, self._idle_s = battery, idle_s

    def _inputs_at(self, now: datetime) -> PauseInputs:
        """Return the inputs with the present sensor values."""
        schedule, since = self._schedule, self._on_battery_at
        recently = since is not None and 0 <= (now - since).total_seconds() < MAINS_STEADY_S
        active = self._idle_s is not None and self._idle_s < schedule.user_idle_s
        return replace(
            self._inputs,
            on_battery=(bool(self._battery) or recently) and schedule.on_battery == "pause",
            user_active=active and schedule.user_active == "pause",
            traffic_until=self._traffic_until,
        )

    @property
    def after_round(self) -> int | None:
        """The round after which the owner requested a pause."""
        return self._inputs.request.after_round if self._inputs.request is not None else None

    def pause(self, order: PauseOrder) -> None:
        """Pause on the owner's request. Raises NotAllowed if the pause would end in the past or too late."""
        now, until = self._clock(), order.until
        if order.for_s is not None:
            until = now + timedelta(seconds=order.for_s)
        if until is not None and until <= now:
            raise NotAllowed("`until` lies in the past: give a later moment.")
        if until is not None and until > now + timedelta(seconds=PAUSE_MAX_S):
            raise NotAllowed("`until` lies more than a year ahead: leave it out, and the pause holds until `resume`.")
        request, is_limited = self._inputs.request, until is not None or order.after_round is not None
        resumed_until = request.resumed_until if request is not None and is_limited else None
        self._set_request(OwnerRequest(until=until, after_round=order.after_round, resumed_until=resumed_until))

    def resume(self) -> None:
        now = self._clock()
        self._inputs = self._inputs_at(now).resumed(now)
        self._directory.save_owner_request(self._inputs.request)

    def _set_request(self, request: OwnerRequest | None) -> None:
        self._inputs = replace(self._inputs, request=request)
        self._directory.save_owner_request(request)

    def decide(self) -> PauseDecision:
        """Return the decision for now. Requests that are over are removed, and so is their file."""
        if not self._trains:
            return PauseDecision()
        now, before = self._clock(), self._inputs.request
        self._inputs = self._inputs_at(now).settled(now)
        if self._inputs.request != before:
            self._directory.save_owner_request(self._inputs.request)
        return self._inputs.decide(now)

    def next_hours_change(self) -> datetime | None:
        """The next moment at which the scheduled hours begin or end."""
        if not self._trains:
            return None
        now, zone, known = self._clock(), self._inputs.hours.zone, self._hours_change
        if known is None or now < known[0] or zone != known[1] or (known[2] is not None and now >= known[2]):
            known = self._hours_change = (now, zone, self._inputs.hours.next_change(now))
        return known[2]

    def info(self, decision: PauseDecision) -> PauseInfo:
        until = rfc3339(decision.until) if decision.until is not None else None
        return PauseInfo(by=decision.by, until=until, after_round=self.after_round)

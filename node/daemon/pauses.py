"""Who wants the node to pause, and what that comes to: owner, hours of the week, battery, somebody at the machine.

`Wishes` and `Verdict` are pure values: the moment is an argument. `Pauser` holds the node's own and keeps what the
owner has said over restarts. Knows no worker and no phase. The owner's word goes before all others: a pause holds as
long as was asked for; `resume` holds until that which it was said against has ended once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Literal

from node.api.seam import PAUSE_MAX_S, NotAllowed, PauseOrder
from node.config import ScheduleConfig
from node.daemon.folder import Asked, DataFolder
from node.schedule import FAR_DAYS, Hours
from node.status import PausedBy, PauseInfo, rfc3339

STEADY_S = 60.0
"""So long mains power has to be back before the node goes on: a loose plug is no reason to start again and again."""


def now_utc() -> datetime:
    return datetime.now(UTC)


def asked_after(asked: Asked | None) -> Asked | None:
    """What is left of it once its moment has come: a pause after a round may be still to come."""
    return Asked(after_round=asked.after_round) if asked is not None and asked.after_round is not None else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all wishes come to. `by` empty: nobody wants a pause."""

    by: PausedBy = ""
    code: str = ""
    reason: str = ""
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """Everything that may want a pause, at one moment."""

    hours: Hours = field(default_factory=Hours)
    asked: Asked | None = None
    """By the owner."""
    on_battery: bool = False
    """There is no mains power, and that counts."""
    user_active: bool = False
    """Somebody uses the machine, and that counts."""
    ignored: frozenset[Literal["battery", "user"]] = frozenset()
    """The owner said `resume` against these."""

    def settled(self, now: datetime) -> Wishes:
        """Without what is over: a pause that has had its time, a `resume` whose reason has ended."""
        asked, ends = self.asked, self.asked.ends if self.asked is not None else None
        if ends is not None and ends <= now:
            asked = asked_after(self.asked)
        holds = {"battery": self.on_battery, "user": self.user_active}
        return replace(self, asked=asked, ignored=frozenset(by for by in self.ignored if holds[by]))

    def resumed(self, now: datetime) -> Wishes:
        """The owner wants it to run, whatever stands against that now."""
        outside = not self.hours.is_active(now)
        turn = self.hours.next_change(now) or now + timedelta(days=FAR_DAYS)
        asked = Asked(resumed_until=turn) if outside else None
        against: set[Literal["battery", "user"]] = set()
        against |= {"battery"} if self.on_battery else set()
        against |= {"user"} if self.user_active else set()
        return replace(self, asked=asked, ignored=frozenset(against))

    def verdict(self, now: datetime) -> Verdict:
        asked = self.asked or Asked(after_round=0)
        if asked.is_pause:
            until = asked.until
            text = "`resume`" if until is None else self.hours.dated(until)
            return Verdict("owner", "paused", f"The node is paused until {text}.", until)
        if asked.resumed_until is None and not self.hours.is_active(now):
            turn = self.hours.next_change(now)
            when = f" until {self.hours.local(turn)}" if turn is not None else ""
            return Verdict("schedule", "scheduled", f"Outside of its hours{when}.", turn)
        if self.on_battery and "battery" not in self.ignored:
            return Verdict("battery", "on_battery", "On battery: it goes on with mains power, or with `resume`.")
        if self.user_active and "user" not in self.ignored:
            return Verdict(
                "user", "user_active", "Somebody uses this machine: it goes on when they are away, or with `resume`."
            )
        return Verdict()


class Pauser:
    """The node's own wishes. One writer: the supervisor's event loop."""

    def __init__(
        self, schedule: ScheduleConfig, folder: DataFolder, clock: Callable[[], datetime], *, trains: bool
    ) -> None:
        """`clock`: the wall clock, as it goes on while the machine sleeps. A node that never trains never pauses."""
        self._folder, self._clock, self._trains = folder, clock, trains
        self._schedule = schedule
        self._battery: bool | None = None
        self._unplugged_at: datetime | None = None
        """When it was last seen on battery."""
        self._idle_s: float | None = None
        self._wishes = Wishes(schedule.hours, folder.load_asked() if trains else None)
        self._turn: tuple[datetime, datetime | None] | None = None
        """The next change of the hours, and since when that is known."""

    def follow(self, schedule: ScheduleConfig) -> None:
        """These settings hold from now on; a `resume` against other hours does not hold any more."""
        if schedule.hours != self._wishes.hours:
            self._wishes, self._turn = replace(self._wishes, hours=schedule.hours), None
            if self._wishes.asked is not None and self._wishes.asked.resumed_until is not None:
                self._ask(asked_after(self._wishes.asked))
        self._schedule = schedule

    def probed(self, battery: bool | None, idle_s: float | None) -> None:
        """Whether the machine is on battery, and for how long nobody has used it; None where that is not known."""
        if battery:
            self._unplugged_at = self._clock()
        self._battery, self._idle_s = battery, idle_s

    def _weighed(self, now: datetime) -> Wishes:
        """With what the probes come to."""
        schedule, since = self._schedule, self._unplugged_at
        unplugged = bool(self._battery) or (since is not None and 0 <= (now - since).total_seconds() < STEADY_S)
        active = self._idle_s is not None and self._idle_s < schedule.user_idle_s
        return replace(
            self._wishes,
            on_battery=unplugged and schedule.on_battery == "pause",
            user_active=active and schedule.user_active == "pause",
        )

    # the owner

    @property
    def after_round(self) -> int | None:
        return self._wishes.asked.after_round if self._wishes.asked is not None else None

    def pause(self, order: PauseOrder) -> None:
        """As ordered. Raises NotAllowed, and nothing is changed, where the moment to end it at does not do."""
        now, until = self._clock(), order.until
        if order.for_s is not None:
            until = now + timedelta(seconds=order.for_s)
        if until is not None and until <= now:
            raise NotAllowed("`until` lies in the past: give a moment to come.")
        if until is not None and until > now + timedelta(seconds=PAUSE_MAX_S):
            raise NotAllowed("`until` lies more than a year ahead: leave it out, and the pause holds until `resume`.")
        asked = self._wishes.asked
        resumed_until = asked.resumed_until if asked is not None and order.after_round is not None else None
        self._ask(Asked(until=until, after_round=order.after_round, resumed_until=resumed_until))

    def resume(self) -> None:
        now = self._clock()
        self._wishes = self._weighed(now).resumed(now)
        self._folder.save_asked(self._wishes.asked)

    def _ask(self, asked: Asked | None) -> None:
        self._wishes = replace(self._wishes, asked=asked)
        self._folder.save_asked(asked)

    # what it comes to

    def verdict(self) -> Verdict:
        """Now. What is over is forgotten, also on the disk."""
        if not self._trains:
            return Verdict()
        now, before = self._clock(), self._wishes.asked
        self._wishes = self._weighed(now).settled(now)
        if self._wishes.asked != before:
            self._folder.save_asked(self._wishes.asked)
        return self._wishes.verdict(now)

    def next_turn(self) -> datetime | None:
        """The next moment at which the hours begin or end."""
        if not self._trains:
            return None
        now = self._clock()
        if self._turn is None or not (self._turn[0] <= now < (self._turn[1] or datetime.max.replace(tzinfo=UTC))):
            self._turn = (now, self._wishes.hours.next_change(now))
        return self._turn[1]

    def info(self, verdict: Verdict) -> PauseInfo:
        until = rfc3339(verdict.until) if verdict.until is not None else None
        return PauseInfo(by=verdict.by, until=until, after_round=self.after_round)

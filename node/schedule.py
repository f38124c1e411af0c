"""Hours of the week: what is written, whether a moment lies in them, and when that changes next. Knows no node.

Hours are what a clock on the wall shows: a moment is active if the local time that it has there lies in a window. Where
clocks are put forward or back, a window is by that much shorter or longer. Windows begin with their first minute and
end before their last; one that ends no later than it begins goes on into the next day.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

logger = logging.getLogger(__name__)

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60
EXAMPLE = "write it as mon-fri 22:00-08:00 or sat,sun 00:00-24:00"
FAR_DAYS = 15
"""A window that falls into the hour that a change of clocks leaves out is missing once: two weeks hold the next one."""

_TIME = re.compile(r"(\d{1,2}):(\d{2})")


@dataclass(frozen=True, slots=True)
class Window:
    """On each of these days, minutes of the day; `end_min` above DAY_MIN is of the next day."""

    days: frozenset[int]
    """0 is Monday."""
    start_min: int
    end_min: int

    def holds(self, weekday: int, minute: float) -> bool:
        return (weekday in self.days and self.start_min <= minute < self.end_min) or (
            (weekday - 1) % 7 in self.days and minute < self.end_min - DAY_MIN
        )


@dataclass(frozen=True, slots=True)
class Hours:
    """When a node may train. Without windows: always."""

    windows: tuple[Window, ...] = ()
    timezone: str = ""
    """IANA name; empty: the machine's."""

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone) if self.timezone else machine_zone()

    def is_active(self, at: datetime) -> bool:
        """`at`: any moment with a time zone."""
        return _is_active(self.windows, at.astimezone(self.zone))

    def next_change(self, at: datetime) -> datetime | None:
        """The first moment after `at` at which `is_active` is another, UTC; None if there is none."""
        at, zone = at.astimezone(UTC), self.zone
        now = self.is_active(at)
        for moment in sorted(set(_turns(self.windows, zone, at.astimezone(zone).date()))):
            if moment > at and _is_active(self.windows, moment.astimezone(zone)) != now:
                return moment
        return None

    def local(self, at: datetime) -> str:
        """A moment of the next days, for a person: `Mon 22:00`."""
        return at.astimezone(self.zone).strftime("%a %H:%M")

    def dated(self, at: datetime) -> str:
        """Any moment, for a person: `8:00 on 23 November 2026 (CET)`."""
        then = at.astimezone(self.zone)
        return f"{then.hour}:{then.minute:02d} on {then.day} {then:%B %Y} ({then.tzname()})"


def hours(active: Sequence[str], timezone: str = "") -> Hours:
    """From what is written. Raises ValueError, with the mend."""
    return Hours(tuple(parse_window(text) for text in whole_windows(active)), check_zone(timezone))


def whole_windows(texts: Sequence[str]) -> tuple[str, ...]:
    """The same, with days that a list's commas have cut off put back: `sat`, `sun 00:00-24:00` is one window."""
    found: list[str] = []
    days = ""
    for text in texts:
        part = text.strip()
        if re.fullmatch(r"[A-Za-z, -]+", part):
            days += part + ","
            continue
        found.append(days + part)
        days = ""
    return (*found, days.rstrip(",")) if days else tuple(found)


def parse_window(text: str) -> Window:
    """`DAYS HH:MM-HH:MM`. Raises ValueError, with the mend."""
    days, _, times = re.sub(r"\s*([-,])\s*", r"\1", text.strip().lower()).rpartition(" ")
    start, dash, end = times.partition("-")
    if not (days and dash):
        raise ValueError(f"{text!r} does not name days and times: {EXAMPLE}")
    start_min, end_min = _minutes(start, text), _minutes(end, text)
    if start_min == DAY_MIN:
        raise ValueError(f"{text!r} begins at 24:00: {EXAMPLE}")
    if end_min <= start_min:
        end_min += DAY_MIN
    return Window(frozenset(_days(days, text)), start_min, end_min)


def parse_moment(text: str, now: datetime, zone: tzinfo | None = None) -> datetime:
    """RFC 3339, or the next `18:30`, `tomorrow 8:00`, `mon 8:00` after `now`. Raises ValueError, with the mend.

    `zone`: what a moment without one means; None: the machine's.
    """
    zone = zone or machine_zone()
    local = now.astimezone(zone)
    *words, last = text.lower().split() or [""]
    day = words[0] if len(words) == 1 else ""
    if _TIME.fullmatch(last) and (not words or day in (*DAYS, "today", "tomorrow")):
        minutes = _minutes(last, text)
        ahead = (DAYS.index(day) - local.weekday()) % 7 if day in DAYS else int(day == "tomorrow")
        for more in (0, 1) if not words else (0, 7) if day in DAYS else (0,):
            date_ = local.date() + timedelta(days=ahead + more + minutes // DAY_MIN)
            first = datetime.combine(date_, time(*divmod(minutes % DAY_MIN, 60)), zone)
            for moment in (first, first.replace(fold=1)):  # Where clocks are put back, an hour comes twice.
                if moment.astimezone(UTC) > now:
                    return moment
        raise ValueError(f"{text!r} is over: give a moment to come")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        mend = "write it as 18:30, 'tomorrow 8:00', 'mon 8:00' or 2030-01-31T08:00:00Z"
        raise ValueError(f"{text!r} is no moment: {mend}") from exc
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)


def check_zone(name: str) -> str:
    """The name as it is. Raises ValueError, with the mend."""
    try:
        if name:
            ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        near = get_close_matches(name, sorted(available_timezones()), 1, 0.0)
        hint = f": the nearest known one is {near[0]}" if near else ""
        raise ValueError(f"there is no time zone {name!r}{hint}") from exc
    return name


@lru_cache(maxsize=1)
def machine_zone() -> ZoneInfo:
    """The zone of this machine, as its environment or /etc/localtime says; else UTC."""
    name = os.environ.get("TZ", "").removeprefix(":")
    file = Path("/etc/localtime")
    if name:
        try:
            return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            logger.warning("Hours are UTC's, as TZ=%s is no time zone's name: set schedule.timezone.", name)
            return ZoneInfo("UTC")
    try:
        place = str(file.resolve(strict=True))
        if "zoneinfo/" in place:
            return ZoneInfo(place.rpartition("zoneinfo/")[2])
        with file.open("rb") as data:
            return ZoneInfo.from_file(data, key="machine")
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return ZoneInfo("UTC")


def _minutes(text: str, window: str) -> int:
    match = _TIME.fullmatch(text.strip())
    minutes = 60 * int(match[1]) + int(match[2]) if match and int(match[2]) < 60 else DAY_MIN + 1
    if minutes > DAY_MIN:
        raise ValueError(f"{text.strip()!r} in {window!r} is no time of the day: {EXAMPLE}")
    return minutes


def _days(text: str, window: str) -> Iterator[int]:
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = (word.strip() for word in part.partition("-"))
        for word in (first, last or first):
            if word not in DAYS:
                raise ValueError(f"{word!r} in {window!r} is no day of the week: take {', '.join(DAYS)}")
        start, end = DAYS.index(first), DAYS.index(last if dash else first)
        yield from (day % 7 for day in range(start, end + 1 if end >= start else end + 8))


def _is_active(windows: Sequence[Window], local: datetime) -> bool:
    minute = 60 * local.hour + local.minute
    return not windows or any(window.holds(local.weekday(), minute) for window in windows)


def _turns(windows: Sequence[Window], zone: ZoneInfo, today: date) -> Iterator[datetime]:
    """All moments of the next days at which anything may change, UTC: edges of windows, and changes of the clocks."""
    minutes = {minute % DAY_MIN for window in windows for minute in (window.start_min, window.end_min)}
    days = [today + timedelta(days=number) for number in range(-1, FAR_DAYS + 1)] if windows else []
    for day in days:
        start = datetime.combine(day, time(), zone)
        for minute in minutes | {0}:
            for fold in (0, 1):
                yield (start + timedelta(minutes=minute)).replace(fold=fold).astimezone(UTC)
        if (change := _clock_change(start.astimezone(UTC), zone)) is not None:
            yield change


def _clock_change(start: datetime, zone: ZoneInfo) -> datetime | None:
    """The second, in the day and two hours after `start`, from which on the zone is another time from UTC."""
    low, high = 0, 26 * 3600
    before = start.astimezone(zone).utcoffset()
    if (start + timedelta(seconds=high)).astimezone(zone).utcoffset() == before:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        same = (start + timedelta(seconds=middle)).astimezone(zone).utcoffset() == before
        low, high = (middle, high) if same else (low, middle)
    return start + timedelta(seconds=high)

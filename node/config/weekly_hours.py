"""Weekly hours in local time: parses them, tells whether a moment is inside them, and finds the next change.

A window includes its first minute and excludes its last. If its end is not later than its start, it ends on the next
day. A clock change inside a window makes the window shorter or longer.
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
MOMENTS = "write it as 18:30, 'tomorrow 8:00', 'mon 8:00' or 2030-01-31T08:00:00Z"
LOCALTIME = "/etc/localtime"
FAR_DAYS = 15
"""Days to search. A clock change can skip a weekly window once, so one week would not be enough."""

_TIME = re.compile(r"(\d{1,2}):(\d{2})")


@dataclass(frozen=True, slots=True)
class Window:
    """The same hours on several days, in minutes of the day."""

    days: frozenset[int]
    """0 is Monday."""
    start_min: int
    end_min: int
    """A value above DAY_MIN is on the next day."""

    def contains(self, weekday: int, minute: float) -> bool:
        return (weekday in self.days and self.start_min <= minute < self.end_min) or (
            (weekday - 1) % 7 in self.days and minute < self.end_min - DAY_MIN
        )


@dataclass(frozen=True, slots=True)
class Hours:
    """When a node may train. Without windows, it may always train."""

    windows: tuple[Window, ...] = ()
    timezone: str = ""
    """IANA name; empty means the machine's time zone."""

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone) if self.timezone else machine_zone()

    def is_active(self, at: datetime) -> bool:
        """Whether `at`, a moment with any time zone, lies inside the hours."""
        local = at.astimezone(self.zone)
        minute = 60 * local.hour + local.minute
        return not self.windows or any(window.contains(local.weekday(), minute) for window in self.windows)

    def next_change(self, at: datetime) -> datetime | None:
        """Return the first moment after `at`, UTC, at which `is_active` changes; None if there is none."""
        at = at.astimezone(UTC)
        was_active = self.is_active(at)
        for moment in sorted(set(_possible_changes(self.windows, self.zone, at.astimezone(self.zone).date()))):
            if moment > at and self.is_active(moment) != was_active:
                return moment
        return None

    def local(self, at: datetime) -> str:
        """Format a moment of the next days: `Mon 22:00`."""
        return at.astimezone(self.zone).strftime("%a %H:%M")

    def dated(self, at: datetime) -> str:
        """Format any moment: `8:00 on 23 November 2026 (CET)`."""
        then = at.astimezone(self.zone)
        return f"{then.hour}:{then.minute:02d} on {then.day} {then:%B %Y} ({then.tzname()})"


def parse_hours(active: Sequence[str], timezone: str = "") -> Hours:
    """Parse weekly hours. Raises ValueError with the remedy."""
    return Hours(tuple(parse_window(text) for text in rejoin_windows(active)), check_zone(timezone))


def rejoin_windows(texts: Sequence[str]) -> tuple[str, ...]:
    """Undo a split at commas inside a window: `sat`, `sun 00:00-24:00` becomes `sat,sun 00:00-24:00`."""
    windows: list[str] = []
    days = ""
    for text in texts:
        part = text.strip()
        if re.fullmatch(r"[A-Za-z, -]+", part):
            days += part + ","
            continue
        windows.append(days + part)
        days = ""
    return (*windows, days.rstrip(",")) if days else tuple(windows)


def parse_window(text: str) -> Window:
    """Parse `DAYS HH:MM-HH:MM`. Raises ValueError with the remedy."""
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
    """Parse RFC 3339, or the next `18:30`, `tomorrow 8:00` or `mon 8:00` after `now`. Raises ValueError with the
    remedy.

    `zone` is the time zone of a text without one; None means the machine's.
    """
    zone = zone or machine_zone()
    local = now.astimezone(zone)
    *words, last = text.lower().split() or [""]
    day = words[0] if len(words) == 1 else ""
    if _TIME.fullmatch(last) and (not words or day in (*DAYS, "today", "tomorrow")):
        minutes = _minutes(last, text, MOMENTS)
        ahead = (DAYS.index(day) - local.weekday()) % 7 if day in DAYS else int(day == "tomorrow")
        for more in (0, 1) if not words else (0, 7) if day in DAYS else (0,):
            date_ = local.date() + timedelta(days=ahead + more + minutes // DAY_MIN)
            first = datetime.combine(date_, time(*divmod(minutes % DAY_MIN, 60)), zone)
            for moment in (first, first.replace(fold=1)):  # an hour occurs twice when clocks are set back
                if moment.astimezone(UTC) > now:
                    return moment
        raise ValueError(f"{text!r} is in the past: give a future moment")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ValueError(f"{text!r} is not a moment: {MOMENTS}") from exc
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)


def check_zone(name: str) -> str:
    """Return the name of a time zone unchanged. Raises ValueError with the remedy if it is unknown."""
    try:
        if name:
            ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        near = get_close_matches(name, sorted(available_timezones()), 1)
        hint = f"the nearest known one is {near[0]}" if near else "write it as Europe/Berlin or UTC"
        raise ValueError(f"there is no time zone {name!r}: {hint}") from exc
    return name


def machine_zone() -> ZoneInfo:
    """Return the machine's time zone from TZ or /etc/localtime, or else UTC. It may change, as on a journey."""
    name = os.environ.get("TZ", "").removeprefix(":")
    file = Path(name if name.startswith("/") else LOCALTIME)
    try:
        return _read_zone(name, file, str(file.resolve(strict=True)), file.stat().st_mtime_ns)
    except OSError:
        return _read_zone(name, file, "", 0)


@lru_cache(maxsize=1)
def _read_zone(name: str, file: Path, target: str, _changed_ns: int) -> ZoneInfo:
    """Read the zone of this name, or else of this file, which `target` is with all links followed."""
    if name and not name.startswith("/"):
        try:
            return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            logger.warning("TZ=%s is not a time zone, so training hours are in UTC: set schedule.timezone.", name)
            return ZoneInfo("UTC")
    try:
        if "zoneinfo/" in target:
            return ZoneInfo(target.rpartition("zoneinfo/")[2])
        with file.open("rb") as data:
            return ZoneInfo.from_file(data, key="machine")
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return ZoneInfo("UTC")


def _minutes(text: str, whole: str, remedy: str = EXAMPLE) -> int:
    match = _TIME.fullmatch(text.strip())
    minutes = 60 * int(match[1]) + int(match[2]) if match and int(match[2]) < 60 else DAY_MIN + 1
    if minutes > DAY_MIN:
        raise ValueError(f"{text.strip()!r} in {whole!r} is not a time of the day: {remedy}")
    return minutes


def _days(text: str, window: str) -> Iterator[int]:
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = (word.strip() for word in part.partition("-"))
        for word in (first, last if dash else first):
            if word not in DAYS:
                raise ValueError(f"{word!r} in {window!r} is not a day of the week: use {', '.join(DAYS)}")
        start, end = DAYS.index(first), DAYS.index(last if dash else first)
        yield from (day % 7 for day in range(start, end + 1 if end >= start else end + 8))


def _possible_changes(windows: Sequence[Window], zone: ZoneInfo, today: date) -> Iterator[datetime]:
    """Yield all moments of the next days, UTC, at which `is_active` may change: window edges and clock changes."""
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
    """Return the second at which the zone's UTC offset changes within 26 hours of `start`, or None."""
    low, high = 0, 26 * 3600
    before = start.astimezone(zone).utcoffset()
    if (start + timedelta(seconds=high)).astimezone(zone).utcoffset() == before:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        is_before = (start + timedelta(seconds=middle)).astimezone(zone).utcoffset() == before
        low, high = (middle, high) if is_before else (low, middle)
    return start + timedelta(seconds=high)

"""Weekly hours agree with a wall clock at any moment, and `next_change` is the next change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from node.config import weekly_hours
from node.config.weekly_hours import (
    DAYS,
    Hours,
    check_zone,
    machine_zone,
    parse_hours,
    parse_moment,
    parse_window,
    rejoin_windows,
)

ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Pacific/Chatham"]
BERLIN = "Europe/Berlin"


@st.composite
def texts(draw: st.DrawFn) -> str:
    first, last = draw(st.sampled_from(DAYS)), draw(st.sampled_from(DAYS))
    days = draw(st.sampled_from([first, f"{first}-{last}", f"{first},{last}"]))
    start, end = draw(st.integers(0, 24 * 60 - 1)), draw(st.integers(0, 24 * 60))
    return f"{days} {start // 60:02d}:{start % 60:02d}-{end // 60:02d}:{end % 60:02d}"


def moments() -> st.SearchStrategy[datetime]:
    """Moments of any time, many of them near clock changes."""
    turns = [
        datetime(2026, *moment, tzinfo=UTC) for moment in ((3, 29, 1), (10, 25, 1), (3, 8, 7), (11, 1, 6), (4, 4, 15))
    ]
    near = st.builds(lambda t, m: t + timedelta(minutes=m), st.sampled_from(turns), st.integers(-3000, 3000))
    anywhere = st.integers(1_700_000_000, 1_900_000_000).map(lambda unix_s: datetime.fromtimestamp(unix_s, UTC))
    return st.one_of(anywhere, near)


def oracle(windows: list[str], zone: str, at: datetime) -> bool:
    """Whether the wall clock lies in a window, computed from the text."""
    local = at.astimezone(ZoneInfo(zone))
    clock = f"{local:%H:%M}"
    today, yesterday = DAYS[local.weekday()], DAYS[local.weekday() - 1]
    for text in windows:
        days, _, times = text.partition(" ")
        start, end = times.split("-")
        named: set[str] = set()
        for part in days.split(","):
            first, _, last = part.partition("-")
            day = DAYS.index(first)
            named.add(DAYS[day])
            while last and DAYS[day] != last:
                day = (day + 1) % 7
                named.add(DAYS[day])
        if start < end:
            active = today in named and start <= clock < end
        else:
            active = (today in named and start <= clock) or (yesterday in named and clock < end)
        if active:
            return True
    return not windows


@settings(max_examples=400)
@given(st.lists(texts(), max_size=3), st.sampled_from(ZONES), moments())
@example(["sun 02:00-03:00"], BERLIN, datetime(2026, 3, 28, tzinfo=UTC))
@example(["sat,sun 00:00-24:00"], BERLIN, datetime(2026, 10, 25, 0, 30, tzinfo=UTC))
def test_weekly_hours_agree_with_the_wall_clock_at_any_moment(windows: list[str], zone: str, at: datetime) -> None:
    assert parse_hours(windows, zone).is_active(at) == oracle(windows, zone, at)


@settings(max_examples=60)
@given(st.lists(texts(), max_size=3), st.sampled_from(ZONES), moments())
@example(["sun 02:10-02:50"], BERLIN, datetime(2026, 3, 28, 12, tzinfo=UTC))
@example(["sun 02:10-02:50"], BERLIN, datetime(2026, 10, 25, 0, 0, tzinfo=UTC))
@example(["mon-sun 00:00-24:00"], BERLIN, datetime(2026, 10, 25, 0, 0, tzinfo=UTC))
def test_next_change_of_weekly_hours_is_the_first_one_that_follows(windows: list[str], zone: str, at: datetime) -> None:
    schedule, now = parse_hours(windows, zone), oracle(windows, zone, at)
    turn = schedule.next_change(at)
    until = turn if turn is not None else at + timedelta(days=8)
    assert until > at
    if turn is not None:
        assert oracle(windows, zone, turn) != now
        assert (turn.second, turn.microsecond) == (0, 0)
        assert oracle(windows, zone, turn - timedelta(seconds=1)) == now or turn - timedelta(seconds=1) < at
    # Steps of a minute would be exact but slow. The next test covers windows of 7 minutes and less.
    moment = at
    while (moment := moment + timedelta(minutes=7)) < until:
        assert oracle(windows, zone, moment) == now, moment


@pytest.mark.parametrize("start", [datetime(2026, 10, 24, 20, tzinfo=UTC), datetime(2026, 3, 28, 20, tzinfo=UTC)])
def test_weekly_hours_change_at_the_right_minutes_around_clock_changes(start: datetime) -> None:
    texts_ = ["sat,sun 01:57-02:03", "sun 02:30-02:31", "sun 02:59-03:01", "sat 23:59-00:01"]
    schedule = parse_hours(texts_, BERLIN)
    minutes = [start + timedelta(minutes=number) for number in range(12 * 60)]
    seen = [after for before, after in pairwise(minutes) if schedule.is_active(before) != schedule.is_active(after)]
    turns, at = [], start
    while (turn := schedule.next_change(at)) is not None and turn <= minutes[-1]:
        turns.append(turn)
        at = turn
    assert turns == seen
    assert len(turns) >= 4


def test_changes_of_weekly_hours_are_formatted_for_people() -> None:
    schedule = parse_hours(["mon-fri 22:00-08:00", "sat,sun 00:00-24:00"], BERLIN)
    at = datetime(2026, 11, 16, 12, tzinfo=ZoneInfo(BERLIN))  # a Monday
    assert not schedule.is_active(at)
    turn = schedule.next_change(at)
    assert turn is not None
    assert schedule.local(turn) == "Mon 22:00"
    assert schedule.is_active(turn)
    saturday = schedule.next_change(datetime(2026, 11, 20, 23, tzinfo=ZoneInfo(BERLIN)))
    assert saturday is not None
    assert schedule.local(saturday) == "Mon 00:00"
    assert schedule.dated(saturday) == "0:00 on 23 November 2026 (CET)"


def test_windows_of_hours_that_were_split_at_commas_are_rejoined() -> None:
    assert rejoin_windows(["sat", "sun 00:00-24:00", " mon - fri 22:00 - 08:00"]) == (
        "sat,sun 00:00-24:00",
        "mon - fri 22:00 - 08:00",
    )
    assert parse_window("Mon - Fri  22:00 - 08:00") == parse_window("mon-fri 22:00-08:00")
    assert Hours().is_active(datetime.now(UTC)) and Hours().next_change(datetime.now(UTC)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mon",
        "22:00-08:00",
        "mon 24:00-03:00",
        "mon 1:60-2:00",
        "mon 25:00-26:00",
        "mo 1:00-2:00",
        "mon 1-2",
        "mon-,tue 8:00-9:00",
    ],
)
def test_an_invalid_window_of_hours_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match="mon"):
        parse_window(text)


def test_error_for_an_unknown_time_zone_names_the_nearest_one() -> None:
    assert check_zone("") == ""
    with pytest.raises(ValueError, match=r"Europe/Berlin\b"):
        check_zone("Europe/Berln")
    with pytest.raises(ValueError, match="nearest known one is Europe/Berlin"):
        check_zone("Europe/Berlim")
    with pytest.raises(ValueError, match="'Mars/Base': write it as Europe/Berlin or UTC"):
        check_zone("Mars/Base")
    with pytest.raises(ValueError, match="time zone"):
        check_zone("../../etc/passwd")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18:30", "2026-11-16T18:30"),
        ("8:00", "2026-11-17T08:00"),
        ("today 24:00", "2026-11-17T00:00"),
        ("Tomorrow 8:00", "2026-11-17T08:00"),
        ("mon 13:00", "2026-11-16T13:00"),
        ("mon 11:00", "2026-11-23T11:00"),
        ("sun 0:00", "2026-11-22T00:00"),
        ("2030-01-31T08:00:00", "2030-01-31T08:00"),
        ("2030-01-31T07:00:00Z", "2030-01-31T08:00"),
    ],
)
def test_moments_are_parsed_from_text_in_the_given_time_zone(text: str, expected: str) -> None:
    zone = ZoneInfo(BERLIN)
    moment = parse_moment(text, datetime(2026, 11, 16, 12, tzinfo=zone), zone)
    assert moment == datetime.fromisoformat(expected).replace(tzinfo=zone)


@pytest.mark.parametrize("text", ["", "soon", "25:00", "today 8:00", "8:00 tomorrow", "tomorrow", "2030-13-01"])
def test_an_invalid_moment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"moment|time of the day"):
        parse_moment(text, datetime(2026, 11, 16, 12, tzinfo=UTC), ZoneInfo("UTC"))


def test_time_zone_of_the_machine_may_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A laptop travels."""
    localtime = tmp_path / "localtime"
    monkeypatch.setattr(weekly_hours, "LOCALTIME", str(localtime))
    monkeypatch.delenv("TZ", raising=False)
    winter = datetime(2026, 1, 1, tzinfo=UTC)
    for name, hours in (("Europe/Berlin", 1), ("Asia/Tokyo", 9)):
        localtime.unlink(missing_ok=True)
        localtime.symlink_to(f"/usr/share/zoneinfo/{name}")
        assert machine_zone().key == name and winter.astimezone(machine_zone()).hour == hours
    monkeypatch.setenv("TZ", "Europe/Berlin")
    assert machine_zone().key == "Europe/Berlin"
    monkeypatch.setenv("TZ", f":{localtime}")
    assert machine_zone().key == "Asia/Tokyo"
    localtime.unlink()
    assert machine_zone().key == "UTC"

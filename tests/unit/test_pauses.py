"""Who wants a pause, and what that comes to; at moments that the test chooses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from node.api.seam import NotAllowed, PauseOrder
from node.config import ScheduleConfig
from node.daemon.folder import Asked, DataFolder
from node.daemon.pauses import STEADY_S, Pauser, Wishes
from node.daemon.probes import read_idle
from node.schedule import hours

NIGHTS = ("mon-fri 22:00-08:00", "sat,sun 00:00-24:00")
MONDAY = datetime(2026, 11, 16, tzinfo=UTC)
NOON, EVENING, NIGHT = (MONDAY + timedelta(hours=h) for h in (12, 21.5, 23))


class Clock:
    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now

    def add(self, **time: float) -> None:
        self.now += timedelta(**time)


def made(folder: Path, clock: Clock, **schedule: object) -> Pauser:
    with DataFolder.open(folder) as data:
        return Pauser(ScheduleConfig.model_validate({"timezone": "UTC", **schedule}), data, clock, trains=True)


def test_outside_of_its_hours_and_back(tmp_path: Path) -> None:
    clock = Clock(NOON)
    pauser = made(tmp_path, clock, active=NIGHTS)
    verdict = pauser.verdict()
    assert (verdict.by, verdict.code, verdict.reason) == (
        "schedule",
        "scheduled",
        "Outside of its hours until Mon 22:00.",
    )
    assert verdict.until == pauser.next_turn() == MONDAY + timedelta(hours=22)
    clock.now = MONDAY + timedelta(hours=22)
    assert pauser.verdict().by == ""
    assert pauser.next_turn() == MONDAY + timedelta(hours=32)


def test_resume_outside_of_hours_holds_until_they_turn_and_over_restarts(tmp_path: Path) -> None:
    clock = Clock(NOON)
    made(tmp_path, clock, active=NIGHTS).resume()
    pauser = made(tmp_path, clock, active=NIGHTS)
    assert pauser.verdict().by == ""
    clock.now = NIGHT
    assert pauser.verdict().by == ""
    assert not (tmp_path / "pause.json").exists()
    clock.add(hours=12)
    assert pauser.verdict().by == "schedule"
    # Away over the turn: what was said yesterday does not hold today.
    made(tmp_path, clock, active=NIGHTS).resume()
    clock.add(days=1)
    assert made(tmp_path, clock, active=NIGHTS).verdict().by == "schedule"


def test_other_hours_end_a_resume_against_the_old_ones(tmp_path: Path) -> None:
    clock = Clock(NOON)
    pauser = made(tmp_path, clock, active=NIGHTS)
    pauser.resume()
    same = ScheduleConfig(timezone="UTC", active=NIGHTS, on_battery="run")
    pauser.follow(same)
    assert pauser.verdict().by == ""
    pauser.follow(ScheduleConfig(timezone="UTC", active=("mon 20:00-21:00",)))
    assert pauser.verdict().by == "schedule"
    pauser.follow(ScheduleConfig(timezone="UTC"))
    assert (pauser.verdict().by, pauser.next_turn()) == ("", None)


def test_the_owner_s_pause_goes_before_the_hours_and_ends_in_them(tmp_path: Path) -> None:
    clock = Clock(NIGHT)
    pauser = made(tmp_path, clock, active=NIGHTS)
    pauser.pause(PauseOrder(for_s=3600))
    assert (pauser.verdict().by, pauser.verdict().until) == ("owner", NIGHT + timedelta(hours=1))
    assert pauser.verdict().reason == "The node is paused until 0:00 on 17 November 2026 (UTC)."
    clock.add(hours=1)
    assert pauser.verdict().by == ""
    # One that ends outside of the hours goes on as theirs, not to training.
    pauser.pause(PauseOrder(until=MONDAY + timedelta(days=1, hours=12)))
    clock.now = MONDAY + timedelta(days=1, hours=11)
    assert pauser.verdict().by == "owner"
    clock.add(hours=1)
    assert pauser.verdict().by == "schedule"
    assert not (tmp_path / "pause.json").exists()
    # Without an end it holds whatever the hours do.
    pauser.pause(PauseOrder())
    clock.now = NIGHT + timedelta(days=2)
    assert made(tmp_path, clock, active=NIGHTS).verdict().by == "owner"
    for until, why in ((NIGHT, "past"), (NIGHT + timedelta(days=500), "more than a year")):
        with pytest.raises(NotAllowed, match=why):
            pauser.pause(PauseOrder(until=until))


def test_a_pause_after_a_round_is_none_yet(tmp_path: Path) -> None:
    clock = Clock(NIGHT)
    pauser = made(tmp_path, clock)
    pauser.pause(PauseOrder(after_round=7))
    verdict = pauser.verdict()
    assert (verdict.by, pauser.after_round, pauser.info(verdict).after_round) == ("", 7, 7)
    assert made(tmp_path, clock).after_round == 7


def test_a_pause_after_a_round_leaves_a_resume_against_the_hours_as_it_is(tmp_path: Path) -> None:
    clock = Clock(NOON)
    pauser = made(tmp_path, clock, active=NIGHTS)
    pauser.resume()
    pauser.pause(PauseOrder(after_round=7))
    assert pauser.verdict().by == ""
    pauser = made(tmp_path, clock, active=NIGHTS)
    assert (pauser.verdict().by, pauser.after_round) == ("", 7)
    clock.now = NIGHT
    assert (pauser.verdict().by, pauser.after_round) == ("", 7), "the hours have begun: only the round is still to come"
    clock.add(hours=12)
    assert (pauser.verdict().by, pauser.after_round) == ("schedule", 7)
    pauser.resume()
    assert (pauser.verdict().by, pauser.after_round) == ("", None), "`resume` takes back all that was to come"
    pauser.pause(PauseOrder(after_round=8))
    pauser.follow(ScheduleConfig(timezone="UTC", active=("mon 20:00-21:00",)))
    assert (pauser.verdict().by, pauser.after_round) == ("schedule", 8)


def test_on_battery_at_once_and_back_only_when_steady(tmp_path: Path) -> None:
    clock = Clock(NOON)
    pauser = made(tmp_path, clock)
    for battery, by in ((None, ""), (False, ""), (True, "battery"), (False, "battery"), (True, "battery")):
        pauser.probed(battery, None)
        assert pauser.verdict().by == by, battery
        clock.add(seconds=10)
    pauser.probed(False, None)
    clock.add(seconds=STEADY_S - 11)
    assert pauser.verdict().code == "on_battery"
    clock.add(seconds=12)
    assert pauser.verdict().by == ""
    assert made(tmp_path, clock, on_battery="run").verdict().by == ""


def test_resume_on_battery_holds_until_it_was_plugged_in_once(tmp_path: Path) -> None:
    clock = Clock(NOON)
    pauser = made(tmp_path, clock)
    pauser.probed(True, None)
    pauser.resume()
    clock.add(hours=1)
    pauser.probed(True, None)
    assert pauser.verdict().by == ""
    pauser.probed(False, None)
    clock.add(seconds=STEADY_S + 1)
    assert pauser.verdict().by == ""
    pauser.probed(True, None)
    assert pauser.verdict().by == "battery"


def test_while_somebody_is_at_the_machine(tmp_path: Path) -> None:
    clock = Clock(NOON)
    pauser = made(tmp_path, clock, user_active="pause", user_idle_s=300)
    seen = []
    for idle_s in (None, 0.0, 299.0, 301.0, 5.0):
        pauser.probed(None, idle_s)
        seen.append(pauser.verdict().code)
    assert seen == ["", "user_active", "user_active", "", "user_active"]
    other = made(tmp_path, clock)
    other.probed(None, 0.0)
    assert other.verdict().by == "", "it is off unless asked for"


@pytest.mark.parametrize("asked", [Asked(), Asked(resumed_until=NIGHT)])
def test_a_relay_has_nothing_to_pause(tmp_path: Path, asked: Asked) -> None:
    with DataFolder.open(tmp_path) as data:
        data.save_asked(asked)
        pauser = Pauser(ScheduleConfig(active=NIGHTS), data, Clock(NOON), trains=False)
        pauser.probed(True, 0.0)
        assert (pauser.verdict().by, pauser.next_turn()) == ("", None)


def test_wishes_are_weighed_in_order() -> None:
    all_ = Wishes(hours(NIGHTS, "UTC"), Asked(), on_battery=True, user_active=True)
    assert all_.verdict(NOON).by == "owner"
    going = all_.resumed(NOON)
    assert going.verdict(NOON).by == ""
    assert going.settled(NIGHT + timedelta(days=1)).verdict(NIGHT + timedelta(days=1)).by == ""
    assert Wishes(hours(NIGHTS, "UTC"), None, on_battery=True, user_active=True).verdict(NOON).by == "schedule"
    assert Wishes(on_battery=True, user_active=True).verdict(NOON).by == "battery"


def test_logind_s_words() -> None:
    assert read_idle("IdleHint=no\nIdleSinceHint=5\n", 100.0) == 0.0
    assert read_idle("IdleHint=yes\nIdleSinceHint=40000000\n", 100.0) == 60.0
    assert read_idle("IdleHint=yes\nIdleSinceHint=\n", 100.0) is None
    assert read_idle("", 100.0) is None

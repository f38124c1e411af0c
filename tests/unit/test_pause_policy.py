"""Tests of the pause policy at moments that each test chooses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from node.api.node_interface import NotAllowed, PauseOrder
from node.config.schema import ScheduleConfig
from node.config.weekly_hours import parse_hours
from node.daemon.data_directory import DataDirectory, OwnerRequest
from node.daemon.host_sensors import parse_idle
from node.daemon.pause_policy import MAINS_STEADY_S, PauseInputs, PausePolicy
from tests.unit.clocks import WallClock

NIGHTS = ("mon-fri 22:00-08:00", "sat,sun 00:00-24:00")
OTHER_HOURS = ScheduleConfig(timezone="UTC", active=("mon 20:00-21:00",))
MONDAY = datetime(2026, 11, 16, tzinfo=UTC)
NOON, NIGHT = MONDAY + timedelta(hours=12), MONDAY + timedelta(hours=23)


def start(folder: Path, clock: WallClock, *, trains: bool = True, **schedule: object) -> PausePolicy:
    with DataDirectory.open(folder) as directory:
        config = ScheduleConfig.model_validate({"timezone": "UTC", **schedule})
        return PausePolicy(config, directory, clock, trains=trains)


def test_node_pauses_outside_of_its_scheduled_hours_and_resumes_within_them(tmp_path: Path) -> None:
    clock = WallClock(NOON)
    policy = start(tmp_path, clock, active=NIGHTS)
    decision = policy.decide()
    assert (decision.by, decision.code) == ("schedule", "scheduled")
    assert decision.reason == "The node is outside of its hours until Mon 22:00."
    assert decision.until == policy.next_hours_change() == MONDAY + timedelta(hours=22)
    clock.now = MONDAY + timedelta(hours=22)
    assert policy.decide().by == ""
    assert policy.next_hours_change() == MONDAY + timedelta(hours=32)


def test_next_change_of_the_hours_follows_the_time_zone_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    policy = start(tmp_path, WallClock(NOON), active=NIGHTS, timezone="")
    assert policy.next_hours_change() == MONDAY + timedelta(hours=21)
    monkeypatch.setenv("TZ", "America/New_York")
    assert policy.next_hours_change() == policy.decide().until == MONDAY + timedelta(hours=27)


def test_resume_by_the_owner_outside_of_hours_holds_until_they_begin_even_over_restarts(tmp_path: Path) -> None:
    clock = WallClock(NOON)
    start(tmp_path, clock, active=NIGHTS).resume()
    policy = start(tmp_path, clock, active=NIGHTS)
    assert policy.decide().by == ""
    clock.now = NIGHT
    assert policy.decide().by == ""
    assert not (tmp_path / "pause.json").exists()
    clock.add(hours=12)
    assert policy.decide().by == "schedule"
    # The hours changed while the node was off.
    start(tmp_path, clock, active=NIGHTS).resume()
    clock.add(days=1)
    assert start(tmp_path, clock, active=NIGHTS).decide().by == "schedule"


def test_new_hours_end_a_resume_by_the_owner_against_the_old_hours(tmp_path: Path) -> None:
    policy = start(tmp_path, WallClock(NOON), active=NIGHTS)
    policy.resume()
    policy.update_schedule(ScheduleConfig(timezone="UTC", active=NIGHTS, on_battery="run"))
    assert policy.decide().by == ""
    policy.update_schedule(OTHER_HOURS)
    assert policy.decide().by == "schedule"
    policy.update_schedule(ScheduleConfig(timezone="UTC"))
    assert (policy.decide().by, policy.next_hours_change()) == ("", None)


def test_pause_by_the_owner_takes_precedence_over_the_hours(tmp_path: Path) -> None:
    clock = WallClock(NIGHT)
    policy = start(tmp_path, clock, active=NIGHTS)
    policy.pause(PauseOrder(for_s=3600))
    assert (policy.decide().by, policy.decide().until) == ("owner", NIGHT + timedelta(hours=1))
    assert policy.decide().reason == "The node is paused until 0:00 on 17 November 2026 (UTC)."
    clock.add(hours=1)
    assert policy.decide().by == ""
    # When the owner's pause ends outside of the hours, the node stays paused by the hours.
    policy.pause(PauseOrder(until=MONDAY + timedelta(days=1, hours=12)))
    clock.now = MONDAY + timedelta(days=1, hours=11)
    assert policy.decide().by == "owner"
    clock.add(hours=1)
    assert policy.decide().by == "schedule"
    assert not (tmp_path / "pause.json").exists()
    policy.pause(PauseOrder())
    clock.now = NIGHT + timedelta(days=2)
    assert start(tmp_path, clock, active=NIGHTS).decide().by == "owner"
    for until, why in ((NIGHT, "past"), (NIGHT + timedelta(days=500), "more than a year")):
        with pytest.raises(NotAllowed, match=why):
            policy.pause(PauseOrder(until=until))


def test_after_a_pause_for_a_time_the_owners_resume_still_holds(tmp_path: Path) -> None:
    clock = WallClock(NOON)
    policy = start(tmp_path, clock, active=NIGHTS)
    policy.resume()
    policy.pause(PauseOrder(for_s=3600))
    assert (policy.decide().by, policy.decide().until) == ("owner", NOON + timedelta(hours=1))
    policy = start(tmp_path, clock, active=NIGHTS)
    clock.add(hours=1)
    assert policy.decide().by == ""
    # Both moments have come.
    policy.pause(PauseOrder(for_s=60))
    clock.now = MONDAY + timedelta(days=1, hours=12)
    assert policy.decide().by == "schedule"
    # New hours end the `resume`, and not the pause.
    policy.resume()
    policy.pause(PauseOrder(for_s=3600))
    policy.update_schedule(OTHER_HOURS)
    assert policy.decide().by == "owner"
    clock.add(hours=1)
    assert policy.decide().by == "schedule"
    # A pause without an end is over only with the next `resume`.
    policy.resume()
    policy.pause(PauseOrder())
    clock.now = NIGHT + timedelta(days=1)
    assert policy.decide().by == "owner"


def test_pause_after_a_round_stays_pending_over_restarts(tmp_path: Path) -> None:
    clock = WallClock(NIGHT)
    policy = start(tmp_path, clock)
    policy.pause(PauseOrder(after_round=7))
    decision = policy.decide()
    assert (decision.by, policy.after_round, policy.info(decision).after_round) == ("", 7, 7)
    assert start(tmp_path, clock).after_round == 7


def test_pause_after_a_round_does_not_end_a_resume_against_the_hours(tmp_path: Path) -> None:
    clock = WallClock(NOON)
    policy = start(tmp_path, clock, active=NIGHTS)
    policy.resume()
    policy.pause(PauseOrder(after_round=7))
    assert policy.decide().by == ""
    policy = start(tmp_path, clock, active=NIGHTS)
    assert (policy.decide().by, policy.after_round) == ("", 7)
    clock.now = NIGHT
    assert (policy.decide().by, policy.after_round) == ("", 7), "the hours have begun: only the round is pending"
    clock.add(hours=12)
    assert (policy.decide().by, policy.after_round) == ("schedule", 7)
    policy.resume()
    assert (policy.decide().by, policy.after_round) == ("", None), "`resume` cancels a pending pause"
    policy.pause(PauseOrder(after_round=8))
    policy.update_schedule(OTHER_HOURS)
    assert (policy.decide().by, policy.after_round) == ("schedule", 8)


def test_node_pauses_at_once_on_battery_and_resumes_on_steady_mains_power(tmp_path: Path) -> None:
    clock = WallClock(NOON)
    policy = start(tmp_path, clock)
    for battery, by in ((None, ""), (False, ""), (True, "battery"), (False, "battery"), (True, "battery")):
        policy.update_sensors(battery, None)
        assert policy.decide().by == by, battery
        clock.add(seconds=10)
    policy.update_sensors(False, None)
    clock.add(seconds=MAINS_STEADY_S - 11)
    assert policy.decide().code == "on_battery"
    clock.add(seconds=12)
    assert policy.decide().by == ""
    assert start(tmp_path, clock, on_battery="run").decide().by == ""


def test_resume_by_the_owner_on_battery_holds_until_mains_power_has_returned(tmp_path: Path) -> None:
    clock = WallClock(NOON)
    policy = start(tmp_path, clock)
    policy.update_sensors(True, None)
    policy.resume()
    clock.add(hours=1)
    policy.update_sensors(True, None)
    assert policy.decide().by == ""
    policy.update_sensors(False, None)
    clock.add(seconds=MAINS_STEADY_S + 1)
    assert policy.decide().by == ""
    policy.update_sensors(True, None)
    assert policy.decide().by == "battery"


def test_node_pauses_while_a_user_is_active_if_configured(tmp_path: Path) -> None:
    clock = WallClock(NOON)
    policy = start(tmp_path, clock, user_active="pause", user_idle_s=300)
    codes = []
    for idle_s in (None, 0.0, 299.0, 301.0, 5.0):
        policy.update_sensors(None, idle_s)
        codes.append(policy.decide().code)
    assert codes == ["", "user_active", "user_active", "", "user_active"]
    default = start(tmp_path, clock)
    default.update_sensors(None, 0.0)
    assert default.decide().by == ""


@pytest.mark.parametrize("request_", [OwnerRequest(), OwnerRequest(resumed_until=NIGHT)])
def test_relay_never_pauses(tmp_path: Path, request_: OwnerRequest) -> None:
    with DataDirectory.open(tmp_path) as directory:
        directory.save_owner_request(request_)
    policy = start(tmp_path, WallClock(NOON), trains=False, active=NIGHTS)
    policy.update_sensors(True, 0.0)
    assert (policy.decide().by, policy.next_hours_change()) == ("", None)


def test_pause_by_the_owner_precedes_the_hours_and_the_hours_precede_the_battery() -> None:
    inputs = PauseInputs(parse_hours(NIGHTS, "UTC"), OwnerRequest(), on_battery=True, user_active=True)
    assert inputs.decide(NOON).by == "owner"
    resumed = inputs.resumed(NOON)
    assert resumed.decide(NOON).by == ""
    assert resumed.settled(NIGHT + timedelta(days=1)).decide(NIGHT + timedelta(days=1)).by == ""
    assert (
        PauseInputs(parse_hours(NIGHTS, "UTC"), None, on_battery=True, user_active=True).decide(NOON).by == "schedule"
    )
    assert PauseInputs(on_battery=True, user_active=True).decide(NOON).by == "battery"


@pytest.mark.parametrize(
    ("properties", "idle_s"),
    [
        ("IdleHint=no\nIdleSinceHint=5\n", 0.0),
        ("IdleHint=no\nIdleSinceHint=0\n", None),
        ("IdleHint=yes\nIdleSinceHint=40000000\n", 60.0),
        ("IdleHint=yes\nIdleSinceHint=\n", None),
        ("", None),
    ],
)
def test_idle_seconds_of_the_user_are_read_from_the_properties_of_logind(properties: str, idle_s: float | None) -> None:
    assert parse_idle(properties, 100.0) == idle_s


def test_traffic_limit_comes_before_all_other_causes_and_resume_overrides_it_for_the_month(tmp_path: Path) -> None:
    clock = WallClock(NOON)
    policy = start(tmp_path, clock, active=NIGHTS)
    ends_at = datetime(2026, 12, 1, tzinfo=UTC)
    policy.update_traffic(ends_at)
    decision = policy.decide()
    assert (decision.by, decision.code, decision.until) == ("traffic", "traffic_limit", ends_at)
    assert "not in the swarm until 0:00 on 1 December 2026 (UTC)" in decision.reason
    policy.pause(PauseOrder(for_s=3600))
    assert policy.decide().by == "traffic", "a pause by the owner keeps the node a member, which costs traffic"
    policy.resume()
    assert policy.decide().by == ""
    policy.update_traffic(None)
    policy.decide()
    policy.update_traffic(ends_at)
    assert policy.decide().by == "traffic", "the next month has its own limit"

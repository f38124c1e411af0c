"""Tests of the month's traffic and electricity on clocks that each test advances."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from node.daemon.month_meter import CORE_WATTS, FILE, GAP_S, GPU_WATTS, MOST_MONTHS, MonthFile, MonthMeter
from node.host.power_meter import processor_joules
from node.status import Activity, Channel, Counters, DeviceInfo, Notice, Report

THREADS = 4
GPU = DeviceInfo(kind="cuda", name="gpu")
CPU = DeviceInfo(kind="cpu", name="cpu")


class Machine:
    def __init__(self, folder: Path, zone: str = "UTC") -> None:
        self.folder, self.zone = folder, zone
        self.now = datetime(2026, 11, 25, 13, tzinfo=UTC)
        self.up_s = 1000.0
        self.counters = Counters()
        self.notices: dict[str, Notice | None] = {}
        self.meter = self.start()

    def start(self, known: Counters | None = None) -> MonthMeter:
        return MonthMeter(
            self.folder, lambda: self.now, lambda: ZoneInfo(self.zone), lambda: self.up_s,
            threads=lambda: THREADS, set_notice=self.set_notice, known=known,
        )  # fmt: skip

    def set_notice(self, code: str, notice: Notice | None) -> None:
        self.notices[code] = notice

    def report(self, *devices: DeviceInfo, after_s: float = 1.0, work_s: float = 0.0, sent: int = 0) -> None:
        self.now += timedelta(seconds=after_s)
        self.up_s += after_s
        old = self.counters
        self.counters = Counters(
            activity_seconds={Activity.COMPUTE: old.activity_seconds.get(Activity.COMPUTE, 0.0) + work_s},
            network_sent_bytes={Channel.REDUCE: old.network_sent_bytes.get(Channel.REDUCE, 0) + sent},
            network_received_bytes={Channel.STATE: old.network_received_bytes.get(Channel.STATE, 0) + 2 * sent},
        )
        self.meter.add_report(Report(devices=devices, counters=self.counters))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def joules(machine: Machine) -> tuple[float, float]:
    usage = machine.meter.usage
    return usage.measured_joules, usage.estimated_joules


def test_the_month_ends_in_the_present_time_zone(machine: Machine) -> None:
    assert machine.meter.usage.ends_at == "2026-12-01T00:00:00Z"
    machine.zone = "America/Los_Angeles"
    assert (machine.meter.usage.month, machine.meter.usage.ends_at) == ("2026-11", "2026-12-01T08:00:00Z")
    machine.meter.store()
    machine.zone = "UTC"
    assert machine.start().usage.ends_at == "2026-12-01T00:00:00Z"


def test_a_disk_that_takes_nothing_is_told_once(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.folder.joinpath(FILE).mkdir()
    for _ in range(3):
        machine.report(CPU, sent=10)
        machine.meter.store()
    assert [record.levelno for record in caplog.records if FILE in record.getMessage()] == [logging.WARNING]


def test_traffic_of_the_month_survives_a_restart_and_counts_nothing_twice(machine: Machine) -> None:
    for _ in range(3):
        machine.report(sent=100)
    assert (machine.meter.usage.sent_bytes, machine.meter.usage.received_bytes) == (300, 600)
    machine.meter.store()
    machine.meter = machine.start(known=machine.counters)
    machine.report(sent=50)
    assert machine.meter.usage.sent_bytes == 350
    machine.counters = Counters()  # The totals were lost.
    machine.report()
    machine.report(sent=7)
    assert machine.meter.usage.sent_bytes == 357


def test_new_month_begins_at_midnight_in_the_zone_of_the_schedule(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "Europe/Berlin")
    machine.report()
    machine.report(sent=10)
    assert (machine.meter.usage.month, machine.meter.usage.ends_at) == ("2026-11", "2026-11-30T23:00:00Z")
    machine.now = datetime(2026, 11, 30, 22, 59, tzinfo=UTC)
    assert machine.meter.usage.sent_bytes == 10
    machine.now = datetime(2026, 11, 30, 23, 0, tzinfo=UTC)
    usage = machine.meter.usage
    assert (usage.month, usage.ends_at, usage.sent_bytes) == ("2026-12", "2026-12-31T23:00:00Z", 0)
    machine.meter.store()
    machine.now += timedelta(days=31)
    machine.meter = machine.start()
    assert machine.meter.usage.month == "2027-01"


def test_energy_is_that_of_the_meter_if_the_device_has_one(machine: Machine) -> None:
    machine.report(GPU.model_copy(update={"energy_joules": 5000.0}))
    machine.report(GPU.model_copy(update={"energy_joules": 5150.0}), work_s=1)
    assert joules(machine) == (150.0, 0.0)
    machine.report(GPU.model_copy(update={"energy_joules": 20.0}), work_s=1)
    assert joules(machine) == (150.0, 0.0), "the meter has begun again"
    machine.report(GPU.model_copy(update={"power_watts": 90.0}), after_s=2, work_s=2)
    assert joules(machine) == (330.0, 0.0), "power is measured as well"


def test_energy_without_a_meter_is_estimated_from_the_seconds_of_computing(machine: Machine) -> None:
    for _ in range(2):
        machine.report(CPU, work_s=0.5)
    assert joules(machine) == (0.0, 0.5 * CORE_WATTS * THREADS)
    machine.report()
    for _ in range(2):
        machine.report(GPU, GPU, work_s=0.5)
    assert joules(machine)[1] == 0.5 * CORE_WATTS * THREADS + 2 * 0.5 * GPU_WATTS


def test_energy_of_a_device_during_a_pause_or_a_gap_is_not_this_nodes(machine: Machine) -> None:
    machine.report(GPU.model_copy(update={"energy_joules": 0.0}))
    machine.report()
    machine.report(GPU.model_copy(update={"energy_joules": 9e6}))
    assert joules(machine) == (0.0, 0.0)
    machine.report(GPU.model_copy(update={"energy_joules": 10e6}), after_s=GAP_S)
    assert joules(machine) == (0.0, 0.0)


def test_damaged_file_of_the_month_counts_as_none(machine: Machine) -> None:
    (machine.folder / FILE).write_text("{")
    machine.meter = machine.start()
    assert machine.meter.usage.sent_bytes == 0
    notice = machine.notices["months_damaged"]
    assert notice is not None and "months.damaged.json" in notice.text
    machine.report(after_s=7 * 86400)
    assert machine.notices == {"months_damaged": None}, "a new month is counted in full"


def test_processor_meter_adds_its_packages_and_needs_permission(tmp_path: Path) -> None:
    assert processor_joules(tmp_path) is None
    for zone, microjoules in (("intel-rapl:0", 2_000_000), ("intel-rapl:1", 3_000_000), ("intel-rapl:0:0", 9)):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "energy_uj").write_text(f"{microjoules}\n")
    assert processor_joules(tmp_path) == 5.0
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert processor_joules(tmp_path) is None


def test_wrong_clock_at_a_start_does_not_erase_the_month(machine: Machine) -> None:
    for _ in range(2):
        machine.report(sent=100)
    machine.meter.store()
    right = machine.now
    for wrong in (datetime(2000, 1, 1, tzinfo=UTC), datetime(2031, 5, 5, tzinfo=UTC)):
        machine.now = wrong
        machine.meter = machine.start(known=machine.counters)
        assert machine.meter.usage.sent_bytes == 0
        machine.report(sent=1)
        machine.meter.store()
    machine.now = right
    assert machine.meter.usage.sent_bytes == 200, "the clock was set while the node ran"
    machine.meter = machine.start(known=machine.counters)
    assert machine.meter.usage.sent_bytes == 200
    machine.report(sent=7)
    assert machine.meter.usage.sent_bytes == 207


def test_file_keeps_a_year_of_months(machine: Machine) -> None:
    for month in range(30):
        machine.now = datetime(2026 + month // 12, 1 + month % 12, 3, tzinfo=UTC)
        machine.report(sent=1)
        machine.meter.store()
    kept = MonthFile.model_validate_json((machine.folder / FILE).read_bytes()).months
    assert len(kept) == MOST_MONTHS and kept[-1].month == "2028-06"

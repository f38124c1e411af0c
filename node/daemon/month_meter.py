"""Counts the traffic and the electricity of a calendar month, over restarts.

Energy comes from the meter of a device where there is one. Without one it is estimated from the seconds of computing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from pathlib import Path

from pydantic import ValidationError

from node.errors import cause_of
from node.host.files import set_aside, write_whole
from node.status import Activity, Counters, DeviceInfo, MonthUsage, Notice, Report, Value, rfc3339

logger = logging.getLogger(__name__)

FILE = "months.json"
DAMAGED = "months_damaged"
MOST_MONTHS = 12
"""Months in the file."""
GAP_S = 60.0
"""If two reports are further apart, the energy between them is not counted, because the device did other things."""
CORE_WATTS, GPU_WATTS = 8.0, 200.0
"""Estimated power of a busy core and of a busy GPU without a meter. Real machines differ by half of it."""
WORK = (Activity.COMPUTE, Activity.EVALUATE)


class MonthFile(Value):
    """The usage of the last months, oldest first."""

    months: tuple[MonthUsage, ...]


class MonthMeter:
    """Used by the supervisor's event loop, except for `store`."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], datetime],
        zone: Callable[[], tzinfo],
        monotonic_s: Callable[[], float],
        *,
        threads: Callable[[], int],
        set_notice: Callable[[str, Notice | None], None],
        known: Counters | None = None,
    ) -> None:
        """`known` are the totals before this start. `threads` is the number of cores that compute."""
        self._file, self._clock, self._zone, self._monotonic_s = folder / FILE, clock, zone, monotonic_s
        self._threads, self._set_notice = threads, set_notice
        self._totals = _traffic(known or Counters())
        self._devices: tuple[DeviceInfo, ...] = ()
        self._work_s = 0.0
        self._seen_at_s: float | None = None
        self._months = self._load()
        """The usage of each of the last months. A wrong clock may name any month for a while."""
        self._usage = MonthUsage()
        self._stored = dict(self._months)
        self._has_failed = False
        """Whether the file could not be written the last time."""

    @property
    def usage(self) -> MonthUsage:
        """The usage of the present month."""
        self._turn()
        return self._usage

    def add_report(self, report: Report) -> None:
        """Count what happened since the previous report."""
        self._turn()
        now_s = self._monotonic_s()
        elapsed_s = now_s - self._seen_at_s if self._seen_at_s is not None else GAP_S
        totals, work_s = _traffic(report.counters), sum(report.counters.activity_seconds.get(a, 0.0) for a in WORK)
        sent, received = (max(0, new - old) for new, old in zip(totals, self._totals, strict=True))
        measured = estimated = 0.0
        if elapsed_s < GAP_S and len(self._devices) == len(report.devices):
            for before, device in zip(self._devices, report.devices, strict=True):
                joules = _metered(before, device, elapsed_s)
                measured += joules or 0.0
                if joules is None:
                    watts = CORE_WATTS * self._threads() if device.kind == "cpu" else GPU_WATTS
                    estimated += watts * min(elapsed_s, max(0.0, work_s - self._work_s))
        self._totals, self._work_s, self._seen_at_s, self._devices = totals, work_s, now_s, report.devices
        self._usage = self._usage.model_copy(
            update={
                "sent_bytes": self._usage.sent_bytes + sent,
                "received_bytes": self._usage.received_bytes + received,
                "measured_joules": self._usage.measured_joules + measured,
                "estimated_joules": self._usage.estimated_joules + estimated,
            }
        )

    def store(self) -> None:
        """Write the file if something has changed. Blocks; a failure loses at most what was counted since."""
        months = {**self._months, **({self._usage.month: self._usage} if self._usage.month else {})}
        months = dict(sorted(months.items())[-MOST_MONTHS:])
        if months == self._stored:
            return
        try:
            write_whole(self._file, MonthFile(months=tuple(months.values())).model_dump_json() + "\n", forced=False)
            self._stored, self._has_failed = months, False
        except OSError as exc:
            if not self._has_failed:
                logger.warning("%s cannot be written (%s): free some space on that disk.", self._file, exc.strerror)
            self._has_failed = True

    def _turn(self) -> None:
        """Begin a new month when it is time."""
        local = self._clock().astimezone(self._zone())
        name = f"{local:%Y-%m}"
        year, month = divmod(12 * local.year + local.month, 12)
        ends_at = rfc3339(datetime(year, month + 1, 1, tzinfo=local.tzinfo).astimezone(UTC))
        if self._usage.month != name:
            if self._usage.month:
                self._months[self._usage.month] = self._usage
                self._set_notice(DAMAGED, None)
            self._usage = self._months.get(name, MonthUsage(month=name))
        if self._usage.ends_at != ends_at:  # The machine may have travelled to another time zone.
            self._usage = self._usage.model_copy(update={"ends_at": ends_at})

    def _load(self) -> dict[str, MonthUsage]:
        try:
            months = MonthFile.model_validate_json(self._file.read_bytes()).months
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as exc:
            text = (
                f"{self._file} cannot be read ({cause_of(exc)}). {set_aside(self._file)} The traffic of this month is "
                "counted from now on: lower limits.month_gb until the month ends if your line has a limit."
            )
            logger.warning("%s", text)
            self._set_notice(DAMAGED, Notice(code=DAMAGED, text=text))
            return {}
        return {usage.month: usage for usage in months}


def _traffic(counters: Counters) -> tuple[int, int]:
    return sum(counters.network_sent_bytes.values()), sum(counters.network_received_bytes.values())


def _metered(before: DeviceInfo, now: DeviceInfo, elapsed_s: float) -> float | None:
    """Joules that the device's meter has counted; None without a meter. A meter that began again counts from the next
    report on."""
    if before.energy_joules is not None and now.energy_joules is not None:
        return max(0.0, now.energy_joules - before.energy_joules)
    return now.power_watts * elapsed_s if now.power_watts is not None else None

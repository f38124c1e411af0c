"""The energy meter of the processor (RAPL), where there is one that this user may read."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path("/sys/class/powercap")


def processor_joules(folder: Path = FOLDER) -> float | None:
    """Energy that all processor packages have drawn since some moment, with all that runs on them.

    None without a readable meter; most systems let only root read it. The meter starts again at 0 about once an hour.
    """
    try:
        packages = [zone for zone in sorted(folder.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        return sum(int((zone / "energy_uj").read_text()) for zone in packages) / 1e6 if packages else None
    except (OSError, ValueError):
        return None

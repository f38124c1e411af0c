"""Sensors of the machine: power supply and user activity. Calls may take seconds; None means unknown."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from node.host.programs import output_of

POWER_SUPPLIES = Path("/sys/class/power_supply")
"""Documented in the kernel's `Documentation/ABI/testing/sysfs-class-power`."""
CONTAINER_MARKERS = (Path("/.dockerenv"), Path("/run/.containerenv"))

UNTOLD = "the desktop has not told logind yet whether somebody is active"


def on_battery() -> bool | None:
    """Whether this machine runs on a battery; None without one."""
    if platform.system() == "Linux":
        return linux_on_battery(POWER_SUPPLIES)
    try:
        battery = psutil.sensors_battery()
    except (OSError, ValueError, RuntimeError):
        return None  # Drivers fail in several ways.
    plugged = battery.power_plugged if battery is not None else None
    return None if plugged is None else not plugged


def linux_on_battery(folder: Path) -> bool | None:
    """Read the kernel's list of power supplies. Batteries of mice, keyboards and gamepads are not the machine's."""
    supplies = [path for path in sorted(folder.glob("*")) if _read_word(path / "scope") != "Device"]
    kinds = {path: _read_word(path / "type") for path in supplies}
    batteries = [path for path, kind in kinds.items() if kind == "Battery"]
    if not batteries:
        return None
    if any(_read_word(path / "online") == "1" for path, kind in kinds.items() if kind in ("Mains", "USB")):
        return False
    return any(_read_word(path / "status") == "Discharging" for path in batteries)


def _read_word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""  # Drivers fail in several ways.


def idle_seconds() -> tuple[float | None, str]:
    """Return the seconds since the last user input and how they are known, or None and the reason."""
    now_s = time.time()
    if is_container():
        return None, "a container does not see who uses its machine"
    if is_wsl():
        return None, "WSL2 does not see who uses Windows"
    if platform.system() == "Darwin":
        idle_s = _mac_idle_s()
        return idle_s, "ioreg" if idle_s is not None else "ioreg does not tell it"
    properties = _logind_properties()
    if (idle_s := parse_idle(properties, now_s)) is not None:
        return idle_s, "logind"
    why = UNTOLD if properties else "there is no logind"
    if (idle_s := _terminals_idle_s(now_s)) is not None:
        return idle_s, f"terminals only, because {why}"
    return None, f"{why}, and nobody is at a terminal"


@dataclass(frozen=True, slots=True)
class HostSensors:
    """The sensors that a supervisor polls; tests replace them."""

    on_battery: Callable[[], bool | None] = on_battery
    idle_s: Callable[[], float | None] = lambda: idle_seconds()[0]
    """Seconds since the last user input."""
    every_s: float = 10.0


def is_container() -> bool:
    with suppress(OSError):
        if Path("/proc/1/environ").read_bytes().find(b"container=") >= 0:
            return True
    return any(marker.exists() for marker in CONTAINER_MARKERS)


def is_wsl() -> bool:
    """Whether this is Linux inside Windows (WSL2)."""
    return "microsoft" in platform.release().lower()


def _mac_idle_s() -> float | None:
    """Return the seconds since the last input on macOS, or None if unknown."""
    return parse_hid_idle(output_of("/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4"))


def parse_hid_idle(properties: str) -> float | None:
    """Return the idle seconds from ioreg's output. `HIDIdleTime` is in nanoseconds."""
    found = re.search(r'"HIDIdleTime" = (\d+)', properties)
    return int(found[1]) / 1e9 if found is not None else None


def _logind_properties() -> str:
    """Return the idle properties over all sessions, which `loginctl show-session` prints if none is named; empty
    without logind."""
    return output_of("loginctl", "show-session", "-p", "IdleHint", "-p", "IdleSinceHint")


def parse_idle(properties: str, now_s: float) -> float | None:
    """Return the idle seconds from logind's properties. `IdleSinceHint` is Unix time in microseconds.

    Some desktops, such as KDE's, never set the hint. It then stays `no` since time 0, which tells nothing.
    """
    known = dict(line.split("=", 1) for line in properties.splitlines() if "=" in line)
    since = known.get("IdleSinceHint", "")
    if known.get("IdleHint") == "no":
        return None if since == "0" else 0.0
    return max(0.0, now_s - int(since) / 1e6) if known.get("IdleHint") == "yes" and since.isdigit() else None


def _terminals_idle_s(now_s: float) -> float | None:
    """Return the idle time of the terminals. Typing updates the access time of a terminal's device."""
    read_at_s: list[float] = []
    for user in psutil.users():
        with suppress(OSError, TypeError):
            read_at_s.append(os.stat(f"/dev/{user.terminal}").st_atime)  # noqa: PTH116 - a device
    return max(0.0, now_s - max(read_at_s)) if read_at_s else None

"""What this machine says of its power and of the people at it. Knows sensors, logind and terminals; decides nothing.

Everything here may take seconds, so it is called on a thread. None is: this machine does not say.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ASK_S = 5.0
CONTAINERS = (Path("/.dockerenv"), Path("/run/.containerenv"))


@dataclass(frozen=True, slots=True)
class Probes:
    """Tests put others in their place."""

    on_battery: Callable[[], bool | None]
    idle_s: Callable[[], float | None]
    """Seconds since somebody has last used this machine."""
    every_s: float = 10.0


def usual_probes() -> Probes:
    return Probes(on_battery, lambda: idle_seconds()[0])


def on_battery() -> bool | None:
    try:
        battery = psutil.sensors_battery()
    except (OSError, ValueError, RuntimeError):
        return None  # A sensor that does not answer says nothing.
    plugged = battery.power_plugged if battery is not None else None
    return None if plugged is None else not plugged


def idle_seconds(now_s: float | None = None) -> tuple[float | None, str]:
    """As the desktop tells logind, else as the terminals were last read; and which of them said so, or why nobody."""
    now_s = time.time() if now_s is None else now_s
    if is_container():
        return None, "a container does not see who uses its machine"
    if (idle_s := _logind_idle_s(now_s)) is not None:
        return idle_s, "logind"
    if (idle_s := _terminals_idle_s(now_s)) is not None:
        return idle_s, "terminals"
    return None, "there is no logind and nobody at a terminal"


def is_container() -> bool:
    with suppress(OSError):
        if Path("/proc/1/environ").read_bytes().find(b"container=") >= 0:
            return True
    return any(mark.exists() for mark in CONTAINERS)


def _logind_idle_s(now_s: float) -> float | None:
    """Of all sessions together: `loginctl show-session` without a session tells of the manager."""
    try:
        done = subprocess.run(
            ["loginctl", "show-session", "-p", "IdleHint", "-p", "IdleSinceHint"],
            capture_output=True, text=True, timeout=ASK_S, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return read_idle(done.stdout, now_s)


def read_idle(said: str, now_s: float) -> float | None:
    """logind's properties: `IdleSinceHint` in microseconds of Unix time."""
    known = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    if known.get("IdleHint") == "no":
        return 0.0
    since = known.get("IdleSinceHint", "")
    return max(0.0, now_s - int(since) / 1e6) if known.get("IdleHint") == "yes" and since.isdigit() else None


def _terminals_idle_s(now_s: float) -> float | None:
    """A terminal's file is accessed when somebody types."""
    read_at: list[float] = []
    for user in psutil.users():
        with suppress(OSError, TypeError):
            read_at.append(os.stat(f"/dev/{user.terminal}").st_atime)  # noqa: PTH116 - a device
    return max(0.0, now_s - max(read_at)) if read_at else None

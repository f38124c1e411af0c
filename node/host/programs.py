"""Runs small programs of the system for what they print."""

from __future__ import annotations

import subprocess


def output_of(*command: str, timeout_s: float = 5.0) -> str:
    """Return what a program writes to stdout. Empty if it is missing, fails or takes longer."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True, stdin=subprocess.DEVNULL
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""

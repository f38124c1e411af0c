"""Ports for nodes that must know their port before they start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

RANGE = (20_000, 30_000)
"""Below the ports that the kernel gives to programs which ask for any port, so no such program takes one meanwhile."""


def free_port() -> int:
    """A TCP port of loopback that is free now."""
    while True:
        port = random.SystemRandom().randrange(*RANGE)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

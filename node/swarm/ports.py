"""The port that a node without a fixed one had last time. Knows a file, no socket.

Invites and the others' lists of known peers name ports: a swarm whose nodes all come back on new ones would not find
itself again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

ANY = "/tcp/0"


def same_as_before(listen: Sequence[str], file: Path) -> tuple[str, ...]:
    """The listen addresses, with the remembered port where one of them leaves it open."""
    open_ones = [address for address in listen if address.endswith(ANY)]
    port = 0
    with suppress(OSError, ValueError):
        port = int(file.read_text())
    if len(open_ones) != 1 or not 0 < port < 2**16:
        return tuple(listen)
    return tuple(f"{a.removesuffix(ANY)}/tcp/{port}" if a in open_ones else a for a in listen)


def remember(port: int, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{port}\n")
    except OSError as exc:
        logger.warning("The port could not be noted in %s: %s.", file, exc.strerror)

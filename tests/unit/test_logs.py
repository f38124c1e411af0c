"""A record for people looks like one record, whoever's words are in it."""

from __future__ import annotations

import logging

import pytest

from node.logs import make_formatter


def line(message: str) -> str:
    record = logging.LogRecord("node.swarm.p2p", logging.WARNING, "", 0, "%s", (message,), None)
    return make_formatter("console").format(record)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Peer abc refused: \x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("carriage\rreturn", r"carriage\rreturn"),
        ("right-to-left \u202e and separator \u2028", r"right-to-left \u202e and separator \u2028"),
        ("C1 \x9b31m", r"C1 \x9b31m"),
        ("Zoë\t☃", "Zoë\t☃"),
    ],
)
def test_what_drives_a_terminal_is_spelled_out(said: str, shown: str) -> None:
    assert line(said).endswith(shown)


def test_a_line_feed_forges_no_record() -> None:
    forged = "12:00:00 ERROR   node.daemon.keeper: The worker crashed"
    first, second = line(f"refused\n{forged}").split("\n")
    assert first.endswith(" node.swarm.p2p: refused")
    assert second == f"    {forged}"

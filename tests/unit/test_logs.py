"""Log records as text and as JSON: levels, handlers, exceptions, and hostile messages."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path

import pytest
from rich.console import Console

from node.commands.terminal import LiveView, log_line
from node.host import logs
from node.host.logs import make_formatter
from tests.unit.test_terminal import make_status


def test_log_lines_in_json_follow_the_level_and_libraries_log_only_warnings() -> None:
    out = io.StringIO()
    logs.configure("info", "json", to=out)
    logging.getLogger("node.x").info("für %s", "you", extra={"round": 4})
    logging.getLogger("node.x").debug("not this")
    logging.getLogger("library").info("nor this")
    logging.getLogger("library").warning("but this")
    try:
        raise RuntimeError("oh")
    except RuntimeError:
        logging.getLogger("node.x").exception("failed")
    first, second, third = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"], first["round"]) == ("info", "node.x", "für you", 4)
    assert first["at"].endswith("Z")
    assert second["message"] == "but this"
    assert "RuntimeError: oh" in third["exception"]


def test_logging_that_is_configured_twice_writes_each_record_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure("info", "console", to=first)
    logs.configure("debug", "console", to=second)
    logging.getLogger("node.x").debug("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_log_records_and_the_live_line_share_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    logs.configure("info", "console", to=console)
    with LiveView(console, tmp_path, line=True, pid=7) as view:
        view.update(make_status())
        logging.getLogger("node.x").info("round [done] %d", 4, extra={"round": 4})
    assert "INFO    node.x: [round 4] round [done] 4\n" in out.getvalue()
    assert "sync in" in out.getvalue()


def format_line(message: str) -> str:
    record = logging.LogRecord("node.swarm.transport.libp2p", logging.WARNING, "", 0, "%s", (message,), None)
    return logs.make_formatter("console").format(record)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Peer abc refused: \x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("carriage\rreturn", r"carriage\rreturn"),
        ("right-to-left \u202e and separator \u2028", r"right-to-left \u202e and separator \u2028"),
        ("C1 \x9b31m", r"C1 \x9b31m"),
        ("Zoë\t☃", "Zoë\t☃"),
    ],
)
def test_control_characters_in_log_messages_are_escaped(message: str, expected: str) -> None:
    assert format_line(message).endswith(expected)


def test_a_line_feed_in_a_message_cannot_forge_a_log_record() -> None:
    forged = "12:00:00 ERROR   node.daemon.supervisor: The worker crashed"
    first, second = format_line(f"refused\n{forged}").split("\n")
    assert first.endswith(" node.swarm.transport.libp2p: refused")
    assert second == f"    {forged}"


def test_lines_of_a_log_file_do_not_control_the_terminal() -> None:
    record = {"at": "now", "level": "info", "logger": "node", "message": "a\x1b[2J\n12:00 ERROR node: b"}
    assert log_line(record).plain == "now info    node: a\\x1b[2J\n    12:00 ERROR node: b"


def test_a_traceback_cannot_forge_a_log_record_or_control_the_terminal() -> None:
    try:
        raise ValueError("\x1b[2J\n12:00:00 INFO    node.worker: forged")
    except ValueError:
        record = logging.LogRecord("node.x", logging.ERROR, "", 1, "It failed.", (), sys.exc_info())
    _, *lines = make_formatter("console").format(record).split("\n")
    assert lines and all(line.startswith("    ") for line in lines) and "\x1b" not in "".join(lines)

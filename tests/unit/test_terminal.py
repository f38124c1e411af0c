"""Terminal output of `run` and `status`, on real consoles over text files."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, TextIO, cast
from urllib.parse import parse_qs, urlsplit

import pytest
from rich.console import Console

from node.commands.terminal import LiveView, Output, dashboard_link, describe, describe_peers, render, short_duration
from node.status import MonthUsage, NodeInfo, PeersInfo, Phase, RunInfo, Status, SyncInfo, TrainingInfo
from tests.peer_row import peer_row

URL = "http://127.0.0.1:5"


def make_status(phase: Phase = Phase.TRAINING, *, invite: str = "", note: str = "", reason: str = "") -> Status:
    return Status(
        node=NodeInfo(), phase=phase, reason=reason, code="x", since="",
        run=RunInfo(round=3, invite=invite, invite_note=note),
        training=TrainingInfo(loss=2.5, tokens_per_second=1234.0), sync=SyncInfo(progress_ratio=0.5, eta_s=65.0),
        peers=PeersInfo(training=2), compute_utilization_ratio=None, reachability="none", devices=(), limits={},
        contribution={},
    )  # fmt: skip


def rendered(status: Status, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(status))
    return out.getvalue()


def write_address(folder: Path, address: object) -> None:
    (folder / "api.json").write_text(json.dumps(address))
    (folder / "api-token").write_text("T" * 43 + "\n")


def test_live_line_shows_round_sync_loss_and_speed_while_training() -> None:
    line = rendered(make_status())
    for part in ("training", "round 4", "sync in 1 min 05 s", "loss 2.500", "1,234 tokens/s", "2 training"):
        assert part in line


def test_status_text_counts_seconds_if_the_round_ends_by_the_clock() -> None:
    training = TrainingInfo(inner_step=32, inner_steps=20)
    status = make_status().model_copy(update={"training": training, "sync": SyncInfo(progress_ratio=0.5)})
    assert "inner step 32 of 20" in describe(status).plain
    by_clock = status.model_copy(update={"sync": SyncInfo(progress_ratio=0.5, round_s=130.0)})
    assert "1 min 05 s of this round's 2 min 10 s" in describe(by_clock).plain
    assert "inner step" not in describe(by_clock).plain


def test_status_text_shows_traffic_and_electricity_of_the_month() -> None:
    month = MonthUsage(month="2026-11", sent_bytes=30_000_000_000, received_bytes=31_000_000_000)
    status = make_status().model_copy(update={"month": month})
    assert re.search(r"month +61\.0 GB of traffic$", describe(status).plain, re.MULTILINE)
    more = {"limit_bytes": 200_000_000_000, "measured_joules": 3.6e6, "estimated_joules": 1.8e6}
    status = status.model_copy(update={"month": month.model_copy(update=more)})
    assert "61.0 of 200.0 GB of traffic, 1.50 kWh of electricity (partly estimated)" in describe(status).plain


@pytest.mark.parametrize("width", [20, 60, 120])
def test_live_line_is_one_line_in_every_phase_and_width(width: int) -> None:
    for phase in Phase:
        assert rendered(make_status(phase, reason="The disk [is] full. " * 9), width).count("\n") == 1


def test_live_line_of_a_starting_node_has_no_markup() -> None:
    assert rendered(make_status(Phase.STARTING, reason="Loading.")).split() == ["starting", "Loading."]


def test_live_line_shows_the_reason_verbatim_in_other_phases_than_training() -> None:
    assert "No peers [yet] answer." in rendered(make_status(Phase.CONNECTING, reason="No peers [yet] answer."))


def test_dashboard_link_and_invite_are_printed_once_when_they_are_known(tmp_path: Path) -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=40), tmp_path, line=False, pid=7) as view:
        view.update(make_status())
        assert out.getvalue() == ""
        write_address(tmp_path, {"url": URL, "pid": 7})
        long_invite = "diloco1-" + "x" * 200
        for _ in range(3):
            view.update(make_status(invite=long_invite))
    assert out.getvalue() == f"Dashboard: {URL}/#token={'T' * 43}\nInvite: {long_invite}\n"


def test_an_invite_is_printed_again_when_it_works_from_a_wider_network(tmp_path: Path) -> None:
    out = io.StringIO()
    near, far = (
        make_status(invite="diloco1-near", note="Works only on this network."),
        make_status(invite="diloco1-far"),
    )
    with LiveView(Console(file=out, width=40), tmp_path, line=False, pid=7) as view:
        for status in (near, near, far, far, near, far):
            view.update(status)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["Invite: diloco1-near", "Works only on this network."]
    assert "from everywhere" in "".join(lines[2:-1]) and lines[-1] == "Invite: diloco1-far"
    assert out.getvalue().count("Invite: ") == 2


LOSES_ITS_OUTPUT = """
import os, pty, sys, termios
from pathlib import Path
from rich.console import Console
from node.commands.terminal import LiveView, Output
from tests.unit.test_terminal import make_status

def lose_reader():
    reading, writing = os.pipe()
    os.close(reading)
    return writing

def lose_terminal():
    outside, inside = pty.openpty()
    os.close(outside)
    return inside

def hold_terminal():
    global outside  # It stays open.
    outside, inside = pty.openpty()
    termios.tcflow(inside, termios.TCOOFF)
    return inside

def leave_unread():
    global reading
    reading, writing = os.pipe()
    return writing

lose = {"held": hold_terminal, "unread": leave_unread, "pipe": lose_reader, "terminal": lose_terminal,
        "disk": lambda: os.open("/dev/full", os.O_WRONLY)}
os.dup2(lose[sys.argv[1]](), 1)
console = Console(file=Output(sys.stdout), force_terminal=True)
with console.file, LiveView(console, Path("nowhere"), line=True, pid=7) as view:
    for _ in range(20):
        view.update(make_status(invite="diloco1-" + 9000 * "x"))
print("The node goes on.", file=sys.stderr)
"""


@pytest.mark.parametrize("lost", ["pipe", "terminal", "disk", "held", "unread"])
def test_a_node_outlives_its_output(lost: str) -> None:
    command = [sys.executable, "-c", LOSES_ITS_OUTPUT, lost]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "The node goes on.\n")


def test_a_program_without_output_can_write() -> None:
    with Output(None) as output:
        Console(file=cast(TextIO, output)).print(2000 * "text\n")
    assert not Console(file=cast(TextIO, output)).is_terminal


@pytest.mark.parametrize("code", ["not_tested", "not_reached", "reached"])
def test_status_text_shows_reachability_and_its_reason(code: str) -> None:
    reachability = "direct" if code == "reached" else "none"
    update = {"reachability": reachability, "reachability_code": code, "reachability_reason": "At 1.2.3.4:5."}
    text = describe(make_status().model_copy(update=update)).plain
    assert f"reachable: {'not tested yet' if code == 'not_tested' else reachability}" in text
    assert "At 1.2.3.4:5." in text


@pytest.mark.parametrize(
    ("address", "link"),
    [
        ({"url": URL, "pid": 7}, f"{URL}/#token={'T' * 43}"),
        ({"url": URL, "pid": 6}, ""),
        ([], ""),
        ({}, ""),
        ({"url": URL, "pid": 7, "public_url": "http://nas.local:81"}, f"http://nas.local:81/#token={'T' * 43}"),
    ],
)
def test_dashboard_link_is_used_only_if_its_file_names_this_process(tmp_path: Path, address: object, link: str) -> None:
    write_address(tmp_path, address)
    assert dashboard_link(tmp_path, pid=7) == link
    assert dashboard_link(tmp_path, pid=7, has_token=False) == link.partition("#")[0]


def test_dashboard_link_encodes_a_token_of_the_owner(tmp_path: Path) -> None:
    write_address(tmp_path, {"url": URL, "pid": 7})
    token = "a+b&c=d/" * 5
    (tmp_path / "api-token").write_text(token + "\n")
    assert parse_qs(urlsplit(dashboard_link(tmp_path, pid=7)).fragment) == {"token": [token]}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 00 s"), (65, "1 min 05 s"), (7805, "2 h 10 min"), (-3, "0 s")]
)
def test_durations_are_formatted_for_people(seconds: float, text: str) -> None:
    assert short_duration(seconds) == text


def test_table_of_peers_fits_into_80_columns_with_the_whole_name() -> None:
    name = "the machine in the cellar of an owner with a lot of words, nr. 2"
    row = peer_row(
        "12D3KooW" + "A" * 44, name=name, phase="downloading", round=123_456, tokens_per_second=1234.5,
        version="12.10.3.dev10", last_seen_s=3.0,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    console.print(describe_peers([row]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    assert "".join(line[: lines[0].index("Phase")].rstrip(" ") for line in lines[1:]).replace(" ", "") == name.replace(
        " ", ""
    )
    for text in ("downloading", "123456", "1,234", "12.10.3.dev10", "3 s ago", "AAAAAA"):
        assert text in lines[1]


def test_status_names_the_memory_limit_of_a_container() -> None:
    status = make_status()
    assert "memory" not in describe(status).plain
    limited = status.model_copy(update={"node": status.node.model_copy(update={"memory_limit_bytes": 536_870_912})})
    assert "memory     at most 0.537 GB: its container's limit" in describe(limited)


@pytest.mark.parametrize(("is_terminal", "start"), [(True, "\x1b[1;31merror\x1b[0m since"), (False, "error since")])
def test_status_is_in_color_on_a_terminal_only(is_terminal: bool, start: str) -> None:
    out = io.StringIO()
    system: Literal["standard", "auto"] = "standard" if is_terminal else "auto"
    console = Console(file=out, force_terminal=is_terminal, color_system=system, soft_wrap=True, highlight=False)
    console.print(describe(make_status(Phase.ERROR, reason="[white]Broken.[/]")))
    text = out.getvalue()
    assert text.startswith(start) and "[white]Broken.[/]" in text
    assert ("\x1b" in text) == is_terminal

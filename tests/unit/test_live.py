"""The live line, link and invite of `run`, and the log around them, on real consoles over text files."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from node import logs
from node.live import LiveView, dashboard_link, describe, render, short_duration
from node.status import NodeInfo, PeersInfo, Phase, Report, RunInfo, Status, SyncInfo, TrainingInfo


def status(phase: Phase = Phase.TRAINING, *, invite: str = "", note: str = "", reason: str = "") -> Status:
    run = RunInfo(round=3, invite=invite, invite_note=note)
    return Status(
        node=NodeInfo(), phase=phase, reason=reason, code="x", since="", run=run,
        training=TrainingInfo(loss=2.5, tokens_per_second=1234.0), sync=SyncInfo(progress_ratio=0.5, eta_s=65.0),
        peers=PeersInfo(training=2), compute_utilization_ratio=None, reachability="none", devices=(), limits={},
        contribution={},  # type: ignore[arg-type]
    )  # fmt: skip


def shown(one: Status, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(one))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def clean_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("node")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:], level, own_level = before[0], before[1], before[2]
    root.setLevel(level)
    ours.setLevel(own_level)


def test_the_line_tells_all() -> None:
    line = shown(status())
    for part in ("training", "round 4", "sync in 1 min 05 s", "loss 2.500", "1,234 tokens/s", "2 training"):
        assert part in line


@pytest.mark.parametrize("width", [20, 60, 120])
def test_it_stays_one_line(width: int) -> None:
    for phase in Phase:
        assert shown(status(phase, reason="The disk [is] full. " * 9), width).count("\n") == 1


def test_other_phases_tell_the_reason_as_it_is() -> None:
    assert "No peers [yet] answer." in shown(status(Phase.CONNECTING, reason="No peers [yet] answer."))


def test_link_and_invite_come_once_each_and_only_when_known(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=40)
    with LiveView(console, tmp_path, line=False, pid=7) as view:
        view.update(status())
        assert out.getvalue() == ""
        (tmp_path / "api.json").write_text(json.dumps({"url": "http://127.0.0.1:5", "pid": 7}))
        (tmp_path / "api-token").write_text("T" * 43 + "\n")
        long_invite = "diloco1-" + "x" * 200
        for _ in range(3):
            view.update(status(invite=long_invite))
    link = "http://127.0.0.1:5/#token=" + "T" * 43
    assert out.getvalue() == f"Dashboard: {link}\nInvite: {long_invite}\n"


def test_an_invite_for_this_network_only_says_so_and_a_better_one_is_printed_once(tmp_path: Path) -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=40), tmp_path, line=False, pid=7) as view:
        for _ in range(2):
            view.update(status(invite="diloco1-near", note="Works only on this network."))
        for _ in range(2):
            view.update(status(invite="diloco1-far"))
        view.update(status(invite="diloco1-near", note="Works only on this network."))
        view.update(status(invite="diloco1-far"))
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["Invite: diloco1-near", "Works only on this network."]
    assert len(lines) == 4 and "from everywhere" in lines[2] and lines[3] == "Invite: diloco1-far"


@pytest.mark.parametrize(("code", "word"), [("not_tested", "not tested yet"), ("not_reached", "none")])
def test_a_node_that_nobody_has_tried_to_reach_is_not_tested_yet(code: str, word: str) -> None:
    told = status().model_copy(update={"reachability_code": code, "reachability_reason": "It is so."})
    assert f"reachable: {word}" in describe(told) and "It is so." in describe(told)


def test_before_the_swarm_is_open_nothing_is_tested() -> None:
    assert Report().reachability_code == "not_tested" and "reachable: not tested yet" in describe(status())


def test_the_address_that_works_is_told() -> None:
    told = status().model_copy(
        update={"reachability": "direct", "reachability_reason": "Others reach it at 1.2.3.4:5."}
    )
    assert "1.2.3.4:5" in describe(told)


def test_the_link_of_an_earlier_process_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "api.json").write_text(json.dumps({"url": "http://127.0.0.1:5", "pid": 6}))
    (tmp_path / "api-token").write_text("T")
    assert dashboard_link(tmp_path, pid=7) == ""
    (tmp_path / "api.json").write_text("[]")
    assert dashboard_link(tmp_path, pid=7) == ""


def test_log_and_live_line_share_a_terminal(tmp_path: Path, clean_logging: None) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    logs.configure("info", "console", to=console)
    with LiveView(console, tmp_path, line=True, pid=7) as view:
        view.update(status())
        logging.getLogger("node.x").info("round [done] %d", 4, extra={"round": 4})
    assert "INFO    node.x: [round 4] round [done] 4\n" in out.getvalue()
    assert "sync in" in out.getvalue()


def test_json_log(clean_logging: None) -> None:
    out = io.StringIO()
    logs.configure("info", "json", to=out)
    logging.getLogger("node.x").info("für %s", "you", extra={"round": 4})
    logging.getLogger("node.x").debug("not this")
    logging.getLogger("library").info("nor this")
    logging.getLogger("library").warning("but this")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"], first["round"]) == ("info", "node.x", "für you", 4)
    assert first["at"].endswith("Z")
    assert second["message"] == "but this"


def test_an_exception_is_one_json_line(clean_logging: None) -> None:
    out = io.StringIO()
    logs.configure("info", "json", to=out)
    try:
        raise RuntimeError("oh")
    except RuntimeError:
        logging.getLogger("node.x").exception("failed")
    (line,) = out.getvalue().splitlines()
    assert "RuntimeError: oh" in json.loads(line)["exception"]


def test_set_up_twice_writes_once(clean_logging: None) -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure("info", "console", to=first)
    logs.configure("debug", "console", to=second)
    logging.getLogger("node.x").debug("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 00 s"), (65, "1 min 05 s"), (7805, "2 h 10 min"), (-3, "0 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert short_duration(seconds) == text

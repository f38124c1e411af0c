"""Tests of the command line, in process and as a program, with real HTTP to a fake node."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from node import __version__
from node.api.redaction import HIDDEN
from node.cli import _make_parser, _read_call, duration_s, main, split_flags
from node.commands.examples import EXAMPLES
from node.commands.terminal import Printer
from node.config.amendments import Amendment
from node.config.manifest import Invite, Manifest, RoundConfig, RunConfig
from node.config.schema import Config, LimitsConfig
from node.errors import NodeError
from node.status import NodeInfo, PeersInfo, Phase, RunInfo, Status, SyncInfo, TrainingInfo
from node.swarm.governance.charter import Charter, sign_amendment
from node.swarm.identity import new_identity
from node.training.checkpoint import CheckpointStore
from tests.peer_row import peer_row

TOKEN = "t" * 43
CLIENT_COMMANDS = ("status", "peers", "logs", "pause", "resume", "drain", "leave", "invite")
COMMANDS = (
    "run",
    "relay",
    "runs",
    *CLIENT_COMMANDS,
    "install-service",
    "update",
    "config",
    "completion",
    "doctor",
    "export",
    "site",
    "certificate",
    "verify",
    "owner",
    "generate",
    "serve",
)
INVITE = str(Invite("ab" * 32, ("/ip4/127.0.0.1/tcp/1/p2p/QmX",)))


def make_status(invite: str = INVITE) -> dict[str, Any]:
    status = Status(
        node=NodeInfo(name="tester", peer_id="QmTester", version="1", data_dir="/somewhere"),
        phase=Phase.TRAINING, reason="Round 4 is under way.", code="training", since="2024-01-01T00:00:00.000Z",
        run=RunInfo(round=3, swarm_round=3, invite=invite, swarm_tokens=12345, state_digest="cd" * 32),
        training=TrainingInfo(loss=2.5, inner_step=7, inner_steps=20, tokens_per_second=1234.5),
        sync=SyncInfo(eta_s=65.0), peers=PeersInfo(connected=3, training=2), compute_utilization_ratio=0.95,
        reachability="direct", devices=(), limits={}, contribution={},
    )  # fmt: skip
    return dict(json.loads(status.model_dump_json()))


class FakeNode(ThreadingHTTPServer):
    """A server that answers requests for a node's API as the test sets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str, Any]] = []
        self.answer: tuple[int, Any] = (200, make_status())


class Handler(BaseHTTPRequestHandler):
    server: FakeNode

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: Any) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            code, answer = 401, {"title": "Unauthorized", "detail": "The token is wrong."}
        else:
            self.server.seen.append((self.command, self.path, body))
            code, answer = self.server.answer
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        if not code:  # The answer is not HTTP.
            self.wfile.write(content)
            return
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    """A fake node on the data folder `tmp_path`."""
    with FakeNode() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        (tmp_path / "api.json").write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_port}", "pid": 1}))
        (tmp_path / "api-token").write_text(TOKEN + "\n")
        with (tmp_path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield server
        server.shutdown()
        thread.join(5)


def call(*argv: str, environ: dict[str, str] | None = None) -> int:
    return main(argv, environ or {})


# As a program


def run_program(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "node.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command_and_exit_code() -> None:
    done = run_program("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"\n    {command}\s", done.stdout)
    for code in (
        "0 stopped",
        "2 bad usage",
        "3 this machine",
        "4 the manifest",
        "10 the run speaks another protocol",
        "70 internal error",
        "75 start it again",
    ):
        assert code in done.stdout.replace("\n", " ")


def test_version_option_prints_the_version() -> None:
    done = run_program("--version")
    assert (done.returncode, done.stdout) == (0, f"diloco-node {__version__}\n")


def test_command_prints_an_error_as_one_sentence_on_stderr_without_a_traceback() -> None:
    done = run_program("run", "--run.round.inner_step", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "diloco-node: Unknown flag --run.round.inner_step: the nearest known one is --run.round.inner_steps.\n"
    )


def test_command_succeeds_when_its_output_pipe_is_closed() -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m node.cli config | true; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_command_succeeds_when_the_pipe_of_its_short_output_is_closed(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "node.cli", "owner", "--data-dir", str(tmp_path / "none")],
        stdout=write_fd, stderr=subprocess.PIPE, env=environment, timeout=60, check=False,
    )  # fmt: skip
    os.close(write_fd)
    assert (done.returncode, done.stderr) == (0, b"")


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path, node: FakeNode) -> None:
    node.answer = 200, {"peers": [peer_row("QmA", name="Zoë \U0001f41d").model_dump(mode="json")]}
    for options in ((), ("--json",)):
        done = subprocess.run(
            [sys.executable, "-m", "node.cli", "peers", *options, "--data-dir", str(tmp_path)],
            capture_output=True, timeout=60, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["peers"][0]["name"] == "Zoë \U0001f41d"


def test_full_disk_is_named_when_the_output_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "node.cli", "config"],
            stdout=full, stderr=subprocess.PIPE, timeout=60, check=False, text=True,
        )  # fmt: skip
    assert done.returncode == 75 and done.stderr.startswith("diloco-node: the disk is full"), done.stderr


def test_table_that_is_printed_to_a_closed_pipe_ends_as_other_output_does() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with pytest.raises(BrokenPipeError), os.fdopen(write_fd, "w") as pipe:
        Printer(file=pipe, highlight=False).print("x")


def test_joining_node_names_the_given_run_settings_that_it_does_not_use(tmp_path: Path) -> None:
    """The data folder is a file, so the node stops with an error after the message."""
    file = tmp_path / "file"
    file.touch()
    done = run_program("run", "--join", INVITE, "--data-dir", str(file), "--run.outer.lr", "0.5", "--api.port", "0")
    assert done.returncode == 2
    first, *_, last = done.stderr.splitlines()
    assert first == "diloco-node: with --join the run comes from the swarm; not used: run.outer.lr"
    assert str(file) in last


# In process


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(command, "--help")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--data-dir DIR" in said
    assert f"Examples:\n{EXAMPLES[command]}" in said


def calls_in(example: str) -> list[list[str]]:
    """The words after `diloco-node` of each line that calls it, as a shell splits them, without redirections."""
    found = []
    for line in example.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        program = next((i for i, word in enumerate(words[:2]) if Path(word).name == "diloco-node"), None)
        if program is not None:
            words = words[program + 1 :]
            found.append(words[: words.index(">")] if ">" in words else words)
    return found


def test_every_command_has_examples() -> None:
    commands = _make_parser()[1]
    assert EXAMPLES.keys() == commands.keys() >= set(COMMANDS)
    assert [name for name, text in EXAMPLES.items() if [name] not in [words[:1] for words in calls_in(text)]] == []
    assert [line for text in EXAMPLES.values() for line in text.splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("words", [words for text in EXAMPLES.values() for words in calls_in(text)], ids=" ".join)
def test_command_line_accepts_the_arguments_of_each_example(words: list[str]) -> None:
    """This includes the names and values of settings."""
    assert _read_call(words, {}).args.command == words[0]


@pytest.mark.parametrize("words", [["run", "--jion", "x"], ["steer", "amand"], ["run", "--run.total_tokens", "many"]])
def test_a_false_example_would_be_noticed(words: list[str]) -> None:
    assert calls_in(f"  diloco-node {shlex.join(words)}   # a comment") == [words]
    with pytest.raises(NodeError):
        _read_call(words, {})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "required: COMMAND"),
        (("train",), "invalid choice: 'train'"),
        (("run", "--data_dir", "x"), "nearest known one is --data-dir."),
        (("run", "--log-level", "debug"), "nearest known one is --log.level."),
        (("run", "surplus"), "'surplus'"),
        (("generate", "--", "--a.b c", "--tokens", "3"), "What follows `--` is text: write --tokens before it."),
        (("run", "--join", "nonsense"), "damaged or cut short"),
        (("pause", "--for", "soon"), "write it as 45m, 2h"),
        (("export",), "required: DIR"),
        (("export", "out"), "belongs to no run yet"),
        (("config", "--config", "/nowhere/x.toml"), "/nowhere/x.toml"),
        (("config", "--api.port", "x"), "api.port = 'x' from the flag --api.port"),
        (("config", "--data-dir", "~no-such-user/x"), "names no user of this machine"),
        (("config", "--run.preset", "~no-such-user/x.toml"), "names no user of this machine"),
        (("config", "--config", "~no-such-user/x.toml"), "names no user of this machine"),
        (("verify", "~no-such-user/x"), "names no user of this machine"),
        (("config", "--run.phases", '[{"a":' + "[" * 50_000), "nested too deeply"),
        (("run", "--run.outer.lr=-1"), "greater than 0"),
    ],
)
def test_bad_usage_ends_with_exit_code_2_a_one_line_error_and_no_data_folder(
    argv: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "node"
    assert call(*argv, environ={"DILOCO_NODE__DATA_DIR": str(folder), "HOME": str(tmp_path)}) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("diloco-node: ") and message in line
    assert out == "" and not folder.exists()


@pytest.mark.parametrize("address", [None, '{"url": "http://127.0.0.1:1", "pid": 1}', "[]", "{}"])
@pytest.mark.parametrize("command", CLIENT_COMMANDS)
def test_client_command_says_in_one_sentence_that_no_node_is_running(
    command: str, address: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if address is not None:
        (tmp_path / "api.json").write_text(address)
        (tmp_path / "api-token").write_text(TOKEN)
    assert call(command, "--data-dir", str(tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"diloco-node: No node runs on the data folder {tmp_path}")


def test_the_token_is_not_sent_to_a_program_at_the_address_of_a_killed_node(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("status", "--json", "--data-dir", str(tmp_path)) == 0
    (tmp_path / "lock").rename(tmp_path / "old lock")
    for leaves_lock in (False, True):
        if leaves_lock:
            (tmp_path / "lock").write_text("4711\n")
        assert call("status", "--data-dir", str(tmp_path)) == 2
        assert "No node runs on the data folder" in capsys.readouterr().err
    assert len(node.seen) == 1, "nothing was sent"


def test_internal_error_ends_with_exit_code_70(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    node.answer = 200, {"run": 5}
    assert call("invite", "--data-dir", str(tmp_path)) == 70
    error = capsys.readouterr().err
    assert "internal error (TypeError" in error
    assert "Traceback" not in error
    assert call("invite", "--data-dir", str(tmp_path), "--log.level", "debug") == 70
    assert "Traceback" in capsys.readouterr().err


def test_status_command_prints_text_or_json(tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("status", "--data-dir", str(tmp_path)) == 0
    out = capsys.readouterr().out
    for part in (
        "training, at work since",
        "Round 4 is under way.",
        "round 3",
        "1,234 tokens/s",
        "2.5000",
        "1 min 05 s",
        "95.0%",
    ):
        assert part in out
    assert call("status", "--json", "--data-dir", str(tmp_path)) == 0
    assert json.loads(capsys.readouterr().out) == make_status()


def test_client_command_takes_the_data_folder_from_environment_or_file(tmp_path: Path, node: FakeNode) -> None:
    assert call("status", environ={"DILOCO_NODE__DATA_DIR": str(tmp_path)}) == 0
    file = tmp_path / "my.toml"
    file.write_text(f"[node]\ndata_dir = '{tmp_path}'\n")
    assert call("status", "--config", str(file)) == 0


@pytest.mark.parametrize(
    ("argv", "body"),
    [
        (("pause",), {}),
        (("pause", "--for", "1h30m"), {"for_s": 5400.0}),
        (("resume",), {}),
        (("drain",), {}),
        (("leave",), {}),
    ],
)
def test_action_command_posts_its_action_and_prints_the_phase(
    argv: tuple[str, ...], body: dict[str, float], tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    node.answer = 202, {"phase": "paused"}
    assert call(*argv, "--data-dir", str(tmp_path)) == 0
    assert node.seen == [("POST", f"/api/v1/actions/{argv[0]}", body)]
    assert "phase paused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("zone", "machine_zone", "text", "sent", "shown"),
    [
        ("America/New_York", "UTC", "2031-01-31T08:00", "2031-01-31T13:00:00Z", "8:00 on 31 January 2031 (EST)"),
        ("America/New_York", "UTC", "2031-01-31T08:00Z", "2031-01-31T08:00:00Z", "3:00 on 31 January 2031 (EST)"),
        ("", "Asia/Tokyo", "2031-01-31T08:00", "2031-01-30T23:00:00Z", "8:00 on 31 January 2031 (JST)"),
    ],
)
def test_pause_reads_a_moment_in_the_time_zone_of_the_running_node(
    zone: str,
    machine_zone: str,
    text: str,
    sent: str,
    shown: str,
    tmp_path: Path,
    node: FakeNode,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", machine_zone)
    node.answer = 200, {"phase": "paused", "config": {"schedule": {"timezone": zone}}}
    assert call("pause", "--until", text, "--data-dir", str(tmp_path)) == 0
    assert node.seen[-1] == ("POST", "/api/v1/actions/pause", {"until": sent})
    assert capsys.readouterr().out == f"pause: accepted; the node goes to phase paused until {shown}.\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("soon", "'soon' is not a moment"),
        ("25:00", "not a time of the day: write it as 18:30"),
        ("0001-01-01T00:00:00+05:00", "date value out of range"),
    ],
)
def test_pause_until_an_invalid_moment_is_bad_usage(
    text: str, problem: str, tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    node.answer = 200, {"config": {"schedule": {"timezone": ""}}}
    assert call("pause", "--until", text, "--data-dir", str(tmp_path)) == 2
    assert problem in capsys.readouterr().err
    assert [method for method, *_ in node.seen] == ["GET"]


def test_pause_with_after_round_0_pauses_after_the_round_in_progress(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("pause", "--after-round", "0", "--data-dir", str(tmp_path)) == 0
    assert capsys.readouterr().out == "pause: accepted; the node pauses when round 4 has ended.\n"
    assert node.seen[-1] == ("POST", "/api/v1/actions/pause", {"after_round": 4})
    assert call("pause", "--after-round", "2", "--data-dir", str(tmp_path)) == 0
    assert capsys.readouterr().out == "pause: accepted; round 2 has ended already, so the node pauses now.\n"
    node.answer = 200, make_status() | {"phase": "paused"}
    assert call("pause", "--after-round", "0", "--data-dir", str(tmp_path)) == 0
    assert "stays paused until `resume`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((409, {"title": "Conflict", "detail": "The node is leaving: start it again."}), "The node is leaving: start"),
        ((500, b"<html>"), "500"),
        ((200, b"<html>"), "is not a node"),
        ((200, [1]), "is not a node"),
        ((0, b"SSH-2.0-OpenSSH\r\n"), "is not a node"),
    ],
)
def test_refusal_by_the_node_or_answer_of_another_program_is_a_one_line_error(
    answer: tuple[int, Any], message: str, tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    node.answer = answer
    assert call("pause", "--data-dir", str(tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_invite_command_prints_the_invite_or_says_that_there_is_none_yet(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("invite", "--data-dir", str(tmp_path)) == 0
    assert capsys.readouterr().out == INVITE + "\n"
    node.answer = 200, make_status(invite="")
    assert call("invite", "--data-dir", str(tmp_path)) == 2
    assert "no invite yet" in capsys.readouterr().err


def test_config_command_prints_every_value_and_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"DILOCO_LOG__FORMAT": "json"}
    assert call("config", "--api.port", "9", "--data-dir", "/x/y", environ=environ) == 0
    rows = [line.partition(" = ") for line in capsys.readouterr().out.splitlines()]
    values = {key.strip(): [part.strip() for part in rest.rsplit("  # ", 1)] for key, _, rest in rows}
    assert values["api.port"] == ["9", "flag --api.port"]
    assert values["node.data_dir"] == ['"/x/y"', "flag --node.data_dir"]
    assert values["log.format"] == ['"json"', "environment variable DILOCO_LOG__FORMAT"]
    assert values["limits.cpu_threads"] == ["0", "default"]
    assert values["run.preset"] == ['"builtin"', "default"]


def test_settings_on_the_command_line_are_separated_from_options() -> None:
    words = "--log.level debug run --join x --api.port=0 --swarm.relay --name n --run.round.inner_steps 5"
    rest, flags = split_flags(words.split())
    assert rest == ["run", "--join", "x", "--name", "n"]
    assert flags == ["--log.level", "debug", "--api.port=0", "--swarm.relay", "--run.round.inner_steps", "5"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("45m", 2700), ("2h", 7200), ("1h30m", 5400), ("0.5d", 43200)]
)
def test_durations_are_parsed_into_seconds(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


def test_peers_are_printed_with_the_fastest_first(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    def peer(name: str, rate: float) -> dict[str, Any]:
        return peer_row(name, name=f"[bold]{name}", tokens_per_second=rate, last_seen_s=3.0).model_dump()

    node.answer = 200, {"peers": [peer("slow", 5.0), peer("fast", 5000.0)]}
    assert call("peers", "--data-dir", str(tmp_path)) == 0
    _head, first, second = capsys.readouterr().out.splitlines()
    assert "[bold]fast" in first and "5,000" in first and "3 s ago" in first and first.endswith("fast")
    assert "[bold]slow" in second
    assert call("peers", "--json", "--data-dir", str(tmp_path)) == 0
    assert len(json.loads(capsys.readouterr().out)["peers"]) == 2


def test_peers_are_grouped_by_owner_and_by_team(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    def peer(key: str, phase: str, owner: str = "", name: str = "", team: str = "") -> dict[str, Any]:
        fields = {"owner": owner or key, "owner_name": name, "team": team}
        return peer_row(key, name=f"box {key}", phase=phase, tokens_per_second=100.0, **fields).model_dump()

    node.answer = (
        200,
        {
            "peers": [
                peer("k1", "training", "k1", "[bold]Ada", "Blue"),
                peer("k2", "paused", "k1", "[bold]Ada", "Blue"),
                peer("k3", "training", "k3", "Cy", "BLUE"),
                peer("k4", "training"),
            ]
        },
    )
    assert call("peers", "--by", "owner", "--data-dir", str(tmp_path)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [["[bold]Ada", "2", "1", "200"], ["Cy", "1", "1", "100"], ["box", "k4", "1", "1", "100"]]
    assert call("peers", "--by", "team", "--data-dir", str(tmp_path)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [["Blue", "3", "2", "300"], ["no", "team", "1", "1", "100"]]


def test_logs_follow_until_the_node_is_gone(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def logs(*numbers: int) -> tuple[int, Any]:
        def line(n: int) -> dict[str, Any]:
            return {"id": n, "at": "12:00", "level": "warning", "logger": "node.x", "message": f"[red]line {n}"}

        lines = [line(n) for n in numbers]
        return 200, {"records": lines, "last_id": max(numbers, default=2)}

    answers = iter([logs(3), logs(), logs(4, 5)])

    def sleep(_seconds: float) -> None:
        node.answer = next(answers, (500, {"title": "It ends."}))

    monkeypatch.setattr(time, "sleep", sleep)
    node.answer = logs(1, 2)
    assert call("logs", "-f", "-n", "2", "--level", "warning", "--data-dir", str(tmp_path)) == 2
    captured = capsys.readouterr()
    assert [line.rpartition("]")[2] for line in captured.out.splitlines()] == [f"line {n}" for n in range(1, 6)]
    assert "[red]line 1" in captured.out
    assert [path for _, path, _ in node.seen[:2]] == [
        "/api/v1/logs?level=warning&limit=2", "/api/v1/logs?level=warning&limit=2000&after=2",
    ]  # fmt: skip
    assert call("logs", "-n", "0", "--data-dir", str(tmp_path)) == 2


def test_status_begins_with_run_progress_limits_and_link(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    status = make_status()
    status["run"] |= {"name": "a run", "total_tokens": 100_000}
    node.answer = 200, status | {"limits": {"upload_mbit_s": 20.0, "disk_gb": 0}}
    assert call("status", "--data-dir", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "a run, 12.3% done: 12,345 of 100,000 tokens" in lines[1]
    assert lines[3].split() == ["limits", "upload_mbit_s", "20"]
    assert "dashboard" in lines[4] and lines[4].endswith("/") and TOKEN not in lines[4], "the output is no terminal"


def test_watched_status_reaches_a_pipe_line_by_line(tmp_path: Path, node: FakeNode) -> None:
    command = [sys.executable, "-m", "node.cli", "status", "--watch", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        lines = [watch.stdout.readline() for _ in range(len(make_status()))]
        watch.send_signal(signal.SIGINT)
    assert sum("Round 4 is under way." in line for line in lines) > 1 and watch.returncode == 0


@pytest.mark.parametrize("command", ["status", "peers", "steer"])
def test_answer_of_a_node_of_another_version_is_a_one_line_error(
    command: str, tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an upgrade, the node runs on with the old version until it is started again."""
    answers = {"status": make_status() | {"new": 1}, "peers": {"peers": [{"new": 1}]}, "steer": {"new": 1}}
    node.answer = 200, answers[command]
    assert call(command, "--data-dir", str(tmp_path)) == 2
    told = "diloco-node: The node is of another version than this command: start the node again.\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("command", [("owner",), ("publish",), ("verify", "{}/file"), ("evaluate", "{}")])
def test_path_that_this_user_may_not_enter_is_a_one_line_error(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stat = Path.stat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        if "closed" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    words = [word.format(tmp_path / "closed") for word in command]
    assert call(*words, "--data-dir", str(tmp_path / "closed")) == 2
    assert re.search("belongs to another user|cannot be read", capsys.readouterr().err)


def test_watched_status_is_shown_until_ctrl_c(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([None, None, KeyboardInterrupt])

    def sleep(_seconds: float) -> None:
        if (error := next(looks)) is not None:
            raise error

    monkeypatch.setattr(time, "sleep", sleep)
    assert call("status", "--watch", "--data-dir", str(tmp_path)) == 0
    assert "Round 4 is under way." in capsys.readouterr().out
    assert len(node.seen) == 3


def accepted_steps(inner_steps: int) -> str:
    """The list of accepted amendments of a run whose founder has changed the inner steps of round 1 and later ones."""
    founder, run_id = new_identity(), "ab" * 32
    charter = Charter(run_id, RunConfig(governance="founder", governance_keys=(founder.peer_id,)))
    changes = {"round.inner_steps": inner_steps}
    amendment = Amendment(run=run_id, number=1, from_round=1, action="amend", changes=changes)
    return charter.accept(b"", sign_amendment(founder, amendment), 0).decode()


def test_config_shows_what_the_running_node_and_the_run_use(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunConfig(round=RoundConfig(inner_steps=20))
    manifest = Manifest(run_id="ab" * 16, initial_digest="cd" * 32, parameters=10, run=run)
    (tmp_path / "manifest.json").write_bytes(manifest.canonical())
    used = Config(limits=LimitsConfig(upload_mbit_s=30)).model_dump(mode="json")
    used["notify"]["webhook"] = HIDDEN
    node.answer = (
        200,
        {"config": used, "origins": {"limits.upload_mbit_s": "settings of the page", "notify.webhook": "file x.toml"}},
    )
    assert call("config", "--data-dir", str(tmp_path), "--run.round.inner_steps", "120") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["run.round.inner_steps"].split(" = ")[1].split() == ["20", "#", "the", "run"]
    monkeypatch.setattr(CheckpointStore, "newest_amendments", lambda _store: (accepted_steps(30), 7))
    assert call("config", "--data-dir", str(tmp_path)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("run.round.inner_steps")]
    assert line.split(" = ")[1].split()[0] == "30", "an amendment has changed it"
    assert HIDDEN in lines["notify.webhook"] and lines["notify.webhook"].endswith("# file x.toml")
    assert "30" in lines["limits.upload_mbit_s"] and "settings of the page" in lines["limits.upload_mbit_s"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_commands_options_and_settings(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("completion", shell) == 0
    script = capsys.readouterr().out
    for word in ("certificate", "serve", "watch", "max-tokens", "limits.upload_mbit_s"):
        assert word in script
    assert shell != "zsh" or script.startswith("autoload -U +X compinit bashcompinit && compinit && bashcompinit\n")


def test_bash_completes_commands_options_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("completion", "bash") == 0
    (tmp_path / "complete.sh").write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        code = f"""
        source ./complete.sh; COMP_WORDS=(diloco-node {" ".join(words)}); COMP_CWORD={len(words)}
        _diloco_node; printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        words_ = ["bash", "-c", code]
        done = subprocess.run(words_, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.split()

    assert completed("cert") == ["certificate"]
    assert completed("runs", "--b") == ["--bootstrap"]
    assert completed("status", "--w") == ["--watch"]
    assert completed("owner", "to") == ["token"]
    assert completed("run", "--limits.up") == ["--limits.upload_mbit_s"]


def test_node_that_runs_and_does_not_answer_is_not_said_to_be_missing(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    address = tmp_path / "api.json"
    stored = address.read_text()
    address.unlink()  # The node is starting.
    assert call("status", "--data-dir", str(tmp_path)) == 2
    assert "does not answer now: try again in a moment" in capsys.readouterr().err
    address.write_text(stored.replace(str(node.server_port), "1"))
    assert call("status", "--data-dir", str(tmp_path)) == 2
    assert "does not answer now: try again in a moment" in capsys.readouterr().err


def test_command_names_the_values_that_the_node_refuses(
    tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = {"where": "body.after_round", "message": "Input should be greater than or equal to 0"}
    node.answer = 422, {"title": "Unprocessable", "detail": "The request is not valid.", "faults": [fault]}
    assert call("pause", "--after-round", "-1", "--data-dir", str(tmp_path)) == 2
    assert "body.after_round: Input should be greater than or equal to 0." in capsys.readouterr().err


@pytest.mark.parametrize("command", ["config", "certificate", "doctor"])
def test_data_folder_of_another_user_is_named_as_such(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of a service of the machine is for its owner."""
    exists, read = Path.exists, Path.read_bytes

    def found(path: Path) -> Path:
        if tmp_path in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return path

    monkeypatch.setattr(Path, "exists", lambda path: exists(found(path)))
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(found(path)))
    assert call(command, "--data-dir", str(tmp_path)) == 2
    assert f"The data folder {tmp_path} belongs to another user" in capsys.readouterr().err

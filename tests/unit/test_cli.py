"""The command line, in process and as a program: names, exit codes, sentences, and a real HTTP conversation."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from node import __version__
from node.cli import _main, duration_s, split_flags
from node.manifest import Invite
from node.status import NodeInfo, Phase, RunInfo, Status, TrainingInfo

TOKEN = "t" * 43
COMMANDS = (
    "run",
    "relay",
    "status",
    "pause",
    "resume",
    "drain",
    "leave",
    "invite",
    "config",
    "doctor",
    "export",
    "generate",
)
INVITE = str(Invite("ab" * 32, ("/ip4/127.0.0.1/tcp/1/p2p/QmX",)))


def a_status(invite: str = INVITE) -> dict[str, Any]:
    status = Status(
        node=NodeInfo(name="tester", peer_id="QmTester", version="1", data_dir="/somewhere"),
        phase=Phase.TRAINING,
        reason="Round 4 is under way.",
        code="training",
        since="2024-01-01T00:00:00.000Z",
        run=RunInfo(round=3, swarm_round=3, invite=invite, swarm_tokens=12345, state_digest="cd" * 32),
        training=TrainingInfo(loss=2.5, inner_step=7, inner_steps=20, tokens_per_second=1234.5),
        sync={"eta_s": 65.0},
        peers={"connected": 3, "training": 2},
        compute_utilization_ratio=0.95,
        reachability="direct",
        devices=(),
        limits={},
        contribution={},
    )  # type: ignore[arg-type]
    found: dict[str, Any] = json.loads(status.model_dump_json())
    return found


class FakeNode(ThreadingHTTPServer):
    """Stands where a node's API stands, with answers of its own."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.seen: list[tuple[str, str, Any]] = []
        self.answer: tuple[int, Any] = (200, a_status())


class Answers(BaseHTTPRequestHandler):
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
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    """A node on the data folder `tmp_path`."""
    with FakeNode() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        (tmp_path / "api.json").write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_port}", "pid": 1}))
        (tmp_path / "api-token").write_text(TOKEN + "\n")
        yield server
        server.shutdown()
        thread.join(5)


def call(*argv: str, environ: dict[str, str] | None = None) -> int:
    return _main(argv, environ or {})


# As a program


def program(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "node.cli", *argv], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_names_every_command_and_exit_code() -> None:
    done = program("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"\n    {command} " in done.stdout
    for code in ("0 stopped", "2 bad usage", "3 this machine", "4 refused", "10 protocol", "70 a fault"):
        assert code in done.stdout.replace("\n", " ")


def test_version() -> None:
    done = program("--version")
    assert (done.returncode, done.stdout) == (0, f"diloco-node {__version__}\n")


def test_a_fault_is_one_sentence_on_stderr_without_a_traceback() -> None:
    done = program("run", "--run.round.inner_step", "5")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "diloco-node: Unknown flag --run.round.inner_step: the nearest known one is --run.round.inner_steps.\n"
    )


def test_a_reader_that_goes_away_is_no_fault() -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m node.cli config | true; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# In process


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(command, "--help")
    assert ended.value.code == 0
    assert "--data-dir DIR" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "required: COMMAND"),
        (("train",), "invalid choice: 'train'"),
        (("run", "--data_dir", "x"), "nearest known one is --data-dir."),
        (("run", "--log-level", "debug"), "nearest known one is --log.level."),
        (("run", "surplus"), "'surplus'"),
        (("run", "--join", "nonsense"), "damaged or cut short"),
        (("pause", "--for", "soon"), "write it as 45m, 2h"),
        (("export",), "required: DIR"),
        (("config", "--config", "/nowhere/x.toml"), "/nowhere/x.toml"),
        (("config", "--api.port", "x"), "api.port = 'x' from the flag --api.port"),
    ],
)
def test_bad_usage_is_exit_code_2(argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("diloco-node: ")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["status", "pause", "resume", "drain", "leave", "invite"])
def test_no_node_is_one_clear_sentence(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "--data-dir", str(tmp_path)) == 2
    (tmp_path / "api.json").write_text('{"url": "http://127.0.0.1:1", "pid": 1}')
    (tmp_path / "api-token").write_text(TOKEN)
    assert call(command, "--data-dir", str(tmp_path)) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    assert first.startswith(f"diloco-node: No node runs on the data folder {tmp_path}")


def test_a_bug_is_exit_code_70(tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.answer = 200, {"run": 5}
    assert call("invite", "--data-dir", str(tmp_path)) == 70
    err = capsys.readouterr().err
    assert "fault of ours (TypeError" in err
    assert "Traceback" not in err
    assert call("invite", "--data-dir", str(tmp_path), "--log.level", "debug") == 70
    assert "Traceback" in capsys.readouterr().err


def test_status_for_people(tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("status", "--data-dir", str(tmp_path)) == 0
    out = capsys.readouterr().out
    for part in (
        "training since",
        "Round 4 is under way.",
        "round 3",
        "1,234 tokens/s",
        "2.5000",
        "1 min 05 s",
        "95.0%",
    ):
        assert part in out


def test_status_as_json(tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("status", "--json", "--data-dir", str(tmp_path)) == 0
    assert json.loads(capsys.readouterr().out) == a_status()


def test_data_folder_may_come_from_environment_or_file(tmp_path: Path, node: FakeNode) -> None:
    assert call("status", environ={"DILOCO_NODE__DATA_DIR": str(tmp_path)}) == 0
    file = tmp_path / "my.toml"
    file.write_text(f"[node]\ndata_dir = '{tmp_path}'\n")
    assert call("status", "--config", str(file)) == 0


@pytest.mark.parametrize(
    ("argv", "path", "body"),
    [
        (("pause",), "pause", {}),
        (("pause", "--for", "1h30m"), "pause", {"for_s": 5400.0}),
        (("resume",), "resume", {}),
        (("drain",), "drain", {}),
        (("leave",), "leave", {}),
    ],
)
def test_actions(
    argv: tuple[str, ...], path: str, body: dict[str, float], tmp_path: Path, node: FakeNode,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    node.answer = 202, {"phase": "paused"}
    assert call(*argv, "--data-dir", str(tmp_path)) == 0
    assert node.seen == [("POST", f"/api/v1/actions/{path}", body)]
    assert "phase paused" in capsys.readouterr().out


def test_a_refused_action_says_why(tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.answer = 409, {"title": "Conflict", "detail": "The node is leaving: start it again."}
    assert call("pause", "--data-dir", str(tmp_path)) == 2
    assert capsys.readouterr().err == "diloco-node: The node is leaving: start it again.\n"


@pytest.mark.parametrize("answer", [(500, b"<html>"), (200, b"<html>"), (200, [1])])
def test_something_else_on_the_port(
    answer: tuple[int, Any], tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    node.answer = answer
    assert call("status", "--data-dir", str(tmp_path)) == 2
    assert "500" in (err := capsys.readouterr().err) or "is not a node" in err


def test_invite(tmp_path: Path, node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("invite", "--data-dir", str(tmp_path)) == 0
    assert capsys.readouterr().out == INVITE + "\n"
    node.answer = 200, a_status(invite="")
    assert call("invite", "--data-dir", str(tmp_path)) == 2
    assert "no invite yet" in capsys.readouterr().err


def test_config_prints_every_value_and_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"DILOCO_LOG__FORMAT": "json"}
    assert call("config", "--api.port", "9", "--data-dir", "/x/y", environ=environ) == 0
    rows = {line.split(" = ")[0].strip(): line.partition(" = ")[2] for line in capsys.readouterr().out.splitlines()}
    found = {key: rest.rsplit("  # ", 1) for key, rest in rows.items()}
    said = {key: (value.strip(), origin) for key, (value, origin) in found.items()}
    assert said["api.port"] == ("9", "flag --api.port")
    assert said["node.data_dir"] == ('"/x/y"', "flag --node.data_dir")
    assert said["log.format"] == ('"json"', "environment variable DILOCO_LOG__FORMAT")
    assert said["limits.cpu_threads"] == ("0", "default")
    assert said["run.preset"] == ('"builtin"', "default")


def test_export_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("export", str(tmp_path / "out"), "--data-dir", str(tmp_path)) == 2
    assert "belongs to no run yet" in capsys.readouterr().err


def test_settings_that_a_joiner_does_not_use_are_named(tmp_path: Path) -> None:
    """The data folder is a file, so the node goes no further."""
    (tmp_path / "file").touch()
    argv = ["run", "--join", INVITE, "--data-dir", str(tmp_path / "file"), "--run.outer.lr", "0.5", "--api.port", "0"]
    done = program(*argv)
    assert done.returncode == 2
    first, *_, last = done.stderr.splitlines()
    assert first == "diloco-node: with --join the swarm decides, so these are not used: run.outer.lr"
    assert str(tmp_path / "file") in last


def test_settings_are_told_from_options() -> None:
    argv = [
        "--log.level",
        "debug",
        "run",
        "--join",
        "x",
        "--api.port=0",
        "--swarm.relay",
        "--name",
        "n",
        "--run.round.inner_steps",
        "5",
    ]
    rest, flags = split_flags(argv)
    assert rest == ["run", "--join", "x", "--name", "n"]
    assert flags == ["--log.level", "debug", "--api.port=0", "--swarm.relay", "--run.round.inner_steps", "5"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("45m", 2700), ("2h", 7200), ("1h30m", 5400), ("0.5d", 43200)]
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds

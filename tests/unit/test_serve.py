"""`diloco-node serve` as a process, used by OpenAI's own client."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from node.cli import main
from node.commands.serve import NewestModel, read_token
from node.config.manifest import RunConfig
from node.errors import DataFolderError
from node.host.priority import AUTOGROUP, NICENESS
from tests.swarm.harness import environment, tiny, wait_for
from tests.unit.data_folder import TOKEN, make_data_folder, save_round

RUN = RunConfig.model_validate(tiny())
PATIENCE_S = 60.0


@dataclass
class Server:
    folder: Path
    process: subprocess.Popen[str]
    url: str

    def client(self, token: str = TOKEN) -> Any:
        openai = pytest.importorskip("openai", reason="the package openai is not installed")
        return openai.OpenAI(base_url=self.url, api_key=token, timeout=PATIENCE_S, max_retries=0)


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[Server]:
    """A server, which is ended by SIGTERM."""
    command = [sys.executable, "-m", "node.cli", "serve", "--data-dir", str(folder), "--port", "0", *flags]
    with subprocess.Popen(command, env=environment({}), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("Serving tiny after round "), line
            yield Server(folder, process, line.split(" on ")[1].split(";")[0])
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0, "it ends as asked"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("node")
    make_data_folder(folder, RUN)
    with started(folder, "--max-tokens", "50") as server:
        yield server


def test_the_client_completes_a_text(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    done = client.completions.create(model="tiny", prompt="def f(", max_tokens=24, temperature=0)
    assert main(["generate", "def f(", "--data-dir", str(server.folder), "--tokens", "24", "--temperature", "0"]) == 0
    assert f"def f({done.choices[0].text}\n" == capsys.readouterr().out
    assert done.choices[0].finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (7, 24)


def test_the_client_streams_the_text_that_it_gets_as_a_whole(server: Server) -> None:
    client = server.client()
    how = {"model": "tiny", "prompt": "def f(", "max_tokens": 24, "seed": 3, "top_p": 0.9}
    whole = client.completions.create(**how)
    events = list(client.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert events[-1].usage == whole.usage and whole.usage.completion_tokens > 0


def test_the_client_chats_and_streams_a_chat(server: Server) -> None:
    client = server.client()
    how = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 4}
    whole = client.chat.completions.create(**how)
    events = list(client.chat.completions.create(**how, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == whole.choices[0].message.content
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_client_raises_its_own_errors(server: Server) -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="allows 50"):
        client.completions.create(model="tiny", prompt="x", max_tokens=51)
    with pytest.raises(openai.BadRequestError, match="takes 1 to 63"):
        client.completions.create(model="tiny", prompt="x" * 64)
    with pytest.raises(openai.NotFoundError, match="There is no model"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.AuthenticationError, match="token is wrong"):
        server.client("wrong").models.list()


def test_the_server_has_a_low_priority_and_serves_a_newer_round_soon(server: Server) -> None:
    process = psutil.Process(server.process.pid)
    if AUTOGROUP.exists():
        (process,) = process.children()
        assert os.getsid(process.pid) == process.pid
        assert Path(f"/proc/{process.pid}/autogroup").read_text().endswith(f"nice {NICENESS}\n")
    low = min(19, os.nice(0) + NICENESS)
    assert process.nice() == low
    assert {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()} == {low}
    digest = save_round(server.folder, RUN, 0, seed=6)
    before = sorted(server.folder.rglob("*"))

    def served() -> bool:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        models = httpx.get(f"{server.url}/models", headers=headers, trust_env=False).json()["data"]
        return (models[0]["round"], models[0]["state_digest"]) == (0, digest)

    wait_for(served, PATIENCE_S, "the newer round is served")
    assert sorted(server.folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "code", "problem"),
    [
        (("--requests", "0"), 2, "--requests and --max-tokens must be at least 1"),
        (("--port", "99999"), 2, "--port from 0 to 65535"),
        (("--host", "nowhere.invalid"), 2, "set --host 127.0.0.1"),
        (("--port", "TAKEN"), 3, "take any free one with --port 0"),
        (("--data-dir", "nowhere"), 2, "start a node on the folder"),
    ],
)
def test_serve_refuses_bad_options(
    server: Server, flags: tuple[str, ...], code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = server.url.rpartition(":")[2].partition("/")[0]
    words = [port if word == "TAKEN" else word for word in flags]
    assert main(["serve", "--data-dir", str(server.folder), *words]) == code
    assert problem in capsys.readouterr().err


def test_a_fault_while_looking_for_newer_rounds_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: NewestModel) -> None:
        raise RuntimeError("a fault of ours")

    make_data_folder(tmp_path, RUN)
    monkeypatch.setattr(NewestModel, "_look", fail)
    assert main(["serve", "--data-dir", str(tmp_path), "--port", "0"]) == 70
    assert "a fault of ours" in capsys.readouterr().err


def test_serve_names_the_cause_if_the_token_is_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path, **_how: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(DataFolderError, match="belongs to another user"):
        read_token(tmp_path)


@pytest.mark.parametrize("token", ["", "short\n", None])
def test_serve_refuses_a_folder_without_a_good_token(tmp_path: Path, token: str | None) -> None:
    make_data_folder(tmp_path, RUN)
    (tmp_path / "api-token").unlink()
    if token is not None:
        (tmp_path / "api-token").write_text(token)
    with pytest.raises(DataFolderError, match="token"):
        read_token(tmp_path)

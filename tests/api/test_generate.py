"""`POST /api/v1/generate`: the owner's page continues a text, in a process that the supervisor starts."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from node.api import routes
from node.api.app import build_app
from node.api.node_interface import GeneratedText, GeneratorBusy, GeneratorFailed, TextRequest
from node.api.routes import ApiContext
from node.config.schema import Config
from node.daemon.text_generator import COMMAND, TextGenerator
from tests.api.conftest import BUILD, TOKEN, FakeNode, HttpClient
from tests.swarm.harness import environment
from tests.unit.test_export import make_trained, run_of

ASKED = {"prompt": "def ", "tokens": 5, "temperature": 0}


class FakeTexts:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, list[TextRequest]()

    async def generate(self, request: TextRequest) -> GeneratedText:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        return GeneratedText(text="main():", round=7)


def client(node: FakeNode, texts: Any, token: str | None = TOKEN) -> HttpClient:
    context = ApiContext(node, node.past, node.metrics, node.keys, node, node.config, BUILD, texts)
    return HttpClient(build_app(context), token, "127.0.0.1")


def test_the_owner_gets_a_continuation(fake_node: FakeNode) -> None:
    texts = FakeTexts()
    answer = client(fake_node, texts).request("POST", "/api/v1/generate", json=ASKED)
    assert answer.status_code == 200 and answer.json() == {"text": "main():", "round": 7}
    assert texts.asked == [TextRequest(prompt="def ", tokens=5, temperature=0.0)]


def test_nobody_else_gets_one(fake_node: FakeNode) -> None:
    texts = FakeTexts()
    answer = client(fake_node, texts, token=None).request("POST", "/api/v1/generate", json=ASKED)
    assert answer.status_code in (401, 403) and texts.asked == []


def test_a_caller_who_hangs_up_frees_the_model_for_the_next_one(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "GONE_CHECK_S", 0.01)
    was_cancelled = asyncio.Event()

    class Slow:
        async def generate(self, _request: TextRequest) -> GeneratedText:
            try:
                await asyncio.sleep(60)
            finally:
                was_cancelled.set()
            raise AssertionError("nobody waits for it")

    body = json.dumps(ASKED).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(_message: Any) -> None:
        pass

    headers = [
        (b"host", b"127.0.0.1"), (b"authorization", f"Bearer {TOKEN}".encode()), (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]  # fmt: skip
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/api/v1/generate", "raw_path": b"",
        "query_string": b"", "root_path": "", "scheme": "http", "headers": headers, "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }  # fmt: skip
    context = ApiContext(fake_node, fake_node.past, fake_node.metrics, fake_node.keys, fake_node, fake_node.config,
                         BUILD, Slow())  # fmt: skip

    async def ask() -> None:
        async with asyncio.timeout(5):
            await build_app(context)(scope, receive, send)
            await was_cancelled.wait()

    asyncio.run(ask())


def test_a_node_that_stops_says_so_to_who_waits_for_a_text(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "GONE_CHECK_S", 0.01)

    class Slow:
        async def generate(self, _request: TextRequest) -> GeneratedText:
            fake_node.board.close()
            await asyncio.sleep(60)
            raise AssertionError("the node has stopped")

    answer = client(fake_node, Slow()).request("POST", "/api/v1/generate", json=ASKED)
    assert answer.status_code == 503 and "The node is stopping" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("texts", "status", "words"),
    [
        (FakeTexts(GeneratorBusy("try again")), 429, "try again"),
        (FakeTexts(GeneratorFailed("no checkpoint yet")), 503, "no checkpoint yet"),
        (None, 404, "A relay has no model"),
    ],
)
def test_a_refusal_says_why(fake_node: FakeNode, texts: Any, status: int, words: str) -> None:
    answer = client(fake_node, texts).request("POST", "/api/v1/generate", json=ASKED)
    assert answer.status_code == status and words in answer.json()["detail"]


@pytest.mark.parametrize(
    "changed", [{"prompt": ""}, {"prompt": "x" * 2001}, {"tokens": 257}, {"temperature": -1}, {"a": 1}]
)
def test_a_malformed_request_is_refused(fake_node: FakeNode, changed: dict[str, Any]) -> None:
    texts = FakeTexts()
    answer = client(fake_node, texts).request("POST", "/api/v1/generate", json={**ASKED, **changed})
    assert answer.status_code == 422 and texts.asked == []


# The process


def generator(folder: Path, code: str = "", timeout_s: float = 60.0) -> TextGenerator:
    config = Config.model_validate({"node": {"data_dir": str(folder)}})
    return TextGenerator(lambda: config, command=(sys.executable, "-c", code) if code else COMMAND, timeout_s=timeout_s)


def ask(one: TextGenerator) -> GeneratedText:
    return asyncio.run(one.generate(TextRequest(prompt="def ", tokens=5, temperature=0.0)))


def test_the_process_continues_the_text_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from node.cli import main

    make_trained(tmp_path, run_of())
    monkeypatch.setenv("PYTHONPATH", environment({})["PYTHONPATH"])
    found = ask(generator(tmp_path))
    assert found.round == 1
    words = ["generate", "def ", "--tokens", "5", "--temperature", "0", "--data-dir", str(tmp_path)]
    assert main(words) == 0
    assert capsys.readouterr().out == f"def {found.text}\n"


def test_a_data_folder_without_a_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment({})["PYTHONPATH"])
    with pytest.raises(GeneratorFailed, match="belongs to no run yet"):
        ask(generator(tmp_path))


def test_a_process_that_hangs_or_dies_is_a_failure_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    hangs = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    began_s = time.monotonic()
    with pytest.raises(GeneratorFailed, match="has not answered within 2 s"):
        ask(generator(tmp_path, hangs, timeout_s=2.0))
    assert time.monotonic() - began_s < 20 and not Path(f"/proc/{file.read_text()}").exists()
    with pytest.raises(GeneratorFailed, match="ended without an answer"):
        ask(generator(tmp_path, "raise SystemExit(1)"))


def test_one_text_is_continued_at_a_time(tmp_path: Path) -> None:
    answer = json.dumps({"text": "x", "round": 3})
    one = generator(tmp_path, f"import time; time.sleep(1); print({answer!r})")

    async def both() -> list[Any]:
        asked = [one.generate(TextRequest(prompt="a")) for _ in range(2)]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second = asyncio.run(both())
    assert first == GeneratedText(text="x", round=3) and isinstance(second, GeneratorBusy)
    assert ask(one).round == 3

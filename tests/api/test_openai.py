"""The OpenAI-compatible API with a fake model: requests, errors, events, limits, and clients that hang or leave."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from node.api.auth import Keys
from node.api.openai_app import BODY_BYTES_MAX, Generations, build_openai_app
from node.api.openai_models import ModelFacts, Piece, PromptRefused, SamplingOptions
from tests.api.conftest import TOKEN
from tests.api.test_connections import Served, serving
from tests.event_loop import until

ASK = {"model": "run/1", "prompt": "abc"}
CHAT = {"model": "run/1", "messages": [{"role": "user", "content": "abc"}]}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TOKENS_MAX = 100
REQUESTS = 2
FACTS = ModelFacts("run/1", 7, 64, 3, "ab" * 32)
PATIENCE_S = 10.0


@dataclass
class FakeModel:
    """Says `words`. After a prompt with "wait" in it, the last word comes only after `go`."""

    words: Sequence[object] = ("Hi", "", " you")
    go: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[Any, SamplingOptions]] = field(default_factory=list)
    facts: ModelFacts = FACTS
    word_s: float = 0.0
    """Time between two words."""

    def complete(self, text: str, options: SamplingOptions) -> Iterator[Piece]:
        self.asked.append((text, options))
        if text == "long":
            raise PromptRefused("It is too long.", param="prompt", code="context_length_exceeded")
        yield Piece("", 5, 0, None)
        if text == "fault":
            raise RuntimeError("a fault of ours")
        for number, word in enumerate(self.words, 1):
            time.sleep(self.word_s)
            if "wait" in text and number == len(self.words):
                assert self.go.wait(PATIENCE_S)
            yield Piece(str(word), 5, number, "length" if number == len(self.words) else None)

    def chat(self, messages: Sequence[Mapping[str, str]], options: SamplingOptions) -> Iterator[Piece]:
        yield from self.complete(" ".join(f"{m['role']}={m['content']}" for m in messages), options)


@asynccontextmanager
async def served_model(
    model: FakeModel, generations: Generations | None = None
) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    async def current() -> FakeModel:
        return model

    generations = generations or Generations(REQUESTS)
    app = build_openai_app(
        current, generations, Keys(TOKEN, lambda: 0.0), tokens_max=TOKENS_MAX, hosts=["node.example"]
    )
    try:
        async with serving(app, None, head_s=PATIENCE_S) as served, served.http() as http:
            yield served, http
    finally:
        model.go.set()
        await asyncio.to_thread(generations.close)


def with_model(model: FakeModel, use: Callable[[Served, httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with served_model(model) as (served, http):
            return await asyncio.wait_for(use(served, http), 3 * PATIENCE_S)

    return asyncio.run(main())


def send(body: Any, path: str = COMPLETIONS, model: FakeModel | None = None, **how: Any) -> httpx.Response:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"Content-Type": "application/json", **how.pop("headers", {})}
    response: httpx.Response = with_model(
        model or FakeModel(), lambda _, http: http.post(path, headers=headers, **content, **how)
    )
    return response


def events_of(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    lines = response.text.split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# Answers


def test_a_completion_has_text_usage_and_the_state_of_the_model() -> None:
    body = send(ASK).json()
    assert body["choices"] == [{"index": 0, "text": "Hi you", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert (body["object"], body["model"], body["system_fingerprint"]) == (
        "text_completion", "run/1", "round-3-abababababab",
    )  # fmt: skip


def test_a_chat_has_a_message_of_the_assistant() -> None:
    body = send(CHAT, CHATS).json()
    message = {"role": "assistant", "content": "Hi you"}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert body["object"] == "chat.completion"


def test_a_completion_is_streamed_as_events() -> None:
    events = events_of(send({**ASK, "stream": True}))
    assert [(e["choices"][0]["text"], e["choices"][0]["finish_reason"]) for e in events] == [
        ("Hi", None), (" you", "length"),
    ]  # fmt: skip
    assert len({event["id"] for event in events}) == 1


def test_a_chat_is_streamed_as_events_with_usage_if_asked() -> None:
    events = events_of(send({**CHAT, "stream": True, "stream_options": {"include_usage": True}}, CHATS))
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""}, {"content": "Hi"}, {"content": " you"},
    ]  # fmt: skip
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "length"]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["total_tokens"] == 8
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_an_event_comes_before_the_answer_is_complete() -> None:
    model = FakeModel()

    async def use(_: Served, http: httpx.AsyncClient) -> None:
        chat = {**CHAT, "messages": [{"role": "user", "content": "wait"}], "stream": True}
        async with http.stream("POST", CHATS, json=chat) as response:
            found, texts = "", response.aiter_text()
            while '"Hi"' not in found:
                found += await anext(texts)
            assert "assistant" in found and " you" not in found
            model.go.set()
            rest = "".join([text async for text in texts])
            assert " you" in rest and rest.endswith("data: [DONE]\n\n")

    with_model(model, use)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, SamplingOptions(16, 1.0, 1.0, None, ())),
        ({"max_tokens": None, "temperature": None, "stop": None, "n": None}, SamplingOptions(16, 1.0, 1.0, None, ())),
        ({"max_tokens": TOKENS_MAX, "temperature": 0, "top_p": 0.5, "seed": -1, "stop": "x"},
         SamplingOptions(TOKENS_MAX, 0.0, 0.5, -1, ("x",))),
        ({"stop": ["a", "b"], "n": 1, "best_of": 1, "echo": False, "logit_bias": {}, "presence_penalty": 0.0,
          "suffix": "", "user": "me"}, SamplingOptions(16, 1.0, 1.0, None, ("a", "b"))),
    ],
)  # fmt: skip
def test_options_of_a_completion_reach_the_model(more: dict[str, Any], expected: SamplingOptions) -> None:
    model = FakeModel()
    assert send({**ASK, "prompt": ["abc"], **more}, model=model).status_code == 200
    assert model.asked == [("abc", expected)]


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({}, TOKENS_MAX),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_completion_tokens": 6, "max_tokens": None}, 6),
        ({"max_completion_tokens": 6, "max_tokens": 6}, 6),
        ({"store": False, "parallel_tool_calls": True, "stream_options": {"include_obfuscation": False}}, TOKENS_MAX),
    ],
)
def test_messages_and_options_of_a_chat_reach_the_model(more: dict[str, Any], tokens: int) -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    messages = [
        {"role": "developer", "content": "a", "name": "me"},
        {"role": "assistant", "content": "x", "refusal": None},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "user", "content": parts},
    ]
    model = FakeModel()
    plain = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False}
    assert send({**CHAT, "messages": messages, **plain, **more}, CHATS, model).status_code == 200
    assert model.asked == [
        ("developer=a assistant=x assistant=no user=b\nc", SamplingOptions(tokens, 1.0, 1.0, None, ()))
    ]


def test_models_are_listed_and_found_by_name() -> None:
    async def use(_: Served, http: httpx.AsyncClient) -> list[httpx.Response]:
        return [await http.get(f"/v1/models{name}") for name in ("", "/run/1", "/other")]

    listed, one, other = with_model(FakeModel(), use)
    assert listed.json() == {"object": "list", "data": [one.json()]}
    assert (one.json()["id"], one.json()["round"], one.json()["state_digest"]) == ("run/1", 3, "ab" * 32)
    assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"


# Bad input


def check_error(response: httpx.Response, status: int, words: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"] and error["param"] == param, error


@pytest.mark.parametrize(
    ("more", "status", "param", "words"),
    [
        ({"model": "other"}, 404, "model", "the model is 'run/1'"),
        ({"model": None}, 400, "model", "required"),
        ({"prompt": None}, 400, "prompt", "required"),
        ({"prompt": ["a", "b"]}, 400, "prompt", "string"),
        ({"prompt": [1, 2]}, 400, "prompt", "string"),
        ({"prompt": "long"}, 400, "prompt", "too long"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater"),
        ({"max_tokens": TOKENS_MAX + 1}, 400, "max_tokens", f"allows {TOKENS_MAX}"),
        ({"max_tokens": 10**400}, 400, "max_tokens", ""),
        ({"max_tokens": 1.5}, 400, "max_tokens", "integer"),
        ({"temperature": -0.1}, 400, "temperature", "greater"),
        ({"temperature": 2.1}, 400, "temperature", "less"),
        ({"top_p": 1.1}, 400, "top_p", "less"),
        ({"seed": 2**63}, 400, "seed", "less"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop", "at most 4"),
        ({"stop": [""]}, 400, "stop.0", "at least 1"),
        ({"stop": {"a": 1}}, 400, "stop", "tuple"),
        ({"stream": "perhaps"}, 400, "stream", "boolean"),
        ({"n": 2}, 400, "n", "does not support"),
        ({"best_of": 2}, 400, "best_of", "does not support"),
        ({"echo": True}, 400, "echo", "does not support"),
        ({"logprobs": 5}, 400, "logprobs", "does not support"),
        ({"suffix": "x"}, 400, "suffix", "does not support"),
        ({"logit_bias": {"1": 2}}, 400, "logit_bias", "does not support"),
        ({"presence_penalty": 0.1}, 400, "presence_penalty", "does not support"),
        ({"top_k": 5}, 400, "top_k", "does not know"),
    ],
)  # fmt: skip
def test_bad_completion_requests_are_refused_with_the_parameter(
    more: dict[str, Any], status: int, param: str, words: str
) -> None:
    check_error(send({**ASK, **more}), status, words, param)


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": ["hi"]}, "messages.0", ""),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'user'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages.0.content", "only parts of type text"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages.0.content", "only parts of type text"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages.0.tool_calls", "not know"),
        ({"tools": [{"type": "function"}]}, "tools", "does not support"),
        ({"response_format": {"type": "json_object"}}, "response_format", "does not support"),
        ({"max_completion_tokens": TOKENS_MAX + 1}, "max_tokens", "allows"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content", "required"),
        ({"store": True}, "store", "does not support"),
    ],
)  # fmt: skip
def test_bad_chat_requests_are_refused_with_the_parameter(more: dict[str, Any], param: str, words: str) -> None:
    check_error(send({**CHAT, **more}, CHATS), 400, words, param)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body"), (b"{", "not JSON"), (b"[]", "body"), (b"null", "body"), (b"\xff", "body"),
        (b"[" * 100_000, "body"),
        (b'{"model": "run/1", "prompt": "x", "temperature": NaN}', "finite"),
        (b'{"model": "run/1", "prompt": "\\ud800"}', "prompt: the text is not valid Unicode"),
        (b'{"model": "run/1", "prompt": "x", "stop": "\\ud800"}', "stop.0: the text is not valid Unicode"),
        (b'{"model": "run/1", "prompt": "x", "\\ud800": 1}', "valid string"),
        (b'{"model": "\\ud800", "prompt": "x"}', "There is no model"),
    ],
)  # fmt: skip
def test_malformed_bodies_are_refused(body: bytes, words: str) -> None:
    response = send(body)
    assert response.status_code in (400, 404), response.text
    assert words in response.json()["error"]["message"]


def test_unknown_paths_and_verbs_are_refused() -> None:
    check_error(send(ASK, "/v1/embeddings"), 404, "Not Found")
    check_error(with_model(FakeModel(), lambda _, http: http.get(COMPLETIONS)), 405, "Method Not Allowed")


# Access and limits


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": ""}, 401),
        ({"Host": "evil.example"}, 403),
        ({"Host": "node.example"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Cookie": "a=b"}, 403),
    ],
)
def test_only_the_owner_gets_answers(headers: dict[str, str], status: int) -> None:
    model = FakeModel()
    response = send(ASK, model=model, headers=headers)
    assert response.status_code == status
    assert bool(model.asked) == (status == 200)
    if status != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/run/1", "/metrics", "/", "/livez", "/openapi.json"])
def test_nothing_is_shown_without_the_token(path: str) -> None:
    response = with_model(FakeModel(), lambda _, http: http.get(path, headers={"Authorization": "Bearer x"}))
    assert response.status_code in (401, 404) and "run/1" not in response.text


def test_bodies_over_the_limit_are_refused() -> None:
    fits = {**ASK, "prompt": "x" * (BODY_BYTES_MAX - 100)}
    assert send(fits).status_code == 200
    check_error(send({**ASK, "prompt": "x" * BODY_BYTES_MAX}), 413, "larger than")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * (BODY_BYTES_MAX // 16)

    async def use(_: Served, http: httpx.AsyncClient) -> httpx.Response:
        return await http.post(COMPLETIONS, content=chunks(), headers={"Content-Type": "application/json"})

    check_error(with_model(FakeModel(), use), 413, "larger than")


def test_requests_over_the_limit_are_refused_until_one_has_ended() -> None:
    model = FakeModel()

    async def use(_: Served, http: httpx.AsyncClient) -> None:
        waiting = [asyncio.create_task(http.post(COMPLETIONS, json={**ASK, "prompt": "wait"})) for _ in range(REQUESTS)]
        await until(lambda: len(model.asked) == REQUESTS)
        for stream in (False, True):
            refused = await http.post(COMPLETIONS, json={**ASK, "stream": stream})
            check_error(refused, 429, f"at most {REQUESTS} requests")
            assert refused.headers["retry-after"] == "1"
        assert (await http.get("/v1/models")).status_code == 200
        model.go.set()
        assert [(await one).status_code for one in waiting] == [200] * REQUESTS
        assert (await http.post(COMPLETIONS, json=ASK)).status_code == 200

    with_model(model, use)


async def all_slots_are_free(model: FakeModel, http: httpx.AsyncClient) -> None:
    """Wait until as many requests as are allowed run at the same time."""
    model.go.clear()
    before = len(model.asked)
    waiting: set[asyncio.Task[httpx.Response]] = set()
    async with asyncio.timeout(PATIENCE_S):
        while len(model.asked) < before + REQUESTS:
            waiting.add(asyncio.create_task(http.post(COMPLETIONS, json={**ASK, "prompt": "wait"})))
            await asyncio.sleep(0.1)
    model.go.set()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_generation(stream: bool) -> None:
    model = FakeModel(words=range(10**9), word_s=0.001)  # Without a pause, the words would fill the event loop.

    async def use(served: Served, http: httpx.AsyncClient) -> None:
        body = json.dumps({**ASK, "prompt": "wait", "stream": stream}).encode()
        for _ in range(REQUESTS):
            await served.open(request_head(len(body)) + body)
        await until(lambda: len(model.asked) == REQUESTS)
        await served.hang_up()
        model.go.set()
        await asyncio.sleep(0.2)
        model.words = ["y"]
        await all_slots_are_free(model, http)

    with_model(model, use)


def request_head(length: int) -> bytes:
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {TOKEN}",
             "Content-Type: application/json", f"Content-Length: {length}"]  # fmt: skip
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_clients_that_read_or_send_nothing_do_not_hold_others() -> None:
    """Each answer is larger than the buffers of a connection, and is computed to its end."""
    model = FakeModel(words=["x" * 100_000] * 200)

    async def use(served: Served, http: httpx.AsyncClient) -> None:
        body = json.dumps({**ASK, "stream": True}).encode()
        for _ in range(REQUESTS):
            reader, _writer = await served.open(request_head(len(body)) + body)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await served.open(request_head(len(body)) + body[:-1])
        await until(lambda: len(model.asked) == REQUESTS)
        model.words = ["y"]
        await all_slots_are_free(model, http)

    with_model(model, use)


def test_an_answer_that_ends_too_early_is_an_error() -> None:
    async def use(_: Served, http: httpx.AsyncClient) -> None:
        for _number in range(REQUESTS + 1):
            check_error(await http.post(COMPLETIONS, json=ASK), 500, "before the end of its answer")
            streamed = await http.post(COMPLETIONS, json={**ASK, "stream": True})
            assert "before the end of its answer" in streamed.text and "[DONE]" not in streamed.text

    with_model(FakeModel(words=()), use)


def test_a_fault_of_the_server_is_reported_and_ends_only_this_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def use(_: Served, http: httpx.AsyncClient) -> None:
        for _number in range(REQUESTS + 1):
            check_error(await http.post(COMPLETIONS, json={**ASK, "prompt": "fault"}), 500, "see its log")
            streamed = await http.post(COMPLETIONS, json={**ASK, "prompt": "fault", "stream": True})
            assert json.loads(streamed.text.removeprefix("data: "))["error"]["type"] == "server_error"
        assert (await http.post(COMPLETIONS, json=ASK)).status_code == 200

    with_model(FakeModel(), use)
    assert sum("a fault of ours" in str(record.exc_text) for record in caplog.records) >= REQUESTS + 1


def test_answers_of_a_server_that_stops_end_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """They would take longer than the server waits for open requests, and then end with a traceback in the log."""
    model, generations = FakeModel(words=["y"] * 50, word_s=0.1), Generations(REQUESTS)

    async def main() -> tuple[httpx.Response, httpx.Response]:
        async with served_model(model, generations) as (served, http):
            whole = asyncio.create_task(http.post(COMPLETIONS, json=ASK))
            streamed = asyncio.create_task(http.post(COMPLETIONS, json={**ASK, "stream": True}))
            await until(lambda: len(model.asked) == REQUESTS)
            await asyncio.sleep(0.3)
            served.server.should_exit = True
            generations.stop()
            return await whole, await streamed

    whole, streamed = asyncio.run(main())
    check_error(whole, 503, "The server is stopping")
    assert streamed.status_code == 200 and "The server is stopping" in streamed.text and "[DONE]" not in streamed.text
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []

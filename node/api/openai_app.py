"""The OpenAI-compatible API of one model: `/v1/models`, `/v1/completions` and `/v1/chat/completions`.

Generations run on threads. A thread never waits for its client: what the client has not read yet is queued, and is at
most one answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from node.api.auth import Guard, Keys
from node.api.openai_models import (
    COMPLETION_TOKENS,
    AsciiResponse,
    ChatRequest,
    CompletionRequest,
    ModelFacts,
    OpenAiError,
    Piece,
    TextModel,
    describe_invalid,
    error_response,
    to_json,
)

BODY_BYTES_MAX = 2**20
CLOSE_S = 10.0
logger = logging.getLogger(__name__)


class Generations:
    """Runs at most `most` generations at a time, each on a thread. Used by one event loop."""

    def __init__(self, most: int, prepare_thread: Callable[[], None] = lambda: None) -> None:
        self._most, self._prepare_thread = most, prepare_thread
        self._threads: set[threading.Thread] = set()
        self._queues: set[asyncio.Queue[Piece | Exception | None]] = set()
        self._is_stopped = False

    async def run(self, pieces: Iterator[Piece]) -> AsyncGenerator[Piece, None]:
        """Yield the pieces, which a thread computes. Closing this iterator ends the thread after its next piece.

        Raises OpenAiError if too many generations run, or if the last piece is missing, and the exceptions of `pieces`.
        """
        if self._is_stopped:
            raise _stopping()
        if len(self._threads) >= self._most:
            text = f"This server answers at most {self._most} requests at a time: try again soon."
            raise OpenAiError(429, text, code="rate_limit_exceeded")
        loop, is_unwanted = asyncio.get_running_loop(), threading.Event()
        queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()  # None is the end.

        def compute() -> None:
            try:
                self._prepare_thread()
                for piece in pieces:
                    if is_unwanted.is_set():
                        return
                    tell(queue.put_nowait, piece)
            except Exception as exc:  # noqa: BLE001 - raised again where the pieces are read
                tell(queue.put_nowait, exc)
            finally:
                tell(queue.put_nowait, None)
                tell(self._threads.discard, thread)

        def tell(function: Callable[[Any], None], argument: Any) -> None:
            with suppress(RuntimeError):  # The loop is closed, as `close` waits only for CLOSE_S.
                loop.call_soon_threadsafe(function, argument)

        thread = threading.Thread(target=compute, name="generation", daemon=True)
        self._threads.add(thread)
        self._queues.add(queue)
        thread.start()
        try:
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    raise OpenAiError(500, "The model has stopped before the end of its answer.", code="internal")
                yield item
                if item.finish:
                    return
        finally:
            is_unwanted.set()
            self._queues.discard(queue)

    def stop(self) -> None:
        """End all answers with an error, and refuse new ones. The server ends only after its open requests."""
        self._is_stopped = True
        for queue in self._queues:
            queue.put_nowait(_stopping())

    def close(self) -> None:
        """Wait until all threads have ended, at most CLOSE_S. Blocks.

        A thread that does not end has been blocked by foreign code, such as the template of a tokenizer. It ends with
        the process.
        """
        ends_at = time.monotonic() + CLOSE_S
        for thread in list(self._threads):
            thread.join(max(0.0, ends_at - time.monotonic()))


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers to one kind of request look."""

    prefix: str
    whole: str
    part: str
    """`object` of a whole answer, and of an event."""
    is_chat: bool

    def choice(self, text: str, finish: str | None) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish}

    def change(self, piece: Piece) -> dict[str, Any]:
        """The choice of an event. The first event of a chat names the role."""
        if not self.is_chat:
            return self.choice(piece.text, piece.finish)
        role = {} if piece.tokens else {"role": "assistant"}
        text = {"content": piece.text} if piece.text or not piece.tokens else {}
        return {"index": 0, "delta": role | text, "logprobs": None, "finish_reason": piece.finish}


COMPLETION = AnswerFormat("cmpl", "text_completion", "text_completion", is_chat=False)
CHAT = AnswerFormat("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)


def build_openai_app(
    current: Callable[[], Awaitable[TextModel]],
    generations: Generations,
    keys: Keys,
    *,
    tokens_max: int,
    hosts: Iterable[str] = (),
) -> ASGIApp:
    """Build the application. `current` returns the newest model; a running answer keeps the one it has begun with.

    `tokens_max` limits the tokens of an answer. `hosts` are as in `Guard`.
    """
    api = FastAPI(openapi_url=None, redirect_slashes=False)
    _add_models(api, current)

    async def model_for(name: str) -> TextModel:
        model = await current()
        if name != model.facts.name:
            raise _no_model(name, model.facts)
        return model

    @api.post("/v1/completions")
    async def completions(wanted: CompletionRequest, request: Request) -> Response:
        model, options = await model_for(wanted.model), wanted.options(COMPLETION_TOKENS, tokens_max)
        pieces = generations.run(model.complete(wanted.prompt, options))
        return await _answer(COMPLETION, model.facts, pieces, wanted, request)

    @api.post("/v1/chat/completions")
    async def chat_completions(wanted: ChatRequest, request: Request) -> Response:
        model, options = await model_for(wanted.model), wanted.options(None, tokens_max)
        messages = [{"role": message.role, "content": message.content} for message in wanted.messages]
        pieces = generations.run(model.chat(messages, options))
        return await _answer(CHAT, model.facts, pieces, wanted, request)

    _add_error_handlers(api)
    return Guard(api, keys, hosts=hosts, body_bytes_max=BODY_BYTES_MAX, answer=error_response)


def _add_models(api: FastAPI, current: Callable[[], Awaitable[TextModel]]) -> None:
    def describe(facts: ModelFacts) -> dict[str, Any]:
        return {
            "id": facts.name,
            "object": "model",
            "created": facts.loaded_at,
            "owned_by": "diloco-node",
            "context_tokens": facts.context_tokens,
            "round": facts.round,
            "state_digest": facts.state_digest,
        }

    @api.get("/v1/models")
    async def models() -> Response:
        return AsciiResponse({"object": "list", "data": [describe((await current()).facts)]})

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        facts = (await current()).facts
        if name != facts.name:
            raise _no_model(name, facts)
        return AsciiResponse(describe(facts))


def _no_model(name: str, facts: ModelFacts) -> OpenAiError:
    text = f"There is no model {name!r} here: the model is {facts.name!r}."
    return OpenAiError(404, text, param="model", code="model_not_found")


async def _answer(
    form: AnswerFormat,
    facts: ModelFacts,
    pieces: AsyncGenerator[Piece, None],
    wanted: CompletionRequest | ChatRequest,
    request: Request,
) -> Response:
    head = {
        "id": f"{form.prefix}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": facts.name,
        "system_fingerprint": facts.fingerprint,
    }
    first = await anext(pieces)  # Raises before the answer begins if the request is refused.
    if wanted.stream:
        head["object"] = form.part
        events = _events(form, head, first, pieces, with_usage=wanted.stream_options.include_usage)
        return StreamingResponse(events, media_type="text/event-stream")
    text, last = [], first
    async with aclosing(pieces):
        async for last in pieces:
            text.append(last.text)
            if await request.is_disconnected():
                return Response(status_code=499)  # Nobody reads it.
    head["object"] = form.whole
    return AsciiResponse({**head, "choices": [form.choice("".join(text), last.finish)], "usage": _usage(last)})


async def _events(
    form: AnswerFormat, head: dict[str, Any], first: Piece, pieces: AsyncGenerator[Piece, None], *, with_usage: bool
) -> AsyncIterator[bytes]:
    """Yield an answer as server-sent events. Pieces without news are left out."""

    def event(choices: list[Any], **more: Any) -> bytes:
        return b"data: " + to_json({**head, "choices": choices, **more}) + b"\n\n"

    last = first
    async with aclosing(pieces):
        if form.is_chat:
            yield event([form.change(first)])
        try:
            async for last in pieces:
                if last.text or last.finish:
                    yield event([form.change(last)])
        except Exception as exc:
            if not isinstance(exc, OpenAiError) or exc.status == 500:
                logger.exception("A generation has failed.")
            error = exc if isinstance(exc, OpenAiError) else _internal_error()
            yield b"data: " + to_json(error.body()) + b"\n\n"
            return
    if with_usage:
        yield event([], usage=_usage(last))
    yield b"data: [DONE]\n\n"


def _usage(last: Piece) -> dict[str, int]:
    return {
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.tokens,
        "total_tokens": last.prompt_tokens + last.tokens,
    }


def _stopping() -> OpenAiError:
    return OpenAiError(503, "The server is stopping: ask again when it runs.", code="stopping")


def _internal_error() -> OpenAiError:
    return OpenAiError(500, "The server failed to answer this request: see its log.", code="internal")


def _add_error_handlers(api: FastAPI) -> None:
    @api.exception_handler(OpenAiError)
    async def refused(_request: Request, error: OpenAiError) -> Response:
        return error.response({"Retry-After": "1"} if error.status == 429 else None)

    @api.exception_handler(HTTPException)
    async def http_error(_request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, str(error.detail), error.headers)

    @api.exception_handler(RequestValidationError)
    async def invalid_request(_request: Request, error: RequestValidationError) -> Response:
        return describe_invalid(error).response()

    @api.exception_handler(Exception)
    async def internal_error(_request: Request, _error: Exception) -> Response:
        return _internal_error().response()

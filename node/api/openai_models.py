"""Requests and errors of the OpenAI-compatible API, and what it needs of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that does not say, as the original API has it."""
STOPS_MAX = 4
SEED = 2**63
Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    max_tokens: int | None
    """Most tokens to sample; None means until the model's context is full."""
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer."""

    text: str
    prompt_tokens: int
    tokens: int
    """Tokens sampled so far, with an end of document and those of a stop text."""
    finish: Finish | None


class TextModel(Protocol):
    """A model with its tokenizer. Both methods are for one thread each.

    They first yield a piece without text, before the model computes anything. They raise PromptRefused if the prompt
    does not fit.
    """

    @property
    def facts(self) -> ModelFacts: ...

    def complete(self, text: str, options: SamplingOptions) -> Iterator[Piece]: ...

    def chat(self, messages: Sequence[Mapping[str, str]], options: SamplingOptions) -> Iterator[Piece]: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    name: str
    loaded_at: int
    """Unix time."""
    context_tokens: int
    round: int
    state_digest: str

    @property
    def fingerprint(self) -> str:
        return f"round-{self.round}-{self.state_digest[:12]}"


# Errors


class OpenAiError(Exception):
    """An error in the form that OpenAI's clients expect."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = {429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        return AsciiResponse(self.body(), self.status, headers)


class PromptRefused(OpenAiError):
    """The model cannot continue this prompt."""

    def __init__(self, message: str, *, param: str, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


class AsciiResponse(JSONResponse):
    """JSON in ASCII, because names in a hostile request may not be valid Unicode."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


def to_json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode("ascii")


CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return OpenAiError(status, message, code=CODES.get(status)).response(headers)


def describe_invalid(error: RequestValidationError) -> OpenAiError:
    """Return the error of the first invalid value."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return OpenAiError(400, "The body is not JSON.")
    where = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(where) or None
    if first["type"] == "extra_forbidden":
        return OpenAiError(
            400, f"This server does not know {param}: leave it out.", param=param, code="unknown_parameter"
        )
    message = str(first["msg"]).removeprefix("Value error, ")
    return OpenAiError(400, f"{param or 'The body'}: {message}.", param=param)


# Requests


def _only(*allowed: Any) -> AfterValidator:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"this server does not support it; leave it out or send {allowed[0]!r}")
        return value

    return AfterValidator(check)


def _check_unicode(text: str) -> str:
    """JSON can contain half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ValueError("the text is not valid Unicode") from exc
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]


def _one_text(prompt: Any) -> Any:
    return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt


def _joined_parts(content: Any) -> Any:
    """Join the texts of a content that is a list of parts."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    texts = [text for text in parts if isinstance(text, str)]
    if len(texts) < len(parts):
        raise ValueError("this server reads only parts of type text")
    return "\n".join(texts)


def _as_tuple(stop: Any) -> Any:
    return (stop,) if isinstance(stop, str) else stop


class OpenAiValue(BaseModel):
    """A part of a request. `null` means the same as no value."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, values: Any) -> Any:
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )


class StreamOptions(OpenAiValue):
    include_usage: bool = False
    include_obfuscation: Annotated[Any, _only(False)] = False


class OpenAiRequest(OpenAiValue):
    """What both kinds of requests have."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-SEED, lt=SEED)
    stop: Annotated[
        tuple[Annotated[Text, Field(min_length=1, max_length=1000)], ...],
        BeforeValidator(_as_tuple),
        Field(max_length=STOPS_MAX),
    ] = ()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""
    n: Annotated[Any, _only(1)] = 1
    logit_bias: Annotated[Any, _only({})] = None
    presence_penalty: Annotated[Any, _only(0)] = 0
    frequency_penalty: Annotated[Any, _only(0)] = 0

    def options(self, default_tokens: int | None, tokens_max: int) -> SamplingOptions:
        """`tokens_max` is the server's limit. Raises OpenAiError if the request wants more."""
        wanted = self.max_tokens
        if wanted is not None and wanted > tokens_max:
            text = f"max_tokens is {wanted}, and this server allows {tokens_max}: ask for fewer."
            raise OpenAiError(400, text, param="max_tokens")
        tokens = wanted or min(default_tokens or tokens_max, tokens_max)
        return SamplingOptions(tokens, self.temperature, self.top_p, self.seed, self.stop)


class CompletionRequest(OpenAiRequest):
    prompt: Annotated[Text, BeforeValidator(_one_text)]
    best_of: Annotated[Any, _only(1)] = 1
    echo: Annotated[Any, _only(False)] = False
    logprobs: Annotated[Any, _only(None)] = None
    suffix: Annotated[Any, _only("")] = ""


class ChatMessage(OpenAiValue):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_joined_parts)]
    name: str = ""

    @model_validator(mode="before")
    @classmethod
    def _with_refusal(cls, values: Any) -> Any:
        """An answer that another model has refused has a refusal in place of a content."""
        if not isinstance(values, dict) or values.get("content") is not None or values.get("role") != "assistant":
            return values
        return {key: value for key, value in values.items() if key != "refusal"} | {"content": values.get("refusal")}


class ChatRequest(OpenAiRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: Annotated[Any, _only(False)] = False
    top_logprobs: Annotated[Any, _only(0)] = 0
    response_format: Annotated[Any, _only({"type": "text"})] = None
    tools: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    parallel_tool_calls: bool = True
    store: Annotated[Any, _only(False)] = False

    @model_validator(mode="before")
    @classmethod
    def _with_one_limit(cls, values: Any) -> Any:
        """`max_completion_tokens` is the newer name of `max_tokens`. Some clients send both."""
        if not isinstance(values, dict) or values.get("max_completion_tokens") is None:
            return values
        rest = {key: value for key, value in values.items() if key != "max_completion_tokens"}
        limit = values["max_completion_tokens"]
        if rest.get("max_tokens") not in (None, limit):
            raise ValueError("max_tokens and max_completion_tokens differ: send one of them")
        return rest | {"max_tokens": limit}

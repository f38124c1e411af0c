"""HTTP errors as `application/problem+json` (RFC 9457): the body, the responses, and the application's handlers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from node.api.node_interface import HistoryUnavailable, NotAllowed
from node.status import Value

PROBLEM_TYPE = "application/problem+json"


class Fault(Value):
    """One invalid value of a request."""

    where: str
    message: str


class Problem(Value):
    """The body of every error."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    code: str = ""
    """One word for a program, if the status alone does not tell the cause."""
    faults: tuple[Fault, ...] = ()


def problem_response(
    status: int,
    detail: str,
    headers: Mapping[str, str] | None = None,
    *,
    code: str = "",
    faults: tuple[Fault, ...] = (),
) -> Response:
    problem = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, code=code, faults=faults)
    # A request may have halves of surrogate pairs, which cannot be encoded. As ASCII, JSON takes them.
    return Response(json.dumps(problem.model_dump()), status, headers, media_type=PROBLEM_TYPE)


def describe_problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that can fail with these statuses, for the OpenAPI document."""
    described: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        phrase = HTTPStatus(status).phrase
        example = Problem(title=phrase, status=status, detail="One sentence with the remedy.").model_dump(mode="json")
        content = {"schema": {"$ref": "#/components/schemas/Problem"}, "example": example}
        described[status] = {"description": phrase, "content": {PROBLEM_TYPE: content}}
    return described


def add_problem_schema(document: dict[str, Any]) -> None:
    """Add to an OpenAPI document the models to which `describe_problems` refers."""
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(problem.pop("$defs", {}))
    schemas["Problem"] = problem


def add_error_handlers(api: FastAPI) -> None:
    """Make the application answer every exception of a route with a `Problem`."""

    @api.exception_handler(HTTPException)
    async def http_error(_request: Request, error: HTTPException) -> Response:
        return problem_response(error.status_code, str(error.detail), error.headers)

    @api.exception_handler(RequestValidationError)
    async def invalid_request(_request: Request, error: RequestValidationError) -> Response:
        faults = tuple(Fault(where=".".join(map(str, e["loc"])), message=e["msg"]) for e in error.errors())
        return problem_response(422, "The request is not valid: correct the values named in faults.", faults=faults)

    @api.exception_handler(NotAllowed)
    async def not_allowed(_request: Request, error: NotAllowed) -> Response:
        return problem_response(409, str(error), code=error.code)

    @api.exception_handler(HistoryUnavailable)
    async def history_unavailable(_request: Request, error: HistoryUnavailable) -> Response:
        return problem_response(503, str(error), {"Retry-After": "5"}, code=error.code)

    @api.exception_handler(Exception)
    async def internal_error(_request: Request, _error: Exception) -> Response:
        return problem_response(500, "The node failed to answer this request: see its log.", code="internal")

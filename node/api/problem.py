"""Errors as `application/problem+json` (RFC 9457). Knows status codes; knows no node."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from node.status import Value

PROBLEM_TYPE = "application/problem+json"


class Fault(Value):
    """One value of a request that is not right."""

    where: str
    message: str


class Problem(Value):
    """The body of every error."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    code: str = ""
    """One word for a program, where there is more to say than the status."""
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
    return Response(problem.model_dump_json(), status, headers, media_type=PROBLEM_TYPE)


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """How a route's errors are described in the OpenAPI document."""
    reference = {"$ref": "#/components/schemas/Problem"}

    def content(status: int) -> dict[str, Any]:
        example = Problem(title=HTTPStatus(status).phrase, status=status, detail="One sentence, with the mend.")
        return {PROBLEM_TYPE: {"schema": reference, "example": example.model_dump(mode="json")}}

    return {status: {"description": HTTPStatus(status).phrase, "content": content(status)} for status in statuses}

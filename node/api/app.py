"""The ASGI application: routes, page, OpenAPI document, errors as problems, all behind the guard. Knows no process."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from node.api.auth import Guard
from node.api.examples import add_examples
from node.api.page import make_page
from node.api.problem import Fault, Problem, problem_response
from node.api.routes import Served, make_router
from node.api.seam import HistoryAway, NotAllowed

logger = logging.getLogger(__name__)

TITLE = "diloco-node"


def build_app(served: Served, *, hosts: Iterable[str] = ()) -> ASGIApp:
    """Everything on the port. `hosts`: the bound address and names allowed in the Host header, beside loopback's."""
    # FastAPI's own documentation pages load scripts from elsewhere; the document itself is served below.
    api = FastAPI(title=TITLE, version=served.build.version, openapi_url=None, redirect_slashes=False)
    api.include_router(make_router(served))
    api.include_router(make_page())
    _add_openapi(api)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(RequestValidationError, _bad_request)
    api.add_exception_handler(NotAllowed, _conflict)
    api.add_exception_handler(HistoryAway, _away)
    api.add_exception_handler(Exception, _our_fault)
    config = served.config.api
    return Guard(api, served.keys, hosts=[*hosts, *config.allowed_hosts], metrics_public=config.metrics_public)


def _add_openapi(api: FastAPI) -> None:
    def document() -> dict[str, Any]:
        if api.openapi_schema is None:
            schema = get_openapi(title=api.title, version=api.version, routes=api.routes)
            problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(problem.pop("$defs", {}))
            schemas["Problem"] = problem
            add_examples(schema)
            api.openapi_schema = schema
        return api.openapi_schema

    @api.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(document())


def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem_response(error.status_code, str(error.detail), error.headers)


def _bad_request(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = tuple(Fault(where=".".join(str(part) for part in e["loc"]), message=e["msg"]) for e in error.errors())
    return problem_response(422, "The request does not have the right form.", faults=faults)


def _conflict(_request: Request, error: Exception) -> Response:
    assert isinstance(error, NotAllowed)
    return problem_response(409, str(error), code=error.code)


def _away(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HistoryAway)
    return problem_response(503, str(error), {"Retry-After": "5"}, code=error.code)


def _our_fault(_request: Request, _error: Exception) -> Response:
    return problem_response(500, "The node failed at this request: its log says why.", code="internal")

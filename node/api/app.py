"""The ASGI application of the API port: routes, dashboard, OpenAPI document and error handlers behind the guard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp

from node.api.auth import Guard
from node.api.errors import add_error_handlers, add_problem_schema
from node.api.examples import add_examples
from node.api.page import make_page
from node.api.public_routes import PATH, PublicPage, make_public_router
from node.api.routes import ApiContext, make_router


def build_app(context: ApiContext, *, hosts: Iterable[str] = ()) -> ASGIApp:
    """Build the application. `hosts` are the names, besides those of loopback, that a Host header may carry."""
    # FastAPI's own documentation pages load scripts from other sites; the document itself is served below.
    api = FastAPI(title="diloco-node", version=context.build.version, openapi_url=None, redirect_slashes=False)
    api.include_router(make_router(context))
    api.include_router(make_page())
    settings = context.config.api
    address = settings.public_url.rstrip("/") + PATH if settings.public else ""
    page = PublicPage(context.node, context.config.node.data_dir, context.config.swarm.announce, address)
    api.include_router(make_public_router(page, is_public=settings.public))
    _add_openapi_document(api)
    add_error_handlers(api)
    names = [*hosts, *settings.host_names]
    return Guard(api, context.keys, hosts=names, metrics_public=settings.metrics_public, page_public=settings.public)


def _add_openapi_document(api: FastAPI) -> None:
    def document() -> dict[str, Any]:
        if api.openapi_schema is None:
            schema = get_openapi(title=api.title, version=api.version, routes=api.routes)
            add_problem_schema(schema)
            add_examples(schema)
            api.openapi_schema = schema
        return api.openapi_schema

    @api.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(document())

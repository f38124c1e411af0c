"""The endpoints, put together. Each turns a request into a question to the node, and the answer into words.

They know the node through `seam.py` only; who may call is decided in `auth.py`.
"""

from __future__ import annotations

from fastapi import APIRouter

from node.api import routes_about, routes_act, routes_health, routes_read
from node.api.configure import add_config
from node.api.problem import problem_responses
from node.api.served import Served

__all__ = ["Served", "make_router"]


def make_router(served: Served) -> APIRouter:
    router = APIRouter(responses=problem_responses(400, 401, 403, 405, 408, 413, 422, 429, 500))
    routes_health.add(router, served)
    routes_read.add(router, served)
    routes_about.add(router, served)
    add_config(router, served.settings)
    routes_act.add(router, served)
    return router

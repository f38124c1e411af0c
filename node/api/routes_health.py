"""Whether the node is well, for whoever watches over it: `/livez`, `/readyz`, `/metrics`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from node.api.models import Health
from node.api.served import Served
from node.status import Phase

READY = frozenset({Phase.TRAINING, Phase.SYNCING, Phase.PAUSED, Phase.DOWNLOADING})
"""In the swarm, or out of it by the owner's will. Connecting is not ready: nobody has answered yet."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add(router: APIRouter, served: Served) -> None:
    def health(response: Response, ok: bool) -> Health:
        status = served.node.view().status
        response.status_code = 200 if ok else 503
        return Health(ok=ok, phase=status.phase, code=status.code)

    unwell: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not so."}}

    @router.get("/livez", response_model=Health, responses=unwell, tags=["health"])
    async def livez(response: Response) -> Health:
        """Whether the event loop answers and the worker's heartbeat is recent. Peers do not matter."""
        return health(response, served.node.view().alive)

    @router.get("/readyz", response_model=Health, responses=unwell, tags=["health"])
    async def readyz(response: Response) -> Health:
        """Whether the node is live and downloading, training, syncing or paused."""
        view = served.node.view()
        return health(response, view.alive and view.status.phase in READY)

    text = {"schema": {"type": "string"}, "example": 'diloco_node_phase{phase="training"} 1.0\n'}
    page: dict[int | str, dict[str, Any]] = {200: {"description": "The page.", "content": {METRICS_TYPE: text}}}

    @router.get("/metrics", response_class=Response, responses=page, tags=["health"])
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(served.metrics.page(), media_type=METRICS_TYPE)

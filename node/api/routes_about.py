"""What the node stands on, and a bundle for whoever helps."""

from __future__ import annotations

import asyncio
import platform
import time
from typing import Any

from fastapi import APIRouter, Response

from node.api.bundle import Facts, make_bundle
from node.api.models import Version
from node.api.problem import problem_response, problem_responses
from node.api.served import Served

BUNDLE_S = 20.0
"""To make a support bundle."""


def add(router: APIRouter, served: Served) -> None:
    _add_setup(router, served)
    _add_bundle(router, served)


def _add_setup(router: APIRouter, served: Served) -> None:
    build = served.build

    @router.get("/api/v1/version", tags=["node"])
    async def version() -> Version:
        """Versions of the node and of what it stands on."""
        return Version(
            version=build.version,
            revision=build.revision,
            python=platform.python_version(),
            torch=build.torch,
            hivemind=build.hivemind,
        )


def _add_bundle(router: APIRouter, served: Served) -> None:
    making: asyncio.Future[bytes] | None = None
    described: dict[int | str, dict[str, Any]] = {
        200: {
            "description": "A zip file.",
            "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}},
        },
        **problem_responses(503),
    }

    @router.get("/api/v1/support-bundle", response_class=Response, responses=described, tags=["node"])
    async def support_bundle() -> Response:
        """Status, swarm, rounds, configuration, versions, machine, log; without secrets and addresses, to hand on."""
        nonlocal making
        if making is None or making.done():
            configured = served.settings.configured()
            facts = Facts(
                served.node.view(),
                configured.config,
                configured.origins,
                served.build,
                served.metrics.page(),
                served.keys.secrets,
            )
            making = asyncio.ensure_future(asyncio.to_thread(make_bundle, facts))
        try:
            # Whoever asks meanwhile gets the same one.
            packed = await asyncio.wait_for(asyncio.shield(making), BUNDLE_S)
        except TimeoutError:
            return problem_response(503, "The bundle takes too long: ask again later.", {"Retry-After": "10"})
        name = time.strftime("diloco-node-support-%Y%m%d-%H%M%S.zip", time.gmtime())
        disposition = f'attachment; filename="{name}"'
        return Response(packed, media_type="application/zip", headers={"Content-Disposition": disposition})

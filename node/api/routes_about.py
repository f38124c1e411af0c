"""What the node stands on: versions."""

from __future__ import annotations

import platform

from fastapi import APIRouter

from node.api.models import Version
from node.api.served import Served


def add(router: APIRouter, served: Served) -> None:
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

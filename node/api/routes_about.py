"""How the node is set up: versions, configuration."""

from __future__ import annotations

import platform
from typing import Any

from fastapi import APIRouter

from node.api.models import ResolvedConfig, Version
from node.api.served import Served

SECRET_WORDS = ("token", "secret", "password")
HIDDEN = "(hidden)"


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

    @router.get("/api/v1/config", tags=["node"])
    async def config() -> ResolvedConfig:
        """The configuration that holds, without secrets."""
        return ResolvedConfig(config=hide_secrets(served.config.model_dump(mode="json")), origins=dict(served.origins))


def hide_secrets(values: dict[str, Any]) -> dict[str, Any]:
    """A copy in which every value whose key sounds secret is hidden."""
    shown: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            shown[key] = hide_secrets(value)
        elif value and any(key == word or key.endswith("_" + word) for word in SECRET_WORDS):
            shown[key] = HIDDEN
        else:
            shown[key] = value
    return shown

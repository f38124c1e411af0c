"""The configuration, read and changed over HTTP. Knows the node through `seam.py` only, and no meaning of any key."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Response

from node.api.models import ResolvedConfig
from node.api.problem import Fault, problem_response, problem_responses
from node.api.seam import Configured, Settings
from node.choices import ChoiceError

SECRET_WORDS = ("token", "secret", "password")
HIDDEN = "(hidden)"
EXAMPLE = {"limits": {"upload_mbit_s": 20}, "schedule": {"active": ["mon-fri 22:00-08:00"]}, "node": {"name": None}}


def add_config(router: APIRouter, settings: Settings) -> None:
    @router.get("/api/v1/config", tags=["node"])
    async def config() -> ResolvedConfig:
        """The configuration that holds, without secrets, and which of its keys may change while the node runs."""
        return _resolved(settings.configured())

    @router.patch("/api/v1/config", response_model=ResolvedConfig, responses=problem_responses(422), tags=["actions"])
    async def change(patch: Annotated[dict[str, Any], Body(examples=[EXAMPLE])]) -> ResolvedConfig | Response:
        """Change some keys, all or none, now and over restarts; null gives a key back to what it was without."""
        try:
            return _resolved(settings.change(patch))
        except ChoiceError as exc:
            faults = tuple(Fault(where=wrong.where, message=wrong.message) for wrong in exc.faults)
            return problem_response(422, str(exc), code=exc.code, faults=faults)


def _resolved(found: Configured) -> ResolvedConfig:
    return ResolvedConfig(
        config=hide_secrets(found.config.model_dump(mode="json")),
        origins=dict(found.origins),
        changeable=dict(found.changeable),
        pending_restart=found.pending_restart,
    )


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

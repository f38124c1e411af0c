"""The endpoints: each turns a request into a question to the node, and the answer into words.

Knows the node through `seam.py` only; who may call is decided in `auth.py`.
"""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse

from node.api.auth import SESSION_S, Keys, session_key
from node.api.events import stream
from node.api.metrics import Build, Metrics
from node.api.models import Accepted, Health, Logs, ResolvedConfig, Rounds, SessionOpened, Swarm, Version
from node.api.problem import problem_response, problem_responses
from node.api.seam import LOG_LEVELS, ActionName, Level, Node, PauseOrder
from node.config import Config
from node.status import Phase, Status

READY = frozenset({Phase.TRAINING, Phase.SYNCING, Phase.PAUSED, Phase.DOWNLOADING})
"""In the swarm, or out of it by the owner's will. Connecting is not ready: nobody has answered yet."""
STREAMS_MAX = 32
SECRET_WORDS = ("token", "secret", "password")
HIDDEN = "(hidden)"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Served:
    """All that the routes stand on."""

    node: Node
    metrics: Metrics
    keys: Keys
    config: Config
    origins: Mapping[str, str]
    build: Build


def make_router(served: Served) -> APIRouter:
    router = APIRouter(responses=problem_responses(401, 403, 405, 413, 422, 429))
    _add_health(router, served)
    _add_reading(router, served)
    _add_about(router, served)
    _add_events(router, served)
    _add_actions(router, served.node)
    _add_session(router, served.keys)
    return router


def _add_health(router: APIRouter, served: Served) -> None:
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

    @router.get("/metrics", response_class=Response, tags=["health"])
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(served.metrics.page(), media_type=METRICS_TYPE)


def _add_reading(router: APIRouter, served: Served) -> None:
    @router.get("/api/v1/status", tags=["node"])
    async def status() -> Status:
        """The whole snapshot of this node."""
        return served.node.view().status

    @router.get("/api/v1/swarm", tags=["node"])
    async def swarm() -> Swarm:
        """Every peer, as this node's directory tells it."""
        return Swarm(peers=served.node.view().swarm)

    @router.get("/api/v1/rounds", tags=["node"])
    async def rounds(limit: Annotated[int, Query(ge=1, le=200)] = 50) -> Rounds:
        """Round records, newest first."""
        return Rounds(rounds=tuple(served.node.view().rounds[:limit]))

    @router.get("/api/v1/logs", tags=["node"])
    async def logs(
        level: Level = "debug",
        after: Annotated[int | None, Query(ge=0)] = None,
        limit: Annotated[int, Query(ge=1, le=2000)] = 200,
    ) -> Logs:
        """Records of `level` and above, oldest first: the first `limit` after id `after`, else the newest `limit`."""
        wanted = LOG_LEVELS[LOG_LEVELS.index(level) :]
        records = [r for r in served.node.view().logs if r.level in wanted and r.id > (after or 0)]
        records = records[-limit:] if after is None else records[:limit]
        return Logs(records=tuple(records), last_id=records[-1].id if records else after or 0)


def _add_about(router: APIRouter, served: Served) -> None:
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


def _add_events(router: APIRouter, served: Served) -> None:
    open_streams = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal open_streams
        open_streams += 1
        try:
            async for event in stream(served.node):
                yield event
        finally:
            open_streams -= 1

    described: dict[int | str, dict[str, Any]] = {
        200: {"description": "Events named `status`, each with a full status.", "content": {"text/event-stream": {}}},
        **problem_responses(503),
    }

    @router.get("/api/v1/events", response_class=StreamingResponse, responses=described, tags=["node"])
    async def events() -> Response:
        """Server-sent events: the status at once, then at most once a second when it changed."""
        if open_streams >= STREAMS_MAX:
            return problem_response(503, "Too many event streams are open: close some.", {"Retry-After": "5"})
        return StreamingResponse(counted(), media_type="text/event-stream")


def _add_actions(router: APIRouter, node: Node) -> None:
    conflict = problem_responses(409)

    def act(action: ActionName, order: PauseOrder | None = None) -> Accepted:
        return Accepted(phase=node.act(action, order or PauseOrder()))

    @router.post("/api/v1/actions/pause", status_code=202, responses=conflict, tags=["actions"])
    async def pause(order: PauseOrder | None = None) -> Accepted:
        """Give the device back: for `for_s` seconds, until `until`, after round `after_round`, or until `resume`."""
        return act("pause", order)

    @router.post("/api/v1/actions/resume", status_code=202, responses=conflict, tags=["actions"])
    async def resume() -> Accepted:
        """End a pause; or try again after the node gave up on its worker."""
        return act("resume")

    @router.post("/api/v1/actions/drain", status_code=202, responses=conflict, tags=["actions"])
    async def drain() -> Accepted:
        """Take part in the current round, then stop."""
        return act("drain")

    @router.post("/api/v1/actions/leave", status_code=202, responses=conflict, tags=["actions"])
    async def leave() -> Accepted:
        """Save, say goodbye, and stop at once."""
        return act("leave")


def _add_session(router: APIRouter, keys: Keys) -> None:
    @router.post("/api/v1/session", tags=["session"])
    async def open_session(request: Request, response: Response) -> SessionOpened:
        """Trade the token for a cookie, so that a page need not keep the token. A session opens no further one."""
        if "authorization" not in request.headers:
            raise HTTPException(401, "The token itself is needed to open a session.")
        response.set_cookie(
            keys.cookie_name,
            keys.open_session(),
            max_age=int(SESSION_S),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return SessionOpened(cookie=keys.cookie_name)

    @router.delete("/api/v1/session", status_code=204, tags=["session"])
    async def close_session(request: Request, response: Response) -> None:
        """Forget the session and clear its cookie."""
        key = session_key(request.headers, keys.cookie_name)
        if key is not None:
            keys.close_session(key)
        response.delete_cookie(keys.cookie_name, httponly=True, samesite="strict")


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

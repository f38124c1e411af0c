"""All endpoints of the API except the dashboard. `auth.Guard` decides who may call them."""

from __future__ import annotations

import asyncio
import hashlib
import platform
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Body, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime

from node.api import models
from node.api.auth import SESSION_S, Keys, bearer, session_key
from node.api.errors import Fault, describe_problems, problem_response
from node.api.metrics import Build, Metrics
from node.api.node_interface import (
    LOG_LEVELS,
    SERIES,
    ActionName,
    Configured,
    ContinuesText,
    GeneratedText,
    GeneratorBusy,
    GeneratorFailed,
    HistoryReader,
    Level,
    LogLine,
    Node,
    PauseOrder,
    RecentWork,
    Settings,
    TextRequest,
)
from node.api.redaction import hide_secrets
from node.api.support_bundle import BundleSource, make_bundle
from node.config.overrides import OverrideError
from node.config.schema import Config
from node.host.cores import usable_cores
from node.status import GovernanceInfo, PeerRow, Phase, RoundRecord, RunInfo, Status

READY = frozenset({Phase.TRAINING, Phase.SYNCING, Phase.PAUSED, Phase.DOWNLOADING})
"""Phases of a ready node. A connecting node is not ready, because no peer has answered yet."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUNDLE_TIMEOUT_S = 20.0
STREAMS_MAX = 128
EVENT_INTERVAL_S = 1.0
KEEP_ALIVE_S = 15.0
RECONNECT_MS = 2000
"""How long a browser waits before it reconnects to the event stream."""
GONE_CHECK_S = 1.0
"""How often a slow answer checks whether its caller still waits."""
POINTS_MAX = 2000
PATCH_EXAMPLE = {
    "limits": {"upload_mbit_s": 20},
    "schedule": {"active": ["mon-fri 22:00-08:00"]},
    "node": {"name": None},
}

Responses = dict[int | str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ApiContext:
    """Everything that the routes use."""

    node: Node
    history: HistoryReader
    metrics: Metrics
    keys: Keys
    settings: Settings
    config: Config
    """The configuration at the start. Only keys that cannot change are read from it, such as `api.allowed_hosts`."""
    build: Build
    texts: ContinuesText | None = None
    """None for a node without a model."""


def make_router(context: ApiContext) -> APIRouter:
    router = APIRouter(responses=describe_problems(400, 401, 403, 405, 408, 413, 422, 429, 500))
    _add_health(router, context)
    _add_status(router, context.node)
    _add_history(router, context)
    _add_logs(router, context.node)
    _add_events(router, context.node, context.keys)
    _add_version(router, context.build)
    _add_support_bundle(router, context)
    _add_config(router, context.settings)
    _add_actions(router, context.node)
    _add_generate(router, context.node, context.texts)
    _add_amendments(router, context.node)
    _add_session(router, context.keys)
    return router


def _add_health(router: APIRouter, context: ApiContext) -> None:
    def health(response: Response, ok: bool) -> models.Health:
        status = context.node.view().status
        response.status_code = 200 if ok else 503
        return models.Health(ok=ok, phase=status.phase, code=status.code)

    unhealthy: Responses = {503: {"model": models.Health, "description": "Not healthy, or not ready."}}

    @router.head("/livez", include_in_schema=False)
    @router.get("/livez", response_model=models.Health, responses=unhealthy, tags=["health"])
    async def livez(response: Response) -> models.Health:
        """Whether the node responds and its worker's last heartbeat is recent. Peers do not matter."""
        return health(response, context.node.view().alive)

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz", response_model=models.Health, responses=unhealthy, tags=["health"])
    async def readyz(response: Response) -> models.Health:
        """Whether the node is live and downloading, training, syncing or paused."""
        view = context.node.view()
        return health(response, view.alive and view.status.phase in READY)

    text = {"schema": {"type": "string"}, "example": 'diloco_node_phase{phase="training"} 1.0\n'}
    page: Responses = {200: {"description": "All metrics.", "content": {METRICS_TYPE: text}}}

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", response_class=Response, responses=page, tags=["health"])
    async def metrics() -> Response:
        """All metrics in Prometheus' text format."""
        text = context.metrics.render()
        await context.node.keep_counters()
        return Response(text, media_type=METRICS_TYPE)


def _add_status(router: APIRouter, node: Node) -> None:
    @router.get("/api/v1/status", tags=["node"])
    async def status() -> Status:
        """The full status of this node."""
        return node.view().status

    @router.get("/api/v1/swarm", tags=["node"])
    async def swarm() -> models.Swarm:
        """Every peer in this node's peer table, and those that departed within the last hour."""
        view = node.view()
        peers = _compare_digests(view.swarm, view.rounds, view.status.run)
        return models.Swarm(peers=peers, departed=tuple(view.departed))

    @router.get("/api/v1/journal", tags=["node"])
    async def journal(
        limit: Annotated[int, Query(ge=1, le=200, description="Maximum number of entries.")] = 50,
    ) -> models.JournalEntries:
        """Who joined, left or fell silent, and what happened to this node, newest first."""
        return models.JournalEntries(entries=tuple(node.view().journal[:limit]))

    @router.get("/api/v1/rounds", tags=["node"])
    async def rounds(
        limit: Annotated[int, Query(ge=1, le=200, description="Maximum number of records.")] = 50,
    ) -> models.Rounds:
        """Round records, newest first, including those from before a restart."""
        return models.Rounds(rounds=tuple(node.view().rounds[:limit]))


def _compare_digests(rows: Iterable[PeerRow], records: Sequence[RoundRecord], run: RunInfo) -> tuple[PeerRow, ...]:
    """Set `digest_agrees`: whether a peer's state digest equals this node's for the same round; None if unknown.

    `records` are this node's round records, newest first.
    """
    digests: dict[int, str] = {}
    for record in reversed(records):
        # This node discarded this many rounds when it left its side of a split.
        for number in range(record.round - record.dropped + 1, record.round + 1):
            digests.pop(number, None)
        if record.state_digest:
            digests[record.round] = record.state_digest
    if run.state_digest:
        digests[run.round] = run.state_digest

    def agrees(row: PeerRow) -> bool | None:
        own = digests.get(row.round)
        return row.state_digest == own if own and row.state_digest else None

    return tuple(row.model_copy(update={"digest_agrees": agrees(row)}) for row in rows)


def _add_history(router: APIRouter, context: ApiContext) -> None:
    unavailable = describe_problems(503)

    @router.get("/api/v1/history", responses=unavailable, tags=["node"])
    async def history(
        series: Annotated[
            str,
            Query(max_length=1000, description=f"Names separated by commas; empty: all. Known: {', '.join(SERIES)}."),
        ] = "",
        since: Annotated[
            AwareDatetime | None, Query(description="A moment with a time zone (RFC 3339); default: an hour ago.")
        ] = None,
        points: Annotated[int, Query(ge=1, le=POINTS_MAX, description="Maximum number of steps.")] = 300,
    ) -> models.History:
        """Means, rates and shares of time over one time axis, kept over restarts. Null means unknown."""
        names = _parse_series(series)
        chart = await context.history.chart(names, since.timestamp() if since else None, points)
        columns = {name: tuple(column) for name, column in chart.columns.items()}
        return models.History(step_s=chart.step_s, at_s=tuple(chart.at_s), series=columns)

    @router.get("/api/v1/work", responses=unavailable, tags=["node"])
    async def work(
        since: Annotated[
            AwareDatetime | None, Query(description="A moment with a time zone (RFC 3339); default: a day ago.")
        ] = None,
    ) -> RecentWork:
        """What this node did from a moment until now, over restarts."""
        return await context.history.work((since or datetime.now(UTC) - timedelta(days=1)).timestamp())


def _parse_series(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in SERIES:
            message = f"there is no series {name!r}; the known ones are {', '.join(SERIES)}"
            raise RequestValidationError([{"loc": ("query", "series"), "msg": message, "type": "value_error"}])
    return names or SERIES


def _add_logs(router: APIRouter, node: Node) -> None:
    @router.get("/api/v1/logs", tags=["node"])
    async def logs(
        level: Annotated[Level, Query(description="Lowest level.")] = "debug",
        after: Annotated[int | None, Query(ge=0, description="Only records with a higher id.")] = None,
        limit: Annotated[int, Query(ge=1, le=2000, description="Maximum number of records.")] = 200,
        search: Annotated[
            str, Query(max_length=200, description="Part of the logger's name or of the message; case is ignored.")
        ] = "",
    ) -> models.Logs:
        """Records of `level` and above, oldest first: the first `limit` after id `after`, or the newest `limit`."""
        levels, needle = LOG_LEVELS[LOG_LEVELS.index(level) :], search.casefold()

        def matches(line: LogLine) -> bool:
            return (
                line.level in levels
                and line.id > (after or 0)
                and (needle in line.logger.casefold() or needle in line.message.casefold())
            )

        records = [line for line in node.view().logs if matches(line)]
        records = records[-limit:] if after is None else records[:limit]
        return models.Logs(records=tuple(records), last_id=records[-1].id if records else after or 0)


def _add_events(router: APIRouter, node: Node, keys: Keys) -> None:
    open_streams = 0

    async def counted(is_allowed: Callable[[], bool]) -> AsyncIterator[bytes]:
        nonlocal open_streams
        open_streams += 1
        try:
            async for event in stream_events(node, is_allowed):
                yield event
        finally:
            open_streams -= 1

    described: Responses = {
        200: {
            "description": "Events named `status`, each with a full status.",
            "content": {
                "text/event-stream": {"schema": {"type": "string"}, "example": "event: status\ndata: {...}\n\n"}
            },
        },
        **describe_problems(503),
    }

    @router.get("/api/v1/events", response_class=StreamingResponse, responses=described, tags=["node"])
    async def events(request: Request) -> Response:
        """Server-sent events: the status at once, then after each change, at most once a second."""
        if open_streams >= STREAMS_MAX:
            return problem_response(503, "Too many event streams are open: close some.", {"Retry-After": "5"})
        key = session_key(request.headers, keys.cookie_name) if bearer(request.headers) is None else None
        stream = counted(lambda: key is None or keys.is_session(key))
        return StreamingResponse(stream, media_type="text/event-stream")


async def stream_events(
    node: Node,
    is_allowed: Callable[[], bool] = lambda: True,
    *,
    interval_s: float = EVENT_INTERVAL_S,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> AsyncIterator[bytes]:
    """Yield the node's status as server-sent events, one per `interval_s` at most; a comment after `keep_alive_s`.

    The stream ends with the last status when the node ends, and instead of the next event if it is no longer allowed.
    """
    yield f"retry: {RECONNECT_MS}\n\n".encode()
    with node.subscribe() as queue:
        while True:
            event, is_last = b": keep-alive\n\n", False
            with suppress(TimeoutError):
                async with asyncio.timeout(keep_alive_s):
                    status = await queue.get()
                body = (status or node.view().status).model_dump_json()
                event, is_last = b"event: status\ndata: " + body.encode() + b"\n\n", status is None
            if not is_allowed():
                return
            yield event
            if is_last:
                return
            await asyncio.sleep(interval_s)


def _add_version(router: APIRouter, build: Build) -> None:
    @router.get("/api/v1/version", tags=["node"])
    async def version() -> models.Version:
        """Versions of the node and of its main dependencies."""
        return models.Version(**asdict(build), python=platform.python_version())


def _add_support_bundle(router: APIRouter, context: ApiContext) -> None:
    making: asyncio.Future[bytes] | None = None
    zip_file = {"schema": {"type": "string", "format": "binary"}}
    described: Responses = {
        200: {"description": "A zip file.", "content": {"application/zip": zip_file}},
        **describe_problems(503),
    }

    @router.get("/api/v1/support-bundle", response_class=Response, responses=described, tags=["node"])
    async def support_bundle() -> Response:
        """Status, swarm, rounds, configuration, versions, machine and log, without secrets and addresses."""
        nonlocal making
        if making is None or making.done():
            configured = context.settings.configured()
            config, origins = configured.config, configured.origins
            page, secrets = context.metrics.render(), context.keys.secrets
            source = BundleSource(context.node.view(), config, origins, context.build, page, secrets)
            making = asyncio.ensure_future(asyncio.to_thread(make_bundle, source))
        try:
            async with asyncio.timeout(BUNDLE_TIMEOUT_S):
                content = await asyncio.shield(making)  # Concurrent requests share one bundle.
        except TimeoutError:
            return problem_response(503, "The bundle takes too long: ask again later.", {"Retry-After": "10"})
        name = time.strftime("diloco-node-support-%Y%m%d-%H%M%S.zip", time.gmtime())
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(content, media_type="application/zip", headers=headers)


def _add_config(router: APIRouter, settings: Settings) -> None:
    def resolved(configured: Configured) -> models.ResolvedConfig:
        return models.ResolvedConfig(
            config=hide_secrets(configured.config.model_dump(mode="json")),
            origins=dict(configured.origins),
            changeable=dict(configured.changeable),
            cores=usable_cores(),
            timezone=configured.config.schedule.zone.key,
            pending_restart=configured.pending_restart,
        )

    @router.get("/api/v1/config", tags=["node"])
    async def config() -> models.ResolvedConfig:
        """The current configuration without secrets, and which of its keys can change while the node runs."""
        return resolved(settings.configured())

    @router.patch(
        "/api/v1/config", response_model=models.ResolvedConfig, responses=describe_problems(422), tags=["actions"]
    )
    async def change(
        patch: Annotated[dict[str, Any], Body(examples=[PATCH_EXAMPLE])],
    ) -> models.ResolvedConfig | Response:
        """Change some keys, all of them or none, for this and later starts. Null undoes the change of a key."""
        try:
            return resolved(settings.change(patch))
        except OverrideError as exc:
            faults = tuple(Fault(where=fault.key, message=fault.message) for fault in exc.faults)
            return problem_response(422, str(exc), code=exc.code, faults=faults)


def _add_actions(router: APIRouter, node: Node) -> None:
    conflict = describe_problems(409)

    def act(action: ActionName, order: PauseOrder | None = None) -> models.Accepted:
        return models.Accepted(phase=node.act(action, order or PauseOrder()))

    @router.post("/api/v1/actions/pause", status_code=202, responses=conflict, tags=["actions"])
    async def pause(order: PauseOrder | None = None) -> models.Accepted:
        """Free the device for `for_s` seconds, until `until`, after round `after_round`, or until `resume`."""
        return act("pause", order)

    @router.post("/api/v1/actions/resume", status_code=202, responses=conflict, tags=["actions"])
    async def resume() -> models.Accepted:
        """End a pause, or start the worker again after the node has stopped or failed."""
        return act("resume")

    @router.post("/api/v1/actions/drain", status_code=202, responses=conflict, tags=["actions"])
    async def drain() -> models.Accepted:
        """Take part in the current round, then stop."""
        return act("drain")

    @router.post("/api/v1/actions/leave", status_code=202, responses=conflict, tags=["actions"])
    async def leave() -> models.Accepted:
        """Save, tell the peers, and stop at once."""
        return act("leave")


def _add_generate(router: APIRouter, node: Node, texts: ContinuesText | None) -> None:
    described = describe_problems(404, 429, 503)

    @router.post("/api/v1/generate", response_model=GeneratedText, responses=described, tags=["actions"])
    async def generate(order: TextRequest, request: Request) -> GeneratedText | Response:
        """Continue a text with the newest checkpoint. It takes seconds, and one request is answered at a time."""
        if texts is None:
            return problem_response(404, "A relay has no model: ask a member that trains.")
        answer = asyncio.create_task(texts.generate(order))
        try:
            while not (await asyncio.wait({answer}, timeout=GONE_CHECK_S))[0]:
                if await request.is_disconnected():
                    return Response(status_code=499)  # Nobody reads it.
                if node.is_ending:
                    return problem_response(503, "The node is stopping: ask again when it runs.", code="stopping")
            return answer.result()
        except GeneratorBusy as exc:
            return problem_response(429, str(exc), {"Retry-After": "5"}, code=exc.code)
        except GeneratorFailed as exc:
            return problem_response(503, str(exc), code=exc.code)
        finally:
            answer.cancel()


def _add_amendments(router: APIRouter, node: Node) -> None:
    @router.get("/api/v1/amendments", tags=["node"])
    async def amendments() -> GovernanceInfo:
        """Who may amend the run while it runs, and its accepted and pending amendments."""
        return node.view().governance

    @router.post("/api/v1/amendments", status_code=202, responses=describe_problems(409), tags=["actions"])
    async def submit(amendment: models.SubmittedAmendment) -> models.AmendmentAccepted:
        """Submit a signed amendment. The members check it and accept it in a later round, or refuse it."""
        node.submit(amendment)
        return models.AmendmentAccepted(digest=hashlib.sha256(amendment.text.encode()).hexdigest())


def _add_session(router: APIRouter, keys: Keys) -> None:
    @router.post("/api/v1/session", tags=["session"])
    async def open_session(request: Request, response: Response) -> models.SessionOpened:
        """Exchange the token for a cookie, so that a page need not keep the token. A session cannot open another."""
        if bearer(request.headers) is None:
            raise HTTPException(401, "A session opens only with the token: send it as Authorization: Bearer.")
        response.set_cookie(
            keys.cookie_name,
            keys.open_session(),
            max_age=int(SESSION_S),
            httponly=True,
            samesite="strict",
            # Behind a proxy with TLS, the scheme of the request is http, but the browser names its own.
            secure="https" in (request.url.scheme, request.headers.get("origin", "").partition(":")[0]),
        )
        return models.SessionOpened(cookie=keys.cookie_name)

    @router.delete("/api/v1/session", status_code=204, tags=["session"])
    async def close_session(request: Request, response: Response) -> None:
        """End the session and clear its cookie."""
        key = session_key(request.headers, keys.cookie_name)
        if key is not None:
            keys.close_session(key)
        response.delete_cookie(keys.cookie_name, httponly=True, samesite="strict")

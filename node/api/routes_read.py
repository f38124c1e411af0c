"""What the node does and did: status, swarm, rounds, history, contributions, logs, events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime

from node.api.agreement import with_agreement
from node.api.events import stream
from node.api.models import Contribution, Contributions, History, Logs, Rounds, Swarm
from node.api.problem import problem_response, problem_responses
from node.api.seam import LOG_LEVELS, SERIES, Level, LogLine
from node.api.served import Served
from node.status import Status

STREAMS_MAX = 128
CONTRIBUTORS_MAX = 1000
POINTS_MAX = 2000


def add(router: APIRouter, served: Served) -> None:
    _add_present(router, served)
    _add_past(router, served)
    _add_logs(router, served)
    _add_events(router, served)


def _add_present(router: APIRouter, served: Served) -> None:
    @router.get("/api/v1/status", tags=["node"])
    async def status() -> Status:
        """The whole snapshot of this node."""
        return served.node.view().status

    @router.get("/api/v1/swarm", tags=["node"])
    async def swarm() -> Swarm:
        """Every peer, as this node's directory tells it."""
        view = served.node.view()
        return Swarm(peers=with_agreement(view.swarm, view.rounds, view.status.run))

    @router.get("/api/v1/rounds", tags=["node"])
    async def rounds(
        limit: Annotated[int, Query(ge=1, le=200, description="At most so many.")] = 50,
    ) -> Rounds:
        """Round records, newest first, those of earlier starts too."""
        return Rounds(rounds=tuple(served.node.view().rounds[:limit]))


def _add_past(router: APIRouter, served: Served) -> None:
    away = problem_responses(503)

    @router.get("/api/v1/history", responses=away, tags=["node"])
    async def history(
        series: Annotated[
            str,
            Query(max_length=1000, description=f"Names with commas between them; empty: all. Of {', '.join(SERIES)}."),
        ] = "",
        since: Annotated[
            AwareDatetime | None, Query(description="A moment with time zone (RFC 3339); without: an hour ago.")
        ] = None,
        points: Annotated[int, Query(ge=1, le=POINTS_MAX, description="At most so many steps.")] = 300,
    ) -> History:
        """Columns over one time axis, over restarts: means, rates, shares of the time; null where nothing is known."""
        names = _series_named(series)
        chart = await served.past.chart(names, since.timestamp() if since else None, points)
        columns = {name: tuple(column) for name, column in chart.columns.items()}
        return History(step_s=chart.step_s, at_s=tuple(chart.at_s), series=columns)

    @router.get("/api/v1/contributions", responses=away, tags=["node"])
    async def contributions() -> Contributions:
        """What each peer has given, in the rounds that this node knows of; the thousand that gave most."""
        me = served.node.view().status.node.peer_id
        return Contributions(
            contributions=tuple(
                Contribution(
                    peer_id=share.peer_id,
                    short_id=share.peer_id[-6:],
                    name=share.name,
                    rounds=share.rounds,
                    tokens=share.tokens,
                    last_round=share.last_round,
                    this_node=share.peer_id == me,
                )
                for share in await served.past.shares(CONTRIBUTORS_MAX)
            )
        )


def _series_named(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in SERIES]
    if unknown:
        message = f"there is no series {unknown[0]!r}; the known ones are {', '.join(SERIES)}"
        raise RequestValidationError([{"loc": ("query", "series"), "msg": message, "type": "value_error"}])
    return names or SERIES


def _add_logs(router: APIRouter, served: Served) -> None:
    @router.get("/api/v1/logs", tags=["node"])
    async def logs(
        level: Annotated[Level, Query(description="Least level.")] = "debug",
        after: Annotated[int | None, Query(ge=0, description="Only what came after the record of this id.")] = None,
        limit: Annotated[int, Query(ge=1, le=2000, description="At most so many.")] = 200,
        search: Annotated[
            str, Query(max_length=200, description="A part of the logger's name or of the message, in any case.")
        ] = "",
    ) -> Logs:
        """Records of `level` and above, oldest first: the first `limit` after id `after`, else the newest `limit`."""
        wanted, part = LOG_LEVELS[LOG_LEVELS.index(level) :], search.casefold()

        def fits(line: LogLine) -> bool:
            return (
                line.level in wanted
                and line.id > (after or 0)
                and (not part or part in line.logger.casefold() or part in line.message.casefold())
            )

        records = [line for line in served.node.view().logs if fits(line)]
        records = records[-limit:] if after is None else records[:limit]
        return Logs(records=tuple(records), last_id=records[-1].id if records else after or 0)


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

    example = "event: status\ndata: {...}\n\n"
    described: dict[int | str, dict[str, Any]] = {
        200: {
            "description": "Events named `status`, each with a full status.",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": example}},
        },
        **problem_responses(503),
    }

    @router.get("/api/v1/events", response_class=StreamingResponse, responses=described, tags=["node"])
    async def events() -> Response:
        """Server-sent events: the status at once, then at most once a second when it changed."""
        if open_streams >= STREAMS_MAX:
            return problem_response(503, "Too many event streams are open: close some.", {"Retry-After": "5"})
        return StreamingResponse(counted(), media_type="text/event-stream")

"""What changes something: actions, and the session of a page."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request, Response

from node.api.auth import SESSION_S, Keys, bearer, session_key
from node.api.models import Accepted, SessionOpened
from node.api.problem import problem_responses
from node.api.seam import ActionName, Node, PauseOrder
from node.api.served import Served


def add(router: APIRouter, served: Served) -> None:
    _add_actions(router, served.node)
    _add_session(router, served.keys)


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
        if bearer(request.headers) is None:
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

"""Serves the public page of the run, if the owner wants it (`api.public`), and its content to the owner in any case."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from node.api import models
from node.api.errors import describe_problems
from node.api.leaderboard import Ranking
from node.api.node_interface import Node, View
from node.api.public_page import STYLE, render
from node.api.public_run import (
    OwnRun,
    PublicRun,
    make_public_run,
    names_in,
    public_invite,
    rank_members,
    read_credit,
    read_owners,
    read_run,
    read_samples,
)

FRESH_S = 1.0
"""The page is made again at most this often, however many people ask for it."""
CACHED_S = 10
"""Browsers and proxies may keep the page for this long."""
CONTRIBUTORS_MAX = 1000
PATH = "/public/"


@dataclass
class PublicPage:
    """Makes the page and keeps it for FRESH_S."""

    node: Node
    folder: Path
    """The data folder."""
    announced: Sequence[str] = ()
    """The multiaddresses that the owner announces."""
    address: str = ""
    """The page's path or URL for the owner's browser; empty if the page is not public."""
    html: bytes = b""
    """The page as `run` made it last."""
    json: bytes = b""
    _made_at: float = -FRESH_S
    _run: PublicRun | None = None
    _ranking: Ranking = field(default_factory=Ranking)
    _ranked: tuple[Any, ...] = ()
    """What the ranking was made of."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> PublicRun:
        async with self._lock:
            if self._run is None or time.monotonic() - self._made_at >= FRESH_S:
                self._run = await asyncio.to_thread(self._make, self.node.view())
                self._made_at = time.monotonic()
            return self._run

    def _make(self, view: View) -> PublicRun:
        folder, node = self.folder, view.status.node
        credit, owners, names = read_credit(folder), read_owners(folder), names_in(view) | {node.peer_id: node.name}
        if self._ranked != (credit, names, owners):  # Ranking thousands of members takes most of a second.
            self._ranking, self._ranked = rank_members(credit, names, owners), (credit, names, owners)
        now, samples = datetime.now(UTC), read_samples(folder)
        invite = public_invite(view.status.run.invite, self.announced)
        run = make_public_run(view, read_run(folder), credit, now, self._ranking, samples, invite)
        self.html, self.json = render(run).encode(), run.model_dump_json().encode()
        return run

    async def own_run(self) -> OwnRun:
        run, peer_id = await self.run(), self.node.view().status.node.peer_id
        own = next((line for line in self._ranking.members if peer_id and line.key == peer_id), None)
        return OwnRun(run=run, own=own, public_page=self.address)

    async def contributions(self) -> models.Contributions:
        await self.run()
        own_id = self.node.view().status.node.peer_id
        return models.Contributions(
            contributions=tuple(
                models.Contribution(
                    peer_id=line.key,
                    short_id=line.key[-6:],
                    name=line.name,
                    rounds=line.rounds,
                    tokens=line.tokens,
                    last_round=line.last_round,
                    this_node=line.key == own_id,
                )
                for line in self._ranking.members[:CONTRIBUTORS_MAX]
                if line.key
            )
        )


def make_public_router(page: PublicPage, *, is_public: bool) -> APIRouter:
    """The routes. Without `is_public` there is only the owner's."""
    router = APIRouter(responses=describe_problems(400, 401, 403, 405, 408, 413, 422, 429, 500))

    @router.get("/api/v1/public", tags=["node"])
    async def public() -> PublicRun:
        """What the public page shows, whether it is public or not."""
        return await page.run()

    @router.get("/api/v1/run", tags=["node"])
    async def own_run() -> OwnRun:
        """The run, and this node's place in its leaderboard."""
        return await page.own_run()

    @router.get("/api/v1/contributions", tags=["node"])
    async def contributions() -> models.Contributions:
        """What members have contributed to the run: the thousand members with the most tokens."""
        return await page.contributions()

    if not is_public:
        return router

    @router.get("/public", include_in_schema=False)
    async def show_redirect() -> RedirectResponse:
        return RedirectResponse(PATH)

    @router.head(PATH, include_in_schema=False)
    @router.get(PATH, include_in_schema=False)
    async def show_page() -> Response:
        await page.run()
        return _answer(page.html, "text/html; charset=utf-8")

    @router.head(PATH + "run.json", include_in_schema=False)
    @router.get(PATH + "run.json", include_in_schema=False)
    async def show_json() -> Response:
        await page.run()
        return _answer(page.json, "application/json")

    @router.head(PATH + "public.css", include_in_schema=False)
    @router.get(PATH + "public.css", include_in_schema=False)
    async def show_style() -> Response:
        return _answer(STYLE.encode(), "text/css; charset=utf-8")

    return router


def _answer(content: bytes, media_type: str) -> Response:
    return Response(content, media_type=media_type, headers={"Cache-Control": f"max-age={CACHED_S}"})

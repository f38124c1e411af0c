"""A small node behind the real application, and clients for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from node.api.app import build_app
from node.api.auth import Keys
from node.api.metrics import Build, Metrics
from node.api.routes import Served
from node.api.seam import ActionName, Configured, NotAllowed, PauseOrder, Space, View
from node.choices import CHANGEABLE, over, read_patch
from node.config import Config
from node.daemon.board import Board
from node.daemon.recorder import Clocks, Recorder
from node.status import Counters, NodeInfo, Phase, PhaseState, Status

TOKEN = "t" * 43
BASE = "http://127.0.0.1:8080"


@dataclass
class StillNode:
    """A node that does nothing but remember; its board is the real one."""

    board: Board
    alive: bool = True
    past: Recorder | None = None
    acted: list[tuple[ActionName, PauseOrder]] = field(default_factory=list)
    refuse: bool = False
    config: Config = field(default_factory=lambda: Config.model_validate({"api": {"allowed_hosts": ["node.example"]}}))
    metrics: Metrics = field(init=False)
    keys: Keys = field(init=False)

    def view(self) -> View:
        return self.board.view(alive=self.alive)

    def subscribe(self) -> AbstractContextManager[asyncio.Queue[Status | None]]:
        return self.board.subscribe()

    def configured(self) -> Configured:
        return Configured(self.config, {"api.allowed_hosts": "file"}, CHANGEABLE)

    def change(self, patch: Mapping[str, Any]) -> Configured:
        self.config = over(self.config, read_patch(patch))
        return self.configured()

    def act(self, action: ActionName, order: PauseOrder) -> Phase:
        if self.refuse:
            raise NotAllowed("The node is leaving.")
        self.acted.append((action, order))
        return Phase.PAUSED


@pytest.fixture
def still_node(tmp_path: Path) -> Iterator[StillNode]:
    node = StillNode(Board(NodeInfo(), {}, state=PhaseState()))
    node.metrics = Metrics(
        Build("1.2", "abc", "2.13", "1.1"), node.view, space=lambda: Space({"cache": 3}, 1, 4), known=Counters()
    )
    node.keys = Keys(TOKEN, time.monotonic)
    node.past = Recorder(tmp_path / "history", Clocks(time.time, time.monotonic), trains=True)
    node.past.totals = node.metrics.totals
    node.board.memory = node.past
    yield node
    node.past.close()


@pytest.fixture
def app(still_node: StillNode) -> ASGIApp:
    build = Build("1.2", "abc", "2.13", "1.1")
    assert still_node.past is not None
    served = Served(
        still_node, still_node.past, still_node.metrics, still_node.keys, still_node, still_node.config, build
    )
    return build_app(served)


ClientMaker = Callable[..., httpx.AsyncClient]


@pytest.fixture
def client(app: ASGIApp) -> ClientMaker:
    """Makes clients: `client()` carries the token, `client(token=None)` nothing."""

    def make(token: str | None = TOKEN, address: str = "127.0.0.1") -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 1))
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers, timeout=5)

    return make

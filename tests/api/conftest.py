"""Fixtures: a fake node behind the real API application, and clients that call it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from node.api.node_interface import ActionName, Configured, NotAllowed, PauseOrder, Space, View
from node.api.routes import ApiContext
from node.config.amendments import SignedAmendment
from node.config.overrides import CHANGEABLE, apply_overrides, read_patch
from node.config.schema import Config
from node.daemon.history import Clocks, HistoryStore
from node.daemon.node_state import NodeState
from node.status import Counters, NodeInfo, Phase, PhaseState, Status

TOKEN = "t" * 43
BASE = "http://127.0.0.1:8080"
BUILD = Build("1.2", "abc", "2.13", "1.1")


@dataclass
class FakeNode:
    """A node that only records the actions it is asked for. Its state, metrics and history are the real classes."""

    board: NodeState
    folder: Path
    alive: bool = True
    refuses: bool = False
    acted: list[tuple[ActionName, PauseOrder]] = field(default_factory=list)
    submitted: list[SignedAmendment] = field(default_factory=list)
    config: Config = field(default_factory=lambda: Config.model_validate({"api": {"allowed_hosts": ["node.example"]}}))
    keys: Keys = field(default_factory=lambda: Keys(TOKEN, time.monotonic))
    metrics: Metrics = field(init=False)
    past: HistoryStore = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(BUILD, self.view, space=lambda: Space({"cache": 3}, 1, 4), known=Counters())
        self.past = HistoryStore(self.folder, Clocks(time.time, time.monotonic), self.metrics.totals, trains=True)
        self.board.record_to(self.past)

    def view(self) -> View:
        return self.board.view(alive=self.alive)

    def subscribe(self) -> AbstractContextManager[asyncio.Queue[Status | None]]:
        return self.board.subscribe()

    @property
    def is_ending(self) -> bool:
        return self.board.is_closed

    async def keep_counters(self) -> None:
        """Nothing to keep."""

    def configured(self) -> Configured:
        return Configured(self.config, {"api.allowed_hosts": "file"}, CHANGEABLE)

    def change(self, patch: Mapping[str, Any]) -> Configured:
        self.config = apply_overrides(self.config, read_patch(patch))
        return self.configured()

    def act(self, action: ActionName, order: PauseOrder) -> Phase:
        if self.refuses:
            raise NotAllowed("The node is leaving.")
        self.acted.append((action, order))
        return Phase.PAUSED

    def submit(self, amendment: SignedAmendment) -> None:
        if self.refuses:
            raise NotAllowed("The node is paused.")
        self.submitted.append(amendment)


@dataclass(frozen=True)
class HttpClient:
    """Calls an ASGI application synchronously. Each call runs in its own event loop."""

    app: ASGIApp
    token: str | None
    address: str

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=(self.address, 1))
            headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
            async with httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers, timeout=30) as http:
                return await http.request(method, path, **options)

        return asyncio.run(send())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)


ClientMaker = Callable[..., HttpClient]


def make_app(node: FakeNode, hosts: Iterable[str] = ()) -> ASGIApp:
    context = ApiContext(node, node.past, node.metrics, node.keys, node, node.config, BUILD)
    return build_app(context, hosts=hosts)


@pytest.fixture
def fake_node(tmp_path: Path) -> Iterator[FakeNode]:
    node = FakeNode(NodeState(NodeInfo(), {}, state=PhaseState()), tmp_path / "history")
    yield node
    node.past.close()


@pytest.fixture
def app(fake_node: FakeNode) -> ASGIApp:
    return make_app(fake_node)


@pytest.fixture
def client(app: ASGIApp) -> ClientMaker:
    """A function that makes clients: `client()` sends the token, and `client(token=None)` sends none."""

    def make(token: str | None = TOKEN, address: str = "127.0.0.1") -> HttpClient:
        return HttpClient(app, token, address)

    return make

"""A page without a swarm: the real API and dashboard in front of a node whose reports the test writes.

Tests of what the page says need no training, so they take seconds.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

from playwright.sync_api import BrowserContext

from node.config.manifest import Manifest, RunConfig
from node.config.schema import ApiConfig
from node.daemon.http_server import bind_api, make_server
from node.daemon.journal import SETTLE_S, Journal
from node.daemon.node_state import NodeState
from node.host.ports import PortFile
from node.status import (
    ContributionInfo,
    DeviceInfo,
    Member,
    MonthUsage,
    NodeInfo,
    Outcome,
    PeerRow,
    PeersInfo,
    Phase,
    PhaseState,
    Report,
    RoundRecord,
    RunInfo,
    Sample,
    Seconds,
    SyncInfo,
    TrainingInfo,
    utc_now,
)
from tests.api.conftest import TOKEN, FakeNode, make_app
from tests.browser.harness import Dashboard
from tests.peer_row import peer_row
from tests.swarm.harness import Node

NAMES = ("shed", "attic", "garage", "cellar")
KEYS = {name: f"12D3KooW{name:x>44}" for name in (*NAMES, "barn")}
TOTAL_TOKENS = 2_000_000_000
TOKENS_A_ROUND = 4_000_000
NEWEST = 41
DIGEST = "9f86d081884c7d659a2feaa0c55ad015"
MANIFEST = Manifest(
    run_id="ab" * 16,
    initial_digest="cd" * 32,
    parameters=152_000_000,
    run=RunConfig(
        name="village",
        purpose="To see how far the laptops of one street get.\nEverything that comes out of it belongs to everybody.",
        total_tokens=TOTAL_TOKENS,
    ),
)
PROMPT = "def open_file("
SAID = {10: "self, self, the the):\n    retur", 40: "path, mode='r'):\n    open(path, mode) as file"}
"""What the model wrote after these rounds."""
MONTH = MonthUsage(
    month="2026-11", ends_at="2026-12-01T00:00:00Z", sent_bytes=31_000_000_000, received_bytes=30_000_000_000,
    limit_bytes=200_000_000_000, measured_joules=89_000_000.0,
)  # fmt: skip


def peer(name: str, phase: str = "training") -> PeerRow:
    return peer_row(
        KEYS[name], name=name, phase=phase, round=NEWEST, tokens_per_second=2400.0, version="0.1.0", last_seen_s=0.6,
        transport="relay" if name == "garage" else "direct", state_digest=DIGEST, this_node=name == "shed",
        compute_utilization_ratio=0.97,
    )  # fmt: skip


def record(number: int, ago_s: float = 0.0) -> RoundRecord:
    inside = [name for at, name in enumerate(NAMES) if (number + at) % 5]
    return RoundRecord(
        round=number,
        outcome=Outcome.COMPLETE if len(inside) == len(NAMES) else Outcome.PARTIAL,
        members=tuple(
            Member(peer_id=KEYS[name], name=name, weight=1_000_000, included=name in inside) for name in NAMES
        ),
        started_at=utc_now(ago_s),
        seconds=Seconds(rendezvous=0.4, reduce=3.0, commit=0.3, apply=0.2, blocked=0.4),
        bytes_sent=31_000_000,
        bytes_received=30_000_000,
        head=f"h{number}",
        state_digest=DIGEST,
        swarm_tokens=TOKENS_A_ROUND * (number + 1),
        evaluation_loss=3.2 - number / 60,
    )


def training_report() -> Report:
    return Report(
        state=PhaseState(
            phase=Phase.TRAINING, code="training", reason=f"Training towards round {NEWEST + 1}.", since=utc_now(5400)
        ),
        peer_id=KEYS["shed"],
        run=RunInfo(
            name="village", manifest_hash=MANIFEST.hash, invite="diloco1-" + "q" * 90, round=NEWEST, swarm_round=NEWEST,
            swarm_tokens=TOKENS_A_ROUND * (NEWEST + 1), total_tokens=TOTAL_TOKENS, head=f"h{NEWEST}",
            state_digest=DIGEST,
        ),
        training=TrainingInfo(
            loss=2.513, evaluation_loss=2.561, learning_rate=4e-4, inner_step=32, inner_steps=20,
            tokens_total=48_000_000, tokens_per_second=2400.0,
            samples=tuple(Sample(round=number, prompt=PROMPT, text=text) for number, text in SAID.items()),
        ),
        sync=SyncInfo(progress_ratio=0.62, eta_s=38.0, round_s=100.0, last=record(NEWEST, 60)),
        peers=PeersInfo(connected=3, training=4),
        swarm=tuple(peer(name) for name in NAMES),
        compute_utilization_ratio=0.97, forecast_utilization_ratio=0.96, reachability="direct",
        reachability_code="reached",
        devices=(
            DeviceInfo(
                kind="cuda", name="NVIDIA GeForce RTX 3060", utilization_ratio=0.98, memory_used_bytes=9_100_000_000,
                memory_size_bytes=12_900_000_000, temperature_celsius=71.0, power_watts=151.0, energy_joules=1e6,
            ),
        ),
        contribution=ContributionInfo(
            rounds_joined=38, rounds_attempted=41, tokens_total=48_000_000, tokens_merged=46_000_000,
            bytes_sent=1_290_000_000, bytes_received=1_240_000_000, training_s=19_800.0,
        ),
    )  # fmt: skip


class Scene:
    """A node that serves its page, and says what `show` passed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = training_report()
        self.ahead_s = -7200.0
        """Seconds by which the journal's clock is ahead."""
        self.board = NodeState(
            NodeInfo(name="shed", version="0.1.0", data_dir=str(folder), started_at=utc_now(5400)),
            {"cpu_threads": 0},
            state=PhaseState(),
            journal=Journal(lambda: datetime.now(UTC) + timedelta(seconds=self.ahead_s)),
        )
        self.node = FakeNode(self.board, folder / "history")
        own = self.node.config.node.model_copy(update={"data_dir": folder})
        self.node.config = self.node.config.model_copy(update={"node": own})
        (folder / "manifest.json").write_bytes(MANIFEST.canonical())
        table = [
            {
                "member": KEYS[name], "tokens": 60_000_000 - 12_000_000 * at, "rounds": 40 - 3 * at, "first_round": at,
                "streak_round": NEWEST - 11, "last_round": NEWEST,
            }
            for at, name in enumerate(("attic", "shed", "garage", "cellar"))
        ]  # fmt: skip
        (folder / "credit.json").write_text(json.dumps({"evidence": {"round": NEWEST}, "table": table}))
        (folder / "api-token").write_text(TOKEN)
        for number in range(NEWEST - 30, NEWEST + 1):
            self.board.add_round(record(number, 60.0 * (NEWEST + 1 - number)))
        self.board.set_phase(None)
        self.board.worker_started()
        self.board.apply_report(self.report)
        self.ahead_s += SETTLE_S
        self.board.apply_report(self.report)
        self.board.set_month(MONTH)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait(10)

    http = None
    """Read by `Dashboard`, which waits for it with a real node."""

    def _run(self) -> None:
        config = ApiConfig(port=0)
        with bind_api(config, PortFile(self.folder / "port"), is_default=False) as sock:
            address = {"url": f"http://127.0.0.1:{sock.getsockname()[1]}"}
            (self.folder / "api.json").write_text(json.dumps(address))
            self._server = make_server(make_app(self.node))
            self._ready.set()
            self._loop.run_until_complete(self._serve(sock))
        self._loop.close()

    async def _serve(self, sock: socket.socket) -> None:
        await self._server.serve(sockets=[sock])
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # As the kernel closes the connections of a process that has ended.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def act(self, change: Callable[[], object]) -> None:
        """Run `change` on the node's event loop."""
        done = threading.Event()

        def call() -> None:
            try:
                change()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(call)
        assert done.wait(10)

    def show(self, **changes: object) -> None:
        """Report these fields of `Report`; the others stay."""
        self.report = self.report.model_copy(update=changes)
        self.act(lambda: self.board.apply_report(self.report))

    def enter(self, phase: Phase, code: str = "", reason: str = "For a test.", ago_s: float = 0.0) -> None:
        self.show(state=PhaseState(phase=phase, code=code or phase.value, reason=reason, since=utc_now(ago_s)))

    def depart(self, name: str, *, ago_s: float, says_goodbye: bool) -> None:
        """Take a peer out of the peer table, as if that had happened `ago_s` seconds ago."""
        self.ahead_s = -ago_s
        left = (KEYS[name],) if says_goodbye else ()
        self.show(swarm=tuple(row for row in self.report.swarm if row.name != name), left=left)

    def end(self) -> None:
        """End the server at once, as a killed daemon does."""
        if self._thread.is_alive():
            self._server.force_exit = self._server.should_exit = True
            self._thread.join(15)
            self.node.past.close()

    def open(self, context: BrowserContext) -> Dashboard:
        tab = Dashboard(context, cast(Node, self)).open()
        tab.page.locator("html:not([data-phase=unknown]):not([data-phase=locked])").wait_for(state="attached")
        return tab


@contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    made = Scene(folder)
    try:
        yield made
    finally:
        made.end()

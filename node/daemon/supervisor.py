"""The supervisor's process root: data folder, port, signals, API and keeper are put together here and nowhere else.

It answers while the worker works, hangs or dies. Knows no torch, no training, no swarm.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import uvicorn

from node import __version__
from node.api.app import build_app
from node.api.auth import Keys
from node.api.metrics import Build
from node.api.routes import Served
from node.api.seam import HistoryAway
from node.config import Config
from node.daemon.board import ROUNDS_KEPT, Board, BoardHandler
from node.daemon.disk import Disk
from node.daemon.folder import DataFolder
from node.daemon.keeper import Keeper
from node.daemon.logfile import FOLDER, LogFile
from node.daemon.notices import NO_TLS, no_tls
from node.daemon.pauses import Pauser, now_utc
from node.daemon.probes import Probes, usual_probes
from node.daemon.recorder import Clocks, Recorder
from node.daemon.server import GRACE_S, Tls, bind_api, load_tls, make_server, url_of
from node.daemon.shift import Timings
from node.daemon.tuner import Tuner
from node.daemon.wants import Mode
from node.errors import NodeError
from node.logs import Stamp, set_level
from node.ports import API_PORT_FILE, PortFile, moved_notice
from node.revision import revision
from node.settings import DEFAULT
from node.status import NodeInfo, Notice, PhaseState, Status, utc_now

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "node.worker")
SERVER_END_S = GRACE_S + 1.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What tests replace, and what only the command line knows."""

    worker_command: Sequence[str] = WORKER_COMMAND
    timings: Timings = field(default_factory=Timings)
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each configured key came from, for `/api/v1/config`."""
    clock: Callable[[], datetime] = now_utc
    """The wall clock that pauses and hours go by."""
    probes: Probes = field(default_factory=usual_probes)


def run(
    config: Config,
    *,
    join: str | None,
    mode: Mode = "train",
    on_status: Callable[[Status], None] | None = None,
    parts: Parts | None = None,
) -> int:
    """Be a node until it is asked to stop, the run is complete, or the worker gives up. Returns the exit code.

    Raises UsageError (exit code 2) where the data folder cannot be had, MachineError (3) where the API's port cannot;
    where nobody chose that port, the next free one is taken. `on_status` hears every change; `api.json` and `api-token`
    are in the data folder before its first call. Only for the main thread: it takes SIGTERM and SIGINT.
    """
    parts = parts or Parts()
    with (
        DataFolder.open(config.node.data_dir) as folder,
        bind_api(
            config.api,
            PortFile(folder.path / "cache" / API_PORT_FILE),
            is_default=parts.origins.get("api.port") == DEFAULT,
        ) as sock,
    ):
        node = config.node.model_copy(update={"data_dir": folder.path})
        config = config.model_copy(update={"node": node})
        tls = load_tls(config.api.tls_cert, config.api.tls_key)
        return asyncio.run(_serve(config, folder, (sock, tls), (mode, join), on_status, parts))


async def _serve(
    config: Config,
    folder: DataFolder,
    port: tuple[socket.socket, Tls | None],
    start: tuple[Mode, str | None],
    on_status: Callable[[Status], None] | None,
    parts: Parts,
) -> int:
    build = _build()
    sock, tls = port
    tuner = Tuner(config, parts.origins, folder)
    set_level(tuner.config.log.level)
    node = NodeInfo(
        name=tuner.config.node.name,
        version=build.version,
        data_dir=str(folder.path),
        mode=start[0],
        started_at=utc_now(),
    )
    board = Board(node, tuner.config.limits.model_dump(), state=PhaseState(since=utc_now()), on_status=on_status)
    folder.tell = partial(_tell, board, "not_kept")
    if not config.node.persist:
        folder.remember_stopped(False)  # a start is the owner's word
    disk = Disk(tuner.config, folder, board)
    pauser = Pauser(tuner.config.schedule, folder, parts.clock, trains=start[0] == "train")
    keeper = Keeper(
        tuner, pauser, folder=folder, board=board, disk=disk, build=build,
        start=start, worker_command=parts.worker_command, timings=parts.timings,
    )  # fmt: skip
    recorder = Recorder(folder.path / "history", Clocks(time.time, time.monotonic), trains=start[0] == "train")
    recorder.totals = keeper.metrics.totals
    keys = Keys(folder.token, time.monotonic)
    served = Served(keeper, recorder, keeper.metrics, keys, keeper, config, build)
    server = make_server(build_app(served, hosts=[config.api.host, sock.getsockname()[0]]), tls)
    with _logging_to(board, folder.path / FOLDER, config.log.format):
        try:
            with suppress(HistoryAway):
                board.restore_rounds(await recorder.rounds(ROUNDS_KEPT))
            board.memory = recorder
            url = url_of(sock, tls=tls is not None)
            folder.write_address(url, tls.certificate if tls else "")
            board.notice(NO_TLS, no_tls(config.api))
            logger.info("The API listens on %s", url)
            _tell_port(board, config.api.port, sock.getsockname()[1])
            beside = (keeper.watch(), disk.keep(), probe(keeper, parts.probes))
            return await _until_end(keeper, board, server, sock, beside)
        finally:
            board.memory = None
            recorder.close()


@contextmanager
def _logging_to(board: Board, folder: Path, format: Literal["console", "json"]) -> Iterator[None]:
    """Every record also to the board and to the folder, and all of them with phase and round."""
    root = logging.getLogger()
    added: list[logging.Handler] = [BoardHandler(board), LogFile(folder, format)]
    stamp = Stamp(board.place)
    for handler in added:
        root.addHandler(handler)
    stamped = list(root.handlers)
    for handler in stamped:
        handler.addFilter(stamp)
    try:
        yield
    finally:
        for handler in stamped:
            handler.removeFilter(stamp)
        for handler in added:
            root.removeHandler(handler)
            handler.close()


async def _until_end(
    keeper: Keeper,
    board: Board,
    server: uvicorn.Server,
    sock: socket.socket,
    beside: Iterable[Coroutine[Any, Any, None]],
) -> int:
    """Serve and tend; whichever ends first takes the other with it, and what runs beside.

    What runs beside is for ever: a node that is watched by nobody is worse than none, so its failure is the node's.
    """
    watching = [asyncio.create_task(one) for one in beside]
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    tending = asyncio.create_task(keeper.tend())
    loop = asyncio.get_running_loop()

    def signalled(number: signal.Signals) -> None:
        if tending.done():
            return
        if keeper.leaving and number is signal.SIGINT:
            keeper.hurry()
        keeper.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    try:
        await asyncio.wait({serving, tending, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if tending.done():
            return tending.result()
        for task in watching:
            if task.done():
                task.result()
        serving.result()
        raise NodeError("The API's server ended by itself: start the node again, and report this with its log.")
    finally:
        tending.cancel()
        for task in watching:
            task.cancel()
        board.close()
        server.should_exit = True
        await asyncio.wait({serving, tending}, timeout=SERVER_END_S)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def probe(keeper: Keeper, probes: Probes) -> None:
    """Look for ever, where what is seen would count."""
    while True:
        asks_battery, asks_user = keeper.heeds
        battery = await asyncio.to_thread(probes.on_battery) if asks_battery else None
        idle_s = await asyncio.to_thread(probes.idle_s) if asks_user else None
        keeper.probed(battery, idle_s)
        await asyncio.sleep(probes.every_s)


def _tell(board: Board, code: str, text: str) -> None:
    """An empty text: it is over."""
    board.notice(code, Notice(code=code, text=text) if text else None)


def _tell_port(board: Board, wanted: int, port: int) -> None:
    if wanted in (0, port):
        return
    text = moved_notice("api.port", wanted, port)
    logger.info("%s", text)
    board.notice("api_port", Notice(code="api_port", level="info", text=text))


def _build() -> Build:
    """Versions from the packages' own words: importing torch only to ask would cost 300 MB."""
    return Build(__version__, revision(), _version("torch"), _version("hivemind"))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"

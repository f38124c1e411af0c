"""The composition root of the supervisor's process: opens the data directory, and starts API and supervisor.

The worker is another process, so the API answers even while the worker hangs or restarts.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import uvicorn

from node import __version__
from node.api.app import build_app
from node.api.auth import Keys
from node.api.metrics import Build
from node.api.node_interface import HistoryUnavailable
from node.api.routes import ApiContext
from node.config.loader import DEFAULT
from node.config.schema import ApiConfig, Config
from node.daemon.data_directory import DataDirectory, DiskMonitor
from node.daemon.history import Clocks, HistoryStore
from node.daemon.host_sensors import HostSensors
from node.daemon.http_server import GRACE_S, NO_TLS, Tls, bind_api, load_tls, make_server, no_tls_notice, url_of
from node.daemon.live_config import LiveConfig
from node.daemon.log_handlers import FOLDER, handle_logs
from node.daemon.metric_sinks import MetricSinks
from node.daemon.month_meter import MonthMeter
from node.daemon.node_state import ROUNDS_KEPT, NodeState
from node.daemon.notifier import Notifier
from node.daemon.pause_policy import PausePolicy, now_utc
from node.daemon.supervisor import Mode, Supervisor
from node.daemon.text_generator import TextGenerator
from node.daemon.worker_watchdog import SupervisorTimings
from node.errors import NodeError
from node.host.cgroup import memory_limit
from node.host.cores import usable_cores
from node.host.logs import set_level
from node.host.ports import API_PORT_FILE, PortFile, moved_notice
from node.host.revision import installed_version, revision
from node.status import NodeInfo, Notice, PhaseState, Status, utc_now
from node.worker_protocol import FoundFrom

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-P", "-m", "node.worker")
"""-P: no module comes from the working folder, which may be that of another user."""
SERVER_END_S = GRACE_S + 1.0


@dataclass(frozen=True, slots=True)
class Parts:
    """Inputs of `run` that tests replace, or that only the command line knows."""

    worker_command: Sequence[str] = WORKER_COMMAND
    timings: SupervisorTimings = field(default_factory=SupervisorTimings)
    origins: Mapping[str, str] = field(default_factory=dict)
    """Source of each configuration key, for `/api/v1/config`."""
    clock: Callable[[], datetime] = now_utc
    """The wall clock of pauses and scheduled hours."""
    sensors: HostSensors = field(default_factory=HostSensors)
    found_from: FoundFrom | None = None
    """The publication from which this node founds a run, if it has none."""


def run(
    config: Config,
    *,
    join: str | None,
    mode: Mode = "train",
    on_status: Callable[[Status], None] | None = None,
    parts: Parts | None = None,
) -> int:
    """Run a node until it is asked to stop, the run is complete, or the worker gives up. Returns the exit code.

    Raises UsageError (exit code 2) if the data directory cannot be used, RestartError (75) if its disk is full, and
    MachineError (3) if the API cannot listen on its port. The next free port replaces a default port that is in use.
    `on_status` is called with each new status, at first perhaps before `api.json` exists. Call this on the main thread,
    because it handles SIGTERM and SIGINT.
    """
    parts = parts or Parts()
    with (
        DataDirectory.open(config.node.data_dir) as directory,
        bind_api(
            config.api,
            PortFile(directory.path / "cache" / API_PORT_FILE),
            is_default=parts.origins.get("api.port") == DEFAULT,
        ) as sock,
    ):
        node = config.node.model_copy(update={"data_dir": directory.path})
        config = config.model_copy(update={"node": node})
        tls = load_tls(config.api.tls_cert, config.api.tls_key)
        return asyncio.run(_run(config, directory, sock, tls, mode, join, on_status, parts))


async def _run(
    config: Config,
    directory: DataDirectory,
    sock: socket.socket,
    tls: Tls | None,
    mode: Mode,
    join: str | None,
    on_status: Callable[[Status], None] | None,
    parts: Parts,
) -> int:
    build = Build(__version__, revision(), *(installed_version(name) or "unknown" for name in ("torch", "hivemind")))
    state = _make_state(config, directory, mode, build.version, on_status)
    with handle_logs(state, directory.path / FOLDER, config.log.format):
        # The log handlers come first, so that the owner sees which files of the data directory are damaged.
        live_config = LiveConfig(config, parts.origins, directory.path, state.set_notice)
        settings = live_config.config
        set_level(settings.log.level)
        for warning in directory.warnings:
            logger.warning("%s", warning)
        state.update_settings(settings.node.name, settings.limits.model_dump())
        state.restore_counters(directory.load_counters())
        if not settings.node.persist:
            directory.remember_stopped(False)  # Without `persist`, a start is the owner's request to run.
        supervisor, disk = _make_supervisor(live_config, directory, state, build, mode, join, parts)
        clocks, trains = Clocks(time.time, time.monotonic), mode == "train"
        history = HistoryStore(directory.path / "history", clocks, supervisor.metrics.totals, trains=trains)
        server = _make_server(supervisor, history, directory, config, build, sock, tls, trains)
        try:
            with suppress(HistoryUnavailable):
                state.restore_rounds(await history.rounds(ROUNDS_KEPT))
            sinks = MetricSinks(settings.metrics.sinks, directory.path, settings.node.name, state.set_notice)
            state.record_to(history, sinks)
            _publish_address(config.api, directory, state, sock, tls)
            watching = (supervisor.watch(), supervisor.poll_sensors(parts.sensors), disk.watch(), sinks.run())
            notifier = Notifier(config.notify, directory.path, lambda: state.status)
            try:
                return await _run_until_end(supervisor, state, server, sock, watching, notifier)
            finally:
                await sinks.close()
        finally:
            state.record_to()
            history.close()


def _make_supervisor(
    live_config: LiveConfig,
    directory: DataDirectory,
    state: NodeState,
    build: Build,
    mode: Mode,
    join: str | None,
    parts: Parts,
) -> tuple[Supervisor, DiskMonitor]:
    settings = live_config.config
    disk = DiskMonitor(settings, directory, state.set_notice)
    supervisor = Supervisor(
        live_config,
        PausePolicy(settings.schedule, directory, parts.clock, trains=mode == "train"),
        directory=directory,
        state=state,
        disk=disk,
        month=MonthMeter(
            directory.path,
            parts.clock,
            lambda: live_config.config.schedule.zone,
            time.monotonic,
            threads=lambda: live_config.config.limits.cpu_threads or usable_cores(),
            set_notice=state.set_notice,
            known=state.counters.counters if state.counters is not None else None,
        ),
        build=build,
        mode=mode,
        join=join,
        found_from=parts.found_from,
        worker_command=parts.worker_command,
        timings=parts.timings,
    )
    return supervisor, disk


def _make_server(
    supervisor: Supervisor,
    history: HistoryStore,
    directory: DataDirectory,
    config: Config,
    build: Build,
    sock: socket.socket,
    tls: Tls | None,
    trains: bool,
) -> uvicorn.Server:
    keys = Keys(directory.token, time.monotonic)
    texts = TextGenerator(lambda: supervisor.configured().config) if trains else None
    context = ApiContext(supervisor, history, supervisor.metrics, keys, supervisor, config, build, texts)
    return make_server(build_app(context, hosts=[config.api.host, sock.getsockname()[0]]), tls)


def _make_state(
    config: Config,
    directory: DataDirectory,
    mode: Mode,
    version: str,
    on_status: Callable[[Status], None] | None,
) -> NodeState:
    limit = memory_limit()
    node = NodeInfo(
        name=config.node.name,
        version=version,
        data_dir=str(directory.path),
        mode=mode,
        memory_limit_bytes=limit.limit_bytes if limit is not None else None,
        started_at=utc_now(),
    )
    state = NodeState(node, config.limits.model_dump(), state=PhaseState(since=utc_now()), on_status=on_status)

    def set_storage_notice(text: str) -> None:
        state.set_notice("not_kept", Notice(code="not_kept", text=text) if text else None)

    directory.on_problem(set_storage_notice)
    return state


def _publish_address(
    api: ApiConfig, directory: DataDirectory, state: NodeState, sock: socket.socket, tls: Tls | None
) -> None:
    url, port = url_of(sock, tls=tls is not None), sock.getsockname()[1]
    directory.write_address(url, tls.certificate if tls else "", api.public_url)
    state.set_notice(NO_TLS, no_tls_notice(api))
    logger.info("The API listens on %s.", url)
    if api.port not in (0, port):
        text = moved_notice("api.port", api.port, port)
        logger.info("%s", text)
        state.set_notice("api_port", Notice(code="api_port", level="info", text=text))


async def _run_until_end(
    supervisor: Supervisor,
    state: NodeState,
    server: uvicorn.Server,
    sock: socket.socket,
    background: Sequence[Coroutine[Any, Any, None]],
    notifier: Notifier,
) -> int:
    """Run the server, the supervisor and the background tasks until one of them ends; then end the others.

    A background task that fails ends the node, because no node may run without its watchdog.
    """
    own = (supervisor.store_counters(), supervisor.processes.watch(), notifier.run())
    tasks = [asyncio.create_task(one) for one in (*background, *own)]
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    running = asyncio.create_task(supervisor.run())
    loop = asyncio.get_running_loop()

    def handle_signal(number: signal.Signals) -> None:
        if not running.done():
            supervisor.shut_down(is_interrupt=number is signal.SIGINT)

    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # A closed terminal; `nohup` ignores it.
        signals.append(signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, handle_signal, number)
    loop.add_signal_handler(signal.SIGTSTP, _refuse_suspension)
    try:
        await asyncio.wait({serving, running, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        for task in tasks:
            if task.done():
                task.result()
        serving.result()
        raise NodeError("The API's server ended by itself: start the node again, and report this with its log.")
    finally:
        running.cancel()
        for task in tasks:
            task.cancel()
        state.close()
        server.should_exit = True
        await asyncio.wait({serving, running}, timeout=SERVER_END_S)
        for number in (*signals, signal.SIGTSTP):
            loop.remove_signal_handler(number)
        await notifier.aclose()


def _refuse_suspension() -> None:
    """Handle Ctrl-Z. It would stop only this process, and the worker would compute on without hours and limits."""
    with suppress(OSError):
        sys.stderr.write("diloco-node: The node keeps running. `diloco-node pause` frees the machine.\n")
        sys.stderr.flush()

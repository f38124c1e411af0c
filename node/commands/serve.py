"""Serves the model of a data folder as an OpenAI-compatible API, in a process of its own and at low priority.

It reads the data folder and writes nothing there, so a node may run on the folder at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from node.api.auth import Keys
from node.api.openai_app import Generations, build_openai_app
from node.commands.export import store_of
from node.commands.served_model import ServedModel
from node.config.schema import Config
from node.daemon.data_directory import TOKEN_LENGTH_MIN
from node.daemon.http_server import bind, load_tls, make_server, no_tls_notice, url_of
from node.errors import DataFolderError, NodeError, UsageError
from node.training.device import threads_per_rank

LOOK_S = 5.0
"""How often the server looks for a newer checkpoint."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    """0 means any free port."""
    requests: int = 4
    """Most requests that are answered at the same time."""
    max_tokens: int = 4096
    """Most tokens of one answer."""


def serve(config: Config, options: ServeOptions, tell: Callable[[str], None]) -> None:
    """Answer requests until SIGINT or SIGTERM. Call this on the main thread. `tell` gets one line with the address.

    Raises DataFolderError without a checkpoint or token, UsageError for bad options, and MachineError if the port is
    not available.
    """
    if options.requests < 1 or options.max_tokens < 1 or not 0 <= options.port < 2**16:
        raise UsageError("--requests and --max-tokens must be at least 1, and --port from 0 to 65535.")
    prepare_thread(config)
    keys = Keys(read_token(config.node.data_dir), time.monotonic)
    with bind(options.host, options.port, flags="--") as sock:
        model = ServedModel.load(config)
        asyncio.run(_serve(config, options, keys, sock, model, tell))


async def _serve(
    config: Config,
    options: ServeOptions,
    keys: Keys,
    sock: socket.socket,
    model: ServedModel,
    tell: Callable[[str], None],
) -> None:
    tls = load_tls(config.api.tls_cert, config.api.tls_key)
    if no_tls_notice(config.api.model_copy(update={"host": options.host})):
        log.warning("Other machines can reach this server without TLS: others on the network path can read the token.")
    newest = NewestModel(config, model)
    generations = Generations(options.requests, lambda: prepare_thread(config))
    hosts = [options.host, sock.getsockname()[0], *config.api.host_names]
    app = build_openai_app(newest.get, generations, keys, tokens_max=options.max_tokens, hosts=hosts)
    server = make_server(app, tls)

    def end() -> None:
        server.should_exit = True
        generations.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end)
    watching = asyncio.create_task(newest.watch())
    tell(
        f"Serving {model.facts.name} after round {model.facts.round} on {url_of(sock, tls=tls is not None)}/v1; "
        f"the API key is the token in {config.node.data_dir / 'api-token'}; Ctrl-C ends this."
    )
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()  # Raises: without it, an old model would be served for ever.
    finally:
        watching.cancel()
        end()
        await serving
        await asyncio.to_thread(generations.close)


class NewestModel:
    """Loads the newest outer parameters while somebody asks for them. At most two models are in memory."""

    def __init__(self, config: Config, model: ServedModel) -> None:
        self._model = model
        self._before: weakref.ref[ServedModel] = weakref.ref(model)
        """The model before, for as long as an answer uses it."""
        self._config, self._store = config, store_of(config)
        self._seen: tuple[int, int] | None = None
        self._is_wanted = True
        """Whether somebody has asked since the model was loaded."""
        self._loading = asyncio.Lock()
        self._problem = ""

    async def get(self) -> ServedModel:
        """Return the newest model. A running answer keeps its own. Waits for a newer one only after a pause."""
        if not self._is_wanted:
            self._is_wanted = True
            await self._refresh()
        return self._model

    async def watch(self, interval_s: float = LOOK_S) -> None:
        """Look for newer parameters forever."""
        while True:
            if self._is_wanted:
                await self._refresh()
            await asyncio.sleep(interval_s)

    async def _refresh(self) -> None:
        """Load newer parameters. The last model stays if they cannot be read."""
        async with self._loading:
            try:
                await asyncio.to_thread(self._look)
                self._problem = ""
            except NodeError as exc:
                if str(exc) != self._problem:
                    log.warning("The model after round %d is still served: %s", self._model.facts.round, exc)
                self._problem = str(exc)

    def _look(self) -> None:
        before, found = self._model, self._store.outer_version()
        if found == self._seen or self._before() not in (None, before):
            return
        model = ServedModel.load(self._config, before)
        self._seen = found
        if model is not before:
            self._model, self._before, self._is_wanted = model, weakref.ref(before), False
            log.info("The model after round %d is served.", model.facts.round)


def prepare_thread(config: Config) -> None:
    """Call this on each thread that computes, as torch keeps its number of threads per thread."""
    torch.set_num_threads(threads_per_rank(config.limits.cpu_threads, 1))


def read_token(data_dir: Path) -> str:
    """Return the token of the node's API."""
    path = data_dir / "api-token"
    try:
        token = path.read_text(encoding="ascii").strip()
    except PermissionError as exc:
        raise DataFolderError.of_another_user(data_dir) from exc
    except (OSError, ValueError) as exc:
        raise DataFolderError(f"The token {path} cannot be read: start a node on the folder, which makes one.") from exc
    if len(token) < TOKEN_LENGTH_MIN:
        raise DataFolderError(
            f"The token in {path} is too short: remove the file, and the node's next start makes one."
        )
    return token

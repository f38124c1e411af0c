"""Serves the model of a data folder as an OpenAI-compatible API, in a process of its own and at low priority.

It reads the data folder and writes nothing there, so a node may run on the folder at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
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
    app = build_openai_app(lambda: newest.model, generations, keys, tokens_max=options.max_tokens, hosts=hosts)
    server = make_server(app, tls)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
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
        server.should_exit = True
        await serving
        await asyncio.to_thread(generations.close)


class NewestModel:
    """Loads the model again whenever there are newer outer parameters."""

    def __init__(self, config: Config, model: ServedModel) -> None:
        self.model = model
        """The newest model. A running answer keeps its own."""
        self._config, self._store = config, store_of(config)
        self._seen: tuple[int, int] | None = None

    async def watch(self, interval_s: float = LOOK_S) -> None:
        """Look for newer parameters forever. The last model stays if they cannot be read, and is tried again."""
        problem = ""
        while True:
            try:
                await asyncio.to_thread(self._look)
                problem = ""
            except NodeError as exc:
                if str(exc) != problem:
                    log.warning("The model after round %d is still served: %s", self.model.facts.round, exc)
                problem = str(exc)
            await asyncio.sleep(interval_s)

    def _look(self) -> None:
        found = self._store.outer_version()
        if found == self._seen:
            return
        before = self.model
        self.model = ServedModel.load(self._config, before)
        self._seen = found
        if self.model is not before:
            log.info("The model after round %d is served.", self.model.facts.round)


def prepare_thread(config: Config) -> None:
    """Call this on each thread that computes, as torch keeps its number of threads per thread."""
    torch.set_num_threads(threads_per_rank(config.limits.cpu_threads, 1))


def read_token(data_dir: Path) -> str:
    """Return the token of the node's API."""
    path = data_dir / "api-token"
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as exc:
        raise DataFolderError(f"The token {path} cannot be read: start a node on the folder, which makes one.") from exc
    if len(token) < TOKEN_LENGTH_MIN:
        raise DataFolderError(
            f"The token in {path} is too short: remove the file, and the node's next start makes one."
        )
    return token

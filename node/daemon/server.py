"""Binding the port and serving an ASGI application on it. Knows sockets and uvicorn; knows no node.

Whoever reaches the port, token or not, may hold connections: how many, and how long in silence, is bounded here.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from node.config import ApiConfig
from node.errors import MachineError, UsageError
from node.ports import IN_USE, PortFile, candidates

logger = logging.getLogger(__name__)

GRACE_S = 2
"""How long open requests may go on after the end was asked for; event streams end by themselves before that."""
BACKLOG = 128
CONNECTIONS_MAX = 512
"""Four times the event streams that are let in. Beyond it new connections are closed at once."""
HEAD_S = 10.0
"""A TLS handshake, and then a request's head, that is not complete by then is given up."""
FILES = 8192
"""Open files that the process asks for. Its children inherit that, and some go over all that they might have."""
PEM_BEGIN, PEM_END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate and key, known to fit."""

    cert: Path
    key: Path
    certificate: str
    """The node's own certificate, PEM: what its command line trusts."""


def load_tls(cert: str, key: str) -> Tls | None:
    """None where neither is given. Raises UsageError where they cannot be used."""
    if not cert:
        return None
    tls = Tls(Path(cert).expanduser(), Path(key).expanduser(), "")
    for name, path in (("tls_cert", tls.cert), ("tls_key", tls.key)):
        try:
            path.read_bytes()
        except OSError as exc:
            raise UsageError(
                f"api.{name} {path} cannot be read ({exc.strerror}): mend the path or its rights."
            ) from exc
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
        text = tls.cert.read_text(encoding="ascii")
        own = text[text.index(PEM_BEGIN) : text.index(PEM_END) + len(PEM_END)] + "\n"
        ssl.PEM_cert_to_DER_cert(own)
    except (ssl.SSLError, ValueError) as exc:
        raise UsageError(
            f"api.tls_cert {tls.cert} and api.tls_key {tls.key} cannot be used ({exc}): give a PEM certificate, "
            "its own first, and its key without a password."
        ) from exc
    return Tls(tls.cert, tls.key, own)


def _no_password() -> str:
    raise ValueError("the key has a password")


class _Listener(socket.socket):
    """Accepts at most `connections_max` connections at a time, and closes what is beyond.

    Counted here and not by uvicorn, which hears of a connection only once its TLS handshake is over.
    """

    def __init__(self, family: int, kind: int, protocol: int, connections_max: int) -> None:
        super().__init__(family, kind, protocol)
        self._connections_max = connections_max
        self._open: list[socket.socket] = []
        """Also closed ones, until it is full."""
        self._told = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises ConnectionAbortedError for one too many: to asyncio, one that its caller gave up."""
        connection, address = super().accept()
        if len(self._open) >= self._connections_max:
            self._open = [one for one in self._open if one.fileno() >= 0]
        if len(self._open) >= self._connections_max:
            connection.close()
            self._tell()
            raise ConnectionAbortedError(errno.ECONNABORTED, "too many connections")
        self._told = self._told and len(self._open) > self._connections_max // 2
        self._open.append(connection)
        return connection, address

    def _tell(self) -> None:
        """Once, until half of them have gone: else each connection of a flood would be a line in the log."""
        if not self._told:
            self._told = True
            logger.warning(
                "The API has %d connections open and closes further ones: some program holds too many.", len(self._open)
            )


def bind(host: str, port: int, *, connections_max: int = CONNECTIONS_MAX) -> socket.socket:
    """A listening socket; `connections_max` or half of the files that the process may open, whichever is less, is what
    it accepts at a time. Raises MachineError where this machine cannot listen there, UsageError where `host` is no
    address; both name the mend."""
    connections_max = min(connections_max, _raise_files() // 2)
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = _Listener(family, kind, protocol, connections_max)
    except OSError as exc:
        raise UsageError(f"The API address {host} is not usable ({exc}): set --api.host 127.0.0.1.") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise MachineError(
                f"Port {port} on {host} is in use by another program: take any free one with --api.port 0.", code=IN_USE
            ) from exc
        raise MachineError(
            f"The API cannot listen on {host} port {port} ({exc.strerror}): set --api.host and --api.port.",
            code="cannot_listen",
        ) from exc
    return sock


def bind_api(api: ApiConfig, file: PortFile, *, is_default: bool, keep: bool = True) -> socket.socket:
    """As `bind`. Where nobody chose the port (`is_default`): that of last time, the default, or the next free one.

    `keep`: remember it for the next start.
    """
    if not is_default:
        return bind(api.host, api.port)
    for candidate in candidates(api.port, file.recall(api.port)):
        try:
            sock = bind(api.host, candidate)
        except MachineError as exc:
            if exc.code != IN_USE or not candidate:
                raise
        else:
            if keep:
                file.remember(api.port, int(sock.getsockname()[1]))
            return sock
    raise AssertionError("the last candidate is any port")


def _raise_files() -> int:
    """How many files this process may have open, after asking for FILES; never less than before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max(soft, wanted)
    with suppress(OSError, ValueError):  # a system that says no leaves what there is
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """The address to call from this machine; a wildcard is reached over loopback."""
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(host.split("%")[0])
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    scheme = "https" if tls else "http"
    return f"{scheme}://[{address}]:{port}" if address.version == 6 else f"{scheme}://{address}:{port}"


class _Line(H11Protocol):
    """Ends a connection that has sent no complete head of a request `head_s` after its opening, or its last answer.

    uvicorn waits for the first request for ever; after an answer, likewise for the rest of what has begun to come.
    """

    def __init__(self, head_s: float, **parts: Any) -> None:
        super().__init__(**parts)
        self._head_s = head_s
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._patience is not None:
            self._patience.cancel()

    def _await_head(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.loop.call_later(self._head_s, self._give_up)

    def _give_up(self) -> None:
        """Nothing where a request is being answered: its answer's end starts the wait anew."""
        cycle = cast(RequestResponseCycle | None, self.cycle)  # uvicorn's own type forgets the time before a request
        if cycle is None:
            self.transport.abort()  # close() would have TLS wait for the other side's goodbye
        elif cycle.response_complete:
            self.transport.close()  # after what is still to be sent


class _Server(uvicorn.Server):
    """uvicorn would take SIGTERM and SIGINT and raise them again at its end (exit 143); here they are our own.

    Nor can it be told how long a TLS handshake may take, or a request's head.
    """

    def __init__(self, config: uvicorn.Config, head_s: float) -> None:
        super().__init__(config)
        self._head_s = head_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's for sockets that are given and no lifespan."""
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        limit_s = self._head_s if tls else None
        self.servers = [
            await loop.create_server(
                self._line, sock=sock, ssl=tls, ssl_handshake_timeout=limit_s, backlog=self.config.backlog
            )
            for sock in sockets or []
        ]
        self.started = True

    def _line(self) -> _Line:
        return _Line(self._head_s, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def make_server(app: ASGIApp, tls: Tls | None = None, *, head_s: float = HEAD_S) -> uvicorn.Server:
    """A server for `serve(sockets=[...])`; `should_exit = True` ends it. Only the socket tells the caller's address."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=tls.cert if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )
    return _Server(config, head_s)

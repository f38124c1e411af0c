"""The HTTP server: binds the API's port and serves an ASGI application on it.

Anyone who reaches the port can open connections without a token, so their number and their idle time are limited.
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

from node.config.schema import ApiConfig
from node.errors import MachineError, UsageError, cause_of
from node.host.ports import IN_USE, PortFile, candidates
from node.status import Notice

logger = logging.getLogger(__name__)

GRACE_S = 2
"""Time that open requests have to finish when the server stops. Event streams end before that."""
BACKLOG = 128
CONNECTIONS_MAX = 512
"""Four times the number of event streams. Further connections are closed at once."""
PER_ADDRESS_RATIO = 0.25
"""Share of the connections that one address may hold, so that one program elsewhere does not lock the owner out.
Loopback has no limit of its own, because all tunnels and proxies on this machine are one address."""
HEAD_S = 10.0
"""Time limit for a TLS handshake, and for the head of a request."""
FILES = 8192
"""Limit of open files to set; not higher, because child processes inherit it and some try every descriptor."""
PEM_BEGIN, PEM_END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
NO_TLS = "no_tls"
WILDCARDS = frozenset({"0.0.0.0", "::"})


@dataclass(frozen=True, slots=True)
class Tls:
    """A certificate and its key, checked by `load_tls`."""

    cert: Path
    key: Path
    certificate: str
    """The node's own certificate, PEM. The node's command line accepts exactly this one."""


def load_tls(cert: str, key: str) -> Tls | None:
    """Check the certificate and its key; None if no certificate is set. Raises UsageError if they cannot be used."""
    if not cert:
        return None
    cert_file, key_file = Path(cert).expanduser(), Path(key).expanduser()
    for name, path in (("tls_cert", cert_file), ("tls_key", key_file)):
        try:
            path.read_bytes()
        except OSError as exc:
            raise UsageError(
                f"api.{name} {path} cannot be read ({exc.strerror}): correct the path or its permissions."
            ) from exc
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert_file, key_file, password=_refuse_password)
        text = cert_file.read_text(encoding="ascii")
        own = text[text.index(PEM_BEGIN) : text.index(PEM_END) + len(PEM_END)] + "\n"
        ssl.PEM_cert_to_DER_cert(own)
    except (ssl.SSLError, ValueError) as exc:
        raise UsageError(
            f"api.tls_cert {cert_file} and api.tls_key {key_file} cannot be used ({cause_of(exc)}): give a PEM file "
            "with the node's own certificate first, and its key without a password."
        ) from exc
    return Tls(cert_file, key_file, own)


def _refuse_password() -> str:
    raise ValueError("the key has a password")


def no_tls_notice(api: ApiConfig) -> Notice | None:
    """Return a notice if other machines can open the page without encryption, else None.

    A node that is bound to all addresses, as in a container, answers only to loopback and the names that are allowed.
    A public URL with https means that a proxy encrypts.
    """
    names = [name for name in (api.host, *api.host_names) if not _is_loopback(name) and name not in WILDCARDS]
    if api.tls_cert or api.public_url.startswith("https:") or _is_loopback(api.host) or not names:
        return None
    text = (
        f"The page is open to other machines (api.host is {api.host}; it answers to {', '.join(names)}) without TLS: "
        "others on the network path can read the token. Set api.tls_cert and api.tls_key, or bind 127.0.0.1 and use "
        "an SSH tunnel."
    )
    return Notice(code=NO_TLS, text=text)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _LimitedListener(socket.socket):
    """Accepts at most `connections_max` connections at a time and closes further ones.

    uvicorn cannot do this, because it learns of a connection only after the TLS handshake.
    """

    def __init__(self, family: int, kind: int, protocol: int, connections_max: int) -> None:
        super().__init__(family, kind, protocol)
        self._connections_max = connections_max
        self._open: list[tuple[socket.socket, str]] = []
        """Accepted connections and their addresses. Closed ones are removed only when a limit is reached."""
        self._has_warned = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises ConnectionAbortedError at the limit, as if the client had aborted."""
        connection, address = super().accept()
        host = address[0] if isinstance(address, tuple) else ""
        if self._is_full(host):
            self._open = [(one, its_host) for one, its_host in self._open if one.fileno() >= 0]
        if self._is_full(host):
            connection.close()
            self._warn()
            raise ConnectionAbortedError(errno.ECONNABORTED, "too many connections")
        self._has_warned = self._has_warned and len(self._open) > self._connections_max // 2
        self._open.append((connection, host))
        return connection, address

    def _is_full(self, host: str) -> bool:
        """Whether there are too many connections, in all or of this address."""
        if len(self._open) >= self._connections_max or _is_loopback(host):
            return len(self._open) >= self._connections_max
        return sum(its_host == host for _, its_host in self._open) >= PER_ADDRESS_RATIO * self._connections_max

    def _warn(self) -> None:
        """Warn, but not again until half of the connections are closed, so that a flood does not fill the log."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The API has %d open connections and closes further ones: some program holds too many.", len(self._open)
            )


def bind(host: str, port: int, *, connections_max: int = CONNECTIONS_MAX, flags: str = "--api.") -> socket.socket:
    """Open a socket that accepts `connections_max` connections, or half the limit of open files if that is less.

    `flags` is the beginning of the flags that set host and port. Raises MachineError if this machine cannot listen
    there, and UsageError if `host` is not an address.
    """
    connections_max = min(connections_max, _raise_file_limit() // 2)
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = _LimitedListener(family, kind, protocol, connections_max)
    except OSError as exc:
        raise UsageError(f"The API address {host} is not usable ({cause_of(exc)}): set {flags}host 127.0.0.1.") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise MachineError(
                f"Port {port} on {host} is in use by another program: take any free one with {flags}port 0.",
                code=IN_USE,
            ) from exc
        raise MachineError(
            f"The API cannot listen on {host} port {port} ({exc.strerror}): set {flags}host and {flags}port.",
            code="cannot_listen",
        ) from exc
    return sock


def bind_api(api: ApiConfig, file: PortFile, *, is_default: bool, keep: bool = True) -> socket.socket:
    """Bind the API's port. A default port (`is_default`) may be replaced by the last one used, or by the next free one.

    `keep` says whether to remember the port for the next start.
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


def _raise_file_limit() -> int:
    """Raise the limit of open files to FILES if possible. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max(soft, wanted)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """Return the API's URL for programs on this machine, which reach a wildcard address over loopback."""
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(host.split("%")[0])
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    scheme = "https" if tls else "http"
    return f"{scheme}://[{address}]:{port}" if address.version == 6 else f"{scheme}://{address}:{port}"


class _Protocol(H11Protocol):
    """Closes a connection if no complete request head arrives within `head_s` of its opening or its last response.

    uvicorn has no time limit for the first request, nor for the rest of a later one that has begun.
    """

    def __init__(self, head_s: float, **parts: Any) -> None:
        super().__init__(**parts)
        self._head_s = head_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self._head_s, self._time_out)

    def _time_out(self) -> None:
        """Close the connection, unless a request is in progress: its response restarts the timer."""
        cycle = cast(RequestResponseCycle | None, self.cycle)  # uvicorn's type omits None, the value before a request
        if cycle is None:
            self.transport.abort()  # close() would wait for the client to end TLS
        elif cycle.response_complete:
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process with 143, and with deadlines for connections."""

    def __init__(self, config: uvicorn.Config, head_s: float) -> None:
        super().__init__(config)
        self._head_s = head_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start like uvicorn's server, with given sockets and without a lifespan."""
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        handshake_s = self._head_s if tls else None
        self.servers = [
            await loop.create_server(
                self._make_protocol, sock=sock, ssl=tls, ssl_handshake_timeout=handshake_s, backlog=self.config.backlog
            )
            for sock in sockets or []
        ]
        self.started = True

    def _make_protocol(self) -> _Protocol:
        return _Protocol(
            self._head_s, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def make_server(app: ASGIApp, tls: Tls | None = None, *, head_s: float = HEAD_S) -> uvicorn.Server:
    """Return a server. `serve(sockets=[...])` runs it, `should_exit = True` ends it. Proxy headers are ignored."""
    # Any web page in the owner's browser can cause uvicorn's warnings, for example by opening WebSockets.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
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

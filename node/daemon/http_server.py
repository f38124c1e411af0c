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
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from node.config.schema import ApiConfig
from node.errors import MachineError, UsageError, cause_of
from node.host.files import expand_user
from node.host.ports import IN_USE, PortFile, candidates
from node.status import Notice

logger = logging.getLogger(__name__)

GRACE_S = 2
"""Time that open requests have to finish when the server stops. Event streams end before that."""
BACKLOG = 128
CONNECTIONS_MAX = 512
"""Four times the number of event streams. Beyond it, a new connection replaces an idle one."""
PER_CALLER_RATIO = 0.25
"""Share of the connections that one address, or one IPv6 network of 64 bits, may hold. So one program elsewhere does
not lock the owner out. Loopback has no limit of its own, because all tunnels and proxies on this machine are one
address."""
RESERVED_RATIO = 1 / 16
"""Share of the connections that only callers on this machine may use."""
HEAD_S = 10.0
"""Time limit for a TLS handshake, and for the head of a request."""
STALL_RATIO = 2
"""A client that reads too slowly is disconnected after this many times `head_s`."""
SLOWEST_BYTES_PER_S = 1000
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
    cert_file, key_file = expand_user(cert), expand_user(key)
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


COMPOSE_NAME = "node"
"""The name by which Prometheus asks a node in docker/compose.yaml. Only containers of that project know it."""


def no_tls_notice(api: ApiConfig) -> Notice | None:
    """Return a notice if other machines can open the page without encryption, else None.

    A node that is bound to all addresses, as in a container, answers only to loopback and the names that are allowed.
    A public URL with https means that a proxy encrypts.
    """
    inside = (*WILDCARDS, COMPOSE_NAME)
    names = [name for name in (api.host, *api.host_names) if not _is_loopback(name) and name not in inside]
    if api.tls_cert or api.public_url.startswith("https:") or _is_loopback(api.host) or not names:
        return None
    text = (
        f"The page is open to other machines (api.host is {api.host}; it answers to {', '.join(names)}) without TLS: "
        "others on the network path can read the token. Set api.tls_cert and api.tls_key, or bind 127.0.0.1 (a "
        "container publishes 127.0.0.1:8080:8080) and use an SSH tunnel."
    )
    return Notice(code=NO_TLS, level="info", text=text)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


THIS_MACHINE = ""


def _caller(host: str) -> str:
    """What the limits count as one caller: this machine, an IPv4 address, or an IPv6 network of 64 bits."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if _is_loopback(str(address)):
        return THIS_MACHINE
    return str(address if address.version == 4 else ipaddress.ip_network((address, 64), strict=False))


Peer = tuple[str, int]
"""Address and port of a client."""


class _LimitedListener(socket.socket):
    """Limits the connections that are open at a time, in all and by caller.

    At a limit, a new connection replaces the one that is idle for longest. If all have requests, the new one is closed.
    uvicorn cannot do this, because it learns of a connection only after the TLS handshake.
    """

    def __init__(self, family: int, kind: int, protocol: int, connections_max: int) -> None:
        super().__init__(family, kind, protocol)
        self._connections_max = connections_max
        self._open: dict[Peer, tuple[socket.socket, str]] = {}
        """Accepted connections and their callers. Closed ones are removed only at a limit."""
        self.protocols: dict[Peer, _Protocol] = {}
        """Of the open connections (with TLS, after the handshake), the least recently used first."""
        self._has_warned = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises ConnectionAbortedError at the limit, as if the client had aborted."""
        connection, address = super().accept()
        caller = _caller(address[0])
        if self._rivals(caller):
            self._open = {peer: entry for peer, entry in self._open.items() if entry[0].fileno() >= 0}
        rivals = self._rivals(caller)
        if rivals:
            self._warn()
            idle = next((peer for peer, one in self.protocols.items() if peer in rivals and one.is_idle), None)
            if idle is None:
                connection.close()
                raise ConnectionAbortedError(errno.ECONNABORTED, "too many connections")
            self.protocols.pop(idle).transport.abort()
            del self._open[idle]
        self._has_warned = self._has_warned and len(self._open) > self._connections_max // 2
        self._open[address[:2]] = (connection, caller)
        return connection, address

    def _rivals(self, caller: str) -> set[Peer]:
        """The connections of which one must end before this caller gets another one; none below the limits."""
        if caller == THIS_MACHINE:
            return set(self._open) if len(self._open) >= self._connections_max else set()
        own = {peer for peer, (_, its_caller) in self._open.items() if its_caller == caller}
        if len(own) >= PER_CALLER_RATIO * self._connections_max:
            return own
        others = {peer for peer, (_, its_caller) in self._open.items() if its_caller != THIS_MACHINE}
        reserved = max(1, round(RESERVED_RATIO * self._connections_max))
        is_full = len(others) >= self._connections_max - reserved or len(self._open) >= self._connections_max
        return others if is_full else set()

    def _warn(self) -> None:
        """Warn, but not again until half of the connections are closed, so that a flood does not fill the log."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The API has %d open connections and closes some of them: some program holds too many.", len(self._open)
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
    except (OSError, UnicodeError) as exc:
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
    """Closes a connection whose client sends no complete request head in time, or does not read what it asked for.

    The head has `head_s` from the opening or the last response on. uvicorn has no time limit for the first request, nor
    for the rest of a later one that has begun, nor for a client that does not read.
    """

    def __init__(self, head_s: float, protocols: dict[Peer, _Protocol], **parts: Any) -> None:
        super().__init__(**parts)
        self._head_s, self._protocols = head_s, protocols
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._unsent_bytes = 0
        """What waited for the client when the timer was started."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress and no response is unsent."""
        cycle = cast(RequestResponseCycle | None, self.cycle)  # uvicorn's type omits None, the value before a request
        return (cycle is None or cycle.response_complete) and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._used()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._used()

    def _used(self) -> None:
        self._restart_timer()
        if self.client is not None and not self.transport.is_closing():
            self._protocols.pop(self.client, None)
            self._protocols[self.client] = self

    def pause_writing(self) -> None:
        super().pause_writing()
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.client is not None and self._protocols.get(self.client) is self:
            del self._protocols[self.client]
        if self._timer is not None:
            self._timer.cancel()

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._timer_s = STALL_RATIO * self._head_s if self._unsent_bytes else self._head_s
        self._timer = self.loop.call_later(self._timer_s, self._time_out)

    def _time_out(self) -> None:
        """Close the connection, unless a request is in progress whose client reads: its response restarts the timer."""
        sent_bytes = self._unsent_bytes - self.transport.get_write_buffer_size()
        if not self.cycle:
            self.transport.abort()  # close() would wait for the client to end TLS
        elif self.is_idle:
            self.transport.close()
        elif self.cycle.response_complete or self.flow.write_paused:
            if sent_bytes < SLOWEST_BYTES_PER_S * self._timer_s:
                self.transport.abort()
            else:
                self._restart_timer()


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
                partial(self._make_protocol, sock.protocols if isinstance(sock, _LimitedListener) else {}),
                sock=sock,
                ssl=tls,
                ssl_handshake_timeout=handshake_s,
                backlog=self.config.backlog,
            )
            for sock in sockets or []
        ]
        self.started = True

    def _make_protocol(self, protocols: dict[Peer, _Protocol]) -> _Protocol:
        return _Protocol(
            self._head_s, protocols, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
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

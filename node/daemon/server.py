"""Binding the port and serving an ASGI application on it. Knows sockets and uvicorn; knows no node."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from node.errors import UsageError

GRACE_S = 2
"""How long open requests may go on after the end was asked for; event streams end by themselves before that."""
BACKLOG = 128
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


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError, which names the mend."""
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise UsageError(f"The API address {host} is not usable ({exc}): set --api.host 127.0.0.1.") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise UsageError(
                f"Port {port} on {host} is in use by another program: take any free one with --api.port 0.",
                code="port_in_use",
            ) from exc
        raise UsageError(
            f"The API cannot listen on {host} port {port} ({exc.strerror}): set --api.host and --api.port."
        ) from exc
    return sock


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """The address to call from this machine; a wildcard is reached over loopback."""
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(host.split("%")[0])
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    scheme = "https" if tls else "http"
    return f"{scheme}://[{address}]:{port}" if address.version == 6 else f"{scheme}://{address}:{port}"


class _Server(uvicorn.Server):
    """uvicorn would take SIGTERM and SIGINT and raise them again at its end (exit 143); here they are our own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, tls: Tls | None = None) -> uvicorn.Server:
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
    return _Server(config)

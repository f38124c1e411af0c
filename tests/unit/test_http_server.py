"""The notice about an API without TLS, and what the server does not log. tests/api/test_connections.py has the rest."""

from __future__ import annotations

import logging
import socket
import threading

import pytest
from fastapi import FastAPI

from node.config.schema import ApiConfig
from node.daemon.http_server import make_server, no_tls_notice


@pytest.mark.parametrize(
    ("host", "allowed", "cert", "is_open"),
    [
        ("127.0.0.1", "", "", False), ("::1", "", "", False), ("localhost", "", "", False),
        ("127.9.9.9", "", "", False),
        ("192.168.1.5", "", "", True), ("node.example", "", "", True), ("192.168.1.5", "", "a.pem", False),
        # As in a container, the API listens on all addresses but allows no name that others could use.
        ("0.0.0.0", "", "", False), ("::", "", "", False), ("0.0.0.0", "localhost", "", False),
        ("0.0.0.0", "node", "", False),
        ("0.0.0.0", "node.example", "", True), ("0.0.0.0", "node.example", "a.pem", False),
        # A proxy on this machine may have its own TLS.
        ("127.0.0.1", "node.example", "", False),
    ],
)  # fmt: skip
def test_api_open_to_other_machines_without_tls_has_a_notice(host: str, allowed: str, cert: str, is_open: bool) -> None:
    api = ApiConfig(host=host, allowed_hosts=(allowed,) if allowed else (), tls_cert=cert, tls_key=cert)
    assert (no_tls_notice(api) is not None) is is_open


def test_warnings_that_any_web_page_can_cause_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = make_server(FastAPI())
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            upgrade = "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
            for request in (upgrade.encode(), b"\x00garbage\r\n\r\n"):
                with socket.create_connection(sock.getsockname(), 10) as client:
                    client.sendall(request)
                    assert client.recv(100).startswith(b"HTTP/1.1 4")
        finally:
            server.should_exit = True
            thread.join(20)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == []

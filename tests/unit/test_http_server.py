"""The notice about an API without TLS. Connections are tested in tests/api/test_connections.py."""

from __future__ import annotations

import pytest

from node.config.schema import ApiConfig
from node.daemon.http_server import no_tls_notice


@pytest.mark.parametrize(
    ("host", "allowed", "cert", "is_open"),
    [
        ("127.0.0.1", "", "", False), ("::1", "", "", False), ("localhost", "", "", False),
        ("127.9.9.9", "", "", False),
        ("192.168.1.5", "", "", True), ("node.example", "", "", True), ("192.168.1.5", "", "a.pem", False),
        # As in a container, the API listens on all addresses but allows no name that others could use.
        ("0.0.0.0", "", "", False), ("::", "", "", False), ("0.0.0.0", "localhost", "", False),
        ("0.0.0.0", "node.example", "", True), ("0.0.0.0", "node.example", "a.pem", False),
        # A proxy on this machine may have its own TLS.
        ("127.0.0.1", "node.example", "", False),
    ],
)  # fmt: skip
def test_api_open_to_other_machines_without_tls_has_a_notice(host: str, allowed: str, cert: str, is_open: bool) -> None:
    api = ApiConfig(host=host, allowed_hosts=(allowed,) if allowed else (), tls_cert=cert, tls_key=cert)
    assert (no_tls_notice(api) is not None) is is_open

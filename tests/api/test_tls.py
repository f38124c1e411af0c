"""HTTPS with the owner's certificate: the API, the command line, and errors about unusable files."""

from __future__ import annotations

import datetime as dt
import json
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from node.commands.client import Client
from node.config.loader import load
from node.config.schema import Config
from node.daemon.app import run
from node.daemon.http_server import load_tls
from node.errors import ConfigError, UsageError
from tests.api.daemon import Daemon


def make_certificate(folder: Path, name: str = "node", password: bytes | None = None) -> tuple[Path, Path]:
    """Write a self-signed certificate and its key. Returns both paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=2))
        .not_valid_after(now + dt.timedelta(days=2))
        .sign(key, hashes.SHA256())
    )
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    cert, private = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return cert, private


def test_api_sessions_and_the_command_line_work_over_https(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    data = tmp_path / "data"
    Path(f"{data}.config").write_text(json.dumps({"api": {"tls_cert": str(cert), "tls_key": str(key)}}))
    with Daemon(data) as daemon:
        daemon.until_there()
        address = json.loads((data / "api.json").read_text())
        assert address["url"].startswith("https://127.0.0.1:")
        token = (data / "api-token").read_text().strip()
        trusting = ssl.create_default_context(cafile=str(cert))
        trusting.check_hostname = False
        headers = {"Authorization": f"Bearer {token}"}
        url = address["url"]
        with httpx.Client(base_url=url, verify=trusting, headers=headers, trust_env=False, timeout=10) as http:
            assert http.get("/api/v1/status").json()["notices"] == []
            assert "Secure" in http.post("/api/v1/session").headers["set-cookie"]
        client = Client(data)
        assert client.is_there()
        assert client.act("pause") == {"phase": "paused"}
        # The command line does not send the token to a node with another certificate.
        other, _ = make_certificate(tmp_path, "other")
        (data / "api.json").write_text(json.dumps(address | {"certificate": other.read_text()}))
        assert not client.is_there()
        (data / "api.json").write_text(json.dumps({"url": url}))
        assert not client.is_there()


def test_unusable_certificate_or_key_file_is_refused_with_the_name_of_its_setting(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    _, locked = make_certificate(tmp_path, "locked", b"secret")
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no certificate")
    bad = [(cert, other), (cert, locked), (rubbish, key), (cert, rubbish), (tmp_path / "none", key), (cert, tmp_path)]
    for one, two in bad:
        with pytest.raises(UsageError, match=r"api\.tls_(cert|key)") as caught:
            load_tls(str(one), str(two))
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)
    config = Config.model_validate(
        {"node": {"data_dir": tmp_path / "x"}, "api": {"port": 0, "tls_cert": str(cert), "tls_key": str(other)}}
    )
    with pytest.raises(UsageError, match="cannot be used"):
        run(config, join=None)


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="tls_cert and tls_key go together"):
        load(file=None, environ={}, flags=["--api.tls_cert=a.pem"])

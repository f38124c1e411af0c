"""Talks to the node that runs on a data folder, over its HTTP port. Knows api.json and api-token; no flags."""

from __future__ import annotations

import json
import ssl
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from node.errors import UsageError

TIMEOUT_S = 10.0
API_FILE = "api.json"
TOKEN_FILE = "api-token"  # noqa: S105 - the name of a file


class Client:
    """Calls of one node's API. Raises UsageError when no node answers, or when it says no."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    def status(self) -> dict[str, Any]:
        return self._call("GET", "/api/v1/status")

    def is_there(self) -> bool:
        """Whether a node answers on this data folder; what a killed one left behind is none."""
        try:
            self.status()
        except UsageError:
            return False
        return True

    def act(self, action: str, order: dict[str, Any] | None = None) -> dict[str, Any]:
        """pause, resume, drain, leave; the answer names the phase that it leads to."""
        return self._call("POST", f"/api/v1/actions/{action}", order or {})

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        url, token, certificate = self._address()
        request = Request(  # noqa: S310 - the address comes from our own data folder
            url.rstrip("/") + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            method=method,
        )
        try:
            # No proxy: the node is on this machine, whatever the environment says.
            with build_opener(ProxyHandler({}), PinnedHandler(certificate)).open(request, timeout=TIMEOUT_S) as answer:
                found = json.loads(answer.read())
        except HTTPError as exc:
            with exc:
                raise UsageError(_problem(exc)) from exc
        except (URLError, OSError) as exc:
            raise self._not_running() from exc
        except ValueError as exc:
            raise UsageError(f"What answers at {url} is not a node: look what else uses that port.") from exc
        if not isinstance(found, dict):
            raise UsageError(f"What answers at {url} is not a node: look what else uses that port.")
        return found

    def _address(self) -> tuple[str, str, str]:
        """Where the API is, its token, and its certificate (PEM; empty without TLS)."""
        try:
            address = json.loads((self._data_dir / API_FILE).read_text(encoding="utf-8"))
            url, certificate = str(address["url"]), str(address.get("certificate", ""))
            token = (self._data_dir / TOKEN_FILE).read_text(encoding="utf-8").strip()
        except PermissionError as exc:
            raise UsageError(f"The data folder {self._data_dir} belongs to another user: ask as that user.") from exc
        except (OSError, ValueError, KeyError) as exc:
            raise self._not_running() from exc
        return url, token, certificate

    def _not_running(self) -> UsageError:
        return UsageError(
            f"No node runs on the data folder {self._data_dir}: start one with `diloco-node run`, "
            "or name its folder with --data-dir.",
            code="no_node",
        )


class PinnedHandler(HTTPSHandler):
    """HTTPS with the one certificate that the node of this data folder has; who has signed it is no matter."""

    def __init__(self, certificate: str) -> None:
        super().__init__()
        self._pinned = ssl.PEM_cert_to_DER_cert(certificate) if certificate else b""

    def https_open(self, request: Request) -> Any:
        return self.do_open(self._connection, request)

    def _connection(self, host: str, **options: Any) -> HTTPSConnection:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return _PinnedConnection(host, self._pinned, context=context, **options)


class _PinnedConnection(HTTPSConnection):
    def __init__(self, host: str, pinned: bytes, **options: Any) -> None:
        super().__init__(host, **options)
        self._pinned = pinned

    def connect(self) -> None:
        super().connect()
        # Nothing has been sent yet.
        if self.sock.getpeercert(binary_form=True) != self._pinned:
            self.close()
            raise ssl.SSLError("it is not the certificate of this data folder's node")


def _problem(exc: HTTPError) -> str:
    """The sentence of an application/problem+json answer."""
    try:
        said = json.loads(exc.read())
        return str(said.get("detail") or said["title"])
    except (OSError, ValueError, KeyError, AttributeError):
        return f"The node answered {exc.code} {exc.reason}."

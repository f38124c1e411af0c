"""HTTP client for the node that runs on a data folder, found through its `api.json` and `api-token`."""

from __future__ import annotations

import fcntl
import json
import os
import ssl
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from pydantic import BaseModel, ValidationError

from node.errors import DataFolderError, UsageError
from node.status import GovernanceInfo

TIMEOUT_S = 10.0
T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ApiAddress:
    """Where a node's API is, and what is needed to call it."""

    url: str
    token: str
    certificate: str
    """PEM; empty without TLS."""
    pid: int | None
    """Process of the node that wrote the address."""
    public_url: str = ""
    """The page's address for browsers, if it differs."""


def read_address(data_dir: Path) -> ApiAddress:
    """Return the address that a running node has written. Raises OSError or ValueError if there is none."""
    stored = json.loads((data_dir / "api.json").read_text(encoding="utf-8"))
    token = (data_dir / "api-token").read_text(encoding="utf-8").strip()
    if not isinstance(stored, dict) or "url" not in stored:
        raise ValueError("api.json holds no address")
    public_url = str(stored.get("public_url", ""))
    return ApiAddress(
        str(stored["url"]).rstrip("/"), token, str(stored.get("certificate", "")), stored.get("pid"), public_url
    )


def _is_locked(data_dir: Path) -> bool:
    """Whether a node runs on the folder. It holds the lock until its process ends, even by a kill."""
    try:
        fd = os.open(data_dir / "lock", os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def read_answer(kind: type[T], answer: dict[str, Any]) -> T:
    """Read a node's answer. Raises UsageError if the node is of another version, as it is after an upgrade."""
    try:
        return kind.model_validate(answer)
    except ValidationError as exc:
        raise UsageError("The node is of another version than this command: start the node again.") from exc


class Client:
    """Calls the API of one node. Raises UsageError when no node answers, or when it refuses.

    A killed node leaves its address behind, and another program may listen there now. So the token is sent only while a
    node holds the folder's lock.
    """

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    def status(self) -> dict[str, Any]:
        return self._call("GET", "/api/v1/status")

    def peers(self) -> dict[str, Any]:
        return self._call("GET", "/api/v1/swarm")

    def config(self) -> dict[str, Any]:
        """The configuration that the node uses, and where each value comes from."""
        return self._call("GET", "/api/v1/config")

    def logs(self, *, level: str, after: int | None, limit: int) -> dict[str, Any]:
        """Log records after this id, or the newest ones."""
        query = f"level={level}&limit={limit}" + ("" if after is None else f"&after={after}")
        return self._call("GET", f"/api/v1/logs?{query}")

    def public(self) -> dict[str, Any]:
        """What the public page of the run shows."""
        return self._call("GET", "/api/v1/public")

    def governance(self) -> GovernanceInfo:
        """Who may amend the run, and its amendments."""
        return read_answer(GovernanceInfo, self._call("GET", "/api/v1/amendments"))

    def submit_amendment(self, signed: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", "/api/v1/amendments", signed)

    def is_there(self) -> bool:
        """Whether a node answers on this data folder. Files that a killed node has left do not count."""
        try:
            self.status()
        except UsageError:
            return False
        return True

    def act(self, action: str, order: dict[str, Any] | None = None) -> dict[str, Any]:
        """Request `pause`, `resume`, `drain` or `leave`. The answer names the phase to which the node goes."""
        return self._call("POST", f"/api/v1/actions/{action}", order or {})

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            if not _is_locked(self._data_dir):
                raise self._not_running()
            address = read_address(self._data_dir)
        except PermissionError as exc:
            raise DataFolderError.of_another_user(self._data_dir) from exc
        except (OSError, ValueError) as exc:
            raise self._no_answer() from exc
        request = Request(  # noqa: S310 - the address comes from our own data folder
            address.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {address.token}", "Content-Type": "application/json"},
            method=method,
        )
        # No proxy: the node is on this machine, whatever the environment says.
        opener = build_opener(ProxyHandler({}), PinnedHandler(address.certificate))
        not_a_node = UsageError(f"The program at {address.url} is not a node: check what else uses that port.")
        try:
            with opener.open(request, timeout=TIMEOUT_S) as response:
                answer = json.loads(response.read())
        except HTTPError as exc:
            with exc:
                raise UsageError(_read_problem(exc)) from exc
        except OSError as exc:
            raise self._no_answer() from exc
        except (ValueError, HTTPException) as exc:
            raise not_a_node from exc
        if not isinstance(answer, dict):
            raise not_a_node
        return answer

    def _not_running(self) -> UsageError:
        return UsageError(
            f"No node runs on the data folder {self._data_dir}: start one with `diloco-node run`, "
            "or name its folder with --data-dir.",
            code="no_node",
        )

    def _no_answer(self) -> UsageError:
        return UsageError(
            f"The node on the data folder {self._data_dir} does not answer now: try again in a moment.",
            code="no_answer",
        )


class PinnedHandler(HTTPSHandler):
    """HTTPS that accepts only the certificate of this data folder's node, whoever has signed it."""

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
        # The request, and with it the token, has not been sent yet.
        if self.sock.getpeercert(binary_form=True) != self._pinned:
            self.close()
            raise ssl.SSLError("this is not the certificate of the data folder's node")


def _read_problem(error: HTTPError) -> str:
    """Return the sentence in an application/problem+json response. If the request is not valid, it names the faults."""
    try:
        problem = json.loads(error.read())
        if faults := "; ".join(f"{fault['where']}: {fault['message']}" for fault in problem.get("faults", ())):
            return f"The node refuses this request: {faults}."
        return str(problem.get("detail") or problem["title"])
    except (OSError, ValueError, KeyError, AttributeError):
        return f"The node answered {error.code} {error.reason}: see its log."
